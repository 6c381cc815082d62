"""Keys and values in fp8: the engine against plain decoding whose keys and values are rounded by
the same rule."""

import contextlib
import functools
import logging
import math

import pytest
import torch

from mtpkit.engine import LLM, loading
from mtpkit.errors import UserError
from mtpkit.kernels.kv_store import KVScales
from mtpkit.kernels.linear import FP8
from mtpkit.model import build_model
from mtpkit.model.kinds import layers_of
from mtpkit.model.layers import attention as layer
from tests.engine.poison import poison
from tests.engine.replayed import replay_on_cpu
from tests.engine.tiny import (
    decode,
    generate,
    greedy,
    guide,
    held_bytes,
    make_llm,
    make_prompts,
    record_drafts,
    teacher_forced_drafts,
    tiny_config,
    tiny_model,
)

PROMPTS = make_prompts()
MODELS = [("M-*M-", "*-"), ("*-*-", "*-"), ("G-*G-", "G-"), ("+-M+", "+-")]
LENGTH = 16
K = "num_speculative_tokens"


@functools.cache
def fp8_model(
    pattern: str = "*-*-",
    mtp_pattern: str = "*-",
    heads: str = "repeated",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
):
    """A model for a cache in fp8, whose layers of grouped-query attention have scales of their own:
    with some of them keys and values are clamped, with others they lose bits."""
    config = tiny_config(heads, pattern, mtp_pattern)
    model = build_model(config, dtype=dtype, device=device, seed=1)
    scales = [KVScales(0.004, 2.5), KVScales(1.5, 0.003), KVScales(0.3, 0.7)]
    for mixer, _ in attentions(model, "attention"):
        mixer.kv_scales = scales[0]
        scales = scales[1:] + scales[:1]
    return model


def attentions(model, *names: str):
    for _, block, kind in layers_of(model):
        if kind.name in names:
            yield block.self_attention, kind.name


def nearest(x, scale=1.0):
    """What stands for `x` in a cache in fp8."""
    inverse = torch.tensor(1 / scale, dtype=torch.float32)
    return (x * inverse).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@contextlib.contextmanager
def rounding(model):
    """In the block, whole sequences are computed with rounded keys and values: `decode` is what an
    engine with a cache in fp8 should do."""
    undo = contextlib.ExitStack()
    for mixer, name in attentions(model, "attention", "mla"):
        if name == "attention":
            undo.callback(_round_keys_and_values(mixer))
        else:
            undo.callback(_round_latents(mixer))
    with undo:
        yield


def _round_keys_and_values(mixer):
    def both(k, v):
        return nearest(k, mixer.kv_scales.key), nearest(v, mixer.kv_scales.value)

    def before(_, args):
        q, k, v, documents = args
        return q, *both(k, v), documents

    hook = mixer.core_attention.register_forward_pre_hook(before)
    depth = mixer._depth
    mixer._depth = lambda q, k, v, inputs: depth(q, *both(k, v), inputs)

    def undo():
        hook.remove()
        del mixer._depth

    return undo


def _round_latents(mixer):
    rotate = mixer._rotate

    def after(up, args, _):
        return nearest(up.normed(args[0])) @ up.weight.t(), None

    def rotated(x, positions):
        turned = rotate(x, positions)
        return nearest(turned) if x.shape[2] == 1 else turned  # keys have one head, queries four

    hook = mixer.linear_kv_up_proj.register_forward_hook(after)
    mixer._rotate = rotated

    def undo():
        hook.remove()
        del mixer._rotate

    return undo


def truth(model, prompts=PROMPTS, length=LENGTH) -> list[list[int]]:
    with rounding(model):
        return [decode(model, prompt, length) for prompt in prompts]


def make(model, k: int, **settings):
    return make_llm(model, k, kv_cache_dtype="fp8_e4m3", **settings)


def said(llm, prompts=PROMPTS) -> list[list[int]]:
    k = llm.engine.config.num_speculative_tokens
    if k:
        known = truth(llm.model, prompts, LENGTH + 2 * k)
        following = [prompt + after for prompt, after in zip(prompts, known, strict=True)]
        guide(llm, prompts, LENGTH, following)
    return generate(llm, prompts, greedy(LENGTH))


@pytest.mark.parametrize(("pattern", "mtp_pattern"), MODELS)
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
def test_tokens_are_those_of_rounded_keys_and_values_for_every_k(pattern, mtp_pattern, k):
    model = fp8_model(pattern, mtp_pattern)
    llm = make(model, k)
    assert said(llm) == truth(model)
    if k:
        assert all(0 < rate < 1 for rate in llm.stats().conditional_acceptance)


