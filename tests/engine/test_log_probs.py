"""Log-probabilities of outputs, against the model's own over the whole sequence."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import NemotronHForCausalLM

from mtpkit import LLM, SamplingParams
from mtpkit.checkpoint import save_hf_model
from mtpkit.engine import RequestOutputKind
from mtpkit.engine.requests.log_probs import MOST_LOG_PROBS
from mtpkit.engine.requests.tree import DynamicTree, parse_tree
from mtpkit.errors import UserError
from mtpkit.model import (
    SequenceInput,
    base_forward,
    build_model,
    compute_logits,
    normed_states,
)
from tests.checkpoint.builders import add_heads, write_base
from tests.engine.fakes import HashModel, extend_hash, fake_engine, run
from tests.engine.rank_cases import config
from tests.engine.tiny import VOCAB_SIZE, guide, make_llm, make_prompts, tiny_model
from tests.ranks import run_ranks

PROMPTS = make_prompts((1, 4, 9, 3, 17, 8))
CLOSE = 1e-5


class Words:
    """Numbers as text."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"{token_id} " for token_id in token_ids)


def asked(index: int, **settings) -> SamplingParams:
    """Requests that ask for none, one or many log-probabilities; greedy, drawn and penalised."""
    ways = [{}, {"temperature": 0.8, "seed": index, "top_k": 12}, {"repetition_penalty": 1.4}]
    known = dict(
        temperature=0, max_tokens=18, ignore_eos=True, logprobs=(0, 3, 20, None)[index % 4]
    )
    return SamplingParams(**known | ways[index % 3] | settings)


def whole_log_probs(model, tokens: list[int]) -> torch.Tensor:
    """[T, V], the log-probabilities after each token of a sequence."""
    device = next(model.parameters()).device
    with torch.inference_mode():
        hidden = base_forward(model, torch.tensor([tokens], device=device), SequenceInput())
        logits = compute_logits(model, normed_states(model, hidden[:, 0]))
    return logits.float().log_softmax(-1).cpu()


def check(output, count: int | None, log_probs: torch.Tensor) -> None:
    """Compare an output with log-probabilities [T, V] after each token of the sequence."""
    completion = output.outputs[0]
    if count is None:
        assert completion.logprobs is None and completion.cumulative_logprob is None
        return
    assert len(completion.logprobs) == len(completion.token_ids)
    total = 0.0
    for index, (token, found) in enumerate(
        zip(completion.token_ids, completion.logprobs, strict=True)
    ):
        here = log_probs[len(output.prompt_token_ids) - 1 + index]
        order = here.argsort(descending=True, stable=True).tolist()
        assert next(iter(found)) == token
        assert set(found) == {token, *order[:count]}
        for each, one in found.items():
            assert one.logprob == pytest.approx(here[each].item(), abs=CLOSE)
            assert one.rank == order.index(each) + 1
            assert one.decoded_token == f"{each} "
        total += found[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)


