"""Prefill in chunks and decode steps with rejections compute what whole sequences do."""

import dataclasses
import itertools
from itertools import chain

import pytest
import torch

from mtpkit.model import (
    SequenceInput,
    StepInput,
    base_forward,
    fold_rings,
    mtp_forward,
    state_specs,
)
from mtpkit.model.kinds import KINDS, caching_length
from mtpkit.model.state import (
    Committed,
    Newest,
    RecurrentSpec,
    Replay,
    ReplaySpec,
    Ring,
    StateLayout,
    States,
    StateSizes,
)
from tests.kernels.recurrence import relative
from tests.model.toy import VOCAB, toy_model

K = 2
BLOCK_SIZE = 4
NUM_BLOCKS = 48
SLOTS = 6
RING = 15
TOLERANCE = 1e-5
CPU = torch.device("cpu")
LATENT = dict(
    pattern="M+-+", mtp_pattern="+E", qk_layernorm=True, layernorm_zero_centered_gamma=True
)
MAMBA_HEAD = dict(pattern="MM**", mtp_pattern="M*E")
DELTA_HEAD = dict(pattern="GM*G", mtp_pattern="G*")
GATED = dict(
    attention_output_gate=True,
    add_qkv_bias=True,
    qk_layernorm=True,
    layernorm_zero_centered_gamma=True,
    position_embedding_type="rope",
    rotary_percent=0.5,
)


@dataclasses.dataclass(frozen=True)
class OwnRing(ReplaySpec):
    """With rings of any length."""

    length: int

    def ring(self, sizes: StateSizes) -> Ring:
        return Ring(self.length)


def make_layout(model, rollback: str, rings: tuple[int, ...] = (RING,)) -> StateLayout:
    """`rings`: lengths of the replay rings of the layers in turn."""
    specs = state_specs(model)
    lengths = itertools.cycle(rings)
    if rollback == "replay":
        for name, (*others, last) in specs.items():
            if isinstance(last, RecurrentSpec):
                specs[name] = (*others, OwnRing(last.shape, last.inputs, next(lengths)))
    return StateLayout(specs, StateSizes(BLOCK_SIZE, 1 + K, rollback, torch.float32))


def nan_states(layout: StateLayout) -> States:
    """Everything NaN: a step must not read what was not written."""
    states = layout.allocate(NUM_BLOCKS, SLOTS, CPU)
    for state in states.all():
        for tensor in state.tensors.values():
            tensor.fill_(torch.nan)
    return states


@dataclasses.dataclass
class Row:
    """A request: its tokens so far, and where its history is."""

    tokens: list[int]
    blocks: list[int]
    slot: int
    length: int = 0
    """Tokens that are committed in the states."""


class Cells:
    """The states of all layers, and what of them is committed."""

    def __init__(self, layout: StateLayout) -> None:
        self.states, self.committed = (
            nan_states(layout),
            Committed.none(layout.counters, SLOTS, CPU),
        )

    def held(self, slots: torch.Tensor) -> Committed:
        """What of these slots is committed."""
        return self.committed.at(slots)

    def move(self, model, row: Row, slot: int, blocks: list[int]) -> None:
        """Put what a prefill chunk would have left of a request elsewhere; where it was is NaN
        then."""
        old = torch.tensor([row.slot])
        held = self.held(old)
        self.states.settle(old, held)
        fold_rings(model, self.states, old, torch.tensor([row.length]), held)
        self.committed.put(torch.tensor([row.slot, slot]), Committed.none(held.counts, 2, CPU))
        for state in self.states.all():
            was, new = (row.blocks, blocks) if state.unit == "block" else (row.slot, slot)
            for part in state.chunk_end.values():
                part[new] = part[was]
            for tensor in state.tensors.values():
                tensor[was] = torch.nan
        row.slot = slot
        row.blocks = blocks


