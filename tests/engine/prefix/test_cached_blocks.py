"""The allocator of cached blocks against a plain model, over random histories."""

from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mtpkit.engine.scheduling.prefix_blocks import CachedBlocks
from mtpkit.errors import MtpkitError


class History(RuleBasedStateMachine):
    """`held` has one entry per reference, `keys` the keys of each id, `idle` the idle ids in
    order."""

    @initialize(size=st.integers(1, 7))
    def start(self, size):
        self.pool, self.held, self.keys, self.idle = CachedBlocks(size), [], {}, OrderedDict()

    @rule(data=st.data())
    def allocate(self, data):
        free = self.pool.size - len(set(self.held)) - len(self.idle)
        count = data.draw(st.integers(0, self.pool.num_free))
        for _ in range(count - free):
            evicted, _ = self.idle.popitem(last=False)
            del self.keys[evicted]
        ids = self.pool.allocate(count)
        assert len(set(ids)) == len(ids) and not set(ids) & (set(self.held) | set(self.idle))
        self.held += ids

    @precondition(lambda self: self.held or self.idle)
    @rule(data=st.data())
    def share(self, data):
        shared = data.draw(st.sampled_from([*self.held, *self.idle]))
        self.idle.pop(shared, None)
        self.held.append(shared)
        self.pool.share(shared)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        leaving = data.draw(st.permutations(range(len(self.held))))[
            : data.draw(st.integers(0, len(self.held)))
        ]
        ids = [self.held[i] for i in leaving]
        self.held = [held for i, held in enumerate(self.held) if i not in leaving]
        self.pool.release(ids)
        last = {held: index for index, held in enumerate(ids)}
        for held in sorted(set(ids), key=last.get):
            if held not in self.held and self.keys.get(held):
                self.idle[held] = None

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.integers(0, 9))
    def publish(self, data, key):
        held = data.draw(st.sampled_from(self.held))
        self.pool.publish(held, key)
        if all(key not in keys for keys in self.keys.values()):
            self.keys.setdefault(held, []).append(key)

    @rule(key=st.integers(0, 9))
    def withdraw(self, key):
        self.pool.withdraw(key)
        for held in [held for held, keys in self.keys.items() if key in keys]:
            self.keys[held].remove(key)
            if not self.keys[held]:
                del self.keys[held]
                self.idle.pop(held, None)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def touch(self, data):
        touched = data.draw(st.sampled_from([*self.idle]))
        self.pool.touch(touched)
        self.idle.move_to_end(touched)

    @invariant()
    def agrees(self):
        self.pool.check_integrity(self.held)
        assert self.pool.num_free == self.pool.size - len(
            set(self.held)
        ) and self.pool.num_idle == len(self.idle)
        found = {key: self.pool.find(key) for key in range(10)}
        assert found == dict.fromkeys(range(10)) | {
            k: held for held, keys in self.keys.items() for k in keys
        }
        assert not set(self.pool.free_ids) & (set(self.held) | set(self.idle))


History.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestHistory = History.TestCase


def test_what_was_idle_for_longest_is_evicted_first():
    pool = CachedBlocks(3)
    for held in pool.allocate(3):
        pool.publish(held, f"key {held}")
    pool.release([2, 0, 1])
    pool.touch(2)
    assert pool.num_free == 3 and pool.allocate(2) == [1, 0]
    assert pool.find("key 2") == 2 and pool.find("key 0") is None and pool.num_evicted == 2


def test_integrity_check_finds_keys_of_free_blocks():
    pool = CachedBlocks(2)
    (held,) = pool.allocate(1)
    pool.publish(held, "key")
    pool._keys.clear()
    with pytest.raises(MtpkitError, match="inconsistent"):
        pool.check_integrity([held])
