"""Requests and their outputs."""

import math
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Literal, NamedTuple

from mtpkit.engine.requests.detokenizer import Detokenizer
from mtpkit.engine.requests.grammar import Constraint
from mtpkit.engine.requests.log_probs import Logprob, TokenLogProbs
from mtpkit.engine.requests.params import RequestOutputKind, SamplingParams
from mtpkit.engine.requests.stats import AcceptanceHistory, RequestMetrics, RequestStats
from mtpkit.engine.requests.tree import DraftShape
from mtpkit.errors import MtpkitError, UserError

_KEYED_TOKENS = 16
"""Tokens that `Request.noise_key` depends on."""

FinishReason = Literal["stop", "length", "error", "abort"]
StopReason = int | str | None
"""What ended an output with finish reason "stop": the token of `stop_token_ids` or the stop string;
None for an end-of-sequence token."""


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
    """All state of one request on the host, which makes one output. Only the scheduler changes it.

    `token_ids` are the prompt and the output; as far as the host knows, the caches hold the first
    `num_computed` of them. The newest output token is fed by the next decode step, not by prefill.
    The prefill of a preempted request computes all tokens before the newest one, and makes its
    drafts again; decoding then continues with the same output.
    """

    request_id: str
    """Id that no other waiting or running request has, except for siblings."""
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
    end_token_ids: Mapping[int, StopReason] = field(default_factory=dict)
    """Tokens that end the request, each with the stop reason that it is."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the output does not contain."""
    constraint: Constraint | None = None
    """What the output may go on with; None: anything."""
    checkpoint_at: int | None = None
    """Number of prompt tokens after which the prefix cache keeps a checkpoint, such as those before
    the generation prompt."""

    index: int = 0
    """Place of the output among those of its prompt."""
    siblings: Sequence["Request"] = ()
    """The requests of all outputs of the prompt, this one included, if there are several."""

    metrics: RequestMetrics = field(init=False)
    """When the request arrived, ran and ended."""
    token_ids: list[int] = field(init=False)
    """The prompt, then the output."""
    log_probs: list[dict[int, Logprob]] = field(default_factory=list)
    """Log-probabilities of each output token, if the request asks for them."""
    prompt_log_probs: list[dict[int, Logprob] | None] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens, as far as they are computed, if the request asks
    for them; None for the first token."""
    cumulative_logprob: float = 0.0
    """Sum of those of the output tokens themselves."""
    num_streamed: int = 0
    """Output tokens that earlier outputs of kind `DELTA` held."""
    length_streamed: int = 0
    """Characters of the text that earlier outputs of kind `DELTA` held."""
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
    drafts_in_flight: int = 0
    """Number of launched, uncommitted steps that make drafts for the request."""
    newest_draft_ids: list[int] = field(default_factory=list)
    """The drafts of the newest committed step: a chain, or one per depth of a tree. In an engine
    with trees, constrained requests have what `StepResult.trees` says."""
    history: AcceptanceHistory = field(default_factory=AcceptanceHistory)
    """How often its drafts were accepted lately."""
    runners_up: list[int] = field(default_factory=list)
    """Runners-up of each of these drafts, see `mtpkit.engine.steps.runners_up`; empty: the request
    is not constrained, or they are unknown."""
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
    stop_reason: StopReason = None
    error: str | None = None
    """Message of the error that ended the request."""
    refused: bool = False
    """See `CompletionOutput.refused`."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.metrics = RequestMetrics(time.time())
        if self.reports_prompt:
            self.prompt_log_probs.append(None)

    @cached_property
    def noise_key(self) -> int:
        """Key of the noise that rounds recurrent states in float16, of 63 bits: a hash of the first
        tokens of the prompt.

        It depends neither on the order of requests nor on their seeds, so that a prompt that comes
        again has the same states again. Prompts that share a longer prefix share the key, so that a
        checkpoint that one leaves is what another would have computed.
        """
        first = array("q", self.prompt_token_ids[:_KEYED_TOKENS])
        return int.from_bytes(blake2b(first.tobytes(), digest_size=8).digest()) >> 1

    def emit(self, token_ids: list[int], log_probs: Sequence[TokenLogProbs] = ()) -> int:
        """Append tokens until one ends the request; return the number of appended tokens.

        Args:
            log_probs: those of the tokens, and perhaps of more, if the request asks for them.
        """
        if token_ids and self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.time()
        for count, token_id in enumerate(token_ids, 1):
            self.token_ids.append(token_id)
            if log_probs:
                self._report(log_probs[count - 1], token_id)
            self.finish_reason = self._reason_to_end(token_id)
            if self.finished:
                return count
        return len(token_ids)

    def report_prompt(self, first: int, log_probs: Sequence[TokenLogProbs]) -> None:
        """Add the log-probabilities of the prompt's tokens from place `first` on. Those that are
        known are left out: a preempted request computes its prompt again."""
        known = len(self.prompt_log_probs)
        assert first <= known, "chunks follow one another"
        for place, one in enumerate(log_probs[known - first :], known):
            count = self.params.prompt_logprobs or 0
            tokens = one.of_tokens(self.prompt_token_ids[place], count, self._token_text)
            self.prompt_log_probs.append(tokens)

    def _report(self, log_probs: TokenLogProbs, token_id: int) -> None:
        """Add the log-probabilities of an output token."""
        count = self.params.logprobs or 0
        self.log_probs.append(log_probs.of_tokens(token_id, count, self._token_text))
        self.cumulative_logprob += log_probs.value

    @property
    def _token_text(self) -> Callable[[int], str] | None:
        return self.detokenizer.token_text if self.detokenizer else None

    def _reason_to_end(self, newest: int) -> FinishReason | None:
        """The reason if the newest token ends the request, else None."""
        if newest in self.end_token_ids:
            self.stop_reason = self.end_token_ids[newest]
            if self.detokenizer and self.params.include_stop_str_in_output:
                self._include_end(self.detokenizer, newest)
            return "stop"
        if self.detokenizer and self.detokenizer.append(newest):
            self.stop_reason = self.detokenizer.stop_string
            return "stop"
        return "length" if self.num_output == self.max_tokens else None

    def _include_end(self, detokenizer: Detokenizer, newest: int) -> None:
        """Let the text end with the token that ends the request."""
        if isinstance(self.stop_reason, str):
            # The text leaves out special tokens, but this one was named as a stop string.
            detokenizer.end_with(self.stop_reason)
        elif detokenizer.append(newest):
            self.stop_reason = detokenizer.stop_string

    def end(self) -> None:
        """Complete a request whose reason to end is known: note the time, and decode what the text
        still holds back. A stop string found there is the reason of the end instead of the
        length."""
        self.metrics.finished_time = time.time()
        if self.detokenizer is None:
            return
        found_stop = self.detokenizer.flush()
        if found_stop and self.finish_reason == "length":
            self.finish_reason = "stop"
        if found_stop and self.finish_reason == "stop":
            self.stop_reason = self.detokenizer.stop_string

    def note_drafts(self, token_ids: list[int], runners_up: list[int]) -> None:
        """Note the drafts of a step that is committed, and their runners-up."""
        # A step from before a preemption may come late.
        self.drafts_in_flight = max(0, self.drafts_in_flight - 1)
        self.newest_draft_ids = token_ids
        self.runners_up = runners_up

    @property
    def draft_worth(self) -> float:
        """The acceptance that the request's drafts are expected to have; those of a request that
        keeps out of budgets come first, those of one that does not speculate last."""
        if not self.params.speculate:
            return -math.inf
        if not self.params.speculative_budget:
            return math.inf
        return self.history.rate

    def note_tree(self, drafts: list[int]) -> None:
        """Note all drafts of a step in place of one per depth, see `StepResult.trees`."""
        self.newest_draft_ids = drafts

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
        self.drafts_in_flight = 0
        self.newest_draft_ids = []
        self.runners_up = []
        self.num_published = 0
        self.bad_draft = None

    def fail(self, why: str, refused: bool = False) -> None:
        """End the request with an error; the message begins with the request's name.

        Args:
            refused: see `CompletionOutput.refused`.
        """
        self.finish_reason = "error"
        self.refused = refused
        self.error = f"{self.name}: {why}"

    def abort(self) -> None:
        """End the request because nobody wants more of it."""
        self.finish_reason = "abort"
        self.end()

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

    def take_output(self) -> tuple[list[int], str, list[dict[int, Logprob]]]:
        """Tokens, text and log-probabilities for the next output of the request: those so far, or
        with output kind `DELTA` those that no earlier output held."""
        text = ""
        if self.detokenizer:
            text = self.detokenizer.visible_text(self.finished)
        if not self.streams_deltas:
            return self.output_token_ids, text, list(self.log_probs)

        first = self.num_streamed
        new_tokens = self.token_ids[len(self.prompt_token_ids) + first :]
        new_text = text[self.length_streamed :]
        self.num_streamed += len(new_tokens)
        self.length_streamed = len(text)
        return new_tokens, new_text, self.log_probs[first:]

    @property
    def all_of_prompt(self) -> Sequence["Request"]:
        """The requests of all outputs of the prompt, in order."""
        return self.siblings or (self,)

    @property
    def num_output(self) -> int:
        """Number of tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether the request may begin at a checkpoint of the prefix cache."""
        return not self.reports_prompt

    @property
    def reports_prompt(self) -> bool:
        """Whether the request reports the log-probabilities of the prompt; of siblings, the first
        one does."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def streams_deltas(self) -> bool:
        """Whether each output holds what is new."""
        return self.params.output_kind == RequestOutputKind.DELTA

    @property
    def may_begin(self) -> bool:
        """Whether the request may be admitted: its grammar, if it has one, is compiled."""
        return self.constraint is None or self.constraint.ready

    @property
    def final_only(self) -> bool:
        """Whether the request has no output before its end."""
        return self.params.output_kind == RequestOutputKind.FINAL_ONLY

    @property
    def computes_prompt(self) -> bool:
        """Whether this running request has not computed its prompt in full yet."""
        return not self.decoding and not self.num_output

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
        if not self.decodes_on:
            return False
        # The host walks along the newest tokens and drafts before it says what may follow.
        return self.constraint is None or not (self.in_flight or self.drafts_in_flight)

    @property
    def decodes_on(self) -> bool:
        """Whether decode rows of this running request may follow the launched steps."""
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
    """One of the outputs of a prompt."""

    token_ids: list[int]
    text: str
    """The text without stop strings, stop tokens and special tokens, as far as the sampling
    parameters do not ask for them; empty without a tokenizer."""
    finish_reason: FinishReason | None = None
    """"stop", "length", "abort", or "error", which `error` explains; the tokens before the error
    are valid."""
    index: int = 0
    """Place among the outputs of the prompt."""
    error: str | None = None
    """Error message, one line that names the request."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token, log-probabilities by token id: its own first, then those of the most probable
    tokens. None: `SamplingParams.logprobs` does not ask for them."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of all tokens so far; None as `logprobs`."""
    stop_reason: StopReason = None
    """With finish reason "stop", what ended the output: the stop string, or the token of
    `stop_token_ids`; None for an end-of-sequence token."""
    refused: bool = False
    """Whether the error lies in what the request asked for, such as a grammar that turned out to be
    too complex, not in the model."""

    @classmethod
    def of(cls, request: Request) -> "CompletionOutput":
        """The output of a request so far, or what is new of it."""
        token_ids, text, log_probs = request.take_output()
        asked = request.params.logprobs is not None
        return cls(
            token_ids,
            text,
            request.finish_reason,
            request.index,
            request.error,
            logprobs=log_probs if asked else None,
            cumulative_logprob=request.cumulative_logprob if asked else None,
            stop_reason=request.stop_reason,
            refused=request.refused,
        )


