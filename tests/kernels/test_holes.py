"""Values that are not finite where a token does not look: entries that nothing wrote, and other
tokens of the step."""

import pytest
import torch

from mtpkit.kernels.ancestors import ancestor_masks, seen_tokens
from tests.kernels.test_attention import make_paged
from tests.kernels.test_causal_conv1d import parameters
from tests.kernels.test_delta_rule import make
from tests.kernels.test_latent_attention import LATENT, SCALE, Model
from tests.kernels.test_ssd_varlen import Rows
from tests.kernels.test_trees import CHAIN, DEPTH, MASKS, PARENTS, TOKENS, Delta, Mamba

CONTEXTS = [0, 5, 61]
EARLIER = 4
SPARSE = torch.tensor([[16, 33, 80], [17, 32, 64], [18, 50, 82]])
"""Masks of the tokens 4 .. 6 of trees of 7 entries, of which the first ones are in part seen by
nobody."""


def unseen(masks: torch.Tensor, tables: torch.Tensor, block_size: int) -> torch.Tensor:
    """Entries of the caches, as flat indices, that belong to a tree and that none of its queries
    sees."""
    seen = seen_tokens(masks, TOKENS).any(1)
    places = [
        int(tables[row, place // block_size]) * block_size + place % block_size
        for row, context in enumerate(CONTEXTS)
        for place in (context + entry for entry in range(TOKENS) if not seen[row, entry])
    ]
    return torch.tensor(places)


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("block_size", [2, 4])
def test_attention_reads_no_entry_that_no_query_sees(twin, block_size, splits):
    caches, tables, _ = make_paged(CONTEXTS, [TOKENS] * 3, block_size)
    options = {} if twin.name == "reference" else dict(splits=splits)
    q = torch.randn(3, TOKENS - EARLIER, 4, 6)

    def attend():
        tensors = (t.to(twin.device) for t in (q, *caches, tables, torch.tensor(CONTEXTS), SPARSE))
        return twin("attention").paged_attention(*tensors, EARLIER, **options).cpu()

    want = attend()
    holes = unseen(SPARSE, tables, block_size)
    assert len(holes) == 9
    caches.flatten(1, 2)[:, holes] = torch.nan
    assert want.isfinite().all() and attend().equal(want)


@pytest.mark.parametrize("splits", [None, 3])
def test_latent_attention_reads_no_entry_that_no_query_sees(twin, splits):
    model = Model(CONTEXTS, [TOKENS] * 3)
    options = {} if twin.name == "reference" else dict(splits=splits)
    latent, rotary = (
        t.unflatten(0, (3, TOKENS))[:, EARLIER:]
        for t in model.queries(model.q_nope, model.q_rotary)
    )

    def attend():
        places = (model.cache, model.tables, torch.tensor(CONTEXTS))
        tensors = (t.to(twin.device) for t in (latent, rotary, *places))
        return twin("latent_attention").latent_attention(
            *tensors, SCALE, SPARSE.to(twin.device), EARLIER, **options
        )

    want = attend()
    model.cache.flatten(0, 1)[unseen(SPARSE, model.tables, model.cache.shape[1])] = torch.nan
    assert want.isfinite().all() and attend().equal(want)


SHAPES = {"chain": (CHAIN, ancestor_masks(CHAIN, DEPTH)[0]), "tree": (PARENTS, MASKS)}
BROKEN = 2
"""The token of the step that is not finite."""


def unaware(masks: torch.Tensor) -> torch.Tensor:
    """[3, T] bool, the tokens that do not see the broken one."""
    return ~seen_tokens(masks, TOKENS)[:, :, BROKEN]


def check(have: torch.Tensor, want: torch.Tensor, masks: torch.Tensor) -> None:
    """Outputs [3, T, ...]: what does not see the broken token has the same bits, and its own output
    tells."""
    rest = unaware(masks)
    assert rest.any() and want.isfinite().all() and have[rest].equal(want[rest])
    assert not have[:, BROKEN].isfinite().all((1, 2)).any()


@pytest.mark.parametrize(
    ("kind", "value"), [("keys", torch.nan), ("values", torch.nan), ("values", torch.inf)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_keeps_a_broken_token_to_those_that_see_it(twin, shape, kind, value):
    caches, tables, histories = make_paged(CONTEXTS, [TOKENS] * 3, 4)
    q = torch.randn(3, TOKENS, 4, 6).to(twin.device)
    masks = None if shape == "chain" else MASKS.to(twin.device)
    caches = caches.to(twin.device)
    places = (tables.to(twin.device), torch.tensor(CONTEXTS).to(twin.device), masks)
    want = twin("attention").paged_attention(q, *caches, *places).cpu()
    for row, (context, history) in enumerate(zip(CONTEXTS, histories, strict=True)):
        place = context + BROKEN
        new = history[:, place : place + 1].clone().to(twin.device)
        new[0 if kind == "keys" else 1, :, :, 1] = value
        slot = tables[row, place // 4 : place // 4 + 1] * 4 + place % 4
        twin("kv_store").store_kv(*new, *caches, slot.to(twin.device))
    check(twin("attention").paged_attention(q, *caches, *places).cpu(), want, SHAPES[shape][1])


@pytest.mark.parametrize(
    ("kind", "value"), [("keys", torch.nan), ("latents", torch.nan), ("latents", torch.inf)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_latent_attention_keeps_a_broken_token_to_those_that_see_it(twin, shape, kind, value):
    model = Model(CONTEXTS, [TOKENS] * 3)
    latent, rotary = (
        t.unflatten(0, (3, TOKENS)) for t in model.queries(model.q_nope, model.q_rotary)
    )
    masks = None if shape == "chain" else MASKS.to(twin.device)
    cache = model.cache.to(twin.device)
    size = model.cache.shape[1]
    places = [t.to(twin.device) for t in (model.tables, torch.tensor(CONTEXTS))]
    given = latent.to(twin.device), rotary.to(twin.device), cache, *places, SCALE, masks
    want = twin("latent_attention").latent_attention(*given).cpu()
    rows = cache[:, :, None]
    for row, context in enumerate(CONTEXTS):
        place = context + BROKEN
        new = model.histories[row][place : place + 1, None].clone().to(twin.device)
        new[..., -1 if kind == "keys" else 1] = value
        slot = model.tables[row, place // size : place // size + 1] * size + place % size
        parts = rows[..., LATENT:], rows[..., :LATENT], slot.to(twin.device)
        twin("kv_store").store_kv(new[..., LATENT:], new[..., :LATENT], *parts)
    check(twin("latent_attention").latent_attention(*given).cpu(), want, SHAPES[shape][1])


INPUTS = [
    *(("chain", Mamba, place, torch.nan) for place in range(4)),
    *(("chain", Delta, place, torch.nan) for place in range(5)),
    *(
        ("tree", kind, place, value)
        for kind, place in ((Mamba, 0), (Delta, 2))
        for value in (torch.nan, torch.inf)
    ),
]
"""Each input by its place in `Mamba.drawn` or `Delta.drawn`; x of the one and v of the other also
in trees."""


@pytest.mark.parametrize(("shape", "kind", "broken", "value"), INPUTS)
def test_recurrences_keep_a_broken_token_to_those_that_see_it(twin, shape, kind, broken, value):
    """With replay and with snapshots."""
    rows, (parents, masks) = kind(13), SHAPES[shape]
    ways = [
        (rows.replay, None if shape == "chain" else masks),
        (rows.snapshot, None if shape == "chain" else parents),
    ]
    want = [run(twin, given)[0] for run, given in ways]
    rows.tokens[broken][:, BROKEN, 1] = value
    for (run, given), before in zip(ways, want, strict=True):
        check(run(twin, given)[0], before, masks)


PROMPT = 20


def test_the_scan_of_a_prompt_tells_of_a_step_size_that_is_not_finite(twin):
    """A bound that it is compared with must not take its place."""
    rows = Rows(twin.device, [PROMPT], [0])
    rows.inputs["dt"][BROKEN] = torch.nan
    y = twin("ssd").ssd_varlen(**rows.arguments(), chunk_size=16).cpu()
    assert not y[BROKEN].isfinite().any()


def test_the_delta_rule_of_a_prompt_tells_of_a_decay_that_is_not_finite(twin):
    inputs = make(PROMPT)
    inputs["g"][BROKEN] = torch.nan
    out = twin("gated_delta_rule").delta_varlen(
        **{name: tensor.to(twin.device) for name, tensor in inputs.items()},
        starts=torch.tensor([0, PROMPT], device=twin.device),
    )
    assert not out[BROKEN].cpu().isfinite().any()


@pytest.mark.parametrize("shape", SHAPES)
def test_convolutions_keep_a_broken_token_to_those_that_see_it(twin, shape):
    (weight, bias), (parents, masks) = parameters(4, True), SHAPES[shape]
    x = torch.randn(3, TOKENS, 5)
    state = torch.randn(3, 4 + TOKENS, 5)
    slots = torch.arange(3)
    committed = torch.tensor([2, 0, 1])

    def run():
        given = (
            x,
            state.clone(),
            weight,
            bias,
            slots,
            committed,
            None if shape == "chain" else parents,
        )
        tensors = [None if t is None else t.to(twin.device) for t in given]
        return twin("causal_conv1d").causal_conv1d_update(*tensors)[..., None].cpu()

    want = run()
    x[:, BROKEN, 1] = torch.nan
    check(run(), want, masks)
