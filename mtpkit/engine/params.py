"""What a user sets: how one request is sampled, and how the engine runs."""

from dataclasses import dataclass
from typing import Literal

from mtpkit.errors import UserError

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""


def _raise_problems(what: str, problems: list[str]) -> None:
    if problems:
        raise UserError(f"{what}: " + "; ".join(problems))


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
    """Output is a function of model, prompt, these parameters and the seed. None: drawn from the engine's seed."""
    stop: str | list[str] | tuple[str, ...] | None = None
    """Strings that end the output; they are not part of the text."""
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    """Tokens that end the output besides the end-of-sequence token; not part of the text."""
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _raise_problems("sampling parameters", self._problems())

    def _problems(self) -> list[str]:
        checks = [
            (self.n == 1, f"n is {self.n}, only 1 is served: repeat the prompt instead"),
            (
                isinstance(self.max_tokens, int) and self.max_tokens >= 1,
                f"max_tokens is {self.max_tokens}, must be a whole number of at least 1",
            ),
            (self.temperature >= 0, f"temperature is {self.temperature}, must be 0 (greedy) or more"),
            (self.top_k >= -1, f"top_k is {self.top_k}, must be positive, or 0 or -1 to turn it off"),
            (0 < self.top_p <= 1, f"top_p is {self.top_p}, must be in (0, 1]"),
            (0 <= self.min_p <= 1, f"min_p is {self.min_p}, must be in [0, 1]"),
            (all(self.stop_strings), "stop has an empty string, remove it"),
            (-2 <= self.presence_penalty <= 2, f"presence_penalty is {self.presence_penalty}, must be in [-2, 2]"),
            (-2 <= self.frequency_penalty <= 2, f"frequency_penalty is {self.frequency_penalty}, must be in [-2, 2]"),
            (self.repetition_penalty > 0, f"repetition_penalty is {self.repetition_penalty}, must be positive"),
        ]
        return [problem for good, problem in checks if not good]

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
    seed: int = 0

    def __post_init__(self) -> None:
        _raise_problems("engine", self._problems())

    def _problems(self) -> list[str]:
        k = self.num_speculative_tokens
        if k < 0:
            return [f"num_speculative_tokens is {k}, must be 0 (no drafts) or more"]
        positive = ("max_model_len", "block_size", "max_num_seqs")
        checks = [
            (getattr(self, name) >= 1, f"{name} is {getattr(self, name)}, must be at least 1") for name in positive
        ]
        checks += [
            (
                self.max_num_batched_tokens >= self.decode_width,
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be at least {self.decode_width}, "
                "the 1 + num_speculative_tokens of one request",
            ),
            (
                self.state_rollback in ("replay", "snapshot"),
                f"state_rollback is {self.state_rollback!r}, must be 'replay' or 'snapshot'",
            ),
        ]
        return [problem for good, problem in checks if not good]

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
