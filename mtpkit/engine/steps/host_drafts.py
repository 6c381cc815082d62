"""Drafts that the host chooses: the interface by which they get to the device.

Heads leave their drafts on the device, where the next step finds them. Whoever knows better on the
host, such as a grammar that forces text, replaces them before the step is launched. They are
verified like any draft.

Shape legend: R rows, T tokens of a decode row, the newest output token among them.
"""

from typing import NamedTuple

import numpy as np


class HostDrafts(NamedTuple):
    """Drafts of some decode rows of a step, see `DeviceState.write_drafts`."""

    slots: list[int]
    """Slots of the R rows."""
    token_ids: np.ndarray
    """[R, T - 1] int64, all drafts of the rows."""
    chosen: np.ndarray
    """[R, T - 1] bool, the drafts that the host chose. Others are the heads' own, at their places.
    The choice must not depend on a draft that was drawn for the same place: rejection sampling
    takes the drafts for certain, not for drawn."""
    parents: np.ndarray | None = None
    """[R, T] int64, for trees that grow, see `TokenTree.parents`."""