@pytest.mark.parametrize(("pattern", "mtp_pattern"), MODELS)
def test_rounding_changes_tokens(pattern, mtp_pattern):
    """Otherwise the other tests would compare nothing."""
    model = fp8_model(pattern, mtp_pattern)
    assert generate(make_llm(model, 0), PROMPTS, greedy(LENGTH)) != truth(model)


@pytest.mark.parametrize("heads", ["repeated", "distinct"])
@pytest.mark.parametrize(("pattern", "mtp_pattern"), [MODELS[1], MODELS[3]])
def test_drafts_are_those_of_rounded_keys_and_values(heads, pattern, mtp_pattern):
    model = fp8_model(pattern, mtp_pattern, heads)
    llm = make(model, 3, max_num_batched_tokens=14, max_num_seqs=3)
    drafts = record_drafts(llm, PROMPTS, 10, guided=False)
    with rounding(model):
        assert len(drafts) > 10
        assert all(got == teacher_forced_drafts(model, known, 3) for known, got in drafts.items())


@pytest.mark.parametrize(("pattern", "mtp_pattern"), [MODELS[0], MODELS[3]])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 14, "max_num_seqs": 3, "async_scheduling": True},
        {"block_size": 2, "num_blocks": 30},
        {"block_size": 1, "num_blocks": 120, "max_num_batched_tokens": 9},
    ],
    ids=["chunks", "mixed", "preemption", "more drafts than a block has places"],
)
def test_chunks_mixed_steps_and_preemption(pattern, mtp_pattern, settings):
    model = fp8_model(pattern, mtp_pattern)
    llm = make(model, 3, **settings)
    assert said(llm) == truth(model)
    assert (llm.stats().preemptions > 0) == (settings.get("num_blocks") == 30)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """The device of a model; on a CPU steps are run again where a GPU replays them."""
    if request.param == "cpu":
        replay_on_cpu(monkeypatch)
    return request.param


@pytest.mark.parametrize(("pattern", "mtp_pattern"), [MODELS[0], MODELS[3]])
@pytest.mark.parametrize(
    "settings",
    [
        {K: 3},
        {K: 3, "enable_prefix_caching": True},
        {K: 3, "max_num_batched_tokens": 14, "max_num_seqs": 3},
        {"speculative_token_tree": "[2, 2, 1]"},
        {K: 0},
    ],
    ids=str,
)
def test_graphs(pattern, mtp_pattern, settings, device):
    """With their null rows; the second time, with a prefix cache, every prompt continues from a
    block that is copied."""
    model = fp8_model(pattern, mtp_pattern, device=device)
    others = {name: value for name, value in settings.items() if name != K}
    llm = make(model, settings.get(K), **others)
    assert llm.engine.executor.graphs is not None
    for _ in range(2):
        outputs = llm.generate(PROMPTS, greedy(LENGTH), use_tqdm=False)
        assert [one.outputs[0].token_ids for one in outputs] == truth(model)
    assert (llm.stats().cached_tokens > 0) == ("enable_prefix_caching" in settings)


@pytest.mark.gpu
@pytest.mark.parametrize(("pattern", "mtp_pattern"), [MODELS[1], MODELS[3]])
def test_bf16_models_on_a_gpu(pattern, mtp_pattern):
    """First tokens are those of fp32 up to near ties; all the rest is finite."""
    exact = fp8_model(pattern, mtp_pattern, device="cuda")
    model = fp8_model(pattern, mtp_pattern, device="cuda", dtype=torch.bfloat16)
    llm = make(model, 3, max_num_batched_tokens=16, max_num_seqs=4)
    tokens = generate(llm, PROMPTS, greedy(4))
    same = [a[0] == b[0] for a, b in zip(tokens, truth(exact, length=1), strict=True)]
    assert all(len(t) == 4 for t in tokens) and sum(same) >= len(PROMPTS) - 1


@pytest.mark.parametrize(("pattern", "mtp_pattern"), [MODELS[1], MODELS[3]])
@pytest.mark.parametrize("heads", ["repeated", "distinct"])
def test_trees(heads, pattern, mtp_pattern):
    """Entries of the accepted path are moved as they are."""
    model = fp8_model(pattern, mtp_pattern, heads)
    llm = make(model, 3, speculative_token_tree="[2, 2, 1]")
    assert generate(llm, PROMPTS, greedy(LENGTH)) == truth(model)
    assert sum(llm.stats().acceptance.accepted_per_depth)


