"""The scan over rows with states of their own, against the recurrence in fp64."""

import importlib
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from mtpkit.kernels.ssd import KeptStates
from tests.kernels.conftest import Twin
from tests.kernels.recurrence import relative, step

HEADS, WIDTH, GROUPS, STATE = SIZES = (4, 3, 2, 5)
CHUNK = 16
TOLERANCE = 1e-5
FIRST = 7
"""Number of the first token: rows are those of a larger step."""


class Rows:
    """Rows of tokens as slices of wider tensors, one at slot -1 for each None in `contexts`.

    The slots lie in any order in an equally strided view; those that no row may read are NaN.
    """

    def __init__(
        self,
        device,
        lens,
        contexts,
        dtype=torch.float32,
        sizes=SIZES,
        state_dtype=torch.float32,
        seed=0,
    ):
        heads, width, groups, state = sizes
        self.lens = lens
        self.contexts = contexts
        self.device = device
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape, dtype=dtype):
            return torch.randn(*shape, generator=generator).to(device, dtype)

        xbc = normal(sum(lens), heads * width + 2 * groups * state)
        dt = normal(sum(lens), heads + 3) - 1
        x, B, C = xbc.split([heads * width, groups * state, groups * state], -1)
        self.inputs = dict(
            x=x.unflatten(-1, (heads, width)),
            dt=dt[:, 3:],
            A_log=torch.rand(heads, generator=generator).to(device),
            B=B.unflatten(-1, (groups, state)),
            C=C.unflatten(-1, (groups, state)),
            D=normal(heads, dtype=torch.float32),
            dt_bias=normal(heads),
            dt_limit=(0.01, float("inf")),
        )
        self.entries = normal(len(lens) + 2, 3, heads, width, state, dtype=state_dtype)
        self.entries[:, 0], self.entries[:, 2] = torch.nan, torch.nan
        slots = torch.randperm(len(lens) + 2, generator=generator)[: len(lens)]
        self.slots = torch.tensor(
            [-1 if c is None else int(s) for s, c in zip(slots, contexts, strict=True)]
        )
        unread = [int(s) for s, c in zip(slots, contexts, strict=True) if not c]
        self.states[unread] = torch.nan
        self.before = self.entries.clone()

    @property
    def states(self) -> torch.Tensor:
        """[slots, h, p, n], a view of more."""
        return self.entries[:, 1]

    def arguments(self) -> dict:
        """Keyword arguments of `ssd_varlen` but the chunk size."""
        starts = torch.tensor([0, *self.lens]).cumsum(0) + FIRST
        contexts = torch.tensor([c or 0 for c in self.contexts])
        placed = dict(starts=starts, slots=self.slots, context_lens=contexts)
        return {
            **self.inputs,
            "states": self.states,
            **{name: t.to(self.device) for name, t in placed.items()},
        }

    def wanted(self, dtype=torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """y [t, h, p] and the states [t + 1, h, p, n] before and after each row's tokens, in
        `dtype`."""
        inputs = self.inputs
        steps = F.softplus(inputs["dt"].to(dtype) + inputs["dt_bias"].to(dtype)).clamp(
            *inputs["dt_limit"]
        )
        A = -torch.exp(inputs["A_log"].to(dtype))
        D = inputs["D"].to(dtype)
        x, B, C = (inputs[name].to(dtype) for name in "xBC")
        results = []
        for tokens, slot, context in zip(
            torch.arange(len(x)).split(self.lens), self.slots, self.contexts, strict=True
        ):
            state = (
                self.before[slot, 1].to(dtype)
                if context
                else torch.zeros(self.before.shape[2:], dtype=dtype)
            )
            outputs = [x.new_zeros(0, *x.shape[1:])]
            states = [state.to(x)]
            for t in tokens:
                y, state = step(states[-1], x[t], steps[t], A, B[t], C[t], D)
                outputs.append(y[None])
                states.append(state)
            results.append((torch.cat(outputs), torch.stack(states)))
        return results

    def check(self, y, tolerance: float = TOLERANCE) -> None:
        """y and the states are the recurrence's, and nothing else has changed by a bit."""
        for part, slot, (want_y, want_states) in zip(
            y.split(self.lens), self.slots, self.wanted(), strict=True
        ):
            if slot < 0:
                assert (part == 0).all()
                continue
            if len(part):
                assert relative(part, want_y) < tolerance
            assert error(self.states[slot], want_states[-1]) < tolerance
        assert_untouched(self.entries, self.before, self.slots[self.slots >= 0])
        for slot, length, context in zip(self.slots, self.lens, self.contexts, strict=True):
            if length == 0 and context:
                assert torch.equal(self.states[slot], self.before[slot, 1])


def error(have, want) -> float:
    """`relative`, and zero where both are all zero."""
    return 0.0 if (want == 0).all() and (have == 0).all() else relative(have, want)


def assert_untouched(entries, before, slots) -> None:
    """Nothing but [slots, 1] differs, NaN being equal to NaN."""
    entries = entries.clone()
    before = before.clone()
    entries[slots, 1], before[slots, 1] = 0, 0
    assert torch.equal(entries.view(torch.uint8), before.view(torch.uint8))


CASES = {
    "one token": ([1], [0]),
    "edges": ([15, 16, 17, 33], [0, 0, 0, 0]),
    "continued": ([1, 15, 16, 17, 33], [16, 15, 17, 1, 40]),
    "to the end of a chunk": ([1, 14, 17, 32], [15, 2, 15, 48]),
    "few tokens in two chunks": ([2, 3, 18], [15, 30, 14]),
    "empty": ([0, 5, 0, 0, 3, 0], [0, 7, 9, 16, 0, 0]),
    "null at the end": ([20, 0, 45], [3, 5, None]),
    "null in the middle": ([3, 18, 20, 0, 2], [0, None, 17, None, 5]),
    "only null": ([33, 0], [None, None]),
    "no tokens": ([0, 0, 0], [0, 8, None]),
}


@pytest.mark.parametrize(("lens", "contexts"), CASES.values(), ids=CASES)
def test_rows(twin, lens, contexts):
    rows = Rows(twin.device, lens, contexts)
    rows.check(twin("ssd").ssd_varlen(**rows.arguments(), chunk_size=CHUNK))


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (3, 17, 3, 2), (6, 5, 1, 33), (8, 16, 2, 16), (2, 40, 2, 20)], ids=str
)
@pytest.mark.parametrize("chunk_size", [1, 24, 64])
def test_sizes(twin, sizes, chunk_size):
    rows = Rows(twin.device, [5, 0, 26], [7, None, 0], sizes=sizes)
    rows.check(twin("ssd").ssd_varlen(**rows.arguments(), chunk_size=chunk_size))


