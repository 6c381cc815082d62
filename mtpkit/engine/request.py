"""Requests, their outputs, and the statistics of one request and of the engine."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from mtpkit.engine.detokenizer import Detokenizer
from mtpkit.engine.params import SamplingParams
from mtpkit.engine.tree import Tree
from mtpkit.errors import MtpkitError

FinishReason = Literal["stop", "length", "error"]


@dataclass
class AcceptanceStats:
    """Counts over decode steps, from which acceptance is computed.

    A decode step verifies K drafts. Draft k is *reached* if drafts 1..k-1 were accepted and the token at the place of
    draft k was emitted; it is *accepted* if that token is the draft. If a stop or max_tokens ends the request after e
    tokens of the step, at most drafts 1..e are counted.
    """

    steps: int = 0
    drafted: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    reached_per_depth: list[int] = field(default_factory=list)
    ranks_per_depth: list[list[int]] = field(default_factory=list)
    """In trees, how often the base's choice at a depth was the candidate of each rank, the best first; what is missing
    to `reached_per_depth` was none of them. Chains, where "auto" chooses among both, have one candidate. In
    trees, a depth is reached where the accepted path has candidates for it."""

    @classmethod
    def for_depths(cls, num_speculative_tokens: int, tree: Tree | None = None) -> "AcceptanceStats":
        """Zero counts for K depths."""
        depths = range(num_speculative_tokens)
        ranks = [[0] * tree.most_children for _ in depths] if tree else []
        return cls(0, 0, [0 for _ in depths], [0 for _ in depths], ranks)

    def record_tree(self, ranks: Sequence[int], emitted: int, drafts: int) -> None:
        """Count one decode step of a tree.

        Args:
            ranks: of each depth, see `Verdict.ranks`.
            emitted: number of emitted tokens.
            drafts: number of drafts of the tree; 0: none was made for this step, so that its ranks say nothing.
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
        """The sums of counts for the same depths."""
        accepted, reached = (
            [sum(depth) for depth in zip(*counts, strict=True)]
            for counts in ([s.accepted_per_depth for s in several], [s.reached_per_depth for s in several])
        )
        depths = zip(*(s.ranks_per_depth for s in several), strict=True)
        ranks = [[sum(rank) for rank in zip(*depth, strict=True)] for depth in depths]
        return AcceptanceStats(sum(s.steps for s in several), sum(s.drafted for s in several), accepted, reached, ranks)

    @property
    def accepted(self) -> int:
        """Accepted drafts of all depths."""
        return sum(self.accepted_per_depth)

    @property
    def acceptance_length(self) -> float:
        """1 + mean accepted drafts per decode step."""
        return 1 + self.accepted / max(1, self.steps)

    @property
    def rank_shares(self) -> list[list[float]]:
        """In trees, per depth the share of the steps that reached it in which the base chose the heads' best candidate,
        the second one, and so on."""
        depths = zip(self.ranks_per_depth, self.reached_per_depth, strict=False)
        return [[count / max(1, reached) for count in ranks] for ranks, reached in depths]

    @property
    def conditional_acceptance(self) -> list[float]:
        """Per depth, the rate at which a reached draft is accepted; 0 where none was reached."""
        return [a / max(1, r) for a, r in zip(self.accepted_per_depth, self.reached_per_depth, strict=True)]


