"""Statistics of one request and of the engine."""

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mtpkit.engine.requests.tree import Tree

STEP_TOKENS = (1, *(8 << power for power in range(12)))
"""Bounds of `StepTokens`, vLLM's: 1, 8, 16, .. 16384."""


_PRIOR_RATE = 0.7
_PRIOR_WEIGHT = 4.0
"""Acceptance that is assumed of a new request, and the number of drafts it counts for."""
_DECAY = 0.95
"""Decay factor of a request's counts per decode step. Those of a request whose drafts are not
verified fade, until its rate is the assumed one and they are tried again."""


@dataclass
class AcceptanceHistory:
    """How often the drafts of one request were accepted in its latest steps."""

    tested: float = 0.0
    accepted: float = 0.0

    def observe(self, accepted: int, fresh: int) -> None:
        """Count a decode step that accepted so many of the request's `fresh` drafts."""
        self.tested = self.tested * _DECAY + min(accepted + 1, fresh)
        self.accepted = self.accepted * _DECAY + min(accepted, fresh)

    @property
    def rate(self) -> float:
        """Share of the drafts that were accepted, of those that stood after accepted ones."""
        return (self.accepted + _PRIOR_RATE * _PRIOR_WEIGHT) / (self.tested + _PRIOR_WEIGHT)


@dataclass
class AcceptanceStats:
    """Counts over decode steps, from which acceptance is computed.

    A decode step verifies K drafts. Draft k is *reached* if drafts 1..k-1 were accepted and the
    token at the place of draft k was emitted; it is *accepted* if that token is the draft. If a
    stop or max_tokens ends the request after e tokens of the step, at most drafts 1..e are counted.
    """

    steps: int = 0
    """Decode steps."""
    drafted: int = 0
    """Drafts that decode steps verified, of trees all of them."""
    accepted_per_depth: list[int] = field(default_factory=list)
    """For each depth, the number of steps whose draft was accepted."""
    reached_per_depth: list[int] = field(default_factory=list)
    """For each depth, the number of steps whose draft was reached."""
    ranks_per_depth: list[list[int]] = field(default_factory=list)
    """For trees: how often, per depth, the base's choice was the candidate of each rank, the best
    first. In the other steps that `reached_per_depth` counts, the choice was none of the
    candidates. A tree reaches a depth if its accepted path has candidates there. Where "auto"
    chooses between chains and trees, a chain has one candidate per depth."""

    @classmethod
    def for_depths(cls, num_speculative_tokens: int, tree: Tree | None = None) -> "AcceptanceStats":
        """Zero counts for K depths."""
        depths = range(num_speculative_tokens)
        ranks = [[0] * tree.most_children for _ in depths] if tree else []
        return cls(0, 0, [0 for _ in depths], [0 for _ in depths], ranks)

    def record_tree(self, ranks: Sequence[int], emitted: int, drafts: int) -> None:
        """Count one decode step of a tree.

        Args:
            ranks: one per depth, see `Verdict.ranks`.
            emitted: number of emitted tokens.
            drafts: number of drafts of the tree; 0: no drafts were made for this step, so that
                `ranks` says nothing.
        """
        self.steps += 1
        self.drafted += drafts
        if not drafts:
            return
        for depth, rank in enumerate(ranks[:emitted]):
            if rank >= -1:
                self.reached_per_depth[depth] += 1
            if rank >= 0:
                self.accepted_per_depth[depth] += 1
                self.ranks_per_depth[depth][rank] += 1

    def record(self, accepted: int, emitted: int, depths: int) -> None:
        """Count one decode step of a chain.

        Args:
            accepted: number of accepted drafts.
            emitted: number of emitted tokens.
            depths: number of drafts that were made for this step.
        """
        self.steps += 1
        self.drafted += depths
        for depth in range(min(emitted, depths)):
            self.reached_per_depth[depth] += 1
            self.accepted_per_depth[depth] += depth < accepted
            if self.ranks_per_depth:
                self.ranks_per_depth[depth][0] += depth < accepted

    @classmethod
    def together(cls, several: Sequence["AcceptanceStats"]) -> "AcceptanceStats":
        """Sums of several counts, all for the same depths."""
        ranks = zip(*(one.ranks_per_depth for one in several), strict=True)
        return AcceptanceStats(
            steps=sum(one.steps for one in several),
            drafted=sum(one.drafted for one in several),
            accepted_per_depth=_sums([one.accepted_per_depth for one in several]),
            reached_per_depth=_sums([one.reached_per_depth for one in several]),
            ranks_per_depth=[_sums(depth) for depth in ranks],
        )

    @property
    def accepted(self) -> int:
        """Number of accepted drafts, over all depths."""
        return sum(self.accepted_per_depth)

    @property
    def acceptance_length(self) -> float:
        """1 + mean accepted drafts per decode step."""
        return 1 + self.accepted / max(1, self.steps)

    @property
    def rank_shares(self) -> list[list[float]]:
        """For trees, per depth: of the steps that reached it, the shares in which the base chose
        the heads' best candidate, the second-best, and so on."""
        depths = zip(self.ranks_per_depth, self.reached_per_depth, strict=False)
        return [[count / max(1, reached) for count in ranks] for ranks, reached in depths]

    @property
    def conditional_acceptance(self) -> list[float]:
        """Per depth, the rate at which a reached draft is accepted; 0 where none was reached."""
        depths = zip(self.accepted_per_depth, self.reached_per_depth, strict=True)
        return [accepted / max(1, reached) for accepted, reached in depths]