@pytest.mark.parametrize("tiles", [(16, 2, 16), (64, 4, 16), (32, 1, 32)], ids=str)
def test_tiles(twin, tiles):
    """Several heads per program, heads in parts of which the last is not full, and chunks in
    parts."""
    if twin.name == "reference":
        pytest.skip("has no tiles")
    rows = Rows(twin.device, [1, 70, 20, 0], [40, 9, None, 0], sizes=(8, 40, 2, 20))
    sizes = importlib.import_module("mtpkit.kernels.ssd.triton").ScanTiles(
        *tiles, num_warps=4, num_stages=2
    )
    rows.check(twin("ssd").ssd_varlen(**rows.arguments(), chunk_size=64, tiles=sizes))


def test_few_rows_are_split_to_fill_the_gpu(twin):
    if twin.name == "reference":
        pytest.skip("has no tiles")
    scan_tiles = importlib.import_module("mtpkit.kernels.ssd.triton").scan_tiles
    widths = [scan_tiles(rows, 128, 64, 128, torch.bfloat16).width for rows in (1, 2, 3, 16)]
    assert widths == [32, 64, 64, 64]
    assert scan_tiles(1, 8, 64, 128, torch.bfloat16).width == 16


def test_many_rows(twin):
    """More rows than a program looks at in one round, half of them empty."""
    lens = [row % 2 for row in range(140)]
    contexts = [(None, 0, 3, 16)[row % 4] for row in range(140)]
    rows = Rows(twin.device, lens, contexts, sizes=(2, 3, 1, 4))
    rows.check(twin("ssd").ssd_varlen(**rows.arguments(), chunk_size=CHUNK))


def test_rows_without_states_start_from_zeros(twin):
    rows = Rows(twin.device, [5, 0, 20], [0, 0, 0])
    arguments = rows.arguments()
    for name in ("states", "slots", "context_lens"):
        del arguments[name]
    y = twin("ssd").ssd_varlen(**arguments, chunk_size=CHUNK)
    for part, (want, _) in zip(y.split(rows.lens), rows.wanted(), strict=True):
        assert len(part) == 0 or relative(part, want) < TOLERANCE
    assert_untouched(rows.entries, rows.before, [])