@dataclass
class RequestStats(AcceptanceStats):
    """Acceptance and cost of one request."""

    preemptions: int = 0
    state_bytes: int = 0
    """Recurrent state that the request holds while it runs."""
    kv_bytes: int = 0
    """Largest size of the blocks that the request held."""
    num_cached_tokens: int | None = None
    """Tokens of the prompt that the prefix cache had when the request was first admitted; None before."""


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine was made or its statistics were reset."""

    acceptance: AcceptanceStats
    """Acceptance over the decode steps of all requests."""
    generated_tokens: int
    seconds: float
    """Wall time of the steps."""
    preemptions: int
    state_bytes: int
    """Recurrent state of all slots."""
    state_bytes_per_request: int
    kv_bytes: int
    """All blocks of keys and values."""
    prompt_tokens: int = 0
    """Tokens of the prompts that were admitted, each once."""
    cached_tokens: int = 0
    """Tokens of the prompts that the prefix cache had."""
    prefilled_tokens: int = 0
    """Tokens that chunks computed, those of preempted requests included."""
    returned_bytes: float = 0.0
    """Bytes that the last pipeline stage sends back to each other one per step and request; 0: there is one stage."""

    @classmethod
    def together(cls, several: Sequence["EngineStats"]) -> "EngineStats":
        """Totals of engines that ran at the same time: sums, but the longest time and the state of one request."""
        sums = {each.name: sum(getattr(s, each.name) for s in several) for each in fields(cls) if each.type is int}
        acceptance = AcceptanceStats.together([s.acceptance for s in several])
        most = {name: max(getattr(s, name) for s in several) for name in ("seconds", "state_bytes_per_request")}
        return cls(**sums | most, acceptance=acceptance)

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that the prefix cache had."""
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
        """Generated tokens per second, prefill included."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0


@dataclass(eq=False)
class Request:
    """All state of one request on the host. Only the scheduler changes it.

    `token_ids` are the prompt and the output; as far as the host knows, the caches hold the first `num_computed` of
    them. The newest output token is fed by the next decode step, not by prefill. Prefill of a preempted request
    computes all tokens before the newest one and drafts again; decoding then continues with the same output.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    arrival: int
    """Place in the order of arrival; the youngest request has the largest number."""
    stats: RequestStats
    processors: frozenset[str]
    """Names of the processors of logits that the request uses."""
    prompt: str | None = None
    detokenizer: Detokenizer | None = None
    place: str | None = None
    """Name of the request in messages: its place in the given list or in a file."""
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end the request."""
    checkpoint_at: int | None = None
    """Tokens of the prompt after which the prefix cache keeps a checkpoint, such as those before the generation
    prompt."""

    token_ids: list[int] = field(init=False)
    num_computed: int = 0
    prefill_end: int = 0
    """Tokens that prefill computes: the prompt, or all but the newest token if there was output at admission."""
    num_drafted: int = 0
    """Drafts that the newest step of the request makes, of a tree those on its longest path."""
    drafted_tree: bool = False
    """Whether they are a tree."""
    in_flight: int = 0
    """Launched steps that will emit tokens of this request and are not committed yet."""
    block_table: array = field(default_factory=lambda: array("q"))
    """int64 array, which numpy reads without conversion: tables of many thousand tokens go to the device every step."""
    chain: list[bytes] = field(default_factory=list)
    """Hashes for the prefix cache: entry i is that of the tokens in the first i blocks."""
    num_published: int = 0
    """Full blocks that were offered to the prefix cache since the request was admitted."""
    cuts: list[int] = field(default_factory=list)
    """Positions at which chunks must end, to leave checkpoints, ascending."""
    slot: int | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    """Message about the error that ended the request."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    def fail(self, why: str) -> None:
        """End the request with an error, whose message names it."""
        self.finish_reason, self.error = "error", f"{self.name}: {why}"

    @property
    def name(self) -> str:
        """Name of the request in messages."""
        return f"request {self.request_id}" if self.place is None else f"{self.place} (request {self.request_id})"

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_output(self) -> int:
        """Number of tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def decoding(self) -> bool:
        """Whether the next step of this running request is a decode step."""
        return self.slot is not None and self.num_computed >= self.prefill_end

    @property
    def ends_in_flight(self) -> bool:
        """Whether the launched steps are sure to reach `max_tokens`."""
        return self.num_output + self.in_flight >= self.params.max_tokens

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class CompletionOutput:
    """The generated part of a request."""

    token_ids: list[int]
    text: str
    """Without stop strings, stop tokens and special tokens; empty without a tokenizer."""
    finish_reason: FinishReason | None
    """"stop", "length", or "error", which `error` explains; the tokens before the error are valid."""
    index: int = 0
    error: str | None = None
    """Error message, one line that names the request."""


@dataclass(frozen=True)
class RequestOutput:
    """State of a request after a step, or at its end. `outputs` has one entry; its contents are cumulative."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    stats: RequestStats
    finished: bool

    @classmethod
    def of(cls, request: Request) -> "RequestOutput":
        """The output of a request so far. It shares the request's statistics, which grow until the request ends."""
        text = request.detokenizer.visible_text(request.finished) if request.detokenizer else ""
        completion = CompletionOutput(request.output_token_ids, text, request.finish_reason, error=request.error)
        return cls(
            request.request_id, request.prompt, request.prompt_token_ids, [completion], request.stats, request.finished
        )

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of the prompt that the prefix cache had; None before the request runs."""
        return self.stats.num_cached_tokens

    @property
    def error(self) -> str | None:
        """Message about the error that ended the request, one line that names it; None without an error."""
        return self.outputs[0].error


class RequestError(MtpkitError):
    """Requests ended with an error where all had to succeed."""


def require_whole(outputs: Iterable[RequestOutput]) -> None:
    """Check that no output ended with an error, before outputs are measured or stored.

    Raises:
        RequestError: some did; with the first error and the number of further ones.
    """
    if errors := [output.error for output in outputs if output.error is not None]:
        more = f"; likewise {len(errors) - 1} more requests" if len(errors) > 1 else ""
        raise RequestError(f"{errors[0]}{more}")
