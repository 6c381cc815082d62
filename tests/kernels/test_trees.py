"""Ops on rows that are trees: every path from a root against the same tokens as a chain, in
fp64."""

import pytest
import torch
import torch.nn.functional as F

from mtpkit.kernels.ancestors import ancestor_masks, parents_of, seen_tokens
from mtpkit.kernels.ring import ring_length
from tests.kernels import delta_recurrence, recurrence
from tests.kernels.recurrence import relative
from tests.kernels.test_attention import dense, make_paged
from tests.kernels.test_causal_conv1d import parameters, slow, strided
from tests.kernels.test_latent_attention import LATENT, SCALE, Model

TREES = [[-1, 0, 0, 1, 1, 2, 4], [-1, 0, 1, 0, 2, 3, 0], [-1, 0, 1, 2, 3, 4, 5]]
TOKENS = 7
DEPTH = 6
PARENTS = torch.tensor(TREES)
MASKS, DEPTHS = ancestor_masks(PARENTS, DEPTH)
CHAIN = torch.arange(-1, TOKENS - 1).expand(3, -1)
SLOTS = torch.tensor([3, -1, 0, 2])
"""A slot for each tree, and a padding row."""
TOLERANCE = 1e-5
HEADS = 4
WIDTH = 5
GROUPS = 2
STATE = 7


def path(tree: list[int], token: int) -> list[int]:
    """The tokens from the root to `token`."""
    return [*(path(tree, tree[token]) if tree[token] >= 0 else []), token]


PATHS = [(row, path(tree, token)) for row, tree in enumerate(TREES) for token in range(TOKENS)]


def padded(rows: torch.Tensor) -> torch.Tensor:
    """rows [3, ...] with the padding row in place 1, which repeats the first."""
    return rows[[0, 0, 1, 2]]


def live(rows: torch.Tensor) -> torch.Tensor:
    """The rows [3, ...] of rows [4, ...], on the CPU."""
    return rows[[0, 2, 3]].cpu()


def worst(outputs: torch.Tensor, expect) -> float:
    """The worst relative error over all paths; expect(row, path) is the output of the path's last
    token."""
    return max(relative(outputs[row, along[-1]], expect(row, along)) for row, along in PATHS)


