"""Values that are not finite where a token does not look: entries that nothing wrote, and other tokens of the step."""

import pytest
import torch

from mtpkit.kernels.ancestors import seen_tokens
from tests.kernels.test_attention import make_paged
from tests.kernels.test_latent_attention import SCALE, Model
from tests.kernels.test_trees import TOKENS

CONTEXTS = [0, 5, 61]
EARLIER = 4
SPARSE = torch.tensor([[16, 33, 80], [17, 32, 64], [18, 50, 82]])
"""Masks of the tokens 4 .. 6 of trees of 7 entries, of which the first ones are in part seen by nobody."""


def unseen(masks: torch.Tensor, tables: torch.Tensor, block_size: int) -> torch.Tensor:
    """Entries of the caches, as flat indices, that belong to a tree and that none of its queries sees."""
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
    latent, rotary = (t.unflatten(0, (3, TOKENS))[:, EARLIER:] for t in model.queries(model.q_nope, model.q_rotary))

    def attend():
        places = (model.cache, model.tables, torch.tensor(CONTEXTS))
        tensors = (t.to(twin.device) for t in (latent, rotary, *places))
        return twin("latent_attention").latent_attention(*tensors, SCALE, SPARSE.to(twin.device), EARLIER, **options)

    want = attend()
    model.cache.flatten(0, 1)[unseen(SPARSE, model.tables, model.cache.shape[1])] = torch.nan
    assert want.isfinite().all() and attend().equal(want)
