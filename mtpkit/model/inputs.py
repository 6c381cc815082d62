"""What a layer needs besides its hidden states, as frozen dataclasses of tensors.

megatron-core's wrappers hand one of these through unchanged as `inference_context`; no layer knows who made it.

Shape legend: T tokens of a step, R rows (requests) of a step, s sequence, b batch, K speculative tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch.nn.functional as F
from torch import Tensor


class LayerInput:
    """Base of the inputs below; answers what megatron-core's wrappers ask of an inference context."""

    def is_static_batching(self) -> bool:
        """False: keeps megatron-core from reading attributes of its own contexts."""
        return False

    def is_decode_only(self) -> bool:
        """False: disables megatron-core's own prefill chunking of MLPs."""
        return False


@dataclass(frozen=True)
class SequenceInput(LayerInput):
    """Whole sequences at once, as in training and teacher forcing.

    `documents` [b, s] int: non-decreasing index of the document a token belongs to; attention, convolution and state
    never cross from one to the next. None: each row is one document.
    `positions` [b, s] int: rotary position of each token inside its document. None: 0, 1, 2, ...
    `document_lens`: lengths of the documents, row after row. None: read from `documents`, if need be.
    """

    documents: Tensor | None = None
    positions: Tensor | None = None
    document_lens: tuple[int, ...] | None = None

    def lens(self, batch: int, length: int) -> tuple[int, ...]:
        """Lengths of the documents of `batch` rows of `length` tokens, row after row.

        Waits for the device, once, where only the device knows.
        """
        return (length,) * batch if self.documents is None else self.document_lens or self._lens

    @cached_property
    def _lens(self) -> tuple[int, ...]:
        assert self.documents is not None
        documents = self.documents.cpu()
        first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True).flatten()
        places = [*first.nonzero()[:, 0].tolist(), first.numel()]
        return tuple(end - start for start, end in pairwise(places))


@dataclass(frozen=True)
class DepthInput(SequenceInput):
    """Sequences at MTP depth `depth` under serving attention: a query at i sees depth 1's entries j <= i and the
    entries of depths 2..depth of the same i.

    `streams` maps a layer's name to what its earlier depths left there for the later ones; one fresh dict serves all
    depths of a forward pass.
    """

    depth: int = 1
    streams: dict[str, Any] = field(default_factory=dict)

    def leave[T](self, name: str, entry: T) -> list[T]:
        """Leave `entry` for the later depths of layer `name`.

        Returns:
            Entries of depths 1..depth in order. A depth that runs again in the backward, because its activations were
            not kept, leaves nothing a second time and sees what it saw.
        """
        entries = self.streams.setdefault(name, [])
        if len(entries) < self.depth:
            entries.append(entry)
        return [*entries[: self.depth - 1], entry]


@dataclass(frozen=True)
class AttentionCache:
    """Paged keys and values of one layer, each [num_blocks, block_size, kv_heads, head_dim]."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class SnapshotCache:
    """Recurrent state of one Mamba2 layer, kept after each token of a step and committed by index.

    `conv` [slots, kernel - 1 + K, conv_dim]: the inputs of the convolution; with committed index c the window of the
    next token is columns c .. c + kernel - 2.
    `state` [slots, 1 + K, heads, head_dim, state_dim]: entry c is the committed state.
    """

    conv: Tensor
    state: Tensor


@dataclass(frozen=True)
class ReplayCache:
    """Recurrent state of one Mamba2 layer as one state and a ring of the small inputs that came after it.

    `conv` as in `SnapshotCache`. `state` [slots, heads, head_dim, state_dim]. `x` [slots, L, heads, head_dim],
    `B` [slots, L, groups, state_dim] and `dt` [slots, L, heads] (after softplus) hold the latest inputs, that of
    position i at place i % L. A row's `ring_lens` says how many of its last committed positions are not yet folded into
    `state`; there are never more than `ring_capacity(L)`, so that a step writes to places that it does not read.
    """

    conv: Tensor
    state: Tensor
    x: Tensor
    B: Tensor
    dt: Tensor


LayerCache = AttentionCache | SnapshotCache | ReplayCache


@dataclass(frozen=True)
class StepInput(LayerInput):
    """One step of the engine over a flat batch of T tokens in R rows.

    Rows 0 .. num_decode_rows - 1 carry `decode_width` tokens each and come first; the remaining rows are prefill
    chunks of `prefill_lens` tokens. Row r's tokens are `query_start[r] .. query_start[r + 1] - 1`.

    Example, K = 2, one decode row with 10 cached tokens and one first prefill chunk of 4 tokens:
        query_start [0, 3, 7], context_lens [10, 0], positions [10, 11, 12, 0, 1, 2, 3], num_decode_rows 1,
        decode_width 3, prefill_lens (4,)
    """

    positions: Tensor
    """[T] int64, position of each token in its request."""
    query_start: Tensor
    """[R + 1] int64."""
    context_lens: Tensor
    """[R] int64, tokens of the request that are committed in the caches before this step; 0: a zero state."""
    block_tables: Tensor
    """[R, B] int64, blocks of each row in order; entries past a row's last block may name any block and are never
    read."""
    kv_slots: Tensor
    """[T] int64, block * block_size + offset where each token's key and value go; -1: nowhere."""
    state_slots: Tensor
    """[R] int64, the row's slot in the recurrent caches."""
    committed: Tensor
    """[R] int64, which token of the row's last step is the newest accepted one: its index among the decode_width
    tokens, 0 after a prefill chunk. Selects the convolution window and the snapshot."""
    ring_lens: Tensor
    """[R] int64, committed entries in the replay ring: those of the positions before `context_lens`."""
    num_decode_rows: int
    decode_width: int
    prefill_lens: tuple[int, ...]
    caches: Mapping[str, LayerCache]
    """Cache of each layer by its `cache_name`."""
    parents: Tensor | None = None
    """[T] int64, index in its row of the token that each token follows, -1 for the last committed one. None: every row
    is a chain, in which each token follows the one before it."""

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of the decode rows, which come first."""
        return self.num_decode_rows * self.decode_width


@dataclass(frozen=True)
class AttentionCacheSpec:
    """Sizes of the keys and values that one layer caches for a token."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class MambaCacheSpec:
    """Sizes of the recurrent state that one Mamba2 layer caches for a request."""

    conv_dim: int
    conv_kernel: int
    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int


CacheSpec = AttentionCacheSpec | MambaCacheSpec