def same_bits(twin, have: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bits; on a GPU, where running sums are made in another order than sums, the same but
    for rounding."""
    return relative(have, want.double()) < 1e-6 if twin.name == "cuda" else torch.equal(have, want)


def test_masks():
    assert MASKS[0].tolist() == [1, 3, 5, 11, 19, 37, 83]
    assert DEPTHS[0].tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert ancestor_masks(CHAIN, DEPTH)[0][0].tolist() == [2 ** (t + 1) - 1 for t in range(TOKENS)]
    assert parents_of(MASKS).equal(PARENTS)
    for row, along in PATHS:
        assert seen_tokens(MASKS, TOKENS)[row, along[-1]].nonzero()[:, 0].tolist() == along


def attend(twin, masks, contexts=(0, 5, 61), earlier: int = 0, **options):
    """Attention of trees after contexts; the histories end with the tree's entries."""
    caches, tables, histories = make_paged(contexts, [TOKENS] * 3, 4)
    q = torch.randn(3, TOKENS, 4, 6)[:, earlier:]
    tensors = (t.to(twin.device) for t in (q, *caches, tables, torch.tensor(contexts)))
    masks = None if masks is None else masks[:, earlier:].to(twin.device)
    out = (
        twin("attention")
        .paged_attention(*tensors, ancestors=masks, earlier=earlier, **options)
        .cpu()
    )
    return out, q, histories


@pytest.mark.parametrize(("earlier", "splits"), [(0, None), (0, 1), (0, 3), (4, None), (4, 3)])
def test_attention(twin, earlier, splits):
    options = {} if twin.name == "reference" else dict(splits=splits)
    contexts = [0, 5, 61]
    out, q, histories = attend(twin, MASKS, contexts, earlier, **options)
    for row, context in enumerate(contexts):
        mask = torch.cat(
            [torch.ones(TOKENS, context, dtype=torch.bool), seen_tokens(MASKS, TOKENS)[row]], 1
        )
        assert relative(out[row], dense(q[row], *histories[row], mask[earlier:])) < TOLERANCE


def test_attention_to_a_chain_that_is_given_as_a_tree(twin):
    torch.manual_seed(1)
    have = attend(twin, ancestor_masks(CHAIN, DEPTH)[0])[0]
    torch.manual_seed(1)
    assert same_bits(twin, have, attend(twin, None)[0])


@pytest.mark.parametrize("masks", [MASKS, None])
def test_latent_attention(twin, masks):
    contexts = [0, 4, 61]
    model = Model(contexts, [TOKENS] * 3)
    if masks is None:  # and a chain has the bits of one that is given as a tree
        masks = ancestor_masks(CHAIN, DEPTH)[0]
    latent, rotary = (
        t.unflatten(0, (3, TOKENS)) for t in model.queries(model.q_nope, model.q_rotary)
    )
    places = (model.cache, model.tables, torch.tensor(contexts))
    tensors = [t.to(twin.device) for t in (latent, rotary, *places)]
    op = twin("latent_attention").latent_attention
    out = op(*tensors, SCALE, ancestors=masks.to(twin.device)).cpu()
    if masks is not MASKS:
        assert same_bits(twin, out, op(*tensors, SCALE).cpu())
    late = op(
        tensors[0][:, 3:], tensors[1][:, 3:], *tensors[2:], SCALE, masks[:, 3:].to(twin.device), 3
    ).cpu()
    assert relative(late, out[:, 3:].double()) < TOLERANCE
    for row, context in enumerate(contexts):
        history = model.histories[row].double()
        mask = torch.cat(
            [torch.ones(TOKENS, context, dtype=torch.bool), seen_tokens(masks, TOKENS)[row]], 1
        )
        scores = torch.einsum("thc,nc->htn", torch.cat([latent, rotary], -1)[row].double(), history)
        probs = (SCALE * scores).masked_fill(~mask, -torch.inf).softmax(-1)
        assert (
            relative(out[row], torch.einsum("htn,nc->thc", probs, history[:, :LATENT])) < TOLERANCE
        )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [2, 4])
def test_convolution(twin, width, bias):
    weight, bias = parameters(width, bias)
    x = torch.randn(3, TOKENS, 5)
    committed = torch.tensor([2, 0, 1])
    state = torch.full((4, width + TOKENS, 5), torch.nan)
    windows = torch.randn(3, width - 1, 5)
    for row, slot in enumerate(live(SLOTS).tolist()):
        state[slot, committed[row] : committed[row] + width - 1] = windows[row]

    def run(parents):
        after = state.clone().to(twin.device)
        parts = [
            None if t is None else t.to(twin.device)
            for t in (weight, bias, SLOTS, padded(committed), parents)
        ]
        y = twin("causal_conv1d").causal_conv1d_update(
            strided(padded(x), twin.device), after, *parts
        )
        assert (y[1] == 0).all()
        return live(y), after.cpu()

    y, after = run(padded(PARENTS))
    taps = (weight, bias)
    assert (
        worst(
            y, lambda row, along: slow(torch.cat([windows[row], x[row, along]])[None], *taps)[0, -1]
        )
        < TOLERANCE
    )
    chain, same = run(None)
    assert same_bits(twin, run(padded(CHAIN))[0], chain)
    assert after.nan_to_num().equal(same.nan_to_num()), (
        "the columns are those of the tokens in their order"
    )


