"""The states of all layers: their bytes before allocation, and operations on all of them after
it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from mtpkit.kernels.move_entries import move_entries
from mtpkit.model.state.base import (
    Committed,
    Counter,
    RecurrentState,
    State,
    StateSizes,
    StateSpec,
    StepPlaces,
    Unit,
)

_HEADS = "mtp."
"""Prefix of the layer names of MTP heads."""


@dataclass(frozen=True)
class _Alike:
    """States that keep the tokens of a step at the same places."""

    of_heads: bool
    states: list[State]

    @property
    def state(self) -> State:
        """One of the states, from which to ask the places that all of them share."""
        return self.states[0]

    @cached_property
    def entries(self) -> list[Tensor]:
        """Tensors [entries, ...]: `State.of_tokens` of all states, with the entries of all units in
        one dimension."""
        return [tensor.flatten(0, 1) for state in self.states for tensor in state.of_tokens]


@dataclass(frozen=True)
class States:
    """The states of every layer, in the order in which the layer lists them."""

    layers: Mapping[str, tuple[State, ...]]

    def __getitem__(self, layer: str) -> tuple[State, ...]:
        return self.layers[layer]

    def all(self) -> list[State]:
        """The states of all layers."""
        return [state for states in self.layers.values() for state in states]

    @cached_property
    def noisy(self) -> bool:
        """Whether a state is in float16, which is rounded with noise."""
        recurrent = [one for one in self.all() if isinstance(one, RecurrentState)]
        return any(one.tensors["state"].dtype == torch.float16 for one in recurrent)

    def fork_heads(self, slots: Tensor) -> "States":
        """Return these states with those of MTP heads forked, see `State.fork`."""
        forked = {
            name: tuple(state.fork(slots) for state in states)
            for name, states in self.layers.items()
            if name.startswith(_HEADS)
        }
        return States({**self.layers, **forked})

    def keep_path(self, step: StepPlaces, path: Tensor, accepted: Tensor) -> None:
        """Move the entries of an accepted tree path, in the states of the base's layers, to where a
        chain's tokens would have left them. Does not wait for the device.

        Args:
            path: [R, 1 + K] int64, the tokens of each row on its path, beginning with token 0.
            accepted: [R] int64, number of accepted tokens after token 0; later elements of `path`
                are not read.
        """
        depth = torch.arange(1, path.shape[1], device=path.device)
        # How many tokens are accepted is known on the device alone: the other sources are -1, from
        # which nothing is moved.
        stands = depth <= accepted[:, None]
        index = torch.where(stands, path[:, 1:], 0)
        # The heads' entries of this step's drafts are made again from the accepted tokens.
        for group in (one for one in self._alike if not one.of_heads):
            sources = torch.where(stands, group.state.entries_of(step, index), -1)
            targets = group.state.entries_of(step, depth.expand_as(sources))
            move_entries(sources, targets, *group.entries)

    def settle(self, slots: Tensor, committed: Committed) -> None:
        """Move the committed part of requests' states to where a chunk would have left it, except
        rings, which only layers can fold. Does not wait for the device.

        Args:
            slots: [R] int64, each slot once; -1: a null row, which has no states.
            committed: the committed part of these rows; afterwards it is `Committed.none`, which
                the caller must write.
        """
        for group in self._alike:
            settling = group.state.settling(committed) if group.state.unit == "slot" else None
            if settling is not None:
                # Null rows get negative entries, from which nothing is moved.
                first = slots[:, None] * group.state.of_tokens[0].shape[1]
                sources, targets = (first + places for places in settling)
                move_entries(sources, targets, *group.entries)

    @cached_property
    def _alike(self) -> "list[_Alike]":
        """All states with an entry for each token of a step, grouped by the places of those
        entries."""
        # All states of a group are moved by a few launches, however many layers there are.
        groups: dict[tuple, list[State]] = {}
        for name, states in self.layers.items():
            for state in (one for one in states if one.of_tokens):
                compared = [one.name for one in fields(state) if one.compare]
                rest = [getattr(state, name) for name in compared if name != "tensors"]
                key = name.startswith(_HEADS), type(state), state.of_tokens[0].shape[1:2], *rest
                groups.setdefault(key, []).append(state)
        return [_Alike(key[0], alike) for key, alike in groups.items()]


@dataclass(frozen=True)
class StateLayout:
    """Shapes of the states of every layer."""

    specs: Mapping[str, tuple[StateSpec, ...]]
    sizes: StateSizes
    behind: int = 0
    """Number of positions by which the states of MTP heads are behind the base's, see
    `StateSizes.behind`."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """`StateSizes.layer` of each layer; by default 1."""

    def sizes_of(self, layer: str) -> StateSizes:
        """Return the sizes of the states of one layer."""
        # A step feeds a state that is behind that many tokens more, which its ring or window holds.
        behind = self.behind if layer.startswith(_HEADS) else 0
        return replace(
            self.sizes,
            decode_width=self.sizes.decode_width + behind,
            behind=behind,
            layer=self.numbers.get(layer, 1),
        )

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self._bytes("block")

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one request's slots over all layers: its recurrent states and convolution
        windows."""
        return self._bytes("slot")

    @property
    def head_slot_bytes(self) -> int:
        """The part of `slot_bytes` that belongs to layers of MTP heads."""
        return self._bytes("slot", layers=_HEADS)

    @property
    def ring_bytes(self) -> int:
        """The part of `slot_bytes` that belongs to replay rings."""
        return self._bytes("slot", only_rings=True)

    @property
    def counters(self) -> tuple[Counter, ...]:
        """The counters that the states need for each request, each counter once."""
        found = (counter for spec, sizes in self._all() for counter in spec.counters(sizes))
        return tuple(dict.fromkeys(found))

    def allocate(self, num_blocks: int, num_slots: int, device: torch.device) -> States:
        """Allocate the states of all layers, uninitialised."""
        units: dict[Unit, int] = {"block": num_blocks, "slot": num_slots}
        return States(
            {
                name: tuple(
                    spec.allocate(units[spec.unit], self.sizes_of(name), device) for spec in specs
                )
                for name, specs in self.specs.items()
            }
        )

    def _all(self, layers: str = "") -> list[tuple[StateSpec, StateSizes]]:
        """The states of the layers whose names start with `layers`, and their sizes."""
        specs = {name: specs for name, specs in self.specs.items() if name.startswith(layers)}
        return [(spec, self.sizes_of(name)) for name, own in specs.items() for spec in own]

    def _bytes(self, unit: Unit, only_rings: bool = False, layers: str = "") -> int:
        return sum(
            spec.unit_bytes(sizes, only_rings)
            for spec, sizes in self._all(layers)
            if spec.unit == unit
        )
