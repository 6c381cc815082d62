"""Constrained outputs that drawn drafts lead to have the distribution of decoding without drafts:
the base's own after each token, without what the grammar forbids."""

import functools

import pytest
import torch
from scipy import stats

from mtpkit.engine import Engine, EngineConfig, SamplingParams, StructuredOutputsParams
from mtpkit.engine.requests.request import Request
from mtpkit.engine.requests.tree import parse_tree
from mtpkit.engine.steps.device_state import DeviceState
from mtpkit.model.state import StateLayout
from tests.engine.fakes import CPU, state_sizes
from tests.engine.test_distribution import TableDrafter, TableRunner, TableTreeDrafter
from tests.engine.tokenizers import byte_level

TOKENIZER = byte_level()
SIZE = 300
END = TOKENIZER.eos_token_id
TEXTS = [*(f"{one}{two}cat{last}" for one in "ab" for two in "ab" for last in "ab"), "cca", "ccb"]
"""Some letters are free, some are forced."""
START = 1
SEEDS = 2_000


def logits_after(seed: int, scale: float) -> torch.Tensor:
    """[V, V] logits after each token; those that `TEXTS` need come often."""
    table = scale * torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    table[:, [*b"abct", END]] += 4
    return table


BASE = logits_after(1, 0.8)
HEADS = {"good": BASE + logits_after(2, 0.3), "unrelated": logits_after(3, 1.5)}


@functools.cache
def law() -> dict[tuple[int, ...], float]:
    """Probability of each output."""
    found = {}

    def go(text: bytes, tokens: tuple[int, ...], chance: float) -> None:
        ids = [
            token
            for token in b"abct"
            if any(one.encode().startswith(text + bytes([token])) for one in TEXTS)
        ]
        if text.decode() in TEXTS:
            ids.append(END)
        chances = BASE[tokens[-1] if tokens else START][ids].double().softmax(0).tolist()
        for token, one in zip(ids, chances, strict=True):
            if token == END:
                found[(*tokens, END)] = chance * one
            else:
                go(text + bytes([token]), (*tokens, token), chance * one)

    go(b"", (), 1.0)
    return found


def drawn(heads: str, shape) -> tuple[list[tuple[int, ...]], float]:
    """Outputs of many seeds, and the share of accepted drafts."""
    tree = None if isinstance(shape, int) else parse_tree(shape)
    k = tree.depth if tree else shape
    config = EngineConfig(
        64, k, tree, max_num_seqs=500, max_num_batched_tokens=9000, draft_sampling=True
    )
    table = HEADS[heads]
    drafter = TableTreeDrafter(table, tree) if tree else TableDrafter(table, k, True)
    layout = StateLayout({}, state_sizes(config))
    runner = TableRunner()
    runner.table = BASE
    engine = Engine(config, layout, 2000, runner, drafter, SIZE, CPU, TOKENIZER, (END,))
    grammar = StructuredOutputsParams(choice=TEXTS)
    for seed in range(SEEDS):
        params = SamplingParams(max_tokens=9, seed=seed, structured_outputs=grammar)
        engine.add_request([START], params, str(seed))
    outputs = {}
    while engine.has_unfinished:
        outputs |= {one.request_id: one for one in engine.step() if one.finished}
    tokens = [tuple(outputs[str(seed)].outputs[0].token_ids) for seed in range(SEEDS)]
    accepted = sum(one.stats.accepted for one in outputs.values())
    return tokens, accepted / sum(map(len, tokens))


def p_value(tokens: list[tuple[int, ...]]) -> float:
    """Of a chi-square test of outputs, rare ones together."""
    assert set(tokens) <= set(law())
    common = [one for one, chance in law().items() if chance * SEEDS >= 5]
    counts = [tokens.count(one) for one in common]
    expected = [law()[one] * SEEDS for one in common]
    if sum(expected) < SEEDS - 5:
        counts.append(SEEDS - sum(counts))
        expected.append(SEEDS - sum(expected))
    assert len(common) == len(TEXTS)
    return stats.chisquare(counts, [one * sum(counts) / sum(expected) for one in expected]).pvalue


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("shape", [3, [2, 2, 1]], ids=str)
def test_drawn_drafts_leave_the_law_of_constrained_outputs_alone(shape, heads):
    tokens, accepted = drawn(heads, shape)
    assert p_value(tokens) > 1e-3 and accepted > 0.1


@pytest.mark.parametrize("certain", [True, False])
def test_drafts_that_the_host_chose_are_not_taken_for_drawn_ones(certain, monkeypatch):
    """The host knows none of the heads' drafts and writes others. With the distributions that the
    heads drew from, rejections would spoil the law."""
    monkeypatch.setattr(Request, "note_drafts", _forget_drafts)
    if not certain:
        monkeypatch.setattr(DeviceState, "_make_certain", lambda *_: None)
    tokens, _ = drawn("unrelated", 3)
    assert (p_value(tokens) > 1e-3) == certain


def _forget_drafts(request, *_) -> None:
    request.drafts_in_flight = max(0, request.drafts_in_flight - 1)
