"""What benchmarks run: published shapes with random weights and random prompts, or a checkpoint and real ones."""

from pathlib import Path

import torch

from mtpkit.bench.prompts import read_prompts
from mtpkit.checkpoint import find_companions, load_config, load_model
from mtpkit.config import ModelConfig
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.errors import UserError, listed
from mtpkit.model import build_model
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.kinds import layers_of
from mtpkit.model.kinds.base import Draw

NEMOTRON_H_8B = ModelConfig.of(
    family="",
    vocab_size=131072,
    hidden_size=4096,
    pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    max_position_embeddings=8192,
    mtp_pattern="*",
    mtp_num_depths=3,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    ffn_hidden_size=21504,
    mamba_num_heads=128,
    mamba_head_dim=64,
    mamba_state_dim=128,
    mamba_num_groups=8,
)
"""NVIDIA's Nemotron-H-8B (arXiv:2504.03624) with the repeated attention-only head that the field was measured with."""

NEMOTRON_H_TINY = NEMOTRON_H_8B.replace(
    vocab_size=512,
    hidden_size=64,
    pattern="M-M*-M-",
    max_position_embeddings=1024,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=16,
    ffn_hidden_size=256,
    mamba_num_heads=8,
    mamba_head_dim=16,
    mamba_state_dim=16,
    mamba_num_groups=2,
)
"""The same kinds of layers, small enough for a CPU to decode with in a test."""

NEMOTRON_3_NANO = NEMOTRON_H_8B.replace(
    hidden_size=2688,
    pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    max_position_embeddings=262144,
    num_query_groups=2,
    ffn_hidden_size=0,
    mamba_num_heads=64,
    num_moe_experts=128,
    moe_router_topk=6,
    moe_ffn_hidden_size=1856,
    moe_shared_expert_intermediate_size=3712,
    moe_router_topk_scaling_factor=2.5,
)
"""NVIDIA's Nemotron 3 Nano 30B-A3B (arXiv:2512.20848), with the same head. A random router gives every expert about as
many tokens, so that a batch reads more experts than one of real text does."""

NEMOTRON_3_TINY = NEMOTRON_H_TINY.replace(
    pattern="ME*E",
    ffn_hidden_size=0,
    num_moe_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=48,
    moe_shared_expert_intermediate_size=64,
    moe_router_topk_scaling_factor=2.5,
)
"""Its kinds of layers, small enough for a CPU."""

SHAPES = {
    "nemotron-h-8b": NEMOTRON_H_8B,
    "nemotron-3-nano": NEMOTRON_3_NANO,
    "nemotron-h-tiny": NEMOTRON_H_TINY,
    "nemotron-3-tiny": NEMOTRON_3_TINY,
}
"""By the name that commands take in place of a model directory."""


def get_config(model: str, pattern: str | None = None, distinct: bool = False) -> ModelConfig:
    """The config of a shape or of a model directory.

    Args:
        pattern: layers of a shape's head; None: its own.
        distinct: give a shape a head for each depth.

    Raises:
        UserError: neither a known shape nor a model directory, or a pattern of unknown layers, or heads of one's
            choice for a directory.
    """
    if model in SHAPES:
        changes: dict[str, str | bool] = {} if pattern is None else {"mtp_pattern": pattern}
        changes |= {"mtp_use_repeated_layer": False} if distinct else {}
        return SHAPES[model].replace(**changes) if changes else SHAPES[model]
    directory = _directory(model)
    if distinct:
        raise UserError(f"distinct heads are for a shape ({listed(SHAPES)}), not for a model directory as {model}")
    if pattern is not None:
        raise UserError(f"pattern {pattern!r} is for a shape ({listed(SHAPES)}), not for a model directory as {model}")
    return load_config(directory)


def open_model(
    model: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    pattern: str | None = None,
    distinct: bool = False,
) -> HybridModel:
    """A shape with random weights drawn on the device, or the model of a directory.

    Args:
        dtype: None: bfloat16 on a GPU, float32 on a CPU.
        pattern, distinct: see `get_config`.

    Raises:
        UserError: neither a known shape nor a model directory, or one that cannot be built; see `get_config`.
    """
    config = get_config(model, pattern, distinct)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if model in SHAPES:
        built = build_model(config, dtype, device, init="device").requires_grad_(False)
        _depend_on_context(built)
        return built
    return load_model(_directory(model), dtype, device).requires_grad_(False)


@torch.no_grad()
def _depend_on_context(model: HybridModel) -> None:
    """Make what random layers give depend on all of the tokens before, so that a wrong cache shows in the tokens: as
    models are initialised, the best tokens are the same without state or attention."""
    draw = Draw(torch.Generator().manual_seed(0))
    for _, layer, kind in layers_of(model, heads=False):
        kind.depend_on_context(layer, model.mtpkit_config, draw)


def read_token_ids(path: Path, model: str) -> list[list[int]]:
    """The prompts of a file, texts encoded with the tokenizer beside a model.

    Raises:
        UserError: a file that cannot be read, or texts for a shape, which has no tokenizer.
    """
    prompts = read_prompts(path)
    if all(isinstance(prompt, list) for prompt in prompts):
        return [prompt for prompt in prompts if isinstance(prompt, list)]
    if model in SHAPES:
        raise UserError(
            f"{path} holds texts, but the shape {model} has no tokenizer: give prompt_token_ids in a .jsonl"
        )
    tokenizer = load_tokenizer(find_companions(_directory(model)))
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _directory(model: str) -> Path:
    if not Path(model).is_dir():
        raise UserError(f"model {model!r} is neither a shape ({listed(SHAPES)}) nor a model directory")
    return Path(model)


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count, length), generator=generator).tolist()
