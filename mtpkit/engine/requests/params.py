"""Sampling parameters: how the tokens of one request are chosen, and when the request ends."""

import math
from collections.abc import Iterator, Sequence, Set
from enum import Enum
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from mtpkit.config import LARGEST_COUNT
from mtpkit.config.checked import checked
from mtpkit.engine.requests.absent import SAMPLING_ARGUMENTS, answers_absent_fields
from mtpkit.engine.requests.log_probs import MOST_LOG_PROBS
from mtpkit.engine.requests.structured import StructuredOutputsParams
from mtpkit.engine.requests.token_limits import MOST_BIASED

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""

MOST_END_TOKENS = 16
"""Most end tokens per request that the device checks for; further ones are known to the host
alone."""

SEED_BITS = 63
"""Bits of the seed of a request without a seed of its own. Such seeds are drawn in the order of the
requests, from a generator with the engine's seed."""

_LARGEST = 3.4028234663852886e38
"""The largest float32: the device computes in float32, where larger numbers become infinite."""
_STOP = "a text or a list of texts or None"
_TOKENS = "a list of token ids of 0 or more or None"
_BIAS = "a dict of token ids and numbers or None"
_WORDS = "a list of texts or None"


def _finite(value: float) -> float:
    if abs(value) > _LARGEST:
        raise ValueError("must be a finite number")
    return value


