"""Prefill in chunks and decode steps with rejections compute what whole sequences do."""

import dataclasses
from itertools import chain

import pytest
import torch

from mtpkit.config import SECTIONS, caching_length
from mtpkit.kernels.ssm_update import ring_base
from mtpkit.model import SequenceInput, StepInput, base_forward, cache_specs, mtp_forward
from mtpkit.model.inputs import (
    AttentionCache,
    AttentionCacheSpec,
    LayerCache,
    MambaCacheSpec,
    ReplayCache,
    SnapshotCache,
)
from tests.kernels.recurrence import relative
from tests.model.toy import VOCAB, toy_model

K, BLOCK_SIZE, NUM_BLOCKS, SLOTS, RING = 2, 4, 36, 6, 15
TOLERANCE = 1e-5


def make_cache(spec, rollback: str) -> LayerCache:
    """Everything NaN: a step must not read what was not written."""

    def nan(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan)

    if isinstance(spec, AttentionCacheSpec):
        return AttentionCache(*(nan(NUM_BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim) for _ in range(2)))
    assert isinstance(spec, MambaCacheSpec)
    conv = nan(SLOTS, spec.conv_kernel - 1 + K, spec.conv_dim)
    state = (spec.num_heads, spec.head_dim, spec.state_dim)
    if rollback == "snapshot":
        return SnapshotCache(conv, nan(SLOTS, 1 + K, *state))
    return ReplayCache(
        conv,
        nan(SLOTS, *state),
        nan(SLOTS, RING, spec.num_heads, spec.head_dim),
        nan(SLOTS, RING, spec.num_groups, spec.state_dim),
        nan(SLOTS, RING, spec.num_heads),
    )


@dataclasses.dataclass
class Row:
    """A request: its tokens so far, where its history is, and what its last step left."""

    tokens: list[int]
    blocks: list[int]
    slot: int
    committed: int = 0
    ring_len: int = 0
    length: int = 0
    """Tokens that are committed in the caches."""


def run_step(model, caches, rows: list[Row], feeds: list[list[int]], num_decode_rows: int):
    """Feed each row its tokens; decode rows come first. Returns h and g^1 of every row, [t, 1, h] each.

    The heads read the request's own next token at every position, as after verification.
    """
    positions = [torch.arange(row.length, row.length + len(feed)) for row, feed in zip(rows, feeds, strict=True)]
    places = [
        torch.tensor([row.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in where.tolist()])
        for row, where in zip(rows, positions, strict=True)
    ]
    counts = [len(feed) for feed in feeds]
    step = StepInput(
        positions=torch.cat(positions),
        query_start=torch.tensor([0, *counts]).cumsum(0),
        context_lens=torch.tensor([row.length for row in rows]),
        block_tables=torch.tensor([row.blocks for row in rows]),
        kv_slots=torch.cat(places),
        state_slots=torch.tensor([row.slot for row in rows]),
        committed=torch.tensor([row.committed for row in rows]),
        ring_lens=torch.tensor([row.ring_len for row in rows]),
        num_decode_rows=num_decode_rows,
        decode_width=1 + K,
        prefill_lens=tuple(counts[num_decode_rows:]),
        caches=caches,
    )
    flat = torch.tensor([list(chain(*feeds))])
    hidden = base_forward(model, flat, step)
    following = [row.tokens[row.length + 1 :][: len(feed)] for row, feed in zip(rows, feeds, strict=True)]
    drafted = mtp_forward(model, 1, hidden, torch.tensor([list(chain(*following))]), step)
    return list(zip(hidden.split(counts), drafted.split(counts), strict=True))


def expect(model, row: Row, feed: list[int]):
    """The same from the whole sequence without caches."""
    tokens = torch.tensor([row.tokens[: row.length] + feed])
    hidden = base_forward(model, tokens, SequenceInput())
    shifted = torch.tensor([row.tokens[1 : tokens.shape[1] + 1]])
    drafted = mtp_forward(model, 1, hidden, shifted, SequenceInput())
    return hidden[-len(feed) :], drafted[-len(feed) :]


def draw(generator: torch.Generator, count: int) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=generator).tolist()


def simulate(model, rollback: str, sabotage: str = "", steps: int = 14) -> float:
    """Two requests prefilled in chunks, a third that joins later; random accepts. The worst relative error."""
    generator = torch.Generator().manual_seed(5)
    caches = {name: make_cache(spec, rollback) for name, spec in cache_specs(model).items()}
    order = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    rows = [Row(draw(generator, 60), order[12 * i : 12 * i + 12], slot) for i, slot in enumerate((4, 0, 3))]
    chunks = {0: [[5], [1], [4]], 1: [[1], [6]], 2: [[], [], [], [2], [3]]}
    errors = []
    for turn in range(steps):
        prefill = [i for i, sizes in chunks.items() if turn < len(sizes) and sizes[turn]]
        decode = [i for i, sizes in chunks.items() if turn >= len(sizes)]
        feeds, accepted = [], []
        for i in decode:
            row, count = rows[i], int(torch.randint(0, K + 1, (), generator=generator))
            wrong = [(token + 1) % VOCAB for token in row.tokens[row.length + 1 + count : row.length + 1 + K]]
            feeds.append(row.tokens[row.length : row.length + 1 + count] + wrong)
            accepted.append(count)
        feeds += [rows[i].tokens[rows[i].length : rows[i].length + chunks[i][turn][0]] for i in prefill]
        stepped = [rows[i] for i in decode + prefill]
        outputs = run_step(model, caches, stepped, feeds, len(decode))
        for row, feed, output in zip(stepped, feeds, outputs, strict=True):
            errors += [relative(have, want) for have, want in zip(output, expect(model, row, feed), strict=True)]
        for i, count in zip(decode, accepted, strict=True):
            row, kept = rows[i], K if sabotage == "unrestored" else count
            row.committed = kept
            row.ring_len = int(ring_base(torch.tensor(row.ring_len), 1 + K, RING)) + kept + 1
            row.length += count + 1
        for i in prefill:
            rows[i].length += chunks[i][turn][0]
            rows[i].committed = rows[i].ring_len = 0
        if sabotage == "swapped" and len(decode) > 1:
            first, second = (rows[i] for i in decode[:2])
            first.slot, second.slot = second.slot, first.slot
    return max(errors)