def run_step(model, cells: Cells, rows: list[Row], feeds: list[list[int]], accepted: list[int]):
    """Feed each row its tokens. Decode rows come first: those that `accepted` says the accepted
    drafts of.

    Returns:
        h and g^1 of every row, [t, 1, h] each.

    The heads read the request's own next token at every position, as after verification.
    """
    positions = [
        torch.arange(row.length, row.length + len(feed))
        for row, feed in zip(rows, feeds, strict=True)
    ]
    places = [
        torch.tensor(
            [row.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in where.tolist()]
        )
        for row, where in zip(rows, positions, strict=True)
    ]
    counts = [len(feed) for feed in feeds]
    slots = torch.tensor([row.slot for row in rows])
    step = StepInput(
        positions=torch.cat(positions),
        query_start=torch.tensor([0, *counts]).cumsum(0),
        context_lens=torch.tensor([row.length for row in rows]),
        block_tables=torch.tensor([row.blocks for row in rows]),
        kv_slots=torch.cat(places),
        state_slots=slots,
        committed=cells.committed.at(slots),
        num_decode_rows=len(accepted),
        decode_width=1 + K,
        states=cells.states,
    )
    flat = torch.tensor([list(chain(*feeds))])
    hidden = base_forward(model, flat, step)
    following = [
        row.tokens[row.length + 1 :][: len(feed)] for row, feed in zip(rows, feeds, strict=True)
    ]
    drafted = mtp_forward(model, 1, hidden, torch.tensor([list(chain(*following))]), step)
    last = torch.tensor([*accepted, *[0] * (len(rows) - len(accepted))])
    cells.committed.put(slots, step.committed_after(last + 1))
    return list(zip(hidden.split(counts), drafted.split(counts), strict=True))


def expect(model, row: Row, feed: list[int]):
    """Compute the same from the whole sequence without caches."""
    tokens = torch.tensor([row.tokens[: row.length] + feed])
    hidden = base_forward(model, tokens, SequenceInput())
    shifted = torch.tensor([row.tokens[1 : tokens.shape[1] + 1]])
    drafted = mtp_forward(model, 1, hidden, shifted, SequenceInput())
    return hidden[-len(feed) :], drafted[-len(feed) :]


def draw(generator: torch.Generator, count: int) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=generator).tolist()


def simulate(
    model,
    rollback: str,
    sabotage: str = "",
    steps: int = 14,
    rings: tuple[int, ...] = (RING,),
    moves: bool = False,
) -> float:
    """Two requests prefilled in chunks, a third that joins later; random accepts. The worst
    relative error.

    Args:
        moves: after each step one request goes to another slot and other blocks.
    """
    generator = torch.Generator().manual_seed(5)
    cells = Cells(make_layout(model, rollback, rings))
    order = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    rows = [
        Row(draw(generator, 60), order[12 * i : 12 * i + 12], slot)
        for i, slot in enumerate((4, 0, 3))
    ]
    free_slot = 1
    free_blocks = order[36:48]
    chunks = {0: [[5], [1], [4]], 1: [[1], [6]], 2: [[], [], [], [2], [3]]}
    errors = []
    for turn in range(steps):
        prefill = [i for i, sizes in chunks.items() if turn < len(sizes) and sizes[turn]]
        decode = [i for i, sizes in chunks.items() if turn >= len(sizes)]
        feeds = []
        accepted = []
        for i in decode:
            row = rows[i]
            count = int(torch.randint(0, K + 1, (), generator=generator))
            wrong = [
                (token + 1) % VOCAB
                for token in row.tokens[row.length + 1 + count : row.length + 1 + K]
            ]
            feeds.append(row.tokens[row.length : row.length + 1 + count] + wrong)
            accepted.append(count)
        feeds += [
            rows[i].tokens[rows[i].length : rows[i].length + chunks[i][turn][0]] for i in prefill
        ]
        stepped = [rows[i] for i in decode + prefill]
        kept = [K] * len(accepted) if sabotage == "unrestored" else accepted
        outputs = run_step(model, cells, stepped, feeds, kept)
        for row, feed, output in zip(stepped, feeds, outputs, strict=True):
            errors += [
                relative(have, want)
                for have, want in zip(output, expect(model, row, feed), strict=True)
            ]
        for i, count in zip(decode, accepted, strict=True):
            rows[i].length += count + 1
        for i in prefill:
            rows[i].length += chunks[i][turn][0]
        if sabotage == "swapped" and len(decode) > 1:
            first, second = (rows[i] for i in decode[:2])
            first.slot, second.slot = second.slot, first.slot
        if moves:
            row = rows[turn % len(rows)]
            was = row.slot, row.blocks
            cells.move(model, row, free_slot, free_blocks)
            free_slot, free_blocks = was
    return max(errors)


