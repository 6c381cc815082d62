"""Directories of all quantisers decode the same tokens for every K and on two ranks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from mtpkit.checkpoint import save_hf_model
from mtpkit.engine import LLM
from mtpkit.model import build_model
from tests.checkpoint.builders import edit, edit_config
from tests.checkpoint.schemes import READ, write_quantised
from tests.checkpoint.test_columnwise import SETTINGS, quantized
from tests.engine.tiny import greedy
from tests.ranks import run_ranks
from tests.shared import made_once
from tests.toy_config import toy_config

# Each of two ranks has whole groups of 16 rows and columns.
CONFIG = toy_config(
    vocab_size=48,
    pattern="M*E-",
    mtp_pattern="*E",
    mtp_num_depths=2,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=32,
    moe_shared_expert_intermediate_size=32,
    hidden_size=64,
    ffn_hidden_size=64,
    mamba_head_dim=16,
    kv_channels=16,
    init_std=0.25,
    max_position_embeddings=128,
)
SCHEMES = [*READ, *SETTINGS]
SOME = ["fp8 blocks", "ModelOpt FP8", "compressed W4A16", "compressed NVFP4", "awq"]
"""One scheme for each kind of parts."""
BY_TOKEN = ("ModelOpt rows", "compressed FP8")
"""Inputs have a scale per token: each rank quantises its own part of one, so that tokens are not
those of one rank, see docs/decoding.md."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensors": dict(tensor_parallel_size=2),
    "experts": dict(tensor_parallel_size=2, enable_expert_parallel=True),
    "stages": dict(pipeline_parallel_size=2),
}
_PLAIN = ("embed", "lm_head", "gate.weight", "conv1d", "norm", "mtp.", "eh_proj")
_PROMPTS = [[5], [7, 8, 9, 10], [*range(3, 24)]]


def is_quantised(name: str) -> bool:
    return name.endswith("weight") and not any(part in name for part in _PLAIN)


def write_all(place: Path) -> None:
    """A directory for each scheme."""
    plain = place / "plain"
    save_hf_model(build_model(CONFIG, device="cpu", seed=4), plain)
    edit(plain, lambda tensors: tensors.update(in_bf16(tensors)))
    for scheme in READ:
        write_quantised(scheme, plain, place / scheme, is_quantised)
    for scheme in SETTINGS:
        shutil.copytree(plain, place / scheme)
        edit(place / scheme, lambda tensors, scheme=scheme: pack(tensors, scheme))
        edit_config(place / scheme, quantization_config=SETTINGS[scheme])


def in_bf16(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each.bfloat16() for name, each in tensors.items() if each.is_floating_point()}


def pack(tensors: dict[str, torch.Tensor], scheme: str) -> None:
    """Put random matrices of AWQ or GPTQ in place of plain ones."""
    for name in [name for name in tensors if is_quantised(name)]:
        if tensors[name].dim() == 2 and not any(size % 16 for size in tensors[name].shape):
            parts, _ = quantized(tensors.pop(name), scheme)
            parts["scales"] *= 0.05
            start = name.removesuffix("weight")
            tensors.update({start + part: tensor for part, tensor in parts.items()})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "quantized_directories", write_all)


def decode(directory: Path, k: int, **settings: Any) -> list[list[int]]:
    """The tokens after each prompt."""
    usual = dict(num_blocks=60, device="cpu", dtype="float32", warm_up=False)
    llm = LLM(directory, k, **usual | settings)
    outputs = llm.generate(_PROMPTS, greedy(12), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "schemes", [SOME, [each for each in SCHEMES if each not in SOME]], ids=["some", "others"]
)
def test_drafts_change_nothing(place: Path, schemes: list[str]) -> None:
    for scheme in schemes:
        plain = decode(place / scheme, 0)
        assert all(decode(place / scheme, k) == plain for k in range(1, 5)), scheme


def decode_on_ranks(rank: int, place: Path, expected: dict[str, list[list[int]]]) -> None:
    for scheme, layout, settings in cases():
        parallel_state.destroy_model_parallel()
        found = decode(place / scheme, 3, **LAYOUTS[layout], **settings)
        assert found == expected[json.dumps([scheme, settings])], (scheme, layout)


def cases() -> list[tuple[str, str, dict[str, str]]]:
    """Schemes, layouts and further settings of engines."""
    split = [(scheme, "tensors", {}) for scheme in SCHEMES if scheme not in BY_TOKEN]
    others = [(scheme, layout, {}) for scheme in SOME for layout in ("experts", "stages")]
    staged = [(scheme, "stages", {}) for scheme in BY_TOKEN]
    narrow = dict(kv_cache_dtype="fp8_e4m3", draft_lm_head_dtype="nvfp4")
    return [*split, *others, *staged, *(("NVFP4", layout, narrow) for layout in LAYOUTS)]


def test_two_ranks_decode_what_one_does(place: Path) -> None:
    made = {json.dumps([scheme, more]): (scheme, more) for scheme, _, more in cases()}
    expected = {key: decode(place / scheme, 3, **more) for key, (scheme, more) in made.items()}
    run_ranks(decode_on_ranks, place, expected)
