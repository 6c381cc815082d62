"""Steps as CUDA graphs, with one replay per step.

One graph is captured for each `StepShape` and set of processors, before the first request or when
it is first needed. It reads what the host sends from fixed tensors, and everything
else from `DeviceState`. Null rows pad a step to the shape: they have no recurrent state, and use a
block of keys and values and an entry of `DeviceState` that belong to no request.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from mtpkit.engine.device.capture import Capture
from mtpkit.engine.requests.config import EngineConfig
from mtpkit.engine.requests.tree import DraftShape
from mtpkit.engine.steps.batch import NULL_SLOT, BatchBuilder, block_tables
from mtpkit.engine.steps.plan import Batch, Plan, StepShape
from mtpkit.engine.steps.processors import GREEDY, TEMPERATURE, Use, for_graph

_SMALLEST = 16
"""Fewest chunk tokens that a graph is captured for."""
_COARSE = 128
"""Up to this many tokens, a step takes about as long as reading the weights, so captured sizes are
far apart."""
_TOKENS_PER_CHUNK = 4
"""Chunk tokens per chunk row of a graph. Kernels visit all rows, so more rows would cost time."""


class Sent(NamedTuple):
    """What the host sends for a step, and the graph that reads it."""

    shape: StepShape
    use: Use
    """Names of the processors that the step computes."""
    numbers: np.ndarray
    """See `BatchBuilder.numbers`."""
    tables: np.ndarray
    """See `block_tables`."""


Key = tuple[StepShape, Use]
Execute = Callable[[Batch], Tensor]


def _rounded(value: int, *steps: tuple[int, int], beyond: int) -> int:
    """Round `value` up to a multiple of the step in the first pair (limit, step) with limit >=
    `value`, or else of `beyond`."""
    step = next((step for limit, step in steps if value <= limit), beyond)
    return -(-value // step) * step


def bucket_size(rows: int) -> int:
    """The captured number of decode rows that a step with `rows` decode rows is padded to."""
    return _rounded(rows, (4, 1), (16, 4), (64, 8), beyond=16)


def chunk_bucket(tokens: int) -> int:
    """The captured number of chunk tokens for `tokens`: a power of two up to 128, then four sizes
    per doubling."""
    power = 1 << max(0, tokens - 1).bit_length()
    return max(_SMALLEST, _rounded(tokens, (_COARSE, power), beyond=power // 8))


def mixed_bucket(rows: int, tokens: int) -> tuple[int, int]:
    """The captured numbers of decode rows and of chunk tokens beside them. They are coarser than
    those of `bucket_size` and `chunk_bucket`, since every pair of them is a graph."""
    captured_rows = _rounded(rows, (16, 8), (64, 16), beyond=32)
    captured_tokens = _rounded(tokens, (32, 32), (256, 64), beyond=128)
    return captured_rows, captured_tokens


def _tokens_for(chunks: int) -> int:
    """Chunk tokens that suffice for a graph to have `chunks` rows for chunks and a null row."""
    return (chunks - 1) * _TOKENS_PER_CHUNK + 1


def _sizes(bucket: Callable[[int], int], most: int) -> list[int]:
    """All values of `bucket` for 1 .. most."""
    if not most:
        return []
    sizes = [bucket(1)]
    while sizes[-1] < most:
        sizes.append(bucket(1 + sizes[-1]))
    return sizes


def most_chunk_tokens(config: EngineConfig) -> int:
    """The largest captured number of chunk tokens."""
    return chunk_bucket(max(config.max_num_batched_tokens, _tokens_for(config.max_num_seqs)))


def _most_mixed(config: EngineConfig) -> int:
    """The largest captured number of chunk tokens beside decode rows; 0: chunks run alone."""
    most = min(config.max_mixed_tokens, config.max_num_batched_tokens)
    return most and mixed_bucket(1, most)[1]


def largest_step(config: EngineConfig) -> tuple[int, int, int]:
    """The largest numbers of tokens, of logits and of rows in captured steps."""
    decode_rows = mixed_bucket(config.max_num_seqs, 1)[0]
    chunk_rows = config.max_num_seqs + 1
    rows = decode_rows * config.decode_width
    return (
        max(most_chunk_tokens(config), rows + _most_mixed(config)),
        rows + chunk_rows,
        decode_rows + chunk_rows,
    )


class StepGraphs:
    """Captures steps and replays them.

    Each call gets the captured function as `execute`, the same one each time. The function runs a
    batch without a host-device sync and returns a tensor, which for `run` has an entry per row, [R,
    ...]. The function is not stored, since it refers to the engine, which would then keep itself
    alive.

    Args:
        config: its limits determine the largest steps.
        null_block: the block that all null rows write to.
        warming: makes the context in which a step runs once before it is captured.
    """

    def __init__(
        self,
        builder: BatchBuilder,
        config: EngineConfig,
        null_block: int,
        warming: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.builder = builder
        self.config = config
        self.null_block = null_block
        self._warming = warming
        self.chunk_sizes = _sizes(chunk_bucket, most_chunk_tokens(config))
        """The captured numbers of chunk tokens, ascending."""
        self.mixed_sizes = _sizes(lambda tokens: mixed_bucket(1, tokens)[1], _most_mixed(config))
        """The captured numbers of chunk tokens that run together with decode rows."""
        beside = [size for size in self.chunk_sizes if size > config.max_mixed_tokens]
        self.sizes_beside = [
            size for size in self.mixed_sizes if size <= config.max_mixed_tokens
        ] + beside
        """The captured numbers of chunk tokens in steps that also have decode rows, whether both
        run together or apart."""

        rows, tokens = mixed_bucket(config.max_num_seqs, self.chunk_sizes[-1])
        largest = StepShape(rows, config.max_num_seqs + 1, tokens, 0, config.drafts)
        device = builder.device
        self._numbers = torch.zeros(builder.count(largest), dtype=torch.int64, device=device)

        self._position = config.timed_position
        longest = config.max_model_len + config.decode_width + config.lookahead
        table_width = -(-longest // config.block_size)
        self._tables = torch.full(
            (largest.rows, table_width), null_block, dtype=torch.int64, device=device
        )
        self._given = np.zeros(largest.rows, np.int64)
        """For each row of `_tables`, the number of entries that the newest step of the row gave."""

        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._capture = Capture()

    def run(self, execute: Execute, plan: Plan) -> Tensor:
        """Replay the graph for `plan`.

        Returns:
            [S, ...], the results of `execute` for the rows that sample, valid until the next run.
        """
        sent = self.send(plan)
        return self.sampling_rows(self.replay(execute, sent), sent.shape, plan)

    def send(self, plan: Plan) -> Sent:
        """Make what the host sends for a plan as it is now."""
        shape = self.shape_for(plan)
        return Sent(
            shape,
            plan.processors,
            self.builder.numbers(shape, plan.decode_rows, plan.chunks),
            block_tables(plan, shape, fill=self.null_block),
        )

    def replay(self, execute: Execute, sent: Sent) -> Tensor:
        """Replay a graph; returns all that `execute` gives, also for null rows, valid until the
        next run."""
        graph, result = self.captured(execute, self._key(sent.shape, sent.use))
        # Only after the capture, which runs the step on null rows in the same tensors.
        self._fill(sent.shape, sent.numbers, sent.tables)
        graph.replay()
        return result

    @staticmethod
    def sampling_rows(result: Tensor, shape: StepShape, plan: Plan) -> Tensor:
        """[S, ...] the rows of a plan that sample, of results for all rows of the shape [R, ...].
        Null rows pad the decode rows, so that the chunks' results may lie apart."""
        decoded = plan.num_decode_rows
        chunks = plan.num_sampling_rows - decoded
        if not chunks:
            return result[:decoded]
        first = result[shape.decode_rows :][:chunks]
        if not decoded:
            return first
        return torch.cat([result[:decoded], first])

    def shape_for(self, plan: Plan) -> StepShape:
        """The shape of the graph for a plan."""
        if not plan.chunks:
            return self._padded(plan.num_decode_rows, plan.drafts, plan.short)
        tokens = max(plan.num_chunk_tokens, _tokens_for(len(plan.chunks)))
        return self._with_chunks(plan.num_decode_rows, tokens, plan.drafts)

    @staticmethod
    def _padded(rows: int, drafts: DraftShape, short: tuple[int, int]) -> StepShape:
        """The shape of the graph for decode rows alone."""
        captured = bucket_size(rows)
        # Null rows come last, where the short ones are.
        if short[0]:
            short = short[0] + captured - rows, short[1]
        return StepShape.decoding(captured, drafts, short)

    def _with_chunks(self, rows: int, tokens: int, drafts: DraftShape) -> StepShape:
        if rows:
            rows, tokens = mixed_bucket(rows, tokens)
        else:
            tokens = chunk_bucket(tokens)
        chunks = 1 + min(self.config.max_num_seqs, tokens // _TOKENS_PER_CHUNK)
        return StepShape(rows, chunks, tokens, rows + chunks, drafts)

    def capture_all(self, execute: Execute, shapes: Sequence[DraftShape]) -> None:
        """Capture the graphs that requests may need, with a progress bar, except those for
        penalties, rules, constraints and requests that do not speculate, and for many prompts of
        fewer than `_TOKENS_PER_CHUNK` tokens. The largest steps come first, so that smaller steps
        share their memory.

        Args:
            shapes: all drafts that steps without chunks may have; steps with chunks are captured
                for the most drafts.
        """
        decode_rows = _sizes(bucket_size, self.config.max_num_seqs)
        most = self.config.drafts
        keys = {
            self._key(StepShape.decoding(rows, drafts), use)
            for rows in decode_rows
            for drafts in shapes
            for use in (GREEDY, {TEMPERATURE.name})
        }
        alone = [self._with_chunks(0, tokens, most) for tokens in self.chunk_sizes]
        mixed = [
            self._with_chunks(rows, tokens, most)
            for rows in decode_rows
            for tokens in self.mixed_sizes
        ]
        keys |= {self._key(shape, GREEDY) for shape in alone + mixed}
        largest_first = sorted(keys, key=lambda key: key[0].tokens, reverse=True)
        for key in tqdm(largest_first, desc="CUDA graphs", disable=None):
            self.captured(execute, key)

    def replay_free_slots(self, execute: Execute, given: StepShape) -> None:
        """Replay a greedy step of decode rows on the slots from 0 on, for timing; no request may
        hold them."""
        rows = given.decode_rows
        shape = self._padded(rows, given.drafts, given.short)
        graph, _ = self.captured(execute, self._key(shape, GREEDY))
        self.builder.state.pretend(self._position)
        self._fill(shape, self.builder.null_numbers(shape, range(rows)), self._null_tables(shape))
        graph.replay()

    def captured(self, execute: Execute, key: Key) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The graph of a key and the tensor that holds its result after a replay."""
        if key not in self._graphs:
            self._fill(key[0], self.builder.null_numbers(key[0]), self._null_tables(key[0]))
            self._graphs[key] = self._capture.graph(lambda: self._step(execute, key), self._warming)
        return self._graphs[key]

    def _key(self, shape: StepShape, use: Iterable[str]) -> Key:
        """The key of a graph. Graphs with chunks always compute temperature and filters, so that
        fewer graphs are needed. On a stage without the lm_head, nothing is computed from logits."""
        if not self.builder.state.vocabulary.width:
            return shape, GREEDY
        chosen = frozenset(use)
        if shape.chunk_rows:
            chosen |= {TEMPERATURE.name}
        return shape, for_graph(chosen)

    def _fill(self, shape: StepShape, numbers: np.ndarray, tables: np.ndarray) -> None:
        """Write what a step of this shape reads. Block table entries beyond the given ones name the
        null block: a step that went beyond its blocks by mistake must not find those of another
        request. They are written only where an earlier step gave more, so that most steps make no
        extra launch."""
        self._numbers[: len(numbers)].copy_(self.builder.ints(numbers))

        width = tables.shape[1]
        self._tables[: shape.rows, :width].copy_(self.builder.ints(tables))
        given = self._given[: shape.rows]
        most = given.max(initial=0)
        if most > width:
            self._tables[: shape.rows, width:most] = self.null_block
        given[:] = width

    def _null_tables(self, shape: StepShape) -> np.ndarray:
        return np.full((shape.rows, self._tables.shape[1]), self.null_block)

    def _step(self, execute: Execute, key: Key) -> Tensor:
        shape, use = key
        numbers = self._numbers[: self.builder.count(shape)]
        tables = self._tables[: shape.rows]
        # Null rows advance in each step like all others, and are reset here.
        self.builder.state.restart(NULL_SLOT)
        return execute(self.builder.assemble(shape, numbers, tables, use))
