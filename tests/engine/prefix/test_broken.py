"""Broken on purpose, a cached run differs from a cold one in logits or drafts."""

import functools

import pytest

from mtpkit.engine.device.checkpoints import CheckpointStore
from mtpkit.engine.drafting.repeated import RepeatedDrafter
from mtpkit.engine.drafting.trees import RepeatedTreeDrafter
from mtpkit.engine.steps.plan import Restore
from mtpkit.model.state import Committed, ConvWindow, Snapshot
from tests.engine.prefix.compare import Pair, multi_turn
from tests.engine.test_trees import FIXED
from tests.engine.tiny import greedy, make_prompts, tiny_model

STARTS = make_prompts((21, 9))


def nothing(patch):
    """The comparison holds."""


def stale_state(patch):
    """The checkpoint is that of another request."""
    restore = CheckpointStore.restore

    def stale(self, restores):
        restore(
            self,
            [Restore(one.checkpoint ^ 1, one.slot, one.length, one.blocks) for one in restores],
        )

    patch.setattr(CheckpointStore, "restore", stale)


def ring_not_folded(patch):
    init = CheckpointStore.__init__

    def without(self, *given, **more):
        init(self, *given[:-1], lambda *_: None, **more)

    patch.setattr(CheckpointStore, "__init__", without)


def window_shifted(patch):
    def shifted(self):
        return {"columns": self.columns[:, self.newest.start + 1 :][:, : self.taps]}

    patch.setattr(ConvWindow, "chunk_end", property(shifted))


def window_with_a_rejected_token(patch):
    _with_a_rejected_token(patch, ConvWindow)


def entry_with_a_rejected_token(patch):
    _with_a_rejected_token(patch, Snapshot)


def _with_a_rejected_token(patch, kind):
    """What decoding fed last is not taken back as far as it must be."""
    settling = kind.settling

    def late(self, committed):
        counts = {counter: (held + 1).clamp_max(3) for counter, held in committed.counts.items()}
        return settling(self, Committed(counts))

    patch.setattr(kind, "settling", late)


def heads_left_out(patch):
    """Keys and values of the heads are not copied with their blocks."""
    restore = CheckpointStore.restore

    def without(self, restores):
        restore(self, restores)
        new = [block for one in restores for _, block in one.blocks]
        for name, states in self.states.layers.items():
            for tensor in states[0].tensors.values() if name.startswith("mtp.") else ():
                tensor[new] = 0

    patch.setattr(CheckpointStore, "restore", without)


def heads_not_resumed(patch):
    """The heads' entry of the last position stays that of the token that followed there before."""

    def skipped(draft, self, hidden, batch, verdict):
        held = [
            t
            for name, own in batch.inputs.states.layers.items()
            if name.startswith("mtp.")
            for t in own
        ]
        kept = [tensor.clone() for state in held for tensor in state.tensors.values()]
        drafts = draft(self, hidden, batch, verdict)
        if batch.shape.resumed:
            for tensor, old in zip(
                (t for state in held for t in state.tensors.values()), kept, strict=True
            ):
                tensor.copy_(old)
        return drafts

    for kind in (RepeatedDrafter, RepeatedTreeDrafter):
        patch.setattr(
            kind, "draft", functools.partialmethod(functools.partial(skipped, kind.draft))
        )


def hidden_state_left_out(patch):
    restore = CheckpointStore.restore

    def without(self, restores):
        restore(self, restores)
        self.state.earlier.hidden[[one.slot for one in restores]] = 0

    patch.setattr(CheckpointStore, "restore", without)


def equal(rollback: str, tree: dict) -> bool:
    """Whether conversations, and prompts that go on otherwise, are the same with the cache on."""
    pair = Pair(tiny_model(), 3, state_rollback=rollback, **tree)
    try:
        for start in STARTS:
            multi_turn(pair, start, 2, greedy(9))
            pair.run([[*start, 1], [*start, 2]], greedy(4), together=False)
        pair.check()
    except AssertionError:
        return False
    assert pair.hits == 29 + 17 + 2 * (21 + 9)
    return True


@pytest.mark.parametrize("tree", [{}, FIXED], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("sabotage", "rollback"),
    [
        (nothing, "replay"),
        (nothing, "snapshot"),
        (stale_state, "replay"),
        (ring_not_folded, "replay"),
        (window_shifted, "replay"),
        (window_with_a_rejected_token, "snapshot"),
        (entry_with_a_rejected_token, "snapshot"),
        (heads_left_out, "replay"),
        (heads_not_resumed, "snapshot"),
        (hidden_state_left_out, "replay"),
    ],
)
def test_sabotage_is_seen(monkeypatch, sabotage, rollback, tree):
    sabotage(monkeypatch)
    assert equal(rollback, tree) == (sabotage is nothing)
