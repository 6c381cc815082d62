"""States that layers keep of each request from step to step: one file per kind of state.

The engine asks the states for bytes, allocation and rollback; a layer finds its own states in
`StepInput.states`.
"""

from mtpkit.model.state.base import (
    Committed,
    Counter,
    Newest,
    NoiseKey,
    Part,
    RecurrentState,
    Rollback,
    State,
    StateSizes,
    StateSpec,
    StepPlaces,
    Unit,
)
from mtpkit.model.state.conv_window import ConvWindow, ConvWindowSpec
from mtpkit.model.state.layout import StateLayout, States
from mtpkit.model.state.paged_kv import PagedKV, PagedKVSpec
from mtpkit.model.state.paged_latent import PagedLatent, PagedLatentSpec
from mtpkit.model.state.recurrent import RecurrentSpec
from mtpkit.model.state.replay import Replay, ReplaySpec, Ring
from mtpkit.model.state.snapshot import Snapshot, SnapshotSpec

__all__ = [
    "Committed",
    "ConvWindow",
    "ConvWindowSpec",
    "Counter",
    "Newest",
    "NoiseKey",
    "PagedKV",
    "PagedKVSpec",
    "PagedLatent",
    "PagedLatentSpec",
    "Part",
    "RecurrentSpec",
    "RecurrentState",
    "Replay",
    "ReplaySpec",
    "Ring",
    "Rollback",
    "Snapshot",
    "SnapshotSpec",
    "State",
    "StateLayout",
    "StateSizes",
    "StateSpec",
    "States",
    "StepPlaces",
    "Unit",
]