@dataclass(frozen=True)
class RequestOutput:
    """Outputs of a prompt after a step, or at the end.

    `SamplingParams.output_kind` says whether `outputs` hold all tokens so far or the new ones.
    While several outputs of a prompt grow, `outputs` has those with something new, by `index`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    stats: RequestStats
    """Sums over all outputs of the prompt."""
    finished: bool
    """Whether all outputs of the prompt have ended."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Log-probabilities of the prompt's tokens, as far as they are computed; None for the first.
    None in place of the list: `SamplingParams.prompt_logprobs` does not ask for them."""
    metrics: RequestMetrics | None = field(default=None, compare=False)
    """When the request arrived, ran and ended."""

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "RequestOutput":
        """The output of a prompt so far. A lone output shares the request's statistics and times,
        which grow until the request ends.

        Args:
            requests: those of the prompt that have something new.
        """
        first = requests[0]
        every = first.all_of_prompt
        owner = every[0]
        # With kind `DELTA`, the first output of the one that reports them has them.
        told = owner.num_streamed or (owner is not first and owner.streams_deltas)
        prompt_log_probs = [] if told else list(owner.prompt_log_probs)
        return cls(
            first.request_id,
            first.prompt,
            first.prompt_token_ids,
            [CompletionOutput.of(request) for request in requests],
            RequestStats.of_siblings([request.stats for request in every]),
            all(request.finished for request in every),
            prompt_log_probs or None,
            RequestMetrics.of_siblings([request.metrics for request in every]),
        )

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens found in the prefix cache; None before the request runs."""
        return self.stats.num_cached_tokens

    @property
    def error(self) -> str | None:
        """Message of the first error that ended an output: one line that names the request. None
        without an error."""
        return next((one.error for one in self.outputs if one.error is not None), None)


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
