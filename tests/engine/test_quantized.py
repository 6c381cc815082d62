"""Engines of models whose weights stay quantised: the same function in every step, for every K and
on every number of ranks."""

from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file

from mtpkit.checkpoint import load_model, save_hf_model
from mtpkit.engine import LLM
from mtpkit.errors import UserError
from mtpkit.model import (
    SequenceInput,
    base_forward,
    build_model,
    compute_logits,
    quantize_base,
    stack_experts,
)
from mtpkit.model.quantized import quantized_as
from tests.engine.tiny import decode, generate, greedy, guide, make_llm
from tests.kernels.recurrence import relative
from tests.model.quantized_models import CONFIGS, FORMATS, everywhere, filled, stored
from tests.ranks import run_ranks

PROMPTS = [[5], [7, 8, 9, 10], [*range(3, 24)]]
TOKENS = 12
TOLERANCE = 1e-5


def tokens_of(model, k: int, **settings) -> tuple[list[list[int]], list[int]]:
    """Output tokens, and how many drafts of each depth were accepted."""
    llm = make_llm(model, k, **settings)
    found = generate(llm, PROMPTS, greedy(TOKENS))
    return found, list(llm.stats().acceptance.accepted_per_depth) if k else []


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("mamba2", "int4"),
        ("mamba2", "token, inputs"),
        ("gated delta net", "block"),
        ("gated delta net", "static, inputs"),
        ("gated delta net", "block, inputs"),
        ("mamba2", "nvfp4"),
        ("latent attention", "nvfp4"),
        ("latent attention", "block, inputs"),
        ("dense", "reciprocal"),
        ("dense", "static, inputs"),
    ],
)
def test_drafts_change_nothing(family, kind):
    """Tokens are those of whole sequences, as training computes them, whatever K."""
    config = CONFIGS[family]
    model = filled(config, stored(config, everywhere(FORMATS[kind])))
    want = [decode(model, prompt, TOKENS) for prompt in PROMPTS]
    for k in range(5 if config.mtp.repeated else 3):
        llm = make_llm(model, k)
        if k:
            truth = [prompt + tokens for prompt, tokens in zip(PROMPTS, want, strict=True)]
            guide(llm, PROMPTS, truth=truth)
        assert generate(llm, PROMPTS, greedy(TOKENS)) == want
        assert not k or sum(llm.stats().acceptance.accepted_per_depth)


@pytest.mark.parametrize("settings", [{}, {"draft_vocab": [*range(0, 48, 2)]}], ids=["all", "some"])
@pytest.mark.parametrize("family", CONFIGS)
def test_tokens_and_drafts_are_those_of_the_widened_weights(family, settings):
    config = CONFIGS[family]
    source = stored(config, everywhere(FORMATS["nvfp4"]))
    found = tokens_of(filled(config, source), 2, **settings)
    assert found == tokens_of(filled(config, source, keep=False), 2, **settings)


def as_read(rank: int, out: Path) -> None:
    """Split weights over two ranks in several ways; logits, and tokens of an engine."""
    expected = load_file(out / "logits.st")
    ids = expected["ids"]
    for family, kind, layouts in SPLIT:
        case = f"{family}, {kind}"
        want = expected[f"tokens, {case}"].tolist()
        config = CONFIGS[family]
        source = whole(config, kind)
        for name in layouts:
            parallel_state.destroy_model_parallel()
            model = filled(config, source, **LAYOUTS[name])
            assert stack_experts(model)
            if name == "stages":
                assert tokens_of(model, 2, pipeline_parallel_size=2)[0] == want, case
                continue
            with torch.no_grad():
                logits = compute_logits(model, base_forward(model, ids, SequenceInput()))
            assert relative(logits, expected[case].double()) < TOLERANCE, (case, name)
            settings = dict(enable_expert_parallel=name == "experts", tensor_parallel_size=2)
            assert tokens_of(model, 2, **settings)[0] == want, (case, name)
    config = CONFIGS["dense"]
    source = whole(config, "static, inputs")
    parallel_state.destroy_model_parallel()
    model = filled(config, source, tensor_parallel=2, sequence_parallel=True)
    with torch.no_grad():
        logits = compute_logits(model, base_forward(model, ids, SequenceInput()))
    assert relative(logits, expected["dense, static, inputs"].double()) < TOLERANCE
    source = whole(config, "block")
    parallel_state.destroy_model_parallel()
    # Of 48 columns each rank has 24; rows may be cut, since each can have its block's scale.
    with pytest.raises(
        UserError,
        match=r"^file: decoder.layers.1.mlp.linear_fc2.weight cannot be split over 2"
        r" tensor-parallel ranks, columns \d+ to \d+ cut groups of 16 that share an entry"
        " of weight_scale_inv: use fewer$",
    ):
        filled(config, source, tensor_parallel=2)


def whole(config, kind: str):
    """The file, made by a rank alone."""
    parallel_state.destroy_model_parallel()
    return stored(config, everywhere(FORMATS[kind]))


LAYOUTS = {
    "tensors": dict(tensor_parallel=2),
    "experts": dict(tensor_parallel=2, expert_parallel=2, expert_tensor_parallel=1),
    "stages": dict(pipeline_parallel=2),
}
SPLIT = [
    ("mamba2", "matrix", ["tensors"]),
    ("mamba2", "static, inputs", ["tensors", "experts"]),
    ("gated delta net", "block", ["tensors", "experts"]),
    ("latent attention", "row", ["tensors"]),
    ("dense", "static, inputs", ["tensors", "stages"]),
]


@torch.no_grad()
def test_two_ranks_compute_what_one_does(tmp_path):
    ids = torch.randint(0, 48, (1, 20), generator=torch.Generator().manual_seed(1))
    expected = {"ids": ids}
    for family, kind, _ in SPLIT:
        config = CONFIGS[family]
        model = filled(config, stored(config, everywhere(FORMATS[kind])))
        logits = compute_logits(model, base_forward(model, ids, SequenceInput()))
        expected[f"{family}, {kind}"] = logits
        expected[f"tokens, {family}, {kind}"] = torch.tensor(tokens_of(model, 2)[0])
    save_file(expected, tmp_path / "logits.st")
    run_ranks(as_read, tmp_path)


@pytest.fixture
def directory(tmp_path):
    """A checkpoint that is not quantised."""
    save_hf_model(build_model(CONFIGS["mamba2"], device="cpu", seed=4), tmp_path / "hf")
    return tmp_path / "hf"


def test_a_checkpoint_is_quantised_while_it_is_loaded(directory):
    llm = LLM(directory, 2, quantization="fp8", num_blocks=60, device="cpu", dtype="float32")
    assert quantized_as(llm.model) == {"fp8"}
    found = generate(llm, PROMPTS, greedy(TOKENS), poison=False)

    model = load_model(directory)
    assert not quantized_as(model)
    plain = generate(make_llm(model, 2), PROMPTS, greedy(TOKENS))
    quantize_base(model)
    assert found == generate(make_llm(model, 2, quantization="fp8"), PROMPTS, greedy(TOKENS))
    assert found != plain


def test_what_cannot_be_quantised_is_refused(directory, monkeypatch):
    with pytest.raises(UserError, match=r"^quantization is fp8, but the model given is not quant"):
        LLM(load_model(directory), quantization="fp8")
    config = CONFIGS["dense"]
    model = filled(config, stored(config, everywhere(FORMATS["nvfp4"])))
    with pytest.raises(UserError, match=r"^quantization is fp8, but the model given is not quant"):
        LLM(model, quantization="fp8")