def _sums(several: Sequence[Sequence[int]]) -> list[int]:
    """Sums over lists of the same length, place by place."""
    return [sum(place) for place in zip(*several, strict=True)]


@dataclass
class RequestStats(AcceptanceStats):
    """Acceptance and cost of one request."""

    preemptions: int = 0
    state_bytes: int = 0
    """Bytes of recurrent state that the request holds while it runs."""
    kv_bytes: int = 0
    """Most bytes of blocks that the request held at once."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when the request was first admitted; None before
    that."""

    @classmethod
    def of_siblings(cls, several: Sequence["RequestStats"]) -> "RequestStats":
        """Sums over the outputs of one prompt, but of prompt tokens from the prefix cache those of
        the first output that has run: the others find what it has left there."""
        if len(several) == 1:
            return several[0]
        known = (one.num_cached_tokens for one in several)
        cached = next((tokens for tokens in known if tokens is not None), None)
        return cls(
            **vars(AcceptanceStats.together(several)),
            preemptions=sum(one.preemptions for one in several),
            state_bytes=sum(one.state_bytes for one in several),
            kv_bytes=sum(one.kv_bytes for one in several),
            num_cached_tokens=cached,
        )


@dataclass
class RequestMetrics:
    """When a request arrived, ran and ended, in seconds of `time.time`. Names are vLLM's."""

    arrival_time: float
    """When the request was made from its prompt."""
    first_scheduled_time: float | None = None
    """When the request first got a slot; None before that."""
    first_token_time: float | None = None
    """When the first output token was committed; None before that."""
    finished_time: float | None = None
    """When the request ended; None before that."""

    def note_scheduled(self) -> None:
        """Note that the request got a slot; only the first time counts."""
        if self.first_scheduled_time is None:
            self.first_scheduled_time = time.time()

    @classmethod
    def of_siblings(cls, several: Sequence["RequestMetrics"]) -> "RequestMetrics":
        """The first times of the outputs of one prompt, and the time when all have ended."""
        if len(several) == 1:
            return several[0]
        ends = [one.finished_time for one in several]
        return cls(
            min(one.arrival_time for one in several),
            _first(one.first_scheduled_time for one in several),
            _first(one.first_token_time for one in several),
            None if None in ends else max(time for time in ends if time is not None),
        )


def _first(times: Iterable[float | None]) -> float | None:
    """The first of the times that are known."""
    return min((time for time in times if time is not None), default=None)


@dataclass
class StepTokens:
    """How many tokens steps had: those of prompts that a step computed, and those that it added to
    outputs."""

    counts: list[int] = field(default_factory=lambda: [0] * (1 + len(STEP_TOKENS)))
    """For each of `STEP_TOKENS`, the steps with at most so many tokens and more than the one before
    it has; last, those with more."""
    total: int = 0
    """Tokens of all steps."""

    def observe(self, tokens: int) -> None:
        """Count a step; one without tokens is none."""
        if tokens:
            self.counts[bisect_left(STEP_TOKENS, tokens)] += 1
            self.total += tokens

    @classmethod
    def together(cls, several: Sequence["StepTokens"]) -> "StepTokens":
        """Sums of several counts."""
        counts = _sums([one.counts for one in several])
        return cls(counts, sum(one.total for one in several))


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine was made or its statistics were reset, and what it holds now."""

    acceptance: AcceptanceStats
    """Acceptance over the decode steps of all requests."""
    generated_tokens: int
    seconds: float
    """Wall time of the steps."""
    preemptions: int
    state_bytes: int
    """Bytes of recurrent state of all slots."""
    state_bytes_per_request: int
    kv_bytes: int
    """Bytes of all blocks of keys and values."""
    prompt_tokens: int = 0
    """Prompt tokens of admitted requests; each request counts once, even if it is admitted
    again."""
    cached_tokens: int = 0
    """Those of `prompt_tokens` that were found in the prefix cache."""
    prefilled_tokens: int = 0
    """Tokens that chunks computed, including those that preempted requests computed again."""
    returned_bytes: float = 0.0
    """Bytes per step and request that the last pipeline stage sends to each other stage; 0 with one
    stage."""
    running: int = 0
    """Requests that hold a slot now."""
    waiting: int = 0
    """Requests that wait for a slot now."""
    blocks: int = 0
    """Blocks of keys and values."""
    used_blocks: int = 0
    """Those of `blocks` that requests hold now. Blocks that only the prefix cache knows are
    free."""
    step_tokens: StepTokens = field(default_factory=StepTokens)

    @classmethod
    def together(cls, several: Sequence["EngineStats"]) -> "EngineStats":
        """Totals of concurrent engines: sums, but the maximum of `seconds` and of
        `state_bytes_per_request`."""
        totals: dict[str, Any] = {
            each.name: sum(getattr(one, each.name) for one in several)
            for each in fields(cls)
            if each.type is int
        }
        # Engines run at the same time, and all have slots of the same size.
        for name in ("seconds", "state_bytes_per_request"):
            totals[name] = max(getattr(one, name) for one in several)
        return cls(
            **totals,
            acceptance=AcceptanceStats.together([one.acceptance for one in several]),
            step_tokens=StepTokens.together([one.step_tokens for one in several]),
        )

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in the prefix cache."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def acceptance_length(self) -> float:
        """1 + mean accepted drafts per decode step and request."""
        return self.acceptance.acceptance_length

    @property
    def conditional_acceptance(self) -> list[float]:
        """Per depth, the rate at which a reached draft is accepted."""
        return self.acceptance.conditional_acceptance

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second; the time includes prefill."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0
