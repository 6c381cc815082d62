"""`ssm_replay_update` as decoding runs it: rows together over many steps, widths of whole blocks,
in a CUDA graph."""

import pytest
import torch
import torch.nn.functional as F

from mtpkit.kernels.ring import ring_base, ring_capacity, ring_length
from tests.kernels.conftest import Twin
from tests.kernels.recurrence import relative
from tests.kernels.test_ssm_update import LIMITS, TOLERANCE, views

BF16_TOLERANCE = 2**-8 + 2**-12
"""Rounding of an output and of the operands of tensor cores."""


class Rows:
    """R rows, one of them padding: caches and inputs in tensors that stay where they are, and the
    fp64 state of what each row has accepted. `sizes` are heads, head width, groups and state
    width."""

    def __init__(
        self, twin: Twin, rows: int, tokens: int, length: int, sizes, dtype: torch.dtype
    ) -> None:
        heads, width, groups, state = sizes
        self.update = twin("ssm_update").ssm_replay_update
        self.device = twin.device
        self.tokens = tokens
        self.length = length
        self.sizes = sizes
        self.generator = torch.Generator().manual_seed(rows)
        self.slots = torch.randperm(rows + 2, generator=self.generator)[:rows].to(self.device)
        self.slots[rows // 2] = -1
        self.live = self.slots >= 0
        self.exact = (
            torch.randn(rows, heads, width, state, generator=self.generator)
            .to(self.device)
            .double()
        )
        shapes = [
            (length, heads, width),
            (length, groups, state),
            (length, heads),
            (heads, width, state),
        ]
        dtypes = [dtype, dtype, torch.float32, torch.float32]
        *self.rings, self.state = (
            torch.full((rows + 2, *shape), torch.nan, dtype=of, device=self.device)
            for shape, of in zip(shapes, dtypes, strict=True)
        )
        self.state[self.slots[self.live]] = self.exact[self.live].float()
        self.contexts = torch.randint(0, 1000, (rows,), generator=self.generator).to(self.device)
        self.ring_lens, self.counts = (
            torch.zeros_like(self.contexts),
            torch.zeros_like(self.contexts),
        )
        A_log = torch.log(torch.rand(heads, generator=self.generator) * 2 + 0.05)
        D, bias = torch.randn(2, heads, generator=self.generator)
        self.parameters = {
            k: v.to(self.device) for k, v in dict(A_log=A_log, D=D, dt_bias=bias - 3).items()
        }
        self.tensors = [t.to(self.device, dtype) for t in self.drawn()]

    def drawn(self) -> tuple[torch.Tensor, ...]:
        """x, dt, B and C."""
        return views(len(self.slots), self.tokens, self.generator, self.sizes)

    def draw(self) -> None:
        """New inputs, and how many tokens of each row are accepted, often all. What is forgotten is
        NaN."""
        for tensor, value in zip(self.tensors, self.drawn(), strict=True):
            tensor.copy_(value)
        counts = torch.randint(1, 2 * self.tokens + 1, self.counts.shape, generator=self.generator)
        self.counts.copy_(counts.clamp_max(self.tokens))
        first = (self.contexts - self.ring_lens)[:, None]
        since_first = (torch.arange(self.length, device=self.device) - first) % self.length
        unused = (since_first >= self.ring_lens[:, None])[self.live]
        for ring in self.rings:
            held = ring[self.slots[self.live]]
            held[unused] = torch.nan
            ring[self.slots[self.live]] = held

    def step(self) -> torch.Tensor:
        """y [R, T, h, p]; counts what is accepted. Can be captured."""
        x, dt, B, C = self.tensors
        where = self.slots, self.contexts, self.ring_lens
        inputs = dict(x=x, dt=dt, B=B, C=C, dt_limit=LIMITS) | self.parameters
        y = self.update(self.state, *self.rings, *where, **inputs)
        self.ring_lens.copy_(ring_base(self.ring_lens, self.tokens, self.length) + self.counts)
        self.contexts.add_(self.counts)
        return y

    def expect(self) -> torch.Tensor:
        """y by the recurrence, all rows and heads at once; moves the exact state on."""
        x, dt, B, C = (t.double() for t in self.tensors)
        A_log, D, bias = (t.double() for t in self.parameters.values())
        steps = F.softplus(dt + bias)
        decay = torch.exp(steps * -torch.exp(A_log))
        B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))  # [R, T, h, n]
        state = self.exact
        outputs = []
        for t in range(self.tokens):
            state = (
                decay[:, t, :, None, None] * state
                + (steps[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
            )
            outputs.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
            self.exact = torch.where((t < self.counts)[:, None, None, None], state, self.exact)
        return torch.stack(outputs, 1)


def run(rows: Rows, steps: int, captured: bool) -> float:
    """Worst relative error of y over the steps. `captured`: all but the first replay one graph."""
    worst = 0.0
    live = rows.live
    folds = torch.zeros_like(rows.counts)
    graph = torch.cuda.CUDAGraph() if captured else None
    for index in range(steps):
        rows.draw()
        folds += rows.ring_lens + rows.tokens > ring_capacity(rows.length)
        if graph is None or index == 0:
            y = rows.step()
        else:
            if index == 1:
                with torch.cuda.graph(graph):
                    y = rows.step()
            graph.replay()
        worst = max(worst, relative(y[live], rows.expect()[live]))
        assert (y[~live] == 0).all()
    assert (folds[live] > 1).all(), "a state that was written is read, and written again"
    foreign = torch.ones(len(rows.state), dtype=torch.bool, device=rows.device)
    foreign[rows.slots[live]] = False
    assert all(buffer[foreign].isnan().all() for buffer in (rows.state, *rows.rings))
    return worst


def test_widths_of_whole_blocks(twin):
    """The state is loaded without a mask."""
    assert run(Rows(twin, 3, 2, 10, (4, 16, 2, 16), torch.float32), 12, captured=False) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_of_many_rows(dtype):
    """Widths of a model, and as many heads per program as the kernel takes."""
    rows = Rows(Twin("cuda", "cuda"), 70, 4, ring_length(4), (32, 64, 8, 128), dtype)
    assert run(rows, 60, captured=True) < (TOLERANCE if dtype == torch.float32 else BF16_TOLERANCE)