@torch.no_grad()
@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(position_embedding_type="rope", rotary_percent=0.5),
        MAMBA_HEAD,
        GATED,
        LATENT,
        DELTA_HEAD,
    ],
    ids=["plain", "rope", "mamba_head", "gated", "latent", "delta_head"],
)
def test_steps_equal_whole_sequences(changes, rollback):
    model = toy_model(**changes)
    for name, parameter in model.named_parameters():
        if name.endswith("linear_qkv.bias"):
            parameter.copy_(torch.linspace(-1, 1, len(parameter)))
    assert simulate(model, rollback) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
@pytest.mark.parametrize("sabotage", ["unrestored", "swapped"])
def test_sabotage_would_be_seen(rollback, sabotage):
    assert simulate(toy_model(), rollback, sabotage) > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
@pytest.mark.parametrize("changes", [MAMBA_HEAD, DELTA_HEAD, LATENT])
def test_a_request_goes_on_where_what_a_chunk_leaves_is_put(changes, rollback):
    assert simulate(toy_model(**changes), rollback, moves=True) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
@pytest.mark.parametrize("forgotten", [Newest, Ring])
def test_settling_what_is_not_committed_would_be_seen(forgotten, rollback, monkeypatch):
    def all_zero(self, slots):
        held = self.committed.at(slots).counts
        none = Committed.none(held, len(slots), CPU).counts
        return Committed(
            {one: none[one] if isinstance(one, forgotten) else held[one] for one in held}
        )

    monkeypatch.setattr(Cells, "held", all_zero)
    seen = simulate(toy_model(**MAMBA_HEAD), rollback, moves=True) > 1e-2
    assert seen == (forgotten is Newest or rollback == "replay")


@torch.no_grad()
def test_each_layer_has_a_ring_of_its_own_length():
    model = toy_model(**MAMBA_HEAD)
    lengths = (15, 20, 35)
    layout = make_layout(model, "replay", lengths)
    assert layout.counters == (Newest(), *map(Ring, lengths))
    places = {
        state.inputs("x").shape[1]
        for state in nan_states(layout).all()
        if isinstance(state, Replay)
    }
    assert places == set(lengths) and simulate(model, "replay", rings=lengths) < TOLERANCE


@pytest.mark.parametrize("letter", KINDS)
def test_layers_that_cache_are_known_by_their_letters(letter):
    """Tokens that are not kept must reach all of them."""
    assert (
        bool(state_specs(toy_model(pattern=letter, mtp_pattern="", mtp_num_depths=0)))
        == KINDS[letter].keeps_past
    )
    assert [caching_length(pattern) for pattern in ("*", "*-", "-*", "M*-E", "-", "")] == [
        1,
        1,
        2,
        2,
        0,
        0,
    ]


