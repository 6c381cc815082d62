"""Random histories of engine, allocators, states and prefix cache; and faults of each kind, which
they find."""

import pytest
import torch

from mtpkit.engine.device.executor import Executor
from mtpkit.engine.scheduling import prefix_cache as cache_module
from mtpkit.engine.scheduling.admission import Admission
from mtpkit.engine.scheduling.prefix_blocks import CachedBlocks
from mtpkit.engine.scheduling.prefix_cache import PrefixCache
from mtpkit.engine.steps import verifier as verifier_module
from mtpkit.engine.steps.device_state import DeviceState
from mtpkit.engine.steps.plan import Restore, Save
from tests.engine.fakes import HashRunner, HashStore
from tests.engine.prefix import fuzz

OPERATIONS = 2000


@pytest.mark.parametrize("seed", range(18))
def test_random_histories(seed):
    counts = fuzz.run(OPERATIONS, seed)
    assert len(counts) == 7 and all(counts.values()), counts


def another_checkpoint(patch):
    """The one before is restored."""
    restore = HashStore.restore

    def stale(self, restores):
        count = len(self.kept)
        restore(
            self,
            [
                Restore((one.checkpoint - 1) % count, one.slot, one.length, one.blocks)
                for one in restores
            ],
        )

    patch.setattr(HashStore, "restore", stale)


def ring_not_folded(patch):
    patch.setattr(HashRunner, "fold", lambda *_: None)


def tail_not_copied(patch):
    restore = HashStore.restore

    def without(self, given):
        restore(self, [Restore(r.checkpoint, r.slot, r.length) for r in given])

    patch.setattr(HashStore, "restore", without)


def tail_shared(patch):
    """Full blocks are taken as they are, though the heads' last entry depends on the next token."""
    init = PrefixCache.__init__

    def without_heads(self, blocks, block_size, num_checkpoints, following, *given, **named):
        init(self, blocks, block_size, num_checkpoints, 0, *given, **named)

    patch.setattr(PrefixCache, "__init__", without_heads)


def heads_not_resumed(patch):
    """The heads' entry before the checkpoint is left as it was."""
    execute = Executor.execute

    def skipped(self, batch):
        if not batch.shape.resumed:
            return execute(self, batch)
        draft = self.drafter.draft
        entries = list(getattr(self.drafter, "entries", []))
        try:
            return execute(self, batch)
        finally:
            if entries:
                self.drafter.entries = entries
                self.drafter.draft = draft

    patch.setattr(Executor, "execute", skipped)


def earlier_positions_shifted(patch):
    """A step that begins one position before a checkpoint is given the positions before the next
    one."""
    earlier_at = DeviceState.earlier_at
    patch.setattr(
        DeviceState, "earlier_at", lambda self, slots, behind=False: earlier_at(self, slots)
    )


def earlier_positions_left_out(patch):
    """Of the positions before a checkpoint only the last one is restored."""
    restore = HashStore.restore

    def last(self, restores):
        restore(self, restores)
        earlier = self.engine.executor.state.earlier
        earlier.hidden[[one.slot for one in restores], :-1] = 0

    patch.setattr(HashStore, "restore", last)


def another_position(patch):
    """Requests go on one token early."""
    keep = PrefixCache.keep

    def shifted(self, request, length, decoded=False):
        return keep(self, request, length - 1, decoded) if length > 1 else None

    patch.setattr(PrefixCache, "keep", shifted)


def another_path(patch):
    """Behind the first accepted draft of a tree comes a token that was not accepted."""
    accept = verifier_module.accept_tree

    def wrong(*given):
        accepted, token_ids, path, ranks = accept(*given)
        return accepted, token_ids, torch.where(path > 1, path - 1, path), ranks

    patch.setattr(verifier_module, "accept_tree", wrong)


def end_not_noted(patch):
    """A step that was launched before the host knew of the end writes to the slot."""
    patch.setattr(DeviceState, "live", lambda self, slots, decoding: slots)


def never_written(patch):
    patch.setattr(HashStore, "save", lambda self, saves: None)


def written_late(patch):
    """After the launch of the next step, which decodes."""
    save = HashStore.save
    late = []

    def later(self, saves: list[Save]):
        while late:
            save(self, late.pop(0))
        late.append(saves)

    patch.setattr(HashStore, "save", later)


def hash_of_one_block(patch):
    """Whatever came before it."""
    plain = cache_module.blake2b
    size = cache_module._DIGEST
    patch.setattr(
        cache_module,
        "blake2b",
        lambda data, digest_size: plain(data[size:], digest_size=digest_size),
    )


def evicted_with_its_key(patch):
    patch.setattr(CachedBlocks, "_forget", lambda self, evicted: None)


def held_and_idle(patch):
    """A block that is found again stays where it may be evicted."""
    share = CachedBlocks.share

    def kept(self, held):
        idle = held in self._idle
        share(self, held)
        if idle:
            self._idle[held] = None

    patch.setattr(CachedBlocks, "share", kept)


def block_leaked(patch):
    """Of a request that did not fit, the shared blocks stay held."""
    reserve = Admission.reserve

    def leaking(self, request, positions, hit=None):
        if hit:
            for block in hit.shared[:1]:
                self.blocks.share(block)
        return reserve(self, request, positions, hit)

    patch.setattr(Admission, "reserve", leaking)


def checkpoint_leaked(patch):
    drop = PrefixCache._drop

    def leaking(self, entry):
        drop(self, entry)
        self.slots.allocate(1)

    patch.setattr(PrefixCache, "_drop", leaking)


def blocks_not_watched(patch):
    """A request that waits is given what was found when it came."""
    patch.setattr(CachedBlocks, "_note", lambda self, key: None)


def tails_not_withdrawn(patch):
    """A dropped checkpoint leaves its keys, for which idle blocks are kept though nothing finds
    them."""

    def without(self, entry):
        kept = self.blocks.withdraw
        self.blocks.withdraw = lambda key: None
        try:
            drop(self, entry)
        finally:
            self.blocks.withdraw = kept

    drop = PrefixCache._drop
    patch.setattr(PrefixCache, "_drop", without)


FAULTS = [
    tails_not_withdrawn,
    blocks_not_watched,
    another_checkpoint,
    ring_not_folded,
    tail_not_copied,
    tail_shared,
    heads_not_resumed,
    earlier_positions_shifted,
    earlier_positions_left_out,
    another_position,
    another_path,
    end_not_noted,
    never_written,
    written_late,
    hash_of_one_block,
    evicted_with_its_key,
    held_and_idle,
    block_leaked,
    checkpoint_leaked,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(monkeypatch, fault):
    fault(monkeypatch)
    # Whichever check sees the fault first.
    with pytest.raises(Exception) as found:  # noqa: PT011
        for seed in (2, 3):
            fuzz.run(OPERATIONS, seed)
    # A fault that no longer fits the code fails before that.
    assert {"operate", "end"} & {entry.name for entry in found.traceback}
