"""A request, what a user gets back of it, and the statistics of one and of all."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from mtpkit.engine.detokenizer import Detokenizer
from mtpkit.engine.params import SamplingParams
from mtpkit.errors import MtpkitError

FinishReason = Literal["stop", "length", "error"]


@dataclass
class AcceptanceStats:
    """Counts over decode steps, from which acceptance is computed.

    A decode step verifies K drafts. Draft k is *reached* when drafts 1..k-1 were accepted and the token that its
    verdict decided was emitted; it is *accepted* when that token is the draft. A step that a stop or max_tokens cuts
    after e tokens therefore counts drafts 1..e at most.
    """

    steps: int = 0
    drafted: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    reached_per_depth: list[int] = field(default_factory=list)

    @classmethod
    def for_depths(cls, num_speculative_tokens: int) -> "AcceptanceStats":
        """Zero counts for K depths."""
        return cls(0, 0, [0] * num_speculative_tokens, [0] * num_speculative_tokens)

    def record(self, accepted: int, emitted: int, depths: int) -> None:
        """Count one decode step that accepted `accepted` drafts, of which `depths` were made for it, and emitted
        `emitted` of its tokens."""
        self.steps += 1
        self.drafted += depths
        for depth in range(min(emitted, depths)):
            self.reached_per_depth[depth] += 1
            self.accepted_per_depth[depth] += depth < accepted

    @property
    def accepted(self) -> int:
        """Accepted drafts."""
        return sum(self.accepted_per_depth)

    @property
    def acceptance_length(self) -> float:
        """1 + mean accepted drafts a decode step."""
        return 1 + self.accepted / max(1, self.steps)

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
    """Largest size of the blocks that it held."""


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine was made or its statistics were reset."""

    acceptance: AcceptanceStats
    """Over the decode steps of all requests."""
    generated_tokens: int
    seconds: float
    """Spent in steps."""
    preemptions: int
    state_bytes: int
    """Recurrent state of all slots."""
    state_bytes_per_request: int
    kv_bytes: int
    """All blocks of keys and values."""

    @property
    def acceptance_length(self) -> float:
        """1 + mean accepted drafts a decode step and request."""
        return self.acceptance.acceptance_length

    @property
    def conditional_acceptance(self) -> list[float]:
        """Per depth, the rate at which a reached draft is accepted."""
        return self.acceptance.conditional_acceptance

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, prefill included."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0


def _no_blocks() -> array:
    return array("q")


@dataclass(eq=False)
class Request:
    """Everything that belongs to one request. The scheduler alone changes it.

    `token_ids` are the prompt and the output; the caches hold the first `num_computed` of them, as far as the host
    knows. Once there is output, the newest token is fed by the next decode step, not by prefill: a preempted request
    computes the tokens before it again, drafts again, and goes on as if nothing had happened.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    arrival: int
    """Order of arrival; the largest is the youngest."""
    stats: RequestStats
    processors: frozenset[str]
    """Names of the processors of logits that it uses."""
    prompt: str | None = None
    detokenizer: Detokenizer | None = None
    place: str | None = None
    """Where the user has it: in the list that was given, or in a file."""

    token_ids: list[int] = field(init=False)
    num_computed: int = 0
    prefill_end: int = 0
    """Tokens that prefill computes: the prompt, or all but the newest token when there was output at admission."""
    num_drafted: int = 0
    """Drafts that its newest step makes."""
    in_flight: int = 0
    """Steps under way that emit tokens of this request."""
    block_table: array = field(default_factory=_no_blocks)
    """Of int64, which numpy reads as it is: tables of many thousand tokens go to the device in every step."""
    slot: int | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    """Why it ended with the reason "error"."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    def fail(self, why: str) -> None:
        """End with an error, which names the request."""
        self.finish_reason, self.error = "error", f"{self.name}: {why}"

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"request {self.request_id}" if self.place is None else f"{self.place} (request {self.request_id})"

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_output(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def decoding(self) -> bool:
        """Whether the next step of this running request is a decode step."""
        return self.slot is not None and self.num_computed >= self.prefill_end

    @property
    def ends_in_flight(self) -> bool:
        """Whether the steps under way are sure to reach `max_tokens`."""
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
    """"stop", "length", or "error": `error` says why it could not go on; the tokens before that stand."""
    index: int = 0
    error: str | None = None
    """One line that names the request."""


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
        """A copy of what a user may see of `request`. Its statistics are shared until it is finished."""
        text = request.detokenizer.visible_text(request.finished) if request.detokenizer else ""
        completion = CompletionOutput(request.output_token_ids, text, request.finish_reason, error=request.error)
        return cls(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            [completion],
            request.stats,
            request.finished,
        )

    @property
    def error(self) -> str | None:
        """Why it ended with the reason "error", in one line that names the request."""
        return self.outputs[0].error


class RequestError(MtpkitError):
    """Requests ended with an error where all had to go through."""


def require_whole(outputs: Iterable[RequestOutput]) -> None:
    """Refuse outputs that ended with an error, for whoever measures or keeps them.

    Raises:
        RequestError: with the first of them, and how many more there are.
    """
    if errors := [output.error for output in outputs if output.error is not None]:
        more = f"; likewise {len(errors) - 1} more requests" if len(errors) > 1 else ""
        raise RequestError(f"{errors[0]}{more}")
