"""What decoding and prefill must move and compute, and how long that takes at a given bandwidth and matrix rate.

A phase (the verification of a step, each draft after it) is a list of works. What a work needs follows what came before
it, so that each takes the longer of its bytes over the bandwidth and its FLOPs over the matrix rate, and the times of
all add up. Counted are weights once a phase, the committed recurrent state, keys and values of the context.
Activations, the convolution's window and the replay ring are left out: they are small, and how small is up to the
engine.

The bandwidth is by custom that of a copy, half of whose bytes are written. Nearly all bytes of decoding are read, which
some machines do faster: the limits made from it are a yardstick, not a law.

Shape legend: R rows (requests), T = 1 + K tokens a row, E = accepted drafts + 1, L committed entries of a replay ring.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from mtpkit.config import ModelConfig
from mtpkit.engine.drafting import check_depths
from mtpkit.errors import UserError
from mtpkit.kernels.ssm_update import ring_capacity, ring_length
from mtpkit.model.flops import FORWARD, eh_proj_matrix
from mtpkit.model.kinds import KINDS, caching_length

StateRollback = Literal["replay", "snapshot"]

H200_BANDWIDTH = 4.3e12
"""Bytes a second that a copy reaches on an H200."""
H200_MATRIX_RATE = 790e12
"""bf16 FLOPs a second that an 8192^3 product reaches there."""


@dataclass(frozen=True)
class Work:
    """Kernels of one kind."""

    name: Literal["matrices", "state", "attention"]
    bytes: float
    flops: float

    def seconds(self, bandwidth: float, matrix_rate: float) -> float:
        """Time at these rates, whichever of the two takes longer."""
        return max(self.bytes / bandwidth, self.flops / matrix_rate)


@dataclass(frozen=True)
class Phase:
    """Works that follow each other."""

    name: str
    works: tuple[Work, ...]


@dataclass(frozen=True)
class Cost:
    """What some tokens cost."""

    phases: tuple[Phase, ...]
    tokens: float

    @property
    def works(self) -> Iterator[Work]:
        """Those of all phases."""
        return (work for phase in self.phases for work in phase.works)

    @property
    def bytes(self) -> float:
        """Moved in all."""
        return sum(work.bytes for work in self.works)

    @property
    def flops(self) -> float:
        """Computed in all; a multiplication and an addition are two."""
        return sum(work.flops for work in self.works)

    def seconds(self, bandwidth: float, matrix_rate: float) -> float:
        """Time at so many bytes and FLOPs a second."""
        return sum(work.seconds(bandwidth, matrix_rate) for work in self.works)

    def limit_tokens_per_s(self, bandwidth: float, matrix_rate: float) -> float:
        """Tokens a second at so many bytes and FLOPs a second."""
        return self.tokens / self.seconds(bandwidth, matrix_rate)


def expected_length(acceptance: Sequence[float]) -> float:
    """E, tokens a step, from the conditional acceptance of each depth: 1 + a_1 + a_1 a_2 + ..."""
    length, reached = 1.0, 1.0
    for rate in acceptance:
        reached *= rate
        length += reached
    return length


def depth_rates(acceptance: Sequence[float], k: int) -> list[float]:
    """[K] conditional acceptance of each depth; the last one given holds for all further depths."""
    return [acceptance[min(depth, len(acceptance) - 1)] for depth in range(k)]


def check_draft_vocab_size(size: int | None, config: ModelConfig) -> None:
    """Refuse to draft among more tokens than there are.

    Raises:
        UserError: there are fewer.
    """
    if size is not None and size > config.vocab_size:
        raise UserError(f"draft vocabulary of {size} tokens, but the model has {config.vocab_size}: give at most those")


@dataclass(frozen=True)
class Roofline:
    """Costs of a model with weights, keys and values of `dtype` and recurrent state of `state_dtype`.

    Raises:
        UserError: a draft vocabulary larger than the model's.
    """

    config: ModelConfig
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    state_rollback: StateRollback = "replay"
    """Replay reads the state and writes it once in L tokens; snapshot writes it after each of the T tokens."""
    ring_entries: int | None = None
    """L; None: what the engine's ring for T tokens holds."""
    draft_vocab_size: int | None = None
    """Rows of the lm_head that drafts read; None: all."""

    def __post_init__(self) -> None:
        check_draft_vocab_size(self.draft_vocab_size, self.config)

    def entries(self, k: int) -> int:
        """L of steps with K drafts."""
        return self.ring_entries or ring_capacity(ring_length(1 + k))

    def decode(self, batch_size: int, acceptance: Sequence[float] = (), context_len: float = 512) -> Cost:
        """One decode step: K drafts of every row are verified, then K new ones made.

        Args:
            acceptance: [K] conditional acceptance of each depth; empty: plain decoding.
            context_len: mean tokens that a row attends to.

        Raises:
            UserError: the model's heads cannot make as many drafts.
        """
        if acceptance:
            check_depths(self.config, len(acceptance))
        tokens, length, config = 1 + len(acceptance), expected_length(acceptance), self.config
        cached = batch_size * context_len

        def state_moves(again: int = 0) -> float:
            """Times that a step which feeds each row T tokens, and `again` more once again, reads or writes states."""
            written = length / self.entries(tokens - 1 + again) if self.state_rollback == "replay" else tokens + again
            return batch_size * (1 + written)

        def draft(depth: int) -> Phase:
            # Entries of the newly accepted tokens are made at depth 1; distinct heads make some again at each depth.
            if config.mtp.repeated:
                entries, moved = (length, state_moves()) if depth == 1 else (1.0, float(batch_size))
            else:
                entries, moved = length + depth - 1, state_moves(again=tokens - 2)
            works = self._head(batch_size * entries, batch_size, context_len, cached, moved)
            return Phase(f"draft {depth}", works)

        fed = batch_size * tokens
        base = self._layers(config.pattern, fed, context_len, cached, state_moves())
        verify = Phase("verify", _join(base, self._output(fed, config.vocab_size)))
        return Cost((verify, *map(draft, range(1, tokens))), batch_size * length)

    def prefill(self, num_prompts: int, prompt_len: int, k: int = 0, max_num_batched_tokens: int | None = None) -> Cost:
        """Prompts up to their first token; with K > 0 also the heads' entries for them, and K drafts each.

        Args:
            max_num_batched_tokens: tokens of a step, each of which reads all weights; None: all in one.

        Raises:
            UserError: the model's heads cannot make K drafts.
        """
        if k:
            check_depths(self.config, k)
        config, fed, context = self.config, num_prompts * prompt_len, prompt_len / 2
        passes = -(-fed // (max_num_batched_tokens or fed))
        base = self._layers(config.pattern, fed, context, fed, num_prompts, passes)
        phases = [Phase("base", _join(base, self._output(num_prompts, config.vocab_size, passes)))]
        for depth in range(1, k + 1):
            whole = depth == 1 or not config.mtp.repeated
            sizes = (fed, num_prompts, context, fed, num_prompts, passes)
            works = self._head(*sizes if whole else (num_prompts, num_prompts, prompt_len, fed, num_prompts))
            phases.append(Phase(f"draft {depth}", works))
        return Cost(tuple(phases), fed)

    def _head(
        self, fed: float, drafted: int, context_len: float, cached: float, states: float, passes: int = 1
    ) -> tuple[Work, ...]:
        """One depth over `fed` tokens, of which `drafted` go through the lm_head; the rest as `_layers`.

        Those alone go through what follows the last cache of a repeated head, see `mtp_forward`.
        """
        eh_proj, pattern = eh_proj_matrix(self.config), self.config.mtp.pattern
        cut = caching_length(pattern) if self.config.mtp.repeated else len(pattern)
        return _join(
            self._matrices(eh_proj, fed, passes),
            self._layers(pattern[:cut], fed, context_len, cached, states, passes),
            self._layers(pattern[cut:], drafted, context_len, cached, states, min(passes, math.ceil(drafted))),
            self._output(drafted, self.draft_vocab_size or self.config.vocab_size, passes),
        )

    def _layers(
        self, pattern: str, fed: float, context_len: float, cached: float, states: float, passes: int = 1
    ) -> tuple[Work, ...]:
        """Layers over `fed` tokens.

        Args:
            context_len: mean tokens that each attends to.
            cached: tokens whose keys and values are moved, read or written.
            states: times that a request's state is moved.
            passes: times that the weights are read.
        """
        kept = [KINDS[letter].memory(self.config) for letter in pattern]
        works = [self._layer(letter, fed, passes) for letter in pattern]
        if update := sum(layer.state_flops for layer in kept):
            works.append(Work("state", states * self.state_bytes(pattern), fed * update))
        if scores := sum(layer.score_flops for layer in kept):
            works.append(Work("attention", cached * self.kv_bytes(pattern), fed * scores * context_len))
        return tuple(works)

    def state_bytes(self, pattern: str) -> int:
        """Recurrent state of one request over the layers of a pattern."""
        return sum(KINDS[letter].memory(self.config).state for letter in pattern) * self.state_dtype.itemsize

    def kv_bytes(self, pattern: str) -> int:
        """Keys and values of one token over the layers of a pattern."""
        return sum(KINDS[letter].memory(self.config).kv for letter in pattern) * self.dtype.itemsize

    def _layer(self, letter: str, fed: float, passes: int) -> Work:
        """The matrices of one layer over `fed` tokens."""
        matrices = KINDS[letter].matrices(self.config)
        read = passes * matrices.read(fed / passes) * self.dtype.itemsize
        return Work("matrices", read, FORWARD * matrices.used * fed)

    def _matrices(self, count: float, fed: float, passes: int = 1) -> Work:
        return Work("matrices", passes * count * self.dtype.itemsize, FORWARD * count * fed)

    def _output(self, fed: float, rows: int, passes: int = 1) -> Work:
        """`rows` rows of the lm_head over `fed` tokens; a pass that none of them falls to reads nothing."""
        return self._matrices(rows * self.config.hidden_size, fed, min(passes, math.ceil(fed)))


def _join(*works: Iterable[Work] | Work) -> tuple[Work, ...]:
    """The works of a phase with those of one name added up."""
    flat = [work for part in works for work in ([part] if isinstance(part, Work) else part)]
    names = dict.fromkeys(work.name for work in flat)
    groups = {name: [work for work in flat if work.name == name] for name in names}
    return tuple(Work(name, sum(w.bytes for w in own), sum(w.flops for w in own)) for name, own in groups.items())
