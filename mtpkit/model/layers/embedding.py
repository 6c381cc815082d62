"""The last pipeline stage's embedding, rounded to integers.

The heads embed the tokens that they draft after, but the base's own embedding is on the first
stage. The last stage therefore has a copy; rounding that copy changes only drafts.
"""

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor, nn

from mtpkit.errors import UserError
from mtpkit.kernels.integer_rows import IntegerBits, IntegerRows


class IntegerEmbedding(nn.Module):
    """Replacement for megatron-core's `VocabParallelEmbedding` with an integer table and without
    gradients.

    Args:
        whole: the embedding to round.
    """

    values: Tensor
    scales: Tensor

    def __init__(self, whole: VocabParallelEmbedding, bits: IntegerBits) -> None:
        super().__init__()
        rows = IntegerRows.of(whole.weight, bits)
        self.first = whole.vocab_start_index
        self.tp_group = whole.tp_group
        self.dtype = whole.weight.dtype
        self.register_buffer("values", rows.values)
        self.register_buffer("scales", rows.scales)

    @property
    def rows(self) -> IntegerRows:
        """This rank's part of the table."""
        return IntegerRows(self.values, self.scales)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Embed tokens [...] to [..., h]."""
        if self.tp_group.size() == 1:
            return self.rows.at(token_ids, self.dtype)
        # Each token is in one rank's part: all other ranks add 0.
        local = token_ids - self.first
        held = (local >= 0) & (local < len(self.values))
        own = self.rows.at(torch.where(held, local, 0), self.dtype)
        return reduce_from_tensor_model_parallel_region(
            own.masked_fill(~held[..., None], 0), group=self.tp_group
        )


def has_draft_embedding(model: HybridModel) -> bool:
    """Return whether a stage has an embedding only for drafts: neither the base's own nor its
    lm_head."""
    return (
        model.mtp_process
        and not model.pre_process
        and not model.share_embeddings_and_output_weights
    )


def draft_embedding_bytes(model: HybridModel) -> int:
    """Return the bytes of the embedding that this rank has only for drafts; 0 without one."""
    if not has_draft_embedding(model):
        return 0
    table = model.embedding.word_embeddings
    return sum(tensor.nbytes for tensor in (*table.parameters(), *table.buffers()))


@torch.no_grad()
def round_draft_embedding(model: HybridModel, bits: IntegerBits) -> None:
    """Round the embedding that a model has only for drafts to integers; a model without one stays
    as it is.

    Raises:
        UserError: the embedding has already been rounded to another number of bits.
    """
    if not has_draft_embedding(model):
        return
    table = model.embedding.word_embeddings
    if not isinstance(table, IntegerEmbedding):
        model.embedding.word_embeddings = IntegerEmbedding(table, bits)
    elif table.rows.bits != bits:
        raise UserError(
            f"the draft embedding of this model is already int{table.rows.bits}, not int{bits}:"
            " load the model again"
        )