@pytest.mark.parametrize(("pattern", "mtp_pattern"), [MODELS[0], MODELS[1], MODELS[3]])
@pytest.mark.parametrize("k", [0, 3])
def test_a_hit_in_the_prefix_cache_changes_no_token(pattern, mtp_pattern, k):
    """Prompts that share a prefix, which ends in a block, at its end, and in the one after it."""
    model = fp8_model(pattern, mtp_pattern)
    llm = make(model, k, enable_prefix_caching=True, max_num_seqs=4)
    prompts = [[*PROMPTS[-1][:length], length] for length in (15, 16, 17, 21)]
    want = truth(model, prompts)
    for _ in range(2):
        for prompt, tokens in zip(prompts, want, strict=True):
            ids = [llm.engine.add_request(prompt, greedy(LENGTH))]
            finished = {}
            while llm.engine.has_unfinished:
                poison(llm.engine)
                finished |= {one.request_id: one for one in llm.engine.step() if one.finished}
            assert finished[ids[0]].outputs[0].token_ids == tokens
    assert llm.stats().cached_tokens > 60


@pytest.mark.parametrize("broken", ["scale", "forgotten keys", "key for value"])
def test_a_wrong_rule_is_noticed(broken, monkeypatch):
    model = fp8_model()
    want = truth(model)
    place = layer.place_qkv

    def wrong(*args, scales, **rest):
        if broken == "scale":
            scales = KVScales(2 * scales.key, scales.value)
        if broken == "key for value":
            scales = KVScales(scales.value, scales.key)
        if broken == "forgotten keys":
            args[3].zero_()
        return place(*args, scales=scales, **rest)

    monkeypatch.setattr(layer, "place_qkv", wrong)
    assert generate(make(model, 0), PROMPTS, greedy(LENGTH)) != want


@pytest.mark.parametrize("pattern", ["*-*-", "+-M+"])
def test_a_broken_request_ends_alone(pattern):
    model = build_model(tiny_config("repeated", pattern, pattern[:2]), device="cpu", seed=1)
    with torch.no_grad():
        model.embedding.word_embeddings.weight[5] = math.nan
    outputs = make(model, 0).generate([[1, 2, 3], [4, 5, 6]], greedy(4), use_tqdm=False)
    assert [one.outputs[0].finish_reason for one in outputs] == ["length", "error"]


@pytest.mark.parametrize("pattern", ["*-*-", "+-M+"])
@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_infinite_keys_are_errors_with_either_cache(pattern, dtype):
    """Clamping must not make numbers of them. Values are whole here, queries too."""
    model = build_model(tiny_config("repeated", pattern, pattern[:2]), device="cpu", seed=1)
    mixer = next(mixer for mixer, _ in attentions(model, "attention", "mla"))
    with torch.no_grad():
        if pattern == "*-*-":
            width = mixer.hidden_size_per_attention_head
            mixer.linear_qkv.weight[-2 * width, 0] = math.inf  # of the last group's key
        else:
            mixer.linear_kv_down_proj.weight[-1, 0] = math.inf
    llm = make_llm(model, 0, kv_cache_dtype=dtype)
    (output,) = llm.generate([[1, 2, 3]], greedy(4), use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"


@pytest.mark.parametrize("letter", ["*", "+"])
def test_the_cache_takes_half_of_bfloat16s_memory(letter):
    config = tiny_config("repeated", f"{letter}-{letter}", f"{letter}-")
    model = build_model(config, dtype=torch.bfloat16, device="cpu")
    whole, half = (
        make_llm(model, 3, num_blocks=40, kv_cache_dtype=dtype) for dtype in ("auto", "fp8_e4m3")
    )
    assert 2 * half.memory_plan.block_bytes == whole.memory_plan.block_bytes
    assert half.memory_plan.kv_bytes == 40 * half.memory_plan.block_bytes
    states = half.engine.executor.states.all()
    assert len(states) == 3 and {t.dtype for one in states for t in one.tensors.values()} == {FP8}
    assert 2 * held_bytes(half.engine) == held_bytes(whole.engine)
    assert [len(tokens) for tokens in generate(half, PROMPTS, greedy(4))] == [4] * len(PROMPTS)


def test_auto_reads_no_scales():
    """A cache in the dtype of the model holds keys and values as they are."""
    model = fp8_model()
    plain = tiny_model("repeated", "*-*-", "*-")
    outputs = [generate(make_llm(one, 3), PROMPTS, greedy(LENGTH)) for one in (model, plain)]
    assert outputs[0] == outputs[1]


def test_a_model_without_keys_and_values_is_warned_of(caplog):
    model = build_model(tiny_config("repeated", "MM", "M"), device="cpu", seed=1)
    with caplog.at_level(logging.WARNING):
        make(model, 0)
    assert "kv_cache_dtype has no effect" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        make(tiny_model(), 0)
    assert "kv_cache_dtype" not in caplog.text


def test_a_gpu_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(loading, "_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old One")
    with pytest.raises(UserError, match="kv_cache_dtype is fp8_e4m3, but Old One cannot"):
        LLM(tiny_model(), 0, device="cuda", kv_cache_dtype="fp8_e4m3")