def _unicode(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse lone surrogates, which tokenizers cannot encode."""
    if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
        raise ValueError("must be valid Unicode, without lone surrogates")
    return texts


def _sorted(value: Any) -> Any:
    # A set is no sequence to pydantic, and its order is arbitrary.
    return tuple(sorted(value)) if isinstance(value, Set) else value


class RequestOutputKind(Enum):
    """What the outputs of a request hold while it is unfinished, when outputs are streamed."""

    CUMULATIVE = 0
    """All tokens and the whole text so far."""
    DELTA = 1
    """The tokens and the text that are new since the output before."""
    FINAL_ONLY = 2
    """There is one output, when the request has ended."""


Number = Annotated[float, AfterValidator(_finite)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


@answers_absent_fields(SAMPLING_ARGUMENTS)
@checked("sampling parameters")
class SamplingParams:
    """Rules by which the tokens of a request are chosen and the request ends. Names and defaults
    are vLLM's.

    Raises:
        UserError: values out of range; the message names all of them.
    """

    n: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] = 1
    """Outputs per prompt, at most `max_num_seqs`. Output i has the seed plus i. Where the prefix
    cache is on, the prompt is computed once."""
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = 16
    """Most tokens to generate for each prompt; None: as many as `max_model_len` leaves room for. An
    output that reaches either bound ends with finish reason "length"."""
    temperature: Annotated[Number, Field(ge=0)] = 1.0
    """Temperature of sampling. 0, or a value below 1e-5, is greedy: always the most likely
    token."""
    top_k: int = 0
    """Draw from the k most likely tokens; 0 or -1: from all."""
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Draw from the smallest set of most likely tokens whose probabilities add up to at least this;
    1: from all."""
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """Leave out tokens that are less likely than this share of the most likely token's
    probability."""
    seed: Seed | None = None
    """Seed of the random numbers. With a seed, the output depends only on the model, the prompt and
    these parameters; with `draft_sampling`, also on the heads and K. None: a seed is drawn from a
    generator with the engine's seed."""
    stop: str | Sequence[str] | None = Field(default=(), title=_STOP)
    """Text that ends the output and is not part of it. Give several as a list, or by repeating the
    option. The name of a special token stops where the token is generated."""
    stop_token_ids: Annotated[Sequence[int] | None, BeforeValidator(_sorted)] = Field(
        default=(), title=_TOKENS
    )
    """Tokens that end the output besides the end-of-sequence token; not part of the text. Give
    several as a list, or by repeating the option."""
    ignore_eos: bool = False
    """Generate until `max_tokens`, past end-of-sequence tokens."""
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    """Number subtracted from the logit of each token that occurs in the output."""
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    """Number subtracted from a token's logit once per occurrence of the token in the output."""
    repetition_penalty: Annotated[Number, Field(gt=0)] = 1.0
    """Factor that divides the positive logits, and multiplies the negative ones, of tokens in
    prompt and output; 1: no penalty."""
    min_tokens: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] = 0
    """Fewest tokens to generate before an end-of-sequence token, one of `stop_token_ids` or a stop
    string may end the output."""
    logit_bias: dict[int, float] | None = Field(default=None, title=_BIAS)
    """Numbers from -100 to 100 that are added to the logits of tokens, by token id; numbers beyond
    are clamped."""
    allowed_token_ids: Annotated[Sequence[int] | None, BeforeValidator(_sorted)] = Field(
        default=None, title=_TOKENS
    )
    """Tokens to choose from; None: all. Tokens that end the output are not allowed unless they are
    in the list."""
    bad_words: Sequence[str] | None = Field(default=None, title=_WORDS)
    """Texts that the output does not contain: the last token of such a text is not chosen after the
    others. As in vLLM, only the tokens that the tokenizer makes of the text count, with and without
    a space before it."""
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOG_PROBS)] | None = None
    """Number of most probable tokens per output token whose log-probabilities outputs hold, besides
    that of the token itself; None: none at all. `logprobs_mode` of the LLM says which
    probabilities these are."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOG_PROBS)] | None = None
    """The same for the tokens of the prompt but the first, always with the model's own
    probabilities; None: none. The prompt is then computed whole, whatever the prefix cache holds of
    it."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the text of the output must be, such as JSON that follows a schema."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What streamed outputs hold. `LLM.generate`, which does not stream, returns whole outputs,
    whatever this is."""
    include_stop_str_in_output: bool = False
    """Let the text end with the stop string, or the token, that ended the output."""
    detokenize: bool = True
    """Make texts of the outputs. Without texts there are no stop strings."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text. Otherwise a stop string may contain their names."""
    truncate_prompt_tokens: int | None = None
    """Keep this number of tokens of a longer prompt, its last ones. -1: as many as leave room for
    one token of output in `max_model_len`. None: all."""
    speculate: bool = True
    """Verify drafts. Without them, every step adds one token to the output, which stays the same
    (with `draft_sampling`: becomes that of K = 0), and acceptance rates do not count the
    request."""
    speculative_budget: bool = True
    """Let the engine verify fewer drafts of this request than of others, where it does so, see
    `speculative_budget` of `LLM`."""

    @field_validator("top_k")
    @classmethod
    def _check_top_k(cls, top_k: int) -> int:
        if not -1 <= top_k <= LARGEST_COUNT:
            raise ValueError(f"must be from 1 to {LARGEST_COUNT}, or 0 or -1 to turn it off")
        return top_k

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _check_truncation(cls, tokens: int | None) -> int | None:
        if tokens is not None and not (tokens == -1 or 1 <= tokens <= LARGEST_COUNT):
            raise ValueError(
                f"must be from 1 to {LARGEST_COUNT}, or -1 for as many as max_model_len allows"
            )
        return tokens

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | Sequence[str] | None) -> tuple[str, ...]:
        if stop == "" or ("" in (stop or ()) and not isinstance(stop, str)):
            raise ValueError("must not have an empty string")
        return _unicode((stop,) if isinstance(stop, str) else tuple(stop or ()))

    @field_validator("stop_token_ids")
    @classmethod
    def _check_stop_token_ids(cls, tokens: Sequence[int] | None) -> tuple[int, ...]:
        if any(token < 0 for token in tokens or ()):
            raise ValueError(f"must be {_TOKENS}")
        return tuple(tokens or ())

    @field_validator("logit_bias")
    @classmethod
    def _check_logit_bias(cls, bias: dict[int, float] | None) -> dict[int, float] | None:
        if any(token < 0 or math.isnan(value) for token, value in (bias or {}).items()):
            raise ValueError(f"must be {_BIAS}")
        if bias and len(bias) > MOST_BIASED:
            raise ValueError(f"must have at most {MOST_BIASED} tokens")
        clamped = {token: max(-100.0, min(100.0, value)) for token, value in (bias or {}).items()}
        return clamped or None

    @field_validator("allowed_token_ids")
    @classmethod
    def _check_allowed(cls, tokens: Sequence[int] | None) -> tuple[int, ...] | None:
        if tokens is None:
            return None
        if not tokens or any(token < 0 for token in tokens):
            raise ValueError("must be a list of one or more token ids of 0 or more, or None")
        return tuple(tokens)

    @field_validator("bad_words")
    @classmethod
    def _check_bad_words(cls, words: Sequence[str] | None) -> tuple[str, ...] | None:
        if any(not word.strip() for word in words or ()):
            raise ValueError("must not have an empty text")
        return _unicode(tuple(words or ())) or None

    def problems(self) -> Iterator[str]:
        """Yield a clause for values that do not go together."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            yield f"min_tokens is {self.min_tokens}, must be at most max_tokens {self.max_tokens}"
        if self.stop and not self.detokenize:
            yield "stop needs the text: leave detokenize at True, or use stop_token_ids"

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return tuple(self.stop or ())

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_token_rules(self) -> bool:
        """Whether single tokens are biased, or forbidden anywhere."""
        rules = (self.logit_bias, self.allowed_token_ids, self.bad_words)
        return bool(self.min_tokens) or any(rule is not None for rule in rules)

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes the distribution."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1


NOT_OPTIONS = (
    "n",
    "output_kind",
    "logit_bias",
    "allowed_token_ids",
    "logprobs",
    "prompt_logprobs",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "truncate_prompt_tokens",
    "structured_outputs",
    "speculate",
    "speculative_budget",
)
"""Fields that commands have no options for."""

COMMAND_DEFAULTS = SamplingParams(temperature=0.0, max_tokens=128, seed=0)
"""Defaults of commands: greedy, so that runs can be compared, and long enough to show acceptance.
In Python, `SamplingParams` keeps vLLM's defaults."""
