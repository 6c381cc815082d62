"""The host's part of the prefix cache: finds what earlier requests have computed of a new prompt.

A *checkpoint* is all that a request needs, besides keys and values, to continue after its first P
tokens: see `CheckpointStore`. Keys and values stay in their blocks. The heads' cache entry for
position j depends on the `following` tokens after j, so the key of a full block is the hash of all
tokens up to its end, with the `following` tokens after it. The last blocks before P, which the
first P tokens do not fill or do not determine in full, are the *tail* of the checkpoint. Their keys
belong to the checkpoint. A request that continues from the checkpoint copies the tail, and computes
the heads' entries of the last `following` positions before P again.

Example, blocks of 4 tokens, following = 1, P = 8: block 0 is shared, since its last entry depends
only on tokens up to 4. Block 1 is the tail: the heads' entry of position 7 depends on token 8, in
which requests that continue from the checkpoint may differ.
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from mtpkit.engine.requests.request import Request
from mtpkit.engine.scheduling.blocks import IdPool
from mtpkit.engine.scheduling.prefix_blocks import CachedBlocks
from mtpkit.engine.steps.plan import Restore, Save
from mtpkit.errors import MtpkitError

_DIGEST = 16
"""Bytes of a hash: two different prefixes never have the same one in practice."""


@dataclass(frozen=True)
class Hit:
    """A checkpoint from which a request can continue."""

    checkpoint: int
    """Place in the checkpoint store."""
    length: int
    """P, the number of tokens that need not be computed."""
    shared: tuple[int, ...]
    """Full blocks, to be shared."""
    tail: tuple[int, ...]
    """The blocks after the shared ones, to be copied."""


class _TailKey(NamedTuple):
    """Key of a block of a checkpoint's tail."""

    number: int
    """Number of the checkpoint, of all that were ever made."""
    place: int
    """Place of the block among those of the checkpoint's tokens."""


@dataclass(frozen=True)
class _Entry:
    """A checkpoint that is written, or will be written before any later plan runs."""

    checkpoint: int
    """Place in the checkpoint store."""
    block: bytes
    """Hash of the tokens in the full blocks before P."""
    rest: tuple[int, ...]
    """The tokens after these blocks, up to P."""
    length: int
    """P, the number of tokens before the checkpoint."""
    tails: tuple[_TailKey, ...]
    """Keys of the tail's blocks."""
    owner: Request
    """The request that left the checkpoint; its token after the checkpoint may not be known yet."""

    def precedes(self, tokens: Sequence[int]) -> bool:
        """Whether the token after the checkpoint is the same in `tokens` as in the owner."""
        after = self.owner.token_ids[self.length : self.length + 1]
        return bool(after) and after == tokens[self.length : self.length + 1]

    @property
    def followed(self) -> bool:
        """Whether the owner's token after the checkpoint is known."""
        return len(self.owner.token_ids) > self.length


@dataclass(frozen=True)
class _Lookup:
    """Remembered result for a request that may have to wait, and is then looked up again before
    each step."""

    request: Request
    prefill_end: int
    hit: Hit | None
    hashes: frozenset[bytes]
    """Hashes of the prefixes of full blocks, by which the request's checkpoints are found."""