@torch.no_grad()
@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
@pytest.mark.parametrize(
    "changes",
    [{}, dict(position_embedding_type="rope", rotary_percent=0.5), dict(pattern="MM**", mtp_pattern="M*E")],
    ids=["plain", "rope", "mamba_head"],
)
def test_steps_equal_whole_sequences(changes, rollback):
    assert simulate(toy_model(**changes), rollback) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
@pytest.mark.parametrize("sabotage", ["unrestored", "swapped"])
def test_sabotage_would_be_seen(rollback, sabotage):
    assert simulate(toy_model(), rollback, sabotage) > 1e-2


@pytest.mark.parametrize("letter", SECTIONS)
def test_layers_that_cache_are_known_by_their_letters(letter):
    """Tokens that are not kept must reach all of them."""
    assert bool(cache_specs(toy_model(pattern=letter, mtp_pattern="", mtp_num_depths=0))) == SECTIONS[letter].keeps_past
    assert [caching_length(pattern) for pattern in ("*", "*-", "-*", "M*-E", "-", "")] == [1, 1, 2, 2, 0, 0]


@torch.no_grad()
@pytest.mark.parametrize("mtp_pattern", ["*", "*-", "-*", "M*-E", "-", "M--", "E"])
@pytest.mark.parametrize("keep", [[], [2], [1, 3, 4]])
def test_tokens_that_are_not_kept_fill_the_caches_alone(mtp_pattern, keep):
    model = toy_model(mtp_pattern=mtp_pattern)
    generator, width = torch.Generator().manual_seed(4), 0

    def watch(module, args, kwargs):
        nonlocal width
        width += len(kwargs["hidden_states"])

    layers = model.mtp.layers[0].mtp_model_layer.layers
    caches = [{name: make_cache(spec, "replay") for name, spec in cache_specs(model).items()} for _ in range(2)]
    tokens = draw(generator, 6)
    hidden = torch.randn(5, 1, model.mtpkit_config.hidden_size, generator=generator)
    states, widths = [], []
    for cache, kept in zip(caches, (None, torch.tensor(keep, dtype=torch.int64)), strict=True):
        zeros, width = torch.zeros(1, dtype=torch.int64), 0
        step = StepInput(
            positions=torch.arange(5),
            query_start=torch.tensor([0, 5]),
            context_lens=zeros,
            block_tables=torch.tensor([[3, 7]]),
            kv_slots=torch.tensor([12, 13, 14, 15, 28]),
            state_slots=zeros + 1,
            committed=zeros,
            ring_lens=zeros,
            num_decode_rows=0,
            decode_width=1 + K,
            prefill_lens=(5,),
            caches=cache,
        )
        hooks = [layer.register_forward_pre_hook(watch, with_kwargs=True) for layer in layers]
        states.append(mtp_forward(model, 1, hidden.clone(), torch.tensor([tokens[1:]]), step, keep=kept))
        for hook in hooks:
            hook.remove()
        widths.append(width)
    assert states[1].shape == (len(keep), 1, hidden.shape[-1])
    assert torch.allclose(states[0][keep], states[1], rtol=1e-5, atol=1e-6)
    for name, cache in caches[0].items():
        for field, tensor in vars(cache).items():
            assert torch.equal(tensor.nan_to_num(7), getattr(caches[1][name], field).nan_to_num(7))
    caching = caching_length(mtp_pattern)
    assert widths == [5 * len(mtp_pattern), 5 * caching + len(keep) * (len(mtp_pattern) - caching)]


@torch.no_grad()
@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_a_recycled_slot_does_not_leak(rollback, length):
    """A request in a slot and blocks that another has used computes what it would in fresh ones."""
    model, generator = toy_model(), torch.Generator().manual_seed(2)
    caches = {name: make_cache(spec, rollback) for name, spec in cache_specs(model).items()}
    blocks = list(range(8))
    first, second = (Row(draw(generator, 20), blocks, slot=1) for _ in range(2))
    run_step(model, caches, [first], [first.tokens[:12]], 0)
    first.length = 12
    run_step(model, caches, [first], [draw(generator, 1 + K)], 1)
    (output,) = run_step(model, caches, [second], [second.tokens[:length]], 0)
    for have, want in zip(output, expect(model, second, second.tokens[:length]), strict=True):
        assert relative(have, want) < TOLERANCE


def test_ring_base():
    lens = torch.tensor([0, 3, 9, 10, 12])
    assert ring_base(lens, 3, 15).tolist() == [0, 3, 9, 0, 0]
