"""Requests and their outputs."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mtpkit.engine.requests.detokenizer import Detokenizer
from mtpkit.engine.requests.params import SamplingParams
from mtpkit.engine.requests.stats import RequestStats
from mtpkit.engine.requests.tree import DraftShape
from mtpkit.errors import MtpkitError, UserError

FinishReason = Literal["stop", "length", "error"]


class BadDraft(NamedTuple):
    """A draft whose logits are NaN or infinite. It matters once the drafts before it are accepted:
    until then, one of them may be what the heads cannot read, and the base may reject it."""

    depth: int
    """From 1."""
    position: int
    """Position of the draft in the request."""
    num_output: int
    """Output tokens when the draft was made."""

    def is_reached(self, accepted: int, ranks: list[int] | None) -> bool:
        """Whether the base accepted the drafts before this one.

        Args:
            accepted: number of drafts of this one's path that the base accepted.
            ranks: for a tree, see `Verdict.ranks`. The last accepted draft must have children: the
                bad ones may be those of a sibling that the base rejected.
        """
        if self.depth > 1 + accepted:
            return False
        return ranks is None or ranks[self.depth - 1] >= -1


@dataclass(eq=False)
class Request:
    """All state of one request on the host. Only the scheduler changes it.

    `token_ids` are the prompt and the output; as far as the host knows, the caches hold the first
    `num_computed` of them. The newest output token is fed by the next decode step, not by prefill.
    The prefill of a preempted request computes all tokens before the newest one, and makes its
    drafts again; decoding then continues with the same output.
    """

    request_id: str
    """Id that no other waiting or running request has."""
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    """Key of the request's random numbers: that of `params`, or one drawn for the request."""
    arrival: int
    """Place in the order of arrival; the youngest request has the largest number."""
    stats: RequestStats
    processors: frozenset[str]
    """Names of the logits processors that the request uses."""
    prompt: str | None = None
    """Text of the prompt; None if token ids were given."""
    detokenizer: Detokenizer | None = None
    """Turns the output into text; None without a tokenizer."""
    place: str | None = None
    """Name of the request in messages, such as its place in a list or in a file."""
    max_tokens: int = 16
    """Most tokens to generate: those of `params`, as far as `max_model_len` leaves room for
    them."""
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end the request."""
    checkpoint_at: int | None = None
    """Number of prompt tokens after which the prefix cache keeps a checkpoint, such as those before
    the generation prompt."""

    token_ids: list[int] = field(init=False)
    """The prompt, then the output."""
    num_computed: int = 0
    """Number of tokens whose cache entries are committed or, for chunks, planned."""
    prefill_end: int = 0
    """Number of tokens that prefill computes: the prompt, or all but the newest token if the
    request already had output at admission."""
    newest_step: int = 0
    """Number of the newest planned step that samples for the request. Of decoding requests that do
    not fit into a step together, those with the smallest number come first."""
    newest_drafts: DraftShape = 0
    """The drafts that the request's newest step makes."""
    in_flight: int = 0
    """Number of launched, uncommitted steps that will emit tokens of this request."""
    block_table: array = field(default_factory=lambda: array("q"))
    """int64 array, which numpy reads without conversion: tables of many thousand tokens go to the
    device every step."""
    chain: list[bytes] = field(default_factory=list)
    """Hashes for the prefix cache: entry i is the hash of the tokens in the first i blocks."""
    num_published: int = 0
    """Number of full blocks that were published to the prefix cache since the request was
    admitted."""
    cuts: list[int] = field(default_factory=list)
    """Positions, ascending, at which chunks must end so that a checkpoint can be left there."""
    slot: int | None = None
    """Slot of the request's state on the device; None: the request does not run."""
    bad_draft: BadDraft | None = None
    """A draft of the newest committed step that the heads could not choose."""
    finish_reason: FinishReason | None = None
    """Why the request has ended; None: it has not."""
    error: str | None = None
    """Message of the error that ended the request."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    def emit(self, token_ids: list[int]) -> int:
        """Append tokens until one ends the request; return the number of appended tokens."""
        for count, token_id in enumerate(token_ids, 1):
            self.token_ids.append(token_id)
            self.finish_reason = self._reason_to_end(token_id)
            if self.finished:
                return count
        return len(token_ids)

    def _reason_to_end(self, newest: int) -> FinishReason | None:
        """The reason if the newest token ends the request, else None."""
        # Stop tokens are left out of the text, so the detokenizer must not get them.
        if newest in self.end_token_ids:
            return "stop"
        if self.detokenizer and self.detokenizer.append(newest):
            return "stop"
        return "length" if self.num_output == self.max_tokens else None

    def end_text(self) -> None:
        """Decode what the text of a finished request still holds back. A stop string found there
        is the reason of the end instead of the length."""
        if self.detokenizer is None:
            return
        found_stop = self.detokenizer.flush()
        if found_stop and self.finish_reason == "length":
            self.finish_reason = "stop"

    def fail_if_invalid(
        self, accepted: int, ranks: list[int] | None, valid: bool, bad_draft: int
    ) -> None:
        """End the request with an error if logits that matter are not finite; its valid tokens are
        already appended.

        What the heads compute after a draft has no effect unless the base accepts that draft. A bad
        draft is therefore remembered until the next step shows whether the base got that far.

        Args:
            accepted: drafts of the step before that the base accepted.
            ranks: if these were a tree, one per depth, see `Verdict.ranks`.
            valid: whether all logits of the base that were used are finite.
            bad_draft: the first depth, from 1, at which the logits of the heads are not finite; 0:
                none.
        """
        earlier = self.bad_draft
        self.bad_draft = None
        if bad_draft:
            position = len(self.token_ids) + bad_draft - 1
            self.bad_draft = BadDraft(bad_draft, position, self.num_output)

        if not valid:
            self.fail(
                f"the logits for position {len(self.token_ids)}, after {self.num_output}"
                " output tokens, are NaN or infinite: weights or activations of the base are not"
                " finite; check the checkpoint, or try dtype float32"
            )
        elif earlier and earlier.is_reached(accepted, ranks):
            self._fail_for_draft(earlier)
        # no draft comes before it that the base could reject
        elif self.bad_draft and bad_draft == 1:
            self._fail_for_draft(self.bad_draft)

    def _fail_for_draft(self, bad: BadDraft) -> None:
        self.fail(
            f"draft {bad.depth} for position {bad.position}, after {bad.num_output} output tokens,"
            " has logits that are NaN or infinite: weights or activations of the MTP heads are not"
            " finite; check the heads, or decode without them (K = 0)"
        )

    def leave_slot(self) -> None:
        """Reset what is bound to the slot and the blocks, which others get now."""
        del self.block_table[:]
        self.slot = None
        # Results of steps that are still under way are ignored, see `Scheduler.commit`.
        self.in_flight = 0
        self.num_published = 0
        self.bad_draft = None

    def fail(self, why: str) -> None:
        """End the request with an error; the message begins with the request's name."""
        self.finish_reason = "error"
        self.error = f"{self.name}: {why}"

    @property
    def name(self) -> str:
        """Name of the request in messages."""
        if self.place is None:
            return f"request {self.request_id}"
        return f"{self.place} (request {self.request_id})"

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
        return self.num_output + self.in_flight >= self.max_tokens

    @property
    def ready_to_decode(self) -> bool:
        """Whether the next step may have a decode row of this request."""
        return self.decoding and not self.ends_in_flight

    @property
    def next_cut(self) -> int:
        """Position at which the next chunk of the prompt must end, if not before."""
        later = (cut for cut in self.cuts if cut > self.num_computed)
        return next(later, self.prefill_end)

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class CompletionOutput:
    """The generated part of a request."""

    token_ids: list[int]
    text: str
    """The text without stop strings, stop tokens and special tokens; empty without a tokenizer."""
    finish_reason: FinishReason | None
    """"stop", "length", or "error", which `error` explains; the tokens before the error are
    valid."""
    index: int = 0
    error: str | None = None
    """Error message, one line that names the request."""


