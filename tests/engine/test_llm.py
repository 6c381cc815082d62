"""The front door: prompts in every form, streaming, statistics, errors of a user's making."""

import io
import json
import shutil
import weakref

import pytest
import torch

from mtpkit import LLM, SamplingParams
from mtpkit.checkpoint import save_model
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.engine.loading import warn_untrained
from mtpkit.errors import UserError
from mtpkit.model import build_model, state_specs
from mtpkit.model.state import Newest, Ring
from tests.engine.tiny import (
    greedy,
    guide,
    headless_model,
    held_bytes,
    make_llm,
    make_prompts,
    tiny_config,
    tiny_model,
)
from tests.shared import each


class Words:
    """Numbers as text."""

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(f"{token_id} " for token_id in token_ids)


def test_prompts_in_every_form_give_the_same_output():
    llm = make_llm(tiny_model(), 2, tokenizer=Words())
    forms = ["5 6 7", [5, 6, 7], {"prompt": "5 6 7"}, {"prompt_token_ids": [5, 6, 7]}]
    for form in forms:
        (output,) = llm.generate(form, greedy(6))
        assert output.prompt_token_ids == [5, 6, 7] and output.finished
        assert output.prompt == (
            "5 6 7" if "5 6 7" in (form, *getattr(form, "values", list)()) else None
        )
        assert output.outputs[0].text == Words().decode(output.outputs[0].token_ids)
    assert len({tuple(o.outputs[0].token_ids) for o in llm.generate(forms, greedy(6))}) == 1


def test_outputs_come_in_the_order_of_the_prompts_with_their_own_parameters():
    llm = make_llm(tiny_model(), 3)
    outputs = llm.generate([[1], [2, 3], [4]], [greedy(9), greedy(2), greedy(5)])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 2, 5]
    assert [o.prompt_token_ids for o in outputs] == [[1], [2, 3], [4]]


def test_streaming_grows_to_the_same_output():
    prompts = make_prompts((3, 9))
    want = make_llm(tiny_model(), 0).generate(prompts, greedy())
    llm = guide(make_llm(tiny_model(), 3, tokenizer=Words()), prompts)
    seen: dict[str, list[int]] = {}
    for output in llm.stream(prompts, greedy()):
        before = seen.get(output.request_id, [])
        now = output.outputs[0].token_ids
        assert now[: len(before)] == before and len(before) < len(now) <= len(before) + 4
        seen[output.request_id] = now
        assert output.finished == (len(now) == 20)
    assert list(seen.values()) == [o.outputs[0].token_ids for o in want]


def test_a_closed_stream_leaves_nothing_behind():
    llm = make_llm(tiny_model(), 2)
    stream = llm.stream(make_prompts((3, 9, 4)), greedy())
    next(stream)
    stream.close()
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_unfinished and scheduler.blocks.num_free == scheduler.blocks.size
    scheduler.check_integrity()


def test_a_second_stream_waits_for_the_first_and_an_unread_one_holds_nothing():
    llm = make_llm(tiny_model(), 2)
    unread = llm.stream([[1]], greedy())
    first = llm.stream([[2]], greedy())
    next(first)
    with pytest.raises(UserError, match="an earlier stream of this thread is still open"):
        llm.generate([[3]], greedy())
    assert list(first)[-1].finished
    assert llm.generate([[3]], greedy())[0].finished and list(unread)[-1].finished


def test_seeded_samples_do_not_depend_on_k_batch_or_preemption():
    params = [SamplingParams(max_tokens=15, seed=i, top_p=0.9, ignore_eos=True) for i in range(4)]
    prompts = make_prompts((4, 1, 9, 5))
    alone = make_llm(tiny_model(), 0)
    want = [
        alone.generate(p, one)[0].outputs[0].token_ids
        for p, one in zip(prompts, params, strict=True)
    ]
    for k, settings in ((0, {}), (3, {}), (2, {"block_size": 2, "num_blocks": 18})):
        llm = make_llm(tiny_model(), k, **settings)
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == want
    assert llm.stats().preemptions > 0


@pytest.mark.parametrize("heads", ["repeated", "distinct"])
def test_sampled_drafts_give_the_same_output_after_preemption(heads):
    params = [SamplingParams(max_tokens=15, seed=i, ignore_eos=True) for i in range(4)]
    prompts = make_prompts((4, 1, 9, 5))
    small, large = (
        make_llm(tiny_model(heads), 3, draft_sampling=True, block_size=2, num_blocks=blocks)
        for blocks in (18, 200)
    )
    got, want = (
        [o.outputs[0].token_ids for o in llm.generate(prompts, params)] for llm in (small, large)
    )
    assert got == want and small.stats().preemptions > 0


