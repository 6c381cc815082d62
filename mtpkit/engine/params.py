"""What a user sets: how one request is sampled, and how the engine runs."""

from dataclasses import dataclass
from typing import Any, Literal

from mtpkit.config import LARGEST_COUNT, MOST_DRAFTS
from mtpkit.engine.absent import SAMPLING_ARGUMENTS, answers_absent_fields
from mtpkit.engine.checks import (
    FLAG,
    Rule,
    at_least,
    choice,
    either,
    is_list_of,
    is_text,
    is_whole,
    number,
    plain,
    problems,
    whole,
    within,
)
from mtpkit.errors import raise_problems

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""

_SEED = within(-(2**63), 2**63 - 1)
_PENALTY = number("must be in [-2, 2]", lambda value: -2 <= value <= 2)
_STOP = Rule(
    "a text or a list of texts",
    lambda value: is_text(value) or is_list_of(is_text)(value),
    "must not have an empty string",
    lambda value: value != "" and all(value),
)
_TOKEN_IDS = Rule("a list of token ids of 0 or more", is_list_of(lambda value: is_whole(value) and value >= 0))

SAMPLING_RULES = {
    "n": whole("only 1 is served: repeat the prompt instead", lambda value: value == 1),
    "max_tokens": at_least(1),
    "temperature": number("must be 0 (greedy) or more", lambda value: value >= 0),
    "top_k": whole(
        f"must be from 1 to {LARGEST_COUNT}, or 0 or -1 to turn it off", lambda value: -1 <= value <= LARGEST_COUNT
    ),
    "top_p": number("must be in (0, 1]", lambda value: 0 < value <= 1),
    "min_p": number("must be in [0, 1]", lambda value: 0 <= value <= 1),
    "seed": either(None, _SEED),
    "stop": either(None, _STOP),
    "stop_token_ids": either(None, _TOKEN_IDS),
    "ignore_eos": FLAG,
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": number("must be positive", lambda value: value > 0),
}
"""Fields of `SamplingParams`."""

ENGINE_RULES = {
    "max_model_len": at_least(1),
    "num_speculative_tokens": within(0, MOST_DRAFTS),
    "block_size": at_least(1),
    "max_num_seqs": at_least(1),
    "max_num_batched_tokens": at_least(1),  # and at least what `decode_width` says
    "state_rollback": choice("replay", "snapshot"),
    "draft_sampling": FLAG,
    "async_scheduling": FLAG,
    "graphs": FLAG,
    "seed": either(None, _SEED),
}
"""Fields of `EngineConfig`."""


def _make_plain(config: Any, rules: dict[str, Rule]) -> None:
    """Give a frozen object's fields the types that they are declared with."""
    for name in rules:
        object.__setattr__(config, name, plain(getattr(config, name)))


@answers_absent_fields(SAMPLING_ARGUMENTS)
@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are chosen and when it ends. Names and defaults are vLLM's.

    Raises:
        UserError: values out of range, all of them named.
    """

    n: int = 1
    """Outputs a prompt; only 1."""
    max_tokens: int = 16
    temperature: float = 1.0
    """0 (or below 1e-5): greedy."""
    top_k: int = 0
    """0 or -1: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    """Tokens less likely than this share of the most likely one are left out."""
    seed: int | None = None
    """Output is a function of model, prompt, these parameters and the seed; where drafts are drawn
    (`draft_sampling`), of heads and K as well. None: drawn from the engine's seed."""
    stop: str | list[str] | tuple[str, ...] | None = None
    """Strings that end the output; they are not part of the text."""
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    """Tokens that end the output besides the end-of-sequence token; not part of the text."""
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        raise_problems("sampling parameters", problems(SAMPLING_RULES, vars(self)))
        _make_plain(self, SAMPLING_RULES)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else self.stop or ())
        object.__setattr__(self, "stop_token_ids", self.stop_token_ids or ())

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return tuple(self.stop or ())

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that were seen change the distribution."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs, all values resolved.

    Raises:
        UserError: values that cannot work, all of them named.
    """

    max_model_len: int
    """Longest prompt plus output of a request."""
    num_speculative_tokens: int = 0
    """K, drafts a step; 0 decodes plainly."""
    block_size: int = 16
    """Tokens whose keys and values share a block."""
    max_num_seqs: int = 64
    """Most requests that run at once; each holds a slot of recurrent state."""
    max_num_batched_tokens: int = 2048
    """Most tokens of a step; longer prompts are split over steps."""
    state_rollback: Literal["replay", "snapshot"] = "replay"
    """How recurrent state is taken back after a rejection."""
    draft_sampling: bool = False
    """Draw drafts from the head's distribution instead of taking its best token."""
    async_scheduling: bool = False
    """Launch a step before the results of the last one are looked at."""
    graphs: bool = False
    """Replay decode steps as CUDA graphs."""
    seed: int | None = 0
    """None: another one each time."""

    def __post_init__(self) -> None:
        found = problems(ENGINE_RULES, vars(self))
        budget, k = self.max_num_batched_tokens, self.num_speculative_tokens
        if is_whole(budget) and is_whole(k) and budget < self.decode_width:
            found.append(
                f"max_num_batched_tokens is {budget}, must be at least {self.decode_width}, "
                "the 1 + num_speculative_tokens of one request"
            )
        raise_problems("engine", found)
        _make_plain(self, ENGINE_RULES)

    @property
    def decode_width(self) -> int:
        """Tokens that a decoding request feeds in a step: its newest one and the drafts."""
        return 1 + self.num_speculative_tokens

    @property
    def lookahead(self) -> int:
        """Cache positions beyond the committed ones that a decode step may write.

        1 + K tokens are verified; when all are accepted, K - 1 draft entries follow the newest one.
        """
        return max(1, 2 * self.num_speculative_tokens)
