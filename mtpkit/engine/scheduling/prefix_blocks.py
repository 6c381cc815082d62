"""Blocks of the paged cache that keep their content after their last release, until the room is
needed."""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable

from mtpkit.engine.scheduling.blocks import IdPool
from mtpkit.errors import MtpkitError


class CachedBlocks(IdPool):
    """An `IdPool` whose ids may have keys, each of which says what the block contains.

    An id with keys that loses its last reference becomes idle instead of free: it is found by its
    keys and can be shared again. When no id is free, the one that has been idle for longest is
    evicted: it loses its keys.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._ids: dict[Hashable, int] = {}
        self._keys: dict[int, list[Hashable]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._watched: frozenset[Hashable] = frozenset()
        self.unchanged = True
        """Whether none of the watched keys has been given or taken away since the last call of
        `watch`."""
        self.num_evicted = self.num_idled = 0
        """Number of times that an id was evicted, and that an id became idle."""

    @property
    def num_free(self) -> int:
        """Number of ids that can be allocated, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Number of ids that nobody holds and that keep their content."""
        return len(self._idle)

    @property
    def keys(self) -> Collection[Hashable]:
        """All keys that ids have."""
        return self._ids.keys()

    def allocate(self, count: int) -> list[int]:
        """See `IdPool.allocate`; evicts idle ids if too few are free."""
        while len(self._free) < count and self._idle:
            evicted, _ = self._idle.popitem(last=False)
            self._forget(evicted)
            self._free.append(evicted)
            self.num_evicted += 1
        return super().allocate(count)

    def share(self, held: int) -> None:
        """Add a reference to an allocated or idle id."""
        if held in self._idle:
            del self._idle[held]
            self._references[held] = 1
        else:
            super().share(held)

    def release(self, ids: Iterable[int]) -> None:
        """See `IdPool.release`; ids with keys become idle, and are evicted in the order in which
        they are given."""
        for held in ids:
            super().release([held])
            if held in self._keys and not self._references[held]:
                assert self._free.pop() == held
                self._idle[held] = None
                self.num_idled += 1

    def publish(self, held: int, key: Hashable) -> None:
        """Give an allocated id a key, unless an id has this key already."""
        assert self._references[held] > 0, f"id {held} is free"
        if key not in self._ids:
            self._ids[key] = held
            self._keys.setdefault(held, []).append(key)
            self._note(key)

    def find(self, key: Hashable) -> int | None:
        """The id that has this key, or None."""
        return self._ids.get(key)

    def touch(self, held: int) -> None:
        """Make an idle id the last one to be evicted."""
        if held in self._idle:
            self._idle.move_to_end(held)

    def withdraw(self, key: Hashable) -> None:
        """Take a key away, if an id has it; an idle id that loses its last key becomes free."""
        held = self._ids.pop(key, None)
        if held is None:
            return
        self._note(key)
        self._keys[held].remove(key)
        if not self._keys[held]:
            del self._keys[held]
            if held in self._idle:
                del self._idle[held]
                self._free.append(held)

    def withdraw_all(self) -> None:
        """Take all keys away."""
        for key in list(self._ids):
            self.withdraw(key)

    def _forget(self, held: int) -> None:
        for key in self._keys.pop(held):
            del self._ids[key]
            self._note(key)

    def watch(self, keys: Iterable[Hashable]) -> None:
        """Make `unchanged` tell of these keys, and of no other keys, from now on."""
        self._watched = frozenset(keys)
        self.unchanged = True

    def _note(self, key: Hashable) -> None:
        self.unchanged = self.unchanged and key not in self._watched

    def check_integrity(self, held: list[int]) -> None:
        """See `IdPool.check_integrity`.

        Raises:
            MtpkitError: also if keys and ids do not name each other, or an idle id has a holder or
                no key.
        """
        free = self._free
        try:
            self._free = free + list(self._idle)
            super().check_integrity(held)
        finally:
            self._free = free
        listed = sum(map(len, self._keys.values()))
        astray = [owner for key, owner in self._ids.items() if key not in self._keys.get(owner, ())]
        keyless = [one for one in self._idle if not self._keys.get(one)]
        unheld = [one for one in self._keys if not self._references[one] and one not in self._idle]
        if listed != len(self._ids) or astray or keyless or unheld:
            raise MtpkitError(
                f"cached blocks are inconsistent: ids list {listed} keys of {len(self._ids)}; ids"
                f" that lack a key known for them: {astray}; idle ids without a key: {keyless};"
                f" free ids with keys: {unheld}"
            )
