"""Sampling parameters: how the tokens of one request are chosen, and when the request ends."""

from collections.abc import Sequence, Set
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from mtpkit.config import LARGEST_COUNT
from mtpkit.config.checked import checked
from mtpkit.engine.requests.absent import SAMPLING_ARGUMENTS, answers_absent_fields

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


def _finite(value: float) -> float:
    if abs(value) > _LARGEST:
        raise ValueError("must be a finite number")
    return value


def _sorted(value: Any) -> Any:
    # A set is no sequence to pydantic, and its order is arbitrary.
    return tuple(sorted(value)) if isinstance(value, Set) else value


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

    n: int = 1
    """Outputs per prompt; must be 1."""
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

    @field_validator("n")
    @classmethod
    def _check_n(cls, n: int) -> int:
        if n != 1:
            raise ValueError("must be 1: repeat the prompt instead")
        return n

    @field_validator("top_k")
    @classmethod
    def _check_top_k(cls, top_k: int) -> int:
        if not -1 <= top_k <= LARGEST_COUNT:
            raise ValueError(f"must be from 1 to {LARGEST_COUNT}, or 0 or -1 to turn it off")
        return top_k

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | Sequence[str] | None) -> tuple[str, ...]:
        if stop == "" or ("" in (stop or ()) and not isinstance(stop, str)):
            raise ValueError("must not have an empty string")
        return (stop,) if isinstance(stop, str) else tuple(stop or ())

    @field_validator("stop_token_ids")
    @classmethod
    def _check_stop_token_ids(cls, tokens: Sequence[int] | None) -> tuple[int, ...]:
        if any(token < 0 for token in tokens or ()):
            raise ValueError(f"must be {_TOKENS}")
        return tuple(tokens or ())

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return tuple(self.stop or ())

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes the distribution."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1


COMMAND_DEFAULTS = SamplingParams(temperature=0.0, max_tokens=128, seed=0)
"""Defaults of commands: greedy, so that runs can be compared, and long enough to show acceptance.
In Python, `SamplingParams` keeps vLLM's defaults."""