class Mamba:
    """Three rows with `count` entries in their rings."""

    def __init__(self, count: int) -> None:
        self.count, self.length = count, ring_length(TOKENS)
        self.tokens = self.drawn(TOKENS)
        self.old = self.drawn(count)
        self.state = torch.randn(3, HEADS, WIDTH, STATE)
        self.parameters = dict(
            A_log=torch.rand(HEADS), D=torch.randn(HEADS), dt_bias=torch.randn(HEADS) - 2
        )
        self.contexts = torch.tensor([100, 37, count])

    @staticmethod
    def drawn(count: int) -> list[torch.Tensor]:
        """x, dt, B and C."""
        x = torch.randn(3, count, HEADS, WIDTH)
        dt = torch.randn(3, count, HEADS)
        return [x, dt, *torch.randn(2, 3, count, GROUPS, STATE)]

    def expect(self, row: int, along: list[int]) -> torch.Tensor:
        """y of the last token of a path after the old ones."""
        x, dt, B, C = (
            torch.cat([old[row], new[row, along]])
            for old, new in zip(self.old, self.tokens, strict=True)
        )
        dt = F.softplus(dt.double() + self.parameters["dt_bias"])
        A = -self.parameters["A_log"].double().exp()
        x, dt, B, C = (t[None] for t in (x, dt, B, C))
        return recurrence.scan(
            x, dt, A, B, C, self.parameters["D"], initial_state=self.state[row : row + 1]
        )[0][0, -1]

    def arguments(self, twin) -> dict[str, object]:
        """x, dt, B, C and the parameters of all four rows."""
        tensors = {
            name: padded(t) for name, t in zip(("x", "dt", "B", "C"), self.tokens, strict=True)
        }
        on = {name: t.to(twin.device) for name, t in (tensors | self.parameters).items()}
        return on | dict(dt_limit=(0.0, float("inf")))

    def replay(self, twin, masks) -> list[torch.Tensor]:
        """y, and the state and rings after the step."""
        rings = [
            torch.full((4, self.length, *shape), torch.nan)
            for shape in ((HEADS, WIDTH), (GROUPS, STATE), (HEADS,))
        ]
        state = torch.full((4, HEADS, WIDTH, STATE), torch.nan)
        x, dt, B, _ = self.old
        steps = F.softplus(dt + self.parameters["dt_bias"])
        for row, slot in enumerate(live(SLOTS).tolist()):
            places = (self.contexts[row] - self.count + torch.arange(self.count)) % self.length
            state[slot] = self.state[row]
            for ring, values in zip(rings, (x, B, steps), strict=True):
                ring[slot, places] = values[row]
        counts = torch.full((4,), self.count)
        tensors = [t.to(twin.device) for t in (state, *rings, SLOTS, padded(self.contexts), counts)]
        masks = None if masks is None else padded(masks).to(twin.device)
        y = twin("ssm_update").ssm_replay_update(*tensors, **self.arguments(twin), ancestors=masks)
        assert (y[1] == 0).all()
        return [live(y), *(t.cpu() for t in tensors[:4])]

    def snapshot(self, twin, parents) -> list[torch.Tensor]:
        """y, and the states after the step; entry 2 is the committed one."""
        states = torch.full((4, TOKENS + 1, HEADS, WIDTH, STATE), torch.nan)
        states[live(SLOTS), 2] = self.state
        tensors = [t.to(twin.device) for t in (states, SLOTS, torch.full((4,), 2))]
        parents = None if parents is None else padded(parents).to(twin.device)
        y = twin("ssm_update").ssm_snapshot_update(
            *tensors, **self.arguments(twin), parents=parents
        )
        return [live(y), tensors[0].cpu()]