WAYS = {
    "plain": (0, {}),
    "chains": (3, {}),
    "few blocks": (2, {"num_blocks": 18, "block_size": 4}),
    "small steps": (3, {"max_num_batched_tokens": 9}),
    "a step ahead": (3, {"async_scheduling": True}),
    "a prefix cache": (3, {"enable_prefix_caching": True}),
    "drawn drafts": (2, {"draft_sampling": True}),
    "a tree": (None, {"speculative_token_tree": [2, 2, 1]}),
    "grown trees": (3, {"speculative_eagle_topk": 2, "state_rollback": "snapshot"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_they_are_those_of_the_whole_sequence(way, device):
    """Twice: the second time the prompts may be in the prefix cache."""
    k, settings = WAYS[way]
    model = tiny_model(device=device)
    llm = make_llm(model, k, tokenizer=Words(), max_num_seqs=3, **settings)
    if way in ("chains", "a step ahead") and device == "cpu":
        guide(llm, PROMPTS, 18)  # on the host, which no graph holds
    params = [asked(index) for index in range(len(PROMPTS))]
    for _ in range(2):
        outputs = llm.generate(PROMPTS, params)
        for output, one in zip(outputs, params, strict=True):
            whole = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            check(output, one.logprobs, whole_log_probs(model, whole))
    stats = llm.stats()
    assert (stats.preemptions > 0) == (way == "few blocks")
    assert (stats.cached_tokens > 0) == (way == "a prefix cache")
    assert k == 0 or stats.acceptance.accepted


@pytest.mark.parametrize(
    ("k", "settings"),
    [
        (0, {}),
        (3, {"drafts": "always"}),
        (3, {"drafts": "always", "tree": parse_tree([2, 2, 1]), "async_scheduling": True}),
        (3, {"drafts": "always", "tree": DynamicTree(3, 2, 6)}),
    ],
)
def test_probabilities_of_a_small_vocabulary_add_up_to_one(k, settings):
    """All tokens are among the most probable ones; siblings' logits are not taken for a path's."""
    model = HashModel(vocab_size=11, seed=2)
    engine = fake_engine(model, num_speculative_tokens=k, **settings)
    prompts = [[1, 2, 3], [7], [5, 5, 0, 9]]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, logprobs=20)
    names = [engine.add_request(prompt, params) for prompt in prompts]
    outputs = run(engine)
    for name, prompt in zip(names, prompts, strict=True):
        tokens = outputs[name].outputs[0].token_ids
        values = 0
        logits = []
        for token in [*prompt, *tokens]:
            values = extend_hash(values, token)
            logits.append(model.logits([values])[0])
        want = torch.stack(logits).log_softmax(-1)[len(prompt) - 1 :]
        for here, found in zip(want, outputs[name].outputs[0].logprobs, strict=False):
            assert sum(math.exp(one.logprob) for one in found.values()) == pytest.approx(1)
            assert {token: one.logprob for token, one in found.items()} == pytest.approx(
                dict(enumerate(here.tolist())), abs=CLOSE
            )


def test_processed_ones_are_those_of_the_distribution_that_is_drawn_from():
    model = tiny_model()
    llm = make_llm(model, 2, logprobs_mode="processed_logprobs", tokenizer=Words())
    allowed = list(range(0, VOCAB_SIZE, 4))
    drawn = SamplingParams(
        temperature=0.5, seed=1, max_tokens=9, allowed_token_ids=allowed, top_k=3, logprobs=20
    )
    greedy = SamplingParams(temperature=0, max_tokens=9, logit_bias={5: 3.0}, logprobs=20)
    drawn_output, greedy_output = llm.generate([[3, 4], [7]], [drawn, greedy])
    for output in (drawn_output, greedy_output):
        whole = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        raw = whole_log_probs(model, whole)[len(output.prompt_token_ids) - 1 :]
        for here, found in zip(raw, output.outputs[0].logprobs, strict=False):
            if output is drawn_output:
                kept = sorted(allowed, key=lambda token: -here[token].item())[:3]
                assert set(found) == set(kept)
                want = (here[kept] / 0.5).log_softmax(-1).tolist()
                values = [found[token].logprob for token in kept]
            else:
                here[5] += 3.0
                want = here.log_softmax(-1)[list(found)].tolist()
                values = [one.logprob for one in found.values()]
            assert values == pytest.approx(want, abs=CLOSE)


def test_those_of_prompts_are_the_model_s_own_in_both_modes():
    model = tiny_model()
    prompt = [3, 4, 9, 27]
    rules = dict(temperature=0.5, seed=1, top_k=3, logit_bias={5: 3.0})
    params = SamplingParams(max_tokens=2, prompt_logprobs=4, **rules)
    for mode in ("raw_logprobs", "processed_logprobs"):
        llm = make_llm(model, 2, logprobs_mode=mode, tokenizer=Words())
        (output,) = llm.generate([prompt], params)
        raw = whole_log_probs(model, prompt)
        for here, found in zip(raw, output.prompt_logprobs[1:], strict=False):
            values = [one.logprob for one in found.values()]
            assert values == pytest.approx(here[list(found)].tolist(), abs=CLOSE)


def test_they_are_those_of_transformers(tmp_path):
    """Of outputs and prompts, with and without drafts."""
    write_base(tmp_path, "M*-M")
    add_heads(tmp_path, "*-")
    theirs = NemotronHForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    params = [
        SamplingParams(
            max_tokens=12, ignore_eos=True, logprobs=5, prompt_logprobs=2, temperature=heat, seed=4
        )
        for heat in (0, 1.0)
    ]
    for k, prompt, one in itertools.product((0, 3), ([3, 9, 27, 81], [5]), params):
        llm = make_llm(str(tmp_path), k, dtype="float32", device="cpu")
        (output,) = llm.generate([prompt], [one])
        completion = output.outputs[0]
        with torch.no_grad():
            logits = theirs(torch.tensor([[*prompt, *completion.token_ids]])).logits[0]
        want = logits.float().log_softmax(-1)
        found = [*output.prompt_logprobs[1:], *completion.logprobs]
        assert len(found) == len(want) - 1
        for each, here in zip(found, want, strict=False):
            values = [entry.logprob for entry in each.values()]
            assert values == pytest.approx(here[list(each)].tolist(), abs=CLOSE)


def test_streams_hold_those_of_their_tokens():
    llm = make_llm(tiny_model(), 3, tokenizer=Words())
    params = [asked(2, output_kind=kind) for kind in RequestOutputKind]
    whole, new, final = (list(llm.stream(PROMPTS[2], one)) for one in params)
    want = whole[-1].outputs[0].logprobs
    assert [len(one.outputs[0].logprobs) for one in whole] == [
        len(one.outputs[0].token_ids) for one in whole
    ]
    assert [entry for one in new for entry in one.outputs[0].logprobs] == want
    assert final[-1].outputs[0].logprobs == want and len(new) > 2
    assert new[-1].outputs[0].cumulative_logprob == final[-1].outputs[0].cumulative_logprob


def test_an_output_that_ends_inside_accepted_drafts_has_one_entry_per_token():
    llm = guide(make_llm(tiny_model(), 3, tokenizer=Words()), PROMPTS)
    plain = llm.generate(PROMPTS[1], asked(0))[0].outputs[0].token_ids
    for index, token in enumerate(plain):
        params = asked(0, stop_token_ids=[token])
        completion = llm.generate(PROMPTS[1], params)[0].outputs[0]
        assert completion.finish_reason == "stop"
        assert completion.token_ids == plain[: plain.index(token) + 1]
        assert len(completion.logprobs) == len(completion.token_ids) <= index + 1


PROMPT_WAYS = {
    "plain": (0, {}),
    "chains": (3, {}),
    "few blocks": (2, {"num_blocks": 18, "block_size": 4}),
    "small steps": (3, {"max_num_batched_tokens": 9}),
    "mixed steps": (2, {"max_num_batched_tokens": 12, "max_mixed_tokens": 12}),
    "a step ahead": (3, {"async_scheduling": True}),
    "a prefix cache": (3, {"enable_prefix_caching": True}),
    "a tree": (None, {"speculative_token_tree": [2, 2, 1]}),
}


@pytest.mark.parametrize("way", PROMPT_WAYS)
def test_those_of_prompts_are_those_of_the_whole_prompt(way, monkeypatch):
    """Beside requests that do not ask; the second time the prompts may be in the prefix cache."""
    monkeypatch.setattr("mtpkit.engine.steps.log_probs._TOKENS_AT_ONCE", 3)
    k, settings = PROMPT_WAYS[way]
    model = tiny_model()
    llm = make_llm(model, k, tokenizer=Words(), max_num_seqs=3, **settings)
    params = [asked(index, prompt_logprobs=(0, 20, None)[index % 3]) for index in range(6)]
    plain = make_llm(model, 0).generate(PROMPTS, [asked(index) for index in range(6)])
    for _ in range(2):
        outputs = llm.generate(PROMPTS, params)
        for output, one, without in zip(outputs, params, plain, strict=True):
            assert output.outputs[0].token_ids == without.outputs[0].token_ids
            if one.prompt_logprobs is None:
                assert output.prompt_logprobs is None
                continue
            prompt = output.prompt_token_ids
            assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
            log_probs = whole_log_probs(model, prompt)
            pairs = zip(prompt[1:], output.prompt_logprobs[1:], log_probs, strict=False)
            for token, found, here in pairs:
                order = here.argsort(descending=True, stable=True).tolist()
                assert set(found) == {token, *order[: one.prompt_logprobs]}
                for each, entry in found.items():
                    assert entry.logprob == pytest.approx(here[each].item(), abs=CLOSE)
                    assert entry.rank == order.index(each) + 1
                    assert entry.decoded_token == f"{each} "
    assert (llm.stats().preemptions > 0) == (way == "few blocks")
    # Requests that do not ask find their prompts there.
    assert (llm.stats().cached_tokens > 0) == (way == "a prefix cache")


def test_streams_hold_those_of_prompts_once():
    llm = make_llm(tiny_model(), 3, max_num_batched_tokens=9)
    params = [asked(0, prompt_logprobs=2, output_kind=kind) for kind in RequestOutputKind]
    whole, new, final = (list(llm.stream(PROMPTS[4], one)) for one in params)
    want = final[-1].prompt_logprobs
    assert len(want) == len(PROMPTS[4])
    assert all(one.prompt_logprobs == want for one in whole)
    assert [one.prompt_logprobs for one in new] == [want] + [None] * (len(new) - 1)


@pytest.mark.parametrize("count", [-1, MOST_LOG_PROBS + 1])
def test_how_many_a_request_may_ask_for(count):
    with pytest.raises(UserError, match=f"logprobs is {count}, must be from 0 to 20"):
        SamplingParams(logprobs=count)


RULES = dict(logit_bias={3: 2.0, 9: -5.0}, min_tokens=4, bad_words=["1 2", "7", "30 31 32"])
SIZES = {
    "tensor": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "stages and trees": {"pipeline_parallel_size": 2, "speculative_token_tree": [2, 2]},
}


class Encoder(Words):
    """Words, for `bad_words` too."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text)


def reported(model_dir: str, sizes: dict) -> list:
    """Tokens and log-probabilities of requests with and without rules about tokens."""
    k = None if "speculative_token_tree" in sizes else 2
    small = dict(num_blocks=60, block_size=8, max_num_seqs=4, warm_up=False, seed=3)
    llm = LLM(model_dir, k, tokenizer=Encoder(), **small, **sizes)
    params = [
        asked(index, prompt_logprobs=(None, 4)[index % 2], **RULES if index % 2 else {})
        for index in range(len(PROMPTS))
    ]
    found = []
    for output in llm.generate(PROMPTS, params):
        completion = output.outputs[0]
        listed = [*(completion.logprobs or []), *(output.prompt_logprobs or [])]
        entries = [
            [[token, entry.logprob, entry.rank] for token, entry in (each or {}).items()]
            for each in listed
        ]
        found.append([completion.token_ids, completion.cumulative_logprob, entries])
    return found


def ranks_report(rank: int, model_dir: str, path: str, sizes: dict) -> None:
    """Write what rank 0 reports."""
    found = reported(model_dir, sizes)
    if rank == 0:
        Path(path).write_text(json.dumps(found))


@pytest.mark.parametrize("way", SIZES)
def test_ranks_report_what_one_does(way, tmp_path):
    save_hf_model(build_model(config("mamba2"), device="cpu", seed=1), tmp_path / "model")
    path = tmp_path / "found.json"
    run_ranks(ranks_report, str(tmp_path / "model"), str(path), SIZES[way])
    found = json.loads(path.read_text())
    want = json.loads(json.dumps(reported(str(tmp_path / "model"), {})))
    assert [one[0] for one in found] == [one[0] for one in want]
    for one, other in zip(found, want, strict=True):
        if other[1] is not None:
            assert one[1] == pytest.approx(other[1], abs=1e-4)
        for each, expected in zip(one[2], other[2], strict=True):
            assert [entry[0] for entry in each] == [entry[0] for entry in expected]
            for entry, right in zip(each, expected, strict=True):
                assert entry[1:] == pytest.approx(right[1:], abs=CLOSE)
