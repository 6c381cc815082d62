"""The Transformer Engine backend: chosen, missing, and beside Megatron's own checkpoints and the
local backend."""

import os

import pytest
import torch
from safetensors.torch import load_file

from mtpkit.checkpoint import load_model, save_model
from mtpkit.errors import UserError
from mtpkit.model import SequenceInput, base_forward, build_model, compute_logits, unroll_depths
from mtpkit.model.backends import get_backend, resolve_backend
from mtpkit.model.fp8 import use_fp8_base
from tests.checkpoint.builders import GOLDEN
from tests.kernels.recurrence import relative
from tests.model.toy import CONFIG, packed, toy_tokens

TOLERANCE = 1e-4
"""What products in fp32 by other kernels may differ by, TF32 off."""
# which cuBLAS reads once: products in fp32 would take TF32
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")


@pytest.fixture
def te():
    return pytest.importorskip("transformer_engine.pytorch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_and_not_chosen_by_auto():
    with pytest.raises(UserError, match=r"^backend 'te' needs a GPU; or choose backend 'local'$"):
        get_backend("te")
    assert resolve_backend("auto") == "local" and resolve_backend("te") == "te"


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(__import__("sys").modules, "transformer_engine.pytorch", None)
    with pytest.raises(
        UserError,
        match=r"Transformer Engine, which cannot be imported .*pip install 'mtpkit\[te\]'",
    ):
        get_backend("te")
    assert resolve_backend("auto") == "local"


@pytest.mark.parametrize("installed", [True, False])
def test_auto_says_so_where_the_package_is_there_and_does_not_work(monkeypatch, caplog, installed):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(__import__("sys").modules, "transformer_engine.pytorch", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    assert resolve_backend("auto") == "local"
    warned = (
        "backend 'local' is used: 'te' needs Transformer Engine, which cannot be imported"
        in caplog.text
    )
    assert warned == installed


@pytest.mark.parametrize(
    "error",
    [AssertionError("parts of\ntwo versions"), RuntimeError("an empty package"), OSError("x")],
)
def test_whatever_its_import_raises_is_the_reason(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(UserError, match=rf"cannot be imported \({' '.join(str(error).split())}\)"):
        get_backend("te")


@torch.no_grad()
def states_of(model, ids, documents=None, positions=None):
    """Logits and h, g^1, g^2, .."""
    hidden = base_forward(model, ids, SequenceInput(documents, positions))
    depths = unroll_depths(
        model, hidden, ids, model.mtpkit_config.mtp.num_depths, "per_depth", documents, positions
    )
    return [compute_logits(model, hidden), hidden, *depths]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", ["tp1/gated_rope", "tp1/mamba_attention_mlp", "tp1/moe", "tp1/distinct_heads"]
)
def test_golden_logits_and_depths(case, te):
    golden = load_file(GOLDEN / case / "golden.safetensors")
    model = load_model(GOLDEN / case, device="cuda", backend="te")
    assert any(isinstance(module, te.LayerNormLinear) for module in model.modules())
    logits, *states = states_of(model, golden["ids"].cuda())
    assert relative(logits.transpose(0, 1).cpu(), golden["logits"]) < TOLERANCE
    for k, want in enumerate(golden["mtp_chain_sbh"].chunk(len(states))):
        count = len(want) - k
        assert relative(states[k][:count].cpu(), want[:count]) < TOLERANCE, k


ATTENTION = dict(
    pattern="*-M",
    mtp_pattern="*-",
    attention_output_gate=True,
    add_qkv_bias=True,
    qk_layernorm=True,
    layernorm_zero_centered_gamma=True,
)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, ATTENTION], ids=["usual", "attention"])
def test_one_state_dict_for_both_backends(te, changes):
    config = CONFIG.replace(**changes)
    local, other = (
        build_model(config, device="cuda", backend=name, seed=3) for name in ("local", "te")
    )
    mine = local.state_dict()
    theirs = other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert (
            torch.equal(value, theirs[name])
            if isinstance(value, torch.Tensor)
            else value == theirs[name]
        ), name
    assert local.sharded_state_dict().keys() == other.sharded_state_dict().keys()


@pytest.mark.gpu
@pytest.mark.parametrize("backends", [("local", "te"), ("te", "local")])
@pytest.mark.parametrize("changes", [{}, ATTENTION], ids=["usual", "attention"])
def test_what_one_backend_saves_the_other_loads(te, tmp_path, backends, changes):
    saves, loads = backends
    saved = build_model(CONFIG.replace(**changes), device="cuda", backend=saves, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in saved.parameters():
            if parameter.dim() == 1:  # biases and norms around zero start as zeros
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).cuda())
    save_model(saved, tmp_path)
    loaded = load_model(tmp_path, device="cuda", backend=loads)
    ids = toy_tokens(24).cuda()
    for want, have in zip(states_of(saved, ids), states_of(loaded, ids), strict=True):
        assert relative(have, want) < TOLERANCE


@pytest.mark.gpu
def test_packed_documents_as_with_the_local_backend(te):
    local, other = (
        build_model(CONFIG, device="cuda", backend=name, seed=3) for name in ("local", "te")
    )
    ids, (documents, positions) = toy_tokens(24).cuda(), (t.cuda() for t in packed(1, 9, 6, 8))
    for want, have in zip(
        *(states_of(m, ids, documents, positions) for m in (local, other)), strict=True
    ):
        count = len(want) - 4
        assert relative(have[:count], want[:count]) < TOLERANCE


@pytest.mark.gpu
def test_gradients_as_with_the_local_backend(te):
    gradients = []
    ids = toy_tokens(24, batch=2).cuda()
    for name in ("local", "te"):
        model = build_model(CONFIG, device="cuda", backend=name, seed=3)
        hidden = base_forward(model, ids, SequenceInput()).detach()
        last = list(unroll_depths(model, hidden, ids, 2))[-1]
        weights = torch.randn(last.shape, generator=torch.Generator().manual_seed(4)).cuda()
        (last * weights)[:20].mean().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, want in gradients[0].items():
        assert relative(gradients[1][name], want) < TOLERANCE, name


@pytest.mark.gpu
def test_fp8_stays_near_bf16_and_needs_fitting_matrices(te):
    # all matrices have multiples of 16
    sizes = dict(hidden_size=64, ffn_hidden_size=128, mamba_num_heads=16)
    config = CONFIG.replace(pattern="M*-M", **sizes)
    model = build_model(config, dtype=torch.bfloat16, device="cuda", backend="te", seed=3)
    ids = toy_tokens(32).cuda()
    with torch.no_grad():
        want = base_forward(model, ids, SequenceInput())
        use_fp8_base(model)
        have = base_forward(model, ids, SequenceInput())
    assert 1e-3 < (have - want).float().norm() / want.float().norm() < 0.15
    with pytest.raises(
        UserError, match="fp8 needs a multiple of 8 tokens per product, which experts may not get"
    ):
        use_fp8_base(build_model(CONFIG, dtype=torch.bfloat16, device="cuda", backend="te"))
    with pytest.raises(
        UserError,
        match=r"fp8 needs matrix sizes that are multiples of 16, unlike those of layers\.0",
    ):
        use_fp8_base(
            build_model(
                CONFIG.replace(pattern="M*-M"), dtype=torch.bfloat16, device="cuda", backend="te"
            )
        )
