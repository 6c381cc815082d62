"""Settings of the decode benchmark."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtpkit.bench.roofline import depth_rates
from mtpkit.engine import SamplingParams
from mtpkit.errors import raise_problems

NAME = "decode benchmark"
"""In messages."""


@dataclass(frozen=True)
class DecodeConfig:
    """What is measured.

    Raises:
        UserError: values that cannot be measured, all of them named.
    """

    batch_sizes: tuple[int, ...] = (1, 4, 16, 32, 64, 128)
    ks: tuple[int | Literal["auto"], ...] = (0, 1, 3)
    """Drafts a step; "auto": as the engine chooses."""
    prompt_len: int = 512
    """Of prompts of random tokens."""
    max_tokens: int = 256
    """Generated for each prompt."""
    acceptance: tuple[float, ...] | None = (0.85,)
    """Conditional acceptance of each depth, drawn by chance; the last one holds for all further depths. None: drafts
    are verified."""
    draft_vocab: Path | int | None = None
    """File of the tokens that drafts are chosen among, or how many of the first ones; None: all."""
    repeats: int = 3
    """Measurements, added up."""
    state_rollback: Literal["replay", "snapshot"] = "replay"
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    block_size: int = 16
    max_num_batched_tokens: int | None = None
    enforce_eager: bool = False
    """Decode without CUDA graphs."""
    presence_penalty: float = SamplingParams.presence_penalty
    frequency_penalty: float = SamplingParams.frequency_penalty
    repetition_penalty: float = SamplingParams.repetition_penalty
    """Of all requests."""
    trace: bool = True
    """On a GPU, decode once more after everything is timed, and trace kernels."""
    seed: int = 0

    def __post_init__(self) -> None:
        rates, vocab = self.acceptance or (1.0,), self.draft_vocab
        checks = [
            *((size >= 1, f"batch size is {size}, must be at least 1") for size in self.batch_sizes),
            *((k == "auto" or k >= 0, f"k is {k}, must be 0 (no drafts) or more, or auto") for k in self.ks),
            *((0 <= rate <= 1, f"acceptance is {rate}, must be in 0 .. 1") for rate in rates),
            (bool(self.batch_sizes and self.ks), "a batch size and a k are needed"),
            (self.prompt_len >= 1, f"prompt-len is {self.prompt_len}, must be at least 1"),
            (self.max_tokens >= 2, f"max-tokens is {self.max_tokens}, must be at least 2"),
            (self.repeats >= 1, f"repeats is {self.repeats}, must be at least 1"),
            (not isinstance(vocab, int) or vocab >= 1, f"draft vocabulary of {vocab} tokens, must be at least 1"),
        ]
        raise_problems(NAME, [problem for good, problem in checks if not good])
        assert self.sampling  # refuses penalties out of range

    @property
    def sampling(self) -> SamplingParams:
        """How all requests are sampled: greedily."""
        return SamplingParams(
            temperature=0,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
        )

    def rates(self, k: int) -> list[float] | None:
        """Synthetic acceptance of K depths."""
        return None if self.acceptance is None else depth_rates(self.acceptance, k)