@torch.no_grad()
@pytest.mark.parametrize("mtp_pattern", ["*", "*-", "-*", "M*-E", "-", "M--", "E", "+-"])
@pytest.mark.parametrize("keep", [[], [2], [1, 3, 4]])
def test_tokens_that_are_not_kept_fill_the_caches_alone(mtp_pattern, keep):
    model = toy_model(mtp_pattern=mtp_pattern)
    generator = torch.Generator().manual_seed(4)
    width = 0

    def watch(module, args, kwargs):
        nonlocal width
        width += len(kwargs["hidden_states"])

    layers = model.mtp.layers[0].mtp_model_layer.layers
    layout = make_layout(model, "replay")
    both = [nan_states(layout) for _ in range(2)]
    tokens = draw(generator, 6)
    hidden = torch.randn(5, 1, model.mtpkit_config.hidden_size, generator=generator)
    states = []
    widths = []
    for held, kept in zip(both, (None, torch.tensor(keep, dtype=torch.int64)), strict=True):
        zeros = torch.zeros(1, dtype=torch.int64)
        width = 0
        step = StepInput(
            positions=torch.arange(5),
            query_start=torch.tensor([0, 5]),
            context_lens=zeros,
            block_tables=torch.tensor([[3, 7]]),
            kv_slots=torch.tensor([12, 13, 14, 15, 28]),
            state_slots=zeros + 1,
            committed=Committed.none(layout.counters, 1, CPU),
            num_decode_rows=0,
            decode_width=1 + K,
            states=held,
        )
        hooks = [layer.register_forward_pre_hook(watch, with_kwargs=True) for layer in layers]
        states.append(
            mtp_forward(model, 1, hidden.clone(), torch.tensor([tokens[1:]]), step, keep=kept)
        )
        for hook in hooks:
            hook.remove()
        widths.append(width)
    assert states[1].shape == (len(keep), 1, hidden.shape[-1])
    assert torch.allclose(states[0][keep], states[1], rtol=1e-5, atol=1e-6)
    for first, second in zip(*(held.all() for held in both), strict=True):
        for name, tensor in first.tensors.items():
            assert torch.equal(tensor.nan_to_num(7), second.tensors[name].nan_to_num(7))
    caching = caching_length(mtp_pattern)
    assert widths == [5 * len(mtp_pattern), 5 * caching + len(keep) * (len(mtp_pattern) - caching)]


@torch.no_grad()
@pytest.mark.parametrize(
    ("letter", "product"), [("*", "linear_proj"), ("M", "out_proj"), ("+", "linear_proj")]
)
@pytest.mark.parametrize("keep", [[], [2], [1, 3, 4]])
def test_the_last_layer_with_a_cache_multiplies_kept_tokens_alone(letter, product, keep):
    model = toy_model(mtp_pattern=letter)
    layout = make_layout(model, "replay")
    zeros = torch.zeros(1, dtype=torch.int64)
    seen = []
    step = StepInput(
        positions=torch.arange(5),
        query_start=torch.tensor([0, 5]),
        context_lens=zeros,
        block_tables=torch.tensor([[3, 7]]),
        kv_slots=torch.tensor([12, 13, 14, 15, 28]),
        state_slots=zeros + 1,
        committed=Committed.none(layout.counters, 1, CPU),
        num_decode_rows=0,
        decode_width=1 + K,
        states=nan_states(layout),
    )
    for name, module in model.mtp.named_modules():
        if name.endswith(product):
            forward = module._forward
            module._forward = lambda x, *args, forward=forward: (
                seen.append(len(x)) or forward(x, *args)
            )
    hidden = torch.randn(
        5, 1, model.mtpkit_config.hidden_size, generator=torch.Generator().manual_seed(4)
    )
    mtp_forward(
        model,
        1,
        hidden,
        torch.tensor([[5, 6, 7, 8, 9]]),
        step,
        keep=torch.tensor(keep, dtype=torch.int64),
    )
    assert seen == ([len(keep)] if keep else [])


@torch.no_grad()
@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_a_recycled_slot_does_not_leak(rollback, length):
    """A request in a slot and blocks that another has used computes what it would in fresh ones."""
    model = toy_model()
    generator = torch.Generator().manual_seed(2)
    cells = Cells(make_layout(model, rollback))
    blocks = list(range(8))
    first, second = (Row(draw(generator, 20), blocks, slot=1) for _ in range(2))
    run_step(model, cells, [first], [first.tokens[:12]], [])
    first.length = 12
    run_step(model, cells, [first], [draw(generator, 1 + K)], [0])
    (output,) = run_step(model, cells, [second], [second.tokens[:length]], [])
    for have, want in zip(output, expect(model, second, second.tokens[:length]), strict=True):
        assert relative(have, want) < TOLERANCE


def test_a_ring_counts_what_it_holds():
    lens = torch.tensor([0, 3, 5, 6, 8])
    assert Ring(11).after(lens, 3, 0).tolist() == [0, 3, 5, 0, 0]
    assert Ring(11).after(lens, 3, torch.tensor([1, 2, 3, 1, 3])).tolist() == [1, 5, 8, 1, 3]
