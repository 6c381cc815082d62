"""Latent attention against attention over the keys and values of every head, made from the latents
in fp64."""

import importlib

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Twin
from tests.kernels.inputs import block_tables, write_history
from tests.kernels.recurrence import relative

LATENT = 24
ROTARY = 6
HEADS = 3
NOPE = 5
VALUE = 7
BLOCK = 4
SCALE = 0.37
TOLERANCE = 1e-5
CONTEXTS = [0, 3, 4, 9, 61]


class Model:
    """Projections of one layer, and rows whose histories are scattered over a cache that is NaN
    elsewhere."""

    def __init__(
        self, contexts: list[int], new: list[int], latent: int = LATENT, heads: int = HEADS
    ) -> None:
        self.new = new
        self.contexts = contexts
        self.key_up, self.value_up = (
            torch.randn(heads, NOPE, latent),
            torch.randn(heads, VALUE, latent),
        )
        self.q_nope = [torch.randn(count, heads, NOPE) for count in new]
        self.q_rotary = [torch.randn(count, heads, ROTARY) for count in new]
        lengths = [max(context, 0) + count for context, count in zip(contexts, new, strict=True)]
        self.histories = [torch.randn(length, latent + ROTARY) for length in lengths]
        used = [-(-length // BLOCK) for length in lengths]
        order = torch.randperm(sum(used) + 3)
        self.tables = block_tables(order, used, spare=1)
        self.cache = torch.full((len(order), BLOCK, latent + ROTARY), torch.nan)
        for table, history in zip(self.tables, self.histories, strict=True):
            write_history(self.cache, table, history)

    def queries(self, nope: list[Tensor], rotary: list[Tensor]) -> tuple[Tensor, Tensor]:
        """[T, heads, C] and [T, heads, P] of all rows, views of wider tensors as layers have
        them."""
        absorbed = torch.einsum("thd,hdc->htc", torch.cat(nope), self.key_up).transpose(0, 1)
        return absorbed, torch.cat([torch.cat(rotary), torch.cat(rotary)], -1)[..., :ROTARY]

    def want(self, row: int) -> Tensor:
        """[t, heads, VALUE] in fp64, without absorption."""
        history = self.histories[row].double()
        count = self.new[row]
        latent = self.key_up.shape[-1]
        keys, values = (
            torch.einsum("nc,hdc->nhd", history[:, :latent], up.double()) for up in self.ups
        )
        scores = torch.einsum("thd,nhd->htn", self.q_nope[row].double(), keys)
        scores += torch.einsum("thd,nd->htn", self.q_rotary[row].double(), history[:, latent:])
        mask = torch.ones(len(history), len(history), dtype=torch.bool).tril()[-count:]
        return torch.einsum(
            "htn,nhd->thd", (SCALE * scores).masked_fill(~mask, -torch.inf).softmax(-1), values
        )

    @property
    def ups(self) -> tuple[Tensor, Tensor]:
        return self.key_up, self.value_up

    def error(self, out: Tensor) -> float:
        """Worst error of the rows of out [T, heads, C] that have a context."""
        made = torch.einsum("thc,hdc->thd", out.cpu().double(), self.value_up.double()).split(
            self.new
        )
        rows = [row for row, count in enumerate(self.new) if count and self.contexts[row] >= 0]
        return max(relative(made[row], self.want(row)) for row in rows)


def decode(twin: Twin, model: Model, **options) -> Tensor:
    """The result of rows with equally many tokens, [T, heads, C]."""
    parts = [
        part.unflatten(0, (len(model.new), -1))
        for part in model.queries(model.q_nope, model.q_rotary)
    ]
    tensors = [
        t.to(twin.device) for t in (*parts, model.cache, model.tables, torch.tensor(model.contexts))
    ]
    return twin("latent_attention").latent_attention(*tensors, SCALE, **options).flatten(0, 1).cpu()


def prefill(twin: Twin, model: Model, first: int = 0, tiles=(None, None)) -> Tensor:
    """The result of chunks [T, heads, VALUE]: over their contexts in latents, over their own tokens
    per head."""
    ops = twin("latent_attention")
    lens = torch.tensor(model.contexts).to(twin.device)
    start = (torch.tensor([0, *model.new]).cumsum(0) + first).to(twin.device)
    absorbed, rotary = model.queries(model.q_nope, model.q_rotary)
    tensors = [t.to(twin.device) for t in (absorbed, rotary, model.cache, model.tables)]
    options = [{} if chosen is None else {"tiles": chosen} for chosen in tiles]
    before, lse = ops.latent_context_attention(*tensors, lens, start, SCALE, **options[0])
    own = torch.cat(
        [
            history[len(history) - count :]
            for history, count in zip(model.histories, model.new, strict=True)
        ]
    )
    latent, keys = own.split([own.shape[1] - ROTARY, ROTARY], -1)
    up = torch.cat(model.ups, 1).flatten(0, 1)  # of one product, as layers have it
    plain, values = (
        (latent @ up.t()).unflatten(-1, (len(model.key_up), -1)).split([NOPE, VALUE], -1)
    )
    k = torch.cat([plain, keys[:, None].expand(-1, plain.shape[1], -1)], -1)
    q = torch.cat([torch.cat(model.q_nope), rotary], -1)
    earlier = torch.einsum("thc,hdc->htd", before, model.value_up.to(before.device)).transpose(0, 1)
    parts = (q.to(twin.device), k.to(twin.device), values.to(twin.device))
    return ops.chunk_attention(*parts, earlier, lse, lens, start, SCALE, **options[1]).cpu()


def prefill_error(model: Model, out: Tensor) -> float:
    """Worst error of the rows of out [T, heads, VALUE] that have tokens and a context."""
    rows = [row for row, count in enumerate(model.new) if count and model.contexts[row] >= 0]
    return max(relative(out.split(model.new)[row], model.want(row)) for row in rows)


@pytest.mark.parametrize("tokens", [1, 3])
def test_decode_rows(twin, tokens):
    model = Model(CONTEXTS, [tokens] * 5)
    assert model.error(decode(twin, model)) < TOLERANCE


@pytest.mark.parametrize(("latent", "heads"), [(16, 1), (40, 20)])
def test_widths_and_more_heads_than_a_tile(twin, latent, heads):
    model = Model([5, 30], [2, 2], latent, heads)
    assert model.error(decode(twin, model)) < TOLERANCE
    assert prefill_error(model, prefill(twin, model)) < TOLERANCE


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_contexts_are_split(twin, splits):
    """Some splits hold no position that a query sees."""
    if twin.name == "reference":
        pytest.skip("does not split")
    model = Model([0, 15, 64, 90], [3] * 4)
    assert model.error(decode(twin, model, splits=splits)) < TOLERANCE


def test_chunks_after_contexts(twin):
    """Several tiles in a row, rows of no tokens, rows without context, and padding at the end."""
    model = Model([0, 40, 7, 3, 16, -1], [23, 2, 0, 9, 1, 2])
    chosen = (None, None)
    if twin.name != "reference":
        tiles = importlib.import_module("mtpkit.kernels.attention.tile").Tiles
        chosen = tiles(16, 16, 4, 2), tiles(16, 16, 4, 2)
    out = prefill(twin, model, first=5, tiles=chosen)
    assert prefill_error(model, out) < TOLERANCE
    assert (out[-2:] == 0).all()


def test_no_context_counts_nothing(twin):
    """Neither zeros, nor what lies in the blocks that the tables of such rows name."""
    model = Model([0, 5], [3, 2])
    model.tables[0] = 0
    ops = twin("latent_attention")
    start = torch.tensor([0, 3, 5])
    queries = model.queries(model.q_nope, model.q_rotary)
    tensors = [
        t.to(twin.device)
        for t in (*queries, model.cache, model.tables, torch.tensor([0, 5]), start)
    ]
    out, lse = ops.latent_context_attention(*tensors, SCALE)
    assert (out[:3] == 0).all() and (lse[:3] == -torch.inf).all()
    assert out[3:].isfinite().all() and lse[3:].isfinite().all() and lse.dtype == torch.float32


def test_a_null_row_gives_zeros(twin):
    model = Model([5, -1], [2, 2])
    out = decode(twin, model)
    assert model.error(out) < TOLERANCE and (out[2:] == 0).all()


def test_tiles_of_the_published_sizes_fit_into_shared_memory():
    """Rows of 512 + 64 channels: queries, and as many tiles of rows as are loaded ahead."""
    tiles = importlib.import_module("mtpkit.kernels.latent_attention.triton").latent_tiles
    for queries, dtype in ((1, torch.bfloat16), (512, torch.bfloat16), (512, torch.float32)):
        chosen = tiles(queries, 512, dtype)
        assert (chosen.m + chosen.num_stages * chosen.n) * 576 * dtype.itemsize < 227 * 1024