class PrefixCache:
    """Finds, keeps and forgets checkpoints; the block allocator finds and forgets blocks.

    Args:
        blocks: the allocator of the engine's blocks.
        num_checkpoints: capacity of the checkpoint store; 0: nothing is ever found.
        following: number of tokens after a position on which the heads' entries for the position
            depend; 0 without heads.
        interval: a long prompt leaves a checkpoint at every multiple of this number of tokens.
        successors: whether the heads keep recurrent state. This state depends on the token after a
            checkpoint, so that only requests with the same next token continue from there; no heads
            are run before they continue.
    """

    def __init__(
        self,
        blocks: CachedBlocks,
        block_size: int,
        num_checkpoints: int,
        following: int,
        interval: int,
        successors: bool = False,
    ) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.following = following
        self.interval = interval
        self.successors = successors
        self.slots = IdPool(num_checkpoints)
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        """Entries by checkpoint, the most recently used last."""
        self._by_block: dict[bytes, list[_Entry]] = {}
        self._newest: _Lookup | None = None
        self._refreshed = 0
        """`num_idled` of the allocator when the newest hit's blocks were last put at the end of the
        eviction order."""
        self._number = 0
        """Number of checkpoints made so far; it makes the keys of tails unique."""
        self.num_evicted = 0

    def match(self, request: Request) -> Hit | None:
        """The longest checkpoint, with keys and values still cached, of the tokens that the
        request's prefill computes.

        For a request that waits, the previous result is returned again unless a block or checkpoint
        that matters has been added or removed. While the request waits, the blocks that were found
        are evicted last.
        """
        last = self._newest
        known = (
            last is not None
            and last.request is request
            and last.prefill_end == request.prefill_end
            and self.blocks.unchanged
        )
        if last is not None and known:
            hit = last.hit
        else:
            hit = self._look_up(request)
            self._refreshed = -1

        # Only when a block has become idle since, others come after these in the eviction order.
        if hit and self._refreshed != self.blocks.num_idled:
            for block in reversed(hit.shared + hit.tail):
                self.blocks.touch(block)
            self._refreshed = self.blocks.num_idled
        return hit

    def _look_up(self, request: Request) -> Hit | None:
        """See `match`; the result is remembered if everything that it depends on is known."""
        tokens = request.token_ids
        size = self.block_size
        present = self._present(request)
        # Without a resumed row, a chunk of at least one token must make the drafts.
        longest = request.prefill_end - self.successors
        hashes = request.chain[: request.prefill_end // size + 1]
        hit = None
        certain = True
        for index, entry in self._entries_of(hashes):
            if entry.length > longest or entry.rest != tuple(tokens[index * size : entry.length]):
                continue
            if self.successors and not entry.precedes(tokens):
                # Once the owner's next token is known, it may be the one that is needed.
                certain = certain and entry.followed
                continue

            tail = [self.blocks.find(key) for key in entry.tails]
            full = self._full(entry.length)
            if full > len(present) or None in tail:
                self._drop(entry)  # its keys and values were evicted
                continue
            hit = Hit(
                entry.checkpoint,
                entry.length,
                shared=tuple(present[:full]),
                tail=tuple(block for block in tail if block is not None),
            )
            self.blocks.watch([*self._keys(request, len(present)), *entry.tails])
            break
        else:
            self.blocks.watch(self._keys(request, len(present)))
        self._newest = None
        if certain:
            self._newest = _Lookup(request, request.prefill_end, hit, frozenset(hashes))
        return hit

    def _entries_of(self, hashes: Sequence[bytes]) -> Iterator[tuple[int, _Entry]]:
        """Yield the checkpoints after these prefixes, the longest first, each after its number of
        full blocks."""
        for index in range(len(hashes) - 1, -1, -1):
            for entry in sorted(self._by_block.get(hashes[index], ()), key=lambda one: -one.length):
                yield index, entry

    def _keys(self, request: Request, present: int) -> list[Hashable]:
        """The keys of the `present` cached blocks that a prompt begins with, and the key of the
        block after them."""
        return [
            self._key(request, index)
            for index in range(min(present + 1, self._full(request.prefill_end)))
        ]

    def cuts(self, request: Request, start: int) -> list[int]:
        """Positions inside the prompt, after `start`, at which its chunks end to leave a
        checkpoint: `checkpoint_at`, the end of the cached blocks that the prompt begins with,
        multiples of the interval, and for siblings the last place from which they can continue."""
        if not self.slots.size:
            return []
        marks = {len(self._present(request)) * self.block_size, request.checkpoint_at or 0}
        marks |= set(range(self.interval, request.prefill_end, self.interval))
        if request.siblings and self.successors:
            marks.add(len(request.prompt_token_ids) - 1)
        return sorted(mark for mark in marks if start < mark < request.prefill_end)

    def resume(self, hit: Hit, request: Request) -> Restore:
        """The copies for a request whose block table has the blocks of `hit.shared` and then new
        blocks."""
        assert request.slot is not None
        self._entries.move_to_end(hit.checkpoint)
        copies = zip(hit.tail, request.block_table[len(hit.shared) :], strict=False)
        return Restore(hit.checkpoint, request.slot, hit.length, tuple(copies))

    def keep(self, request: Request, length: int, decoded: bool = False) -> Save | None:
        """Make room for a checkpoint of the first `length` tokens of a running request, which still
        holds its blocks.

        Returns:
            The copy that the device makes once the request has reached `length`; None if the store
            has no capacity or already has this checkpoint.
        """
        if not self.slots.size or not length:
            return None
        self._extend(request)
        full = length // self.block_size
        size = self.block_size
        rest = tuple(request.token_ids[full * size : length])
        same = (e for e in self._by_block.get(request.chain[full], ()) if e.rest == rest)
        known = next(
            (e for e in same if not self.successors or e.precedes(request.token_ids)), None
        )
        if known is not None:
            # A checkpoint without its tail is of no use, and cannot get its tail back.
            if all(self.blocks.find(key) is not None for key in known.tails):
                self._entries.move_to_end(known.checkpoint)
                return None
            self._drop(known)
        if not self.slots.num_free:
            self._drop(next(iter(self._entries.values())))
            self.num_evicted += 1

        (checkpoint,) = self.slots.allocate(1)
        self._number += 1
        tail = range(self._full(length), -(-length // size))
        entry = _Entry(
            checkpoint, request.chain[full], rest, length, self._tail_keys(tail), request
        )
        self.publish(request, length)
        for key, index in zip(entry.tails, tail, strict=True):
            self.blocks.publish(request.block_table[index], key)
        self._entries[checkpoint] = entry
        self._by_block.setdefault(entry.block, []).append(entry)
        self._note(entry)
        assert request.slot is not None
        return Save(checkpoint, request.slot, length, decoded, request.noise_key)

    def publish(self, request: Request, length: int) -> None:
        """Give keys to the full blocks of a request's first `length` tokens, whose steps are
        launched, or will be launched before any later plan."""
        full = self._full(min(length, len(request.token_ids)))
        if full > request.num_published:
            self._extend(request)
            for index in range(request.num_published, full):
                self.blocks.publish(request.block_table[index], self._key(request, index))
            request.num_published = full

    def _full(self, length: int) -> int:
        """Number of blocks whose entries are all determined by the first `length` tokens."""
        return max(0, length - self.following) // self.block_size

    def _extend(self, request: Request) -> None:
        """Extend the request's chain of hashes to all of its full blocks."""
        chain = request.chain
        size = self.block_size
        if not chain:
            chain.append(b"")
        for index in range(len(chain) - 1, len(request.token_ids) // size):
            tokens = array("q", request.token_ids[index * size : (index + 1) * size])
            chain.append(blake2b(chain[-1] + tokens.tobytes(), digest_size=_DIGEST).digest())

    def _key(self, request: Request, index: int) -> Hashable:
        end = (index + 1) * self.block_size
        return request.chain[index + 1], tuple(request.token_ids[end : end + self.following])

    def _present(self, request: Request) -> Sequence[int]:
        """The cached blocks that the prompt begins with."""
        self._extend(request)
        found: list[int] = []
        for index in range(self._full(request.prefill_end)):
            block = self.blocks.find(self._key(request, index))
            if block is None:
                break
            found.append(block)
        return found

    def _tail_keys(self, tail: range) -> tuple[_TailKey, ...]:
        """Keys of the blocks `tail` of the newest checkpoint."""
        return tuple(_TailKey(self._number, place) for place in tail)

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.checkpoint]
        self._by_block[entry.block].remove(entry)
        if not self._by_block[entry.block]:
            del self._by_block[entry.block]
        for key in entry.tails:
            self.blocks.withdraw(key)
        self.slots.release([entry.checkpoint])
        self._note(entry)

    def _note(self, entry: _Entry) -> None:
        """Forget the remembered lookup if a checkpoint that was added or dropped may change it."""
        if self._newest is not None and entry.block in self._newest.hashes:
            self._newest = None

    def clear(self) -> None:
        """Forget all checkpoints and the contents of all blocks. No request may be running."""
        for entry in list(self._entries.values()):
            self._drop(entry)
        self.blocks.withdraw_all()

    def check_integrity(self) -> None:
        """Compare the entries with the store's allocator, and with the keys of blocks.

        Raises:
            MtpkitError: they disagree, or a block has the key of a tail whose checkpoint was
                dropped.
        """
        self.slots.check_integrity(list(self._entries))
        listed = sorted(
            entry.checkpoint for entries in self._by_block.values() for entry in entries
        )
        if listed != sorted(self._entries) or not all(self._by_block.values()):
            raise MtpkitError(
                f"checkpoints found by hash: {listed}; checkpoints held: {sorted(self._entries)}"
            )
        tails = {key for entry in self._entries.values() for key in entry.tails}
        left = [key for key in self.blocks.keys if isinstance(key, _TailKey) and key not in tails]
        if left:
            raise MtpkitError(f"blocks have the keys of tails without a checkpoint: {left}")
