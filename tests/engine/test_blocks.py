"""The allocator against a plain model, over random histories."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mtpkit.engine.scheduling.blocks import IdPool
from mtpkit.errors import MtpkitError


class PoolHistory(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 12))
    def start(self, size):
        self.pool = IdPool(size)
        self.held = []

    @rule(data=st.data())
    def allocate(self, data):
        ids = self.pool.allocate(data.draw(st.integers(0, self.pool.num_free)))
        assert len(set(ids)) == len(ids) and not set(ids) & set(self.held)
        self.held += ids

    @rule(data=st.data())
    def allocate_from(self, data):
        among = range(data.draw(st.integers(0, 2)), self.pool.size, 3)
        if free := set(among) & set(self.pool.free_ids):
            self.held.append(self.pool.allocate_from(among))
            assert self.held[-1] in free

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data):
        self.held.append(data.draw(st.sampled_from(self.held)))
        self.pool.share(self.held[-1])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        leaving = data.draw(st.lists(st.sampled_from(range(len(self.held))), unique=True))
        self.pool.release([self.held[i] for i in leaving])
        self.held = [held for i, held in enumerate(self.held) if i not in leaving]

    @invariant()
    def agrees(self):
        self.pool.check_integrity(self.held)
        assert self.pool.num_free == self.pool.size - len(set(self.held))
        assert not set(self.pool.free_ids) & set(self.held)


TestPoolHistory = PoolHistory.TestCase


@pytest.mark.parametrize("held", [[], [0], [0, 1, 1], [0, 2]])
def test_integrity_check_finds_leaks_and_double_holders(held):
    pool = IdPool(3)
    assert pool.allocate(2) == [0, 1]
    with pytest.raises(MtpkitError, match="inconsistent"):
        pool.check_integrity(held)


def test_misuse_of_the_pool_is_caught():
    pool = IdPool(2)
    ids = pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.allocate(1)
    pool.release(ids)
    with pytest.raises(AssertionError):
        pool.release(ids)
    with pytest.raises(AssertionError):
        pool.share(0)


def test_of_some_ids_the_one_that_is_next_is_taken():
    pool = IdPool(6)
    assert [pool.allocate_from(range(1, 6, 2)) for _ in range(3)] == [1, 3, 5]
    pool.release([3])
    pool.release([1])
    assert pool.allocate_from(range(1, 6, 2)) == 1, "the newest free one, as in allocate"


@pytest.mark.parametrize("free", [[0], [1, 0, 0], []])
def test_a_free_list_that_lacks_an_id_or_has_it_twice_is_noticed(free):
    pool = IdPool(2)
    pool._free = free
    with pytest.raises(MtpkitError, match="allocator is inconsistent"):
        pool.check_integrity([])