class Delta(Mamba):
    """The same of gated delta nets."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.parameters = dict(A_log=torch.rand(HEADS) - 1, dt_bias=torch.randn(HEADS) - 1)

    @staticmethod
    def drawn(count: int) -> list[torch.Tensor]:
        """q, k, v, a and b."""
        q, k = torch.randn(2, 3, count, GROUPS, STATE)
        return [q, k, torch.randn(3, count, HEADS, WIDTH), *torch.randn(2, 3, count, HEADS)]

    def inputs(self, row: int, along: list[int]) -> list[torch.Tensor]:
        """q, k, v, g and beta of the old tokens and a path, in fp64."""
        q, k, v, a, b = (
            torch.cat([old[row], t[row, along]])
            for old, t in zip(self.old, self.tokens, strict=True)
        )
        q, k, g, beta = delta_recurrence.inputs(q, k, a, b, *self.parameters.values())
        return [q, k, v.double(), g, beta]

    def expect(self, row: int, along: list[int]) -> torch.Tensor:
        return delta_recurrence.rule(*self.inputs(row, along), state=self.state[row])[0][-1]

    def corrections(self, row: int) -> torch.Tensor:
        """u [count, h, v] of the old tokens."""
        state = self.state[row].double()
        outputs = []
        for _, k, v, g, beta in zip(*self.inputs(row, []), strict=True):
            decayed = state * g.exp()[:, None, None]
            key = k.repeat_interleave(HEADS // GROUPS, 0)
            u = beta[:, None] * (v - torch.einsum("hvk,hk->hv", decayed, key))
            state = decayed + u[..., None] * key[:, None]
            outputs.append(u)
        return torch.stack(outputs) if outputs else torch.zeros(0, HEADS, WIDTH)

    def arguments(self, twin) -> dict[str, object]:
        tensors = {name: padded(t) for name, t in zip("qkvab", self.tokens, strict=True)}
        return {name: t.to(twin.device) for name, t in (tensors | self.parameters).items()}

    def replay(self, twin, masks) -> list[torch.Tensor]:
        rings = [
            torch.full((4, self.length, *shape), torch.nan)
            for shape in ((GROUPS, STATE), (HEADS, WIDTH), (HEADS,))
        ]
        state = torch.full((4, HEADS, WIDTH, STATE), torch.nan)
        for row, slot in enumerate(live(SLOTS).tolist()):
            places = (self.contexts[row] - self.count + torch.arange(self.count)) % self.length
            state[slot] = self.state[row]
            _, k, _, g, _ = self.inputs(row, [])
            for ring, values in zip(rings, (k, self.corrections(row), g), strict=True):
                ring[slot, places] = values.float()
        counts = torch.full((4,), self.count)
        tensors = [t.to(twin.device) for t in (state, *rings, SLOTS, padded(self.contexts), counts)]
        masks = None if masks is None else padded(masks).to(twin.device)
        y = twin("gated_delta_rule").delta_replay_update(
            *tensors, **self.arguments(twin), ancestors=masks
        )
        assert (y[1] == 0).all()
        return [live(y), *(t.cpu() for t in tensors[:4])]

    def snapshot(self, twin, parents) -> list[torch.Tensor]:
        states = torch.full((4, TOKENS + 1, HEADS, WIDTH, STATE), torch.nan)
        states[live(SLOTS), 2] = self.state
        tensors = [t.to(twin.device) for t in (states, SLOTS, torch.full((4,), 2))]
        parents = None if parents is None else padded(parents).to(twin.device)
        y = twin("gated_delta_rule").delta_snapshot_update(
            *tensors, **self.arguments(twin), parents=parents
        )
        return [live(y), tensors[0].cpu()]


@pytest.mark.parametrize("kind", [Mamba, Delta])
@pytest.mark.parametrize("count", [0, 7, 14])
def test_replay(twin, kind, count):
    """14 entries and 7 tokens do not fit into the ring: the old ones are folded."""
    rows = kind(count)
    y, *after = rows.replay(twin, MASKS)
    assert worst(y, rows.expect) < TOLERANCE
    chain = rows.replay(twin, None)
    for have, want in zip(rows.replay(twin, ancestor_masks(CHAIN, DEPTH)[0]), chain, strict=True):
        assert same_bits(twin, have.nan_to_num(), want.nan_to_num())
    # What does not depend on the tree: the folded state, and where the inputs of tokens lie.
    for index in (0, 2, 3) if kind is Mamba else (0, 1, 3):
        assert same_bits(twin, after[index].nan_to_num(), chain[1 + index].nan_to_num())


@pytest.mark.parametrize("kind", [Mamba, Delta])
def test_snapshots(twin, kind):
    rows = kind(0)
    y, states = rows.snapshot(twin, PARENTS)
    assert worst(y, rows.expect) < TOLERANCE
    if kind is Delta:
        for row, along in PATHS:
            want = delta_recurrence.rule(*rows.inputs(row, along), state=rows.state[row])[1]
            assert relative(states[live(SLOTS)[row], along[-1]], want) < TOLERANCE
    for have, want in zip(rows.snapshot(twin, CHAIN), rows.snapshot(twin, None), strict=True):
        assert same_bits(twin, have.nan_to_num(), want.nan_to_num())
