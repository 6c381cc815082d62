"""Allocator of ids: blocks of the paged cache, slots of recurrent state."""

from collections.abc import Iterable

from mtpkit.errors import MtpkitError


class IdPool:
    """Hands out the integers 0 .. size - 1 and counts the references to each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._references = [0] * size
        self._free = list(reversed(range(size)))

    @property
    def num_free(self) -> int:
        """Number of free ids."""
        return len(self._free)

    @property
    def free_ids(self) -> list[int]:
        """Ids without a reference, ascending."""
        return sorted(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free ids, each with one reference. The caller has checked `num_free`."""
        assert count <= len(self._free), f"{count} of {len(self._free)} free ids"
        ids = [self._free.pop() for _ in range(count)]
        for taken in ids:
            self._references[taken] = 1
        return ids

    def allocate_from(self, among: range) -> int:
        """Take the id in `among` that would be handed out first. The caller knows that one of them
        is free."""
        index = next(
            index for index in reversed(range(len(self._free))) if self._free[index] in among
        )
        taken = self._free.pop(index)
        self._references[taken] = 1
        return taken

    def share(self, held: int) -> None:
        """Add a reference to an allocated id."""
        assert self._references[held] > 0, f"id {held} is free"
        self._references[held] += 1

    def release(self, ids: Iterable[int]) -> None:
        """Drop one reference of each id; dropping the last one frees the id."""
        for held in ids:
            assert self._references[held] > 0, f"id {held} is free"
            self._references[held] -= 1
            if not self._references[held]:
                self._free.append(held)

    def check_integrity(self, held: list[int]) -> None:
        """Compare the references with `held`, the ids of all holders, with one entry per reference.

        Raises:
            MtpkitError: an id is leaked, held although free, or listed twice.
        """
        counts = [0] * self.size
        for taken in held:
            counts[taken] += 1
        unreferenced = [i for i, references in enumerate(self._references) if not references]
        if counts != self._references or sorted(self._free) != unreferenced:
            wrong = [i for i in range(self.size) if counts[i] != self._references[i]]
            raise MtpkitError(
                f"allocator is inconsistent: ids {wrong} have references"
                f" {[self._references[i] for i in wrong]}, holders have"
                f" {[counts[i] for i in wrong]}; free list {self.free_ids}, unreferenced"
                f" {unreferenced}"
            )