def test_engine_seed_serves_requests_without_one():
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    runs = [
        [
            o.outputs[0].token_ids
            for o in make_llm(tiny_model(), 0, seed=seed).generate([[1], [1]], params)
        ]
        for seed in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2] and runs[0][0] != runs[0][1]


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float16"])
def test_bytes_are_those_of_the_tensors(rollback, state_dtype):
    llm = make_llm(tiny_model(), 3, state_rollback=rollback, state_dtype=state_dtype)
    stats = llm.stats()
    assert stats.state_bytes + stats.kv_bytes == held_bytes(llm.engine)
    (output,) = llm.generate([1, 2, 3], greedy(6))
    assert output.stats.state_bytes == stats.state_bytes_per_request == stats.state_bytes // 8
    # 3 + 6 tokens and what 6 positions of lookahead reach
    assert output.stats.kv_bytes == 2 * stats.kv_bytes // 200


def test_statistics_add_up():
    prompts = make_prompts()
    llm = guide(make_llm(tiny_model(), 3), prompts)
    outputs = llm.generate(prompts, greedy())
    total = llm.stats()
    for name in ("steps", "drafted", "accepted"):
        assert getattr(total.acceptance, name) == sum(getattr(o.stats, name) for o in outputs)
    assert total.generated_tokens == 20 * len(prompts) and total.tokens_per_s > 0
    assert total.acceptance_length == 1 + total.acceptance.accepted / total.acceptance.steps > 1.2
    llm.reset_stats()
    assert llm.stats().generated_tokens == 0 and llm.stats().acceptance.steps == 0


