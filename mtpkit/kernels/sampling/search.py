"""Find the cut of any row, even a flat one: passes over the row narrow an interval until its tokens
fit into a buffer.

A `row` is the tuple of its pointer, V, its largest logit m and its scale. Scalars named low and
high are keys. The number that tokens `reach` is their count for top-k and their weight for top-p.
"""

import triton
import triton.language as tl

from mtpkit.kernels.sampling.weights import bisect, key_of, value_of, weight_of

# later passes spread pivots by key, so that the search ends for any distribution
_EVEN_PASSES = tl.constexpr(4)
_RUN = tl.constexpr(8)  # neighbouring tokens per lane of `_gather`
_COARSE = tl.constexpr(256)  # resolution of a guess in keys


@triton.jit
def _tile(line, start, vocab_size, TILE):
    index = start + tl.arange(0, TILE)
    return index, tl.load(line + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def weight_from(row, floor, TILE, STAGES):
    """Total weight of the row's logits >= floor."""
    line, vocab_size, m, scale = row
    total = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, vocab_size, TILE, num_stages=STAGES):
        _index, x = _tile(line, start, vocab_size, TILE)
        total += tl.where(x >= floor, weight_of(x, m, scale), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _guess(row, low, high, floor, target, most, BY_WEIGHT, ROOM):
    """Guess an interval from a sample of ROOM tokens across the row; it misses t in a few cases in
    a thousand.

    The sample estimates the weight below t. The estimate is good because many tokens of little
    weight add up to it.
    """
    line, vocab_size, m, scale = row
    distance = tl.maximum(vocab_size // ROOM, 1)
    index = tl.arange(0, ROOM) * distance
    inside = index < vocab_size
    x = tl.load(line + index, mask=inside, other=float("-inf")).to(tl.float32)
    w = tl.where(inside & (x >= floor), weight_of(x, m, scale) if BY_WEIGHT else 1.0, 0.0)
    wanted = tl.sum(w, 0) - (most - target) / distance
    t = value_of(bisect(x, w, 0.0, wanted, low, high, _COARSE))
    below = tl.where(x < t, w, 0.0)
    sum_below = tl.sum(below, 0)
    variance = tl.sum(below * w, 0) - sum_below * sum_below / tl.minimum(ROOM, vocab_size)
    spread = 3 * tl.sqrt(tl.maximum(variance, 0.0)) + 1e-6 * sum_below
    bottom = bisect(x, w, 0.0, wanted + spread, low, key_of(t) + 1, _COARSE)
    return bottom, tl.minimum(
        bisect(x, w, 0.0, wanted - spread, key_of(t), high, _COARSE) + _COARSE, high
    )


@triton.jit
def _pivot(low, high, part, by_value):
    """The key at the fraction `part` of [low, high), measured in values or in keys."""
    bottom = value_of(low)
    top = value_of(high)
    by_key = low + ((high - low).to(tl.float64) * part).to(tl.int64)
    return tl.where(by_value, key_of(bottom + (top - bottom) * part), by_key)


@triton.jit
def _narrow(row, target, low, high, below, above, keys, BY_WEIGHT, TILE, STAGES):
    """Narrow [low, high) to the part between two of eight `keys`; also return what logits >= low
    and >= high reach."""
    line, vocab_size, m, scale = row
    pivots = [value_of(key) for key in keys]
    reach = [tl.zeros([TILE], tl.float32) for _ in keys]
    for start in tl.range(0, vocab_size, TILE, num_stages=STAGES):
        index, x = _tile(line, start, vocab_size, TILE)
        measure = weight_of(x, m, scale) if BY_WEIGHT else tl.where(index < vocab_size, 1.0, 0.0)
        reach = [
            reach[i] + tl.where(x >= pivots[i], measure, 0.0) for i in (0, 1, 2, 3, 4, 5, 6, 7)
        ]
    for i in tl.static_range(8):
        total = tl.sum(reach[i], 0)
        within = (keys[i] > low) & (keys[i] < high)
        reached = within & (total >= target)
        missed = within & ~reached  # true for NaN too, so that every search ends
        low = tl.where(reached, keys[i], low)
        below = tl.where(reached, total, below)
        high = tl.where(missed, keys[i], high)
        above = tl.where(missed, total, above)
    return low, high, below, above


@triton.jit
def _gather(row, low, high, buffer, ROOM, TILE, STAGES):
    """Copy the logits in [low, high) and their indices to the buffer until it is full.

    Each lane of a thread has a column of the buffer to itself, so that threads exchange no data.

    Returns:
        The number of logits that each lane found, including those that did not fit, and the weight
        of the logits >= high.
    """
    line, vocab_size, m, scale = row
    LANES: tl.constexpr = TILE // _RUN
    lane = tl.arange(0, LANES)[:, None]
    offset = lane * _RUN + tl.arange(0, _RUN)[None, :]
    bottom = value_of(low)
    top = value_of(high)
    held = tl.zeros([LANES], tl.int32)
    above = tl.zeros([LANES, _RUN], tl.float32)
    tl.debug_barrier()  # all threads have finished reading the buffer
    for start in tl.range(0, vocab_size, TILE, num_stages=STAGES):
        index = start + offset
        x = tl.load(line + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
        above += tl.where(x >= top, weight_of(x, m, scale), 0.0)
        found = (x >= bottom) & (x < top) & (index < vocab_size)
        place = held[:, None] + tl.cumsum(found.to(tl.int32), 1) - 1
        packed = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | index
        tl.store(buffer + place * LANES + lane, packed, mask=found & (place < ROOM // LANES))
        held += tl.sum(found.to(tl.int32), 1)
    tl.debug_barrier()
    return held, tl.sum(tl.sum(above, 1), 0)


@triton.jit
def _read_buffer(buffer, held, ROOM, TILE):
    """Read [ROOM] slots of the buffer: whether each holds a token, the token's logit, and its
    index."""
    LANES: tl.constexpr = TILE // _RUN
    place = tl.arange(0, ROOM // LANES)[:, None]
    inside = place < held[None, :]
    packed = tl.load(buffer + place * LANES + tl.arange(0, LANES)[None, :], mask=inside, other=0)
    packed = tl.reshape(tl.where(inside, packed, -1), [ROOM])
    return (
        packed.to(tl.int32) >= 0,
        (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True),
        packed.to(tl.int32),
    )


@triton.jit
def _nth_index(index, equal, nth, vocab_size):
    """The nth smallest index (from 1) of the tokens marked in `equal`."""
    low = vocab_size * 0 - 1
    high = vocab_size - 1
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.sum((equal & (index <= middle)).to(tl.int32), 0) >= nth:
            high = middle
        else:
            low = middle
    return high


@triton.jit
def _nth_in_row(row, t, nth, TILE, STAGES):
    """Index of the nth token (from 1) whose logit is t."""
    line = row[0]
    vocab_size = row[1]
    seen = 0
    place = 0
    for start in tl.range(0, vocab_size, TILE, num_stages=STAGES):
        index, x = _tile(line, start, vocab_size, TILE)
        equal = ((x == t) & (index < vocab_size)).to(tl.int32)
        rank = seen + tl.cumsum(equal, 0)
        place = tl.maximum(place, tl.max(tl.where((equal > 0) & (rank == nth), index, 0), 0))
        seen += tl.sum(equal, 0)
    return place


@triton.jit
def keep_ties(t, m, scale, target, heavier, equal):
    """Return how many of the `equal` tokens at t are kept, and the kept weight; the tokens > t
    weigh `heavier`.

    Tokens at t are kept in the order of their indices while the weight before them is below the
    target.
    """
    w = weight_of(t, m, scale)
    # At least one: rounding may make the heavier tokens reach the target.
    stay = tl.minimum(tl.maximum(tl.ceil((target - heavier) / w), 1.0), equal.to(tl.float32))
    return stay.to(tl.int32), heavier + stay * w


@triton.jit
def search(row, buffer, bound, floor, target, most, BY_WEIGHT, ROOM, TILE, PIVOT_TILE, STAGES):
    """Cut at the largest t >= bound such that the tokens >= t reach the target; at the bound if
    there is no such t.

    Args:
        buffer: [ROOM] int64, private to the program.
        floor: tokens below it do not count; at most the bound.
        most: the number that the tokens >= floor reach.

    Returns:
        t, the last index kept among the tokens at t (all are kept unless BY_WEIGHT), the weight of
        the kept tokens.
    """
    vocab_size = row[1]
    m = row[2]
    scale = row[3]
    LANES: tl.constexpr = TILE // _RUN
    low = key_of(bound)
    high = key_of(m) + 1
    below = most
    above = most * 0
    heavier = above
    held = tl.zeros([LANES], tl.int32)
    passes = 0
    size = tl.full([], ROOM, tl.float32)  # upper bound of the number of tokens in [low, high)
    bottom, top = _guess(row, low, high, floor, target, most, BY_WEIGHT, ROOM)
    searching = low < high
    while searching:
        # If a quarter of the buffer is filled on average, a column of it rarely overflows.
        while (size > ROOM // 4) & (low + 1 < high):
            # the guess may be too narrow: include its ends
            first = tl.where(passes == 0, 0.0, 1 / 9.0)
            step = tl.where(passes == 0, 1 / 7.0, 1 / 9.0)
            by_value = (passes < _EVEN_PASSES) & (value_of(bottom) > float("-inf"))
            keys = [
                _pivot(bottom, top, first + i * step, by_value) for i in (0, 1, 2, 3, 4, 5, 6, 7)
            ]
            low, high, below, above = _narrow(
                row, target, low, high, below, above, keys, BY_WEIGHT, PIVOT_TILE, STAGES
            )
            size = below - above
            if BY_WEIGHT:  # no token in the interval weighs less than its lower end
                size = size / weight_of(value_of(low), m, scale)
            bottom = low
            top = high
            passes += 1
        held, heavier = _gather(row, low, high, buffer, ROOM, TILE, STAGES)
        size = tl.where(tl.max(held, 0) <= ROOM // LANES, 0.0, ROOM)
        searching = (size > 0) & (low + 1 < high)

    last = vocab_size * 1
    if size == 0:
        inside, x, index = _read_buffer(buffer, held, ROOM, TILE)
        w = tl.where(inside, weight_of(x, m, scale), 0.0)
        low = bisect(x, w if BY_WEIGHT else tl.where(inside, 1.0, 0.0), above, target, low, high, 1)
        t = value_of(low)
        heavier += tl.sum(tl.where(x > t, w, 0.0), 0)
        equal = (x == t) & inside
        num_equal = tl.sum(equal.to(tl.int32), 0)
        stay, kept = keep_ties(t, m, scale, target, heavier, num_equal)
        if BY_WEIGHT and stay < num_equal:
            last = _nth_index(index, equal, stay, vocab_size)
    else:  # too many equal logits for the buffer
        t = value_of(low)
        num_equal = tl.sum(held, 0)
        stay, kept = keep_ties(t, m, scale, target, heavier, num_equal)
        if BY_WEIGHT and stay < num_equal:
            last = _nth_in_row(row, t, stay, TILE, STAGES)
    if not BY_WEIGHT:
        kept = heavier + num_equal * weight_of(t, m, scale)
    return t, last, kept