@pytest.mark.parametrize(
    ("lens", "contexts"), [([50], [30]), ([0, 70], [5, 0]), ([33, None], [48, None])], ids=str
)
@pytest.mark.parametrize("name", ["x", "dt", "A_log", "B", "C", "D", "dt_bias"])
def test_a_wrong_argument_would_be_seen(twin, name, lens, contexts):
    rows = Rows(twin.device, [length or 0 for length in lens], contexts)
    arguments = rows.arguments()
    arguments[name] = arguments[name].roll(1, 0)
    y = twin("ssd").ssd_varlen(**arguments, chunk_size=CHUNK)
    with pytest.raises(AssertionError):
        rows.check(y, 1e-2)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_context_only_says_where_chunks_end_and_whether_there_is_a_state(twin, shift):
    found = []
    for contexts in ([20, 16], [20 + shift, 16 + shift]):
        rows = Rows(twin.device, [30, 18], contexts)
        y = twin("ssd").ssd_varlen(**rows.arguments(), chunk_size=CHUNK)
        rows.check(y)
        found.append(y)
    assert not torch.equal(*found) and relative(found[0], found[1].double()) < TOLERANCE


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_large_steps_among_small_ones(twin, dtype, tolerance):
    """A token that forgets everything does not blur the tokens after it, and no decay overflows."""
    rows = Rows(twin.device, [100], [3], dtype)
    dt = torch.full_like(rows.inputs["dt"], -7.0)
    dt[::3] = 3e4
    rows.inputs |= dict(
        dt=dt, A_log=torch.full((HEADS,), 2.77, device=twin.device), dt_limit=(0.0, float("inf"))
    )
    rows.inputs["dt_bias"] = torch.zeros_like(rows.inputs["dt_bias"])
    rows.check(twin("ssd").ssd_varlen(**rows.arguments(), chunk_size=64), tolerance)


def test_steps_are_clamped(twin):
    rows = Rows(twin.device, [20], [3])
    rows.inputs["dt_limit"] = (0.3, 0.5)
    y = twin("ssd").ssd_varlen(**rows.arguments(), chunk_size=CHUNK)
    rows.check(y)
    rows.inputs["dt_limit"] = (0.0, float("inf"))
    with pytest.raises(AssertionError):
        rows.check(y, 1e-2)


def cut(rows: Rows, arguments: dict, begin: int, end: int) -> dict:
    """The arguments of tokens begin .. end - 1 of a single row."""
    part = {name: arguments[name][begin:end] for name in ("x", "dt", "B", "C")}
    starts = torch.tensor([0, end - begin], device=rows.device)
    return {
        **arguments,
        **part,
        "starts": starts,
        "context_lens": arguments["context_lens"] + begin,
    }


@pytest.mark.parametrize("context", [0, 9, 16])
@pytest.mark.parametrize("cuts", [(16,), (32, 48), (16, 32, 48, 64)], ids=str)
def test_cuts_at_ends_of_chunks_change_no_bit(twin, cuts, context):
    sizes = (2, 17, 1, 20)
    whole, parts = (Rows(twin.device, [70], [context], sizes=sizes) for _ in range(2))
    scan = twin("ssd").ssd_varlen
    want = scan(**whole.arguments(), chunk_size=CHUNK)
    places = [0, *(place - context % CHUNK for place in cuts), 70]
    outputs = []
    for begin, end in pairwise(places):
        outputs.append(scan(**cut(parts, parts.arguments(), begin, end), chunk_size=CHUNK))
    assert torch.equal(torch.cat(outputs), want)
    assert torch.equal(parts.states[parts.slots], whole.states[whole.slots])


def test_a_cut_inside_a_chunk_would_be_seen(twin):
    """What the test above compares does depend on where chunks end."""
    whole, parts = (Rows(twin.device, [70], [0], sizes=(2, 17, 1, 20)) for _ in range(2))
    scan = twin("ssd").ssd_varlen
    want = scan(**whole.arguments(), chunk_size=CHUNK)
    outputs = [
        scan(**cut(parts, parts.arguments(), *span), chunk_size=CHUNK)
        for span in ((0, 20), (20, 70))
    ]
    assert (
        not torch.equal(torch.cat(outputs), want)
        and relative(torch.cat(outputs), want.double()) < TOLERANCE
    )