@each(
    ("heads", "settings", "message"),
    [
        ("repeated", {"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
        ("distinct", {"num_speculative_tokens": 4}, "has 3 distinct MTP heads"),
        ("none", {"num_speculative_tokens": 1}, "has no MTP heads"),
        ("repeated", {"dtype": "float16"}, "dtype is 'float16'"),
        ("repeated", {"dtype": "bfloat16"}, "the model given holds torch.float32"),
        ("repeated", {"state_dtype": "int8"}, "state_dtype is 'int8'"),
        ("repeated", {"gpu_memory_utilization": 0.0}, "gpu_memory_utilization is 0.0"),
        ("repeated", {"max_model_len": 0}, "max_model_len is 0"),
        ("repeated", {"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ("repeated", {"num_blocks": 0}, "num_blocks is 0, must be from 1 to 2147483647"),
        ("repeated", {"num_blocks": -3}, "num_blocks is -3, must be from 1 to 2147483647"),
        (
            "repeated",
            {"num_speculative_tokens": 3, "synthetic_acceptance": [0.9, 0.5]},
            "must be 3 rates from 0 to 1",
        ),
        (
            "repeated",
            {"num_speculative_tokens": 1, "synthetic_acceptance": [2.0]},
            "must be 1 rates from 0 to 1",
        ),
        ("repeated", {"device": "gpu"}, "device 'gpu' is unknown: use 'cuda' or 'cpu'"),
        (
            "repeated",
            {"max_model_len": 2**31 - 1},
            "lower max_num_seqs, max_model_len or max_num_batched_tokens",
        ),
    ],
)
def test_settings_that_cannot_work(heads, settings, message):
    model = tiny_model(heads) if heads != "none" else headless_model()
    with pytest.raises(UserError, match=message):
        LLM(model, **settings)


def test_settings_without_effect_are_named(caplog):
    LLM(tiny_model(), 0, draft_vocab=[1, 2], synthetic_acceptance=[0.5], num_blocks=50)
    assert [
        record.message.split()[0] for record in caplog.records if "no effect" in record.message
    ] == [
        "draft_vocab",
        "synthetic_acceptance",
    ]


@pytest.mark.parametrize("extra", [0, 1])
def test_more_drafts_than_depths_are_warned_of_once(caplog, extra):
    model = tiny_model()
    depths = model.mtpkit_config.mtp.num_depths
    warn_untrained.cache_clear()
    for _ in range(2):
        LLM(model, depths + extra, num_blocks=50)
    said = [
        record.message
        for record in caplog.records
        if "later drafts were not trained" in record.message
    ]
    assert len(said) == extra
    if said:
        assert (
            f"num_speculative_tokens is {depths + 1}, but the head of the model given has {depths}"
            " depths" in said[0]
        )
        assert f"take at most {depths}, or train more depths" in said[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_engine_goes_with_its_last_user(device):
    """`LLM` is in no reference cycle, so that its memory is freed without a garbage collection."""
    llm = make_llm(tiny_model(device=device), 2)
    llm.generate(make_prompts((4,)), greedy())
    engine = weakref.ref(llm.engine)
    state = weakref.ref(llm.engine.executor.states.all()[0])
    del llm
    assert engine() is None and state() is None


def test_cache_defaults_to_full_length_requests_for_every_slot():
    """With the prefix cache, for as many prompts of requests that have ended, too."""
    one = -(-(128 + 6) // 16)
    for cached, requests in ((False, 2), (True, 4)):
        llm = LLM(tiny_model(), 3, max_num_seqs=2, enable_prefix_caching=cached)
        assert llm.engine.scheduler.blocks.size == requests * one


def test_ring_holds_a_step_of_any_width():
    llm = make_llm(tiny_model(), 12)
    layout = llm.engine.layout
    assert layout.counters == (Newest(), Ring(48)) and set(layout.specs) == set(
        state_specs(tiny_model())
    )
    assert (
        llm.generate([[1, 2]], greedy())[0].outputs[0].token_ids
        == make_llm(tiny_model(), 0).generate([[1, 2]], greedy())[0].outputs[0].token_ids
    )


def test_text_with_a_real_tokenizer(tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    model = headless_model()
    llm = make_llm(model, 0, tokenizer=tokenizer_dir)
    token_ids = [t % model.mtpkit_config.vocab_size for t in range(3, 9)]
    output = llm.generate([token_ids], greedy(8))[0].outputs[0]
    assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=True)
    assert llm.get_tokenizer().get_vocab() == tokenizer.get_vocab()
    assert make_llm(model, 0).get_tokenizer() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(UserError, match="device is cuda, but torch finds no GPU here: use 'cpu'"):
        LLM(tiny_model(), device="cuda")


def test_all_that_a_model_calls_its_end_ends_a_request(tmp_path, tokenizer_dir):
    """Config, generation settings and tokenizer may each name another token."""
    model = tiny_model()
    model.mtpkit_config = model.mtpkit_config.replace(eos_token_ids=(7,))
    save_model(model, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11]}))
    shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
    own = load_tokenizer(tokenizer_dir).eos_token_id
    assert LLM(tmp_path, num_blocks=50).engine.intake.eos_token_ids == {7, 9, 11, own}
    given = LLM(model, num_blocks=50, tokenizer=tokenizer_dir)
    assert given.engine.intake.eos_token_ids == {7, own}


def test_bfloat16_model_decodes():
    model = build_model(tiny_model().mtpkit_config, dtype=torch.bfloat16)
    llm = make_llm(model, 3, state_dtype="bfloat16")
    assert len(llm.generate([[1, 2, 3]], greedy())[0].outputs[0].token_ids) == 20


def test_a_saved_model_decodes_as_in_memory(tmp_path, tokenizer_dir):
    save_model(tiny_model(), tmp_path / "bare")
    shutil.copytree(tmp_path / "bare", tmp_path / "whole")
    shutil.copytree(tokenizer_dir, tmp_path / "whole", dirs_exist_ok=True)
    want = make_llm(tiny_model(), 2).generate([[1, 2]], greedy())[0].outputs[0].token_ids
    for name in ("bare", "whole"):
        llm = make_llm(tmp_path / name, 2, dtype="float32", device="cpu")
        assert llm.generate([[1, 2]], greedy())[0].outputs[0].token_ids == want
        assert (llm.tokenizer is None) == (name == "bare")


@pytest.mark.parametrize(
    ("terminal", "rank", "options", "shown"),
    [
        (True, 0, {}, True),
        (True, 1, {}, False),
        (False, 0, {}, False),
        (True, 0, {"use_tqdm": False}, False),
        (False, 1, {"use_tqdm": True}, True),
    ],
)
def test_a_terminal_shows_progress(terminal, rank, options, shown, monkeypatch):
    stderr = io.StringIO()
    stderr.isatty = lambda: terminal
    llm = make_llm(tiny_model(), 0)
    llm.ranks.rank = rank
    monkeypatch.setattr("sys.stderr", stderr)
    llm.generate([[1, 2], [3]], greedy(2), **options)
    assert ("prompts: 100%" in stderr.getvalue()) == shown


def test_a_shut_down_llm_gives_up_model_and_caches():
    model = build_model(tiny_config(), device="cpu", seed=3)
    with make_llm(model, 2) as llm:
        want = llm.generate([[1, 2]], greedy())[0].outputs
        model_gone, engine_gone = weakref.ref(model), weakref.ref(llm.engine)
        del model
    assert model_gone() is None and engine_gone() is None and want
    for use in (lambda: llm.generate([[1]]), llm.stats, llm.reset_prefix_cache, lambda: llm.model):
        with pytest.raises(UserError, match="this LLM was shut down: make a new one"):
            use()
    llm.shutdown()
    assert not hasattr(llm, "engine")


def test_an_open_stream_is_closed_before_an_llm_is_shut_down():
    llm = make_llm(tiny_model(), 2)
    stream = llm.stream([[1]], greedy())
    next(stream)
    with pytest.raises(UserError, match="an earlier stream of this thread is still open"):
        llm.shutdown()
    stream.close()
    llm.shutdown()


def test_metrics_have_the_names_and_values_of_vllm():
    """As vLLM's own example of speculative decoding reads them."""
    llm = guide(make_llm(tiny_model(), 3), make_prompts())
    llm.generate(make_prompts(), greedy())
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    acceptance = llm.stats().acceptance
    assert metrics["vllm:generation_tokens"].value == llm.stats().generated_tokens
    assert metrics["vllm:spec_decode_num_draft_tokens"].value == acceptance.drafted
    per_position = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    assert per_position == acceptance.accepted_per_depth and len(per_position) == 3
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"].value
    drafts = metrics["vllm:spec_decode_num_drafts"].value
    assert accepted == sum(per_position) > 0
    assert 1 + accepted / drafts == pytest.approx(acceptance.acceptance_length, rel=0.1)
    assert metrics["vllm:num_requests_running"].value == 0
