"""Models and prompts of the benchmarks: published shapes with random ones, or a checkpoint with real ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from mtpkit.checkpoint import find_companions, load_config, load_model
from mtpkit.config import ModelConfig
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.engine.drafting import check_depths
from mtpkit.engine.prompts import encode, list_prompts
from mtpkit.errors import UserError, listed
from mtpkit.files import parse_json, read_text
from mtpkit.model import build_model
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.kinds import layers_of
from mtpkit.model.kinds.base import Draw
from mtpkit.platform import resolve_dtype

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

DEEPSEEK_V3 = ModelConfig.of(
    family="",
    vocab_size=129280,
    hidden_size=7168,
    pattern="+-" * 3 + "+E" * 58,
    max_position_embeddings=163840,
    mtp_pattern="+E",
    mtp_num_depths=1,
    num_attention_heads=128,
    qk_layernorm=True,
    q_lora_rank=1536,
    kv_lora_rank=512,
    mscale_all_dim=1.0,
    ffn_hidden_size=18432,
    activation="swiglu",
    num_moe_experts=256,
    moe_router_topk=8,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    moe_router_topk_scaling_factor=2.5,
    moe_router_num_groups=8,
    moe_router_group_topk=4,
    layernorm_epsilon=1e-6,
)
"""DeepSeek-V3 (arXiv:2412.19437), 671 billion weights with its one head of 14 more: for `bench roofline`."""

DEEPSEEK_V3_SLICE = DEEPSEEK_V3.replace(pattern="+-+E+E")
"""Its first kinds of layers once or twice, in their sizes, with the head: what one H200 holds in bf16."""

DEEPSEEK_V3_TINY = DEEPSEEK_V3.replace(
    vocab_size=512,
    hidden_size=64,
    pattern="+-+E",
    max_position_embeddings=1024,
    mtp_num_depths=3,
    num_attention_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_head_dim=16,
    qk_pos_emb_head_dim=8,
    v_head_dim=16,
    ffn_hidden_size=96,
    num_moe_experts=8,
    moe_router_topk=4,
    moe_ffn_hidden_size=32,
    moe_shared_expert_intermediate_size=32,
    moe_router_num_groups=4,
    moe_router_group_topk=2,
)
"""Its kinds of layers, small enough for a CPU."""

QWEN3_NEXT_SLICE = ModelConfig.of(
    family="",
    vocab_size=151936,
    hidden_size=2048,
    pattern="GEGEGE*E" * 4,
    max_position_embeddings=262144,
    mtp_pattern="*E",
    mtp_num_depths=3,
    num_attention_heads=16,
    num_query_groups=2,
    kv_channels=256,
    attention_output_gate=True,
    qk_layernorm=True,
    position_embedding_type="rope",
    rotary_base=1e7,
    rotary_percent=0.25,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    activation="swiglu",
    num_moe_experts=512,
    moe_router_topk=10,
    moe_ffn_hidden_size=512,
    moe_shared_expert_intermediate_size=512,
    moe_router_score_function="softmax",
    moe_router_enable_expert_bias=False,
    moe_shared_expert_gate=True,
    layernorm_zero_centered_gamma=True,
    layernorm_epsilon=1e-6,
)
"""16 of the 48 layers of Qwen3-Next-80B-A3B with its head: what one H200 holds in bf16. A random router gives every
expert about as many tokens."""

QWEN3_5_SLICE = QWEN3_NEXT_SLICE.replace(
    vocab_size=248320,
    hidden_size=5120,
    pattern="G-G-G-*-" * 6,
    mtp_pattern="*-",
    num_attention_heads=24,
    num_query_groups=4,
    linear_num_value_heads=48,
    ffn_hidden_size=17408,
    num_moe_experts=0,
    moe_ffn_hidden_size=0,
    moe_shared_expert_intermediate_size=0,
    moe_shared_expert_gate=False,
)
"""24 of the 64 layers of Qwen3.6-27B with its head."""

QWEN3_NEXT_TINY = QWEN3_NEXT_SLICE.replace(
    vocab_size=512,
    hidden_size=64,
    pattern="GEGE*E",
    max_position_embeddings=1024,
    num_attention_heads=4,
    kv_channels=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    num_moe_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=48,
    moe_shared_expert_intermediate_size=64,
)
"""The same kinds of layers, small enough for a CPU."""

SHAPES = {
    "nemotron-h-8b": NEMOTRON_H_8B,
    "nemotron-3-nano": NEMOTRON_3_NANO,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3-slice": DEEPSEEK_V3_SLICE,
    "qwen3-next-slice": QWEN3_NEXT_SLICE,
    "qwen3.5-slice": QWEN3_5_SLICE,
    "nemotron-h-tiny": NEMOTRON_H_TINY,
    "nemotron-3-tiny": NEMOTRON_3_TINY,
    "deepseek-v3-tiny": DEEPSEEK_V3_TINY,
    "qwen3-next-tiny": QWEN3_NEXT_TINY,
}
"""By the name that commands take in place of a model directory."""


LARGE_SHAPES = (
    "nemotron-h-8b",
    "nemotron-3-nano",
    "deepseek-v3",
    "deepseek-v3-slice",
    "qwen3-next-slice",
    "qwen3.5-slice",
)
"""Shapes with billions of weights: too many for a CPU to hold, or to run in reasonable time."""


def require_gpu(model: str, device: torch.device) -> None:
    """Refuse a large shape on a CPU.

    Raises:
        UserError: the model is one.
    """
    if model in LARGE_SHAPES and device.type != "cuda":
        raise UserError(f"{model} needs a GPU; --model nemotron-h-tiny, or a model directory, runs on a CPU")


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
    if distinct or pattern is not None:
        given = "distinct heads are" if distinct else f"pattern {pattern!r} is"
        raise UserError(f"{given} for a shape ({listed(SHAPES)}), not for a model directory as {model}")
    return load_config(directory)


def choose_drafts[K: (int, int | Literal["auto"])](
    config: ModelConfig, given: Sequence[K] | None, usual: Sequence[int]
) -> tuple[K | int, ...]:
    """All K that are `given`, or else, of the `usual` ones, those that the heads of a model were trained for.

    Raises:
        UserError: the heads cannot make so many drafts.
    """
    if given is None:
        return tuple(dict.fromkeys(min(k, config.mtp.default_drafts) for k in usual))
    for k in given:
        check_depths(config, k)
    return tuple(given)


def open_model(
    model: str,
    device: torch.device,
    dtype: str = "auto",
    pattern: str | None = None,
    distinct: bool = False,
    ranks: int = 1,
    whole_experts: bool = False,
) -> HybridModel:
    """A shape with random weights drawn on the device, or the model of a directory.

    Args:
        dtype: `float32`, `bfloat16`, or `auto`: bfloat16 on a GPU, float32 on a CPU.
        pattern, distinct: see `get_config`.
        ranks, whole_experts: tensor-parallel ranks, of which this one has its part; whether they share out experts.

    Raises:
        UserError: neither a known shape nor a model directory, or one that cannot be built; see `get_config`.
    """
    config = get_config(model, pattern, distinct)
    chosen = getattr(torch, resolve_dtype(dtype, device))
    parallel: dict[str, Any] = dict(tensor_parallel=ranks, sequence_parallel=False)
    if whole_experts:
        parallel |= dict(expert_parallel=ranks, expert_tensor_parallel=1)
    if model in SHAPES:
        built = build_model(config, chosen, device, init="device", **parallel).requires_grad_(False)
        _depend_on_context(built)
        return built
    return load_model(_directory(model), chosen, device, **parallel).requires_grad_(False)


@torch.no_grad()
def _depend_on_context(model: HybridModel) -> None:
    """Make the outputs of random layers depend on all earlier tokens, so that a wrong cache shows in the tokens: as
    models are initialised, the best tokens are the same without state or attention."""
    draw = Draw(torch.Generator().manual_seed(0))
    for _, layer, kind in layers_of(model, heads=False):
        kind.depend_on_context(layer, model.mtpkit_config, draw)


def read_token_ids(path: Path, model: str) -> list[list[int]]:
    """The prompts of a file, texts encoded with the tokenizer beside a model.

    Raises:
        UserError: a file that cannot be read, or texts for a shape, which has no tokenizer.
    """
    prompts, tokenizer = read_prompts(path), None
    if any("prompt" in prompt for prompt in prompts):
        if model in SHAPES:
            raise UserError(
                f"{path} holds texts, but the shape {model} has no tokenizer: give prompt_token_ids in a .jsonl"
            )
        tokenizer = load_tokenizer(find_companions(_directory(model)))
    return [list(encode(prompt, tokenizer, name)[1]) for name, prompt in list_prompts(prompts)]


def _directory(model: str) -> Path:
    if not Path(model).is_dir():
        raise UserError(f"model {model!r} is neither a shape ({listed(SHAPES)}) nor a model directory")
    return Path(model)


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count, length), generator=generator).tolist()


def read_prompts(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Prompts of a file, one a line, as `LLM.generate` takes them: `prompt` or `prompt_token_ids`, and as their `name`
    file and line, which messages call them by. Lines of whitespace are skipped.

    A file that ends in .jsonl holds objects with `prompt` (text) or `prompt_token_ids` (integers); any other file is
    plain text.

    Args:
        limit: only so many, evenly spread over the file.

    Raises:
        UserError: a file that cannot be read, a line of another form, or no prompt at all.
    """
    try:
        lines = read_text(path).split("\n")  # other ends of lines may stand in a text
    except UserError as error:
        raise UserError(f"prompts file {error}; name a .jsonl or a text file") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"prompts file {path} holds no prompts; write one a line")
    if limit is not None and limit < len(numbered):
        numbered = [numbered[index * len(numbered) // limit] for index in range(limit)]
    if path.suffix != ".jsonl":
        return [{"prompt": line, "name": f"{path}:{number}"} for number, line in numbered]
    return [{**_parse(line, f"{path}:{number}"), "name": f"{path}:{number}"} for number, line in numbered]


def _parse(line: str, where: str) -> dict[str, Any]:
    record: Any = parse_json(line, where)
    record = record if isinstance(record, dict) else {}
    text, token_ids = record.get("prompt"), record.get("prompt_token_ids")
    if isinstance(token_ids, list) and all(type(token) is int for token in token_ids):
        return {"prompt_token_ids": token_ids}
    if isinstance(text, str):
        return {"prompt": text}
    raise UserError(f'{where} must be an object with "prompt", a text, or "prompt_token_ids", a list of integers')