@pytest.mark.parametrize("every", [16, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_are_kept_at_regular_positions(twin, every, dtype):
    """Rows that end before, at and after such a position, and the places of others stay as they
    are."""
    lens = [47, 48, 49, 0, 31, 30, 16, 100]
    contexts = [0, 0, 48, 48, 17, 17, None, 5]
    rows = Rows(twin.device, lens, contexts)
    spans = [
        range(0 if c is None else c + 1, 0 if c is None else c + n + 1)
        for c, n in zip(contexts, lens, strict=True)
    ]
    positions = [[p for p in span if p % every == 0] for span in spans]
    first = torch.tensor([20 * row for row in reversed(range(len(lens)))])
    first[4] = -1
    places = torch.full(
        (20 * len(lens), 2, HEADS, WIDTH, STATE), torch.nan, dtype=dtype, device=twin.device
    )
    kept = KeptStates(every, first.to(twin.device), places[:, 1])
    rows.check(twin("ssd").ssd_varlen(**rows.arguments(), chunk_size=CHUNK, kept=kept))
    tolerance = TOLERANCE if dtype == torch.float32 else 2**-10
    for row, (_, states) in enumerate(rows.wanted()):
        if row == 4:
            continue
        for place, position in enumerate(positions[row], int(first[row])):
            assert relative(places[place, 1], states[position - contexts[row]]) < tolerance
            places[place, 1] = torch.nan
    assert sum(map(len, positions)) > 3 and places.isnan().all()


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(twin, state_dtype):
    """At most twice the error of the recurrence in bf16, with states in any precision."""
    dtype = torch.bfloat16
    rows = Rows(twin.device, [1, 70, 130, 5], [0, 9, 64, 200], dtype, (4, 32, 2, 32), state_dtype)
    y = twin("ssd").ssd_varlen(**rows.arguments(), chunk_size=64)
    assert y.dtype == dtype
    low = rows.wanted(dtype)
    for part, slot, (want_y, want), (low_y, low_states) in zip(
        y.split(rows.lens), rows.slots, rows.wanted(), low, strict=True
    ):
        assert relative(part, want_y) <= 2 * relative(low_y, want_y)
        stored = low_states[-1].to(state_dtype)
        assert relative(rows.states[slot], want[-1]) <= 2 * relative(stored, want[-1])
    assert_untouched(rows.entries, rows.before, rows.slots)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [(128, 64, 8, 128), (48, 80, 8, 128), (16, 64, 2, 256), (8, 16, 2, 16)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lens", [[4000], [1000, 64, 0, 1, 130, 300]], ids=str)
def test_real_sizes(sizes, dtype, lens):
    """Against the reference in fp32, from inputs of either dtype."""
    found = []
    for name in ("cuda", "reference"):
        rows = Rows("cuda", lens, [0, 100, 7, None, 64, 0][: len(lens)], dtype, sizes)
        arguments = rows.arguments()
        first = 16 * torch.arange(len(lens), device="cuda")
        if name == "reference":
            arguments |= {key: arguments[key].float() for key in ("x", "dt", "B", "C", "dt_bias")}
        kept = KeptStates(
            256, first, torch.zeros(16 * len(lens), *rows.states.shape[1:], device="cuda")
        )
        y = Twin(name, "cuda")("ssd").ssd_varlen(**arguments, chunk_size=128, kept=kept)
        found.append((y, rows.states[rows.slots[rows.slots >= 0]], kept.states))
    tolerance = TOLERANCE if dtype == torch.float32 else 1e-2
    for have, want in zip(*found, strict=True):
        assert relative(have, want.double()) < tolerance


def test_products_are_narrow_where_operands_can_be_copied_ahead():
    """On an H200, others came out wrong."""
    is_narrow = importlib.import_module("mtpkit.kernels.ssd.scan").is_narrow
    x = torch.zeros(5, 4, 32, dtype=torch.bfloat16)
    assert is_narrow(x, x[1:, :, 16:]) and not is_narrow(x, x.float())
    assert is_narrow(x[:, :1, :20]) and not is_narrow(x[:, :, 1:])
    assert not is_narrow(torch.zeros(5, 4, 17, dtype=torch.bfloat16))