@dataclass(frozen=True)
class RequestOutput:
    """State of a request after a step, or at its end. `outputs` has one entry; its contents are
    cumulative."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    stats: RequestStats
    finished: bool

    @classmethod
    def of(cls, request: Request) -> "RequestOutput":
        """The output of a request so far. It shares the request's statistics, which grow until the
        request ends."""
        text = ""
        if request.detokenizer:
            text = request.detokenizer.visible_text(request.finished)
        completion = CompletionOutput(
            request.output_token_ids, text, request.finish_reason, error=request.error
        )
        return cls(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            [completion],
            request.stats,
            request.finished,
        )

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens found in the prefix cache; None before the request runs."""
        return self.stats.num_cached_tokens

    @property
    def error(self) -> str | None:
        """Message of the error that ended the request: one line that names the request. None
        without an error."""
        return self.outputs[0].error


class PromptError(UserError):
    """A prompt that can never be served. Other prompts of the same list are not affected."""


class RequestError(MtpkitError):
    """Requests ended with an error where all had to succeed."""


def require_whole(outputs: Iterable[RequestOutput]) -> None:
    """Check that no output ended with an error, before outputs are measured or stored.

    Raises:
        RequestError: an output did; the message has the first error and the number of further ones.
    """
    errors = [output.error for output in outputs if output.error is not None]
    if not errors:
        return
    more = f"; likewise {len(errors) - 1} more requests" if len(errors) > 1 else ""
    raise RequestError(f"{errors[0]}{more}")
