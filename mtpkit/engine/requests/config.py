"""Settings that an engine runs with, resolved from its options for a model.

Apart from the options, since commands need those for `--help`, and this only with an engine.
"""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from mtpkit.config.checked import checked, field_of
from mtpkit.engine.requests.options import (
    DEFAULT_BUDGET,
    Count,
    Drafts,
    EngineOptions,
    LLMOptions,
    Rollback,
    check_width,
)
from mtpkit.engine.requests.tree import DraftShape, DynamicTree, TokenTree, width_of

_TIMED_POSITION = 256
"""Beyond the places of any ring."""


@checked("engine")
class EngineConfig:
    """Resolved settings that an engine runs with."""

    max_model_len: Count
    """Most tokens of a prompt and its output together."""
    num_speculative_tokens: Drafts = 0
    """K, the most drafts per step; 0 decodes plainly."""
    tree: TokenTree | DynamicTree | None = None
    """Shape of the drafts, with K as its depth; None: a chain."""
    block_size: int = field_of(EngineOptions, "block_size")
    max_num_seqs: int = field_of(EngineOptions, "max_num_seqs")
    max_num_batched_tokens: Count = DEFAULT_BUDGET
    """Most tokens of a step; longer prompts are split over steps."""
    max_mixed_tokens: int = field_of(EngineOptions, "max_mixed_tokens")
    max_inter_token_latency: float | None = field_of(
        EngineOptions, "max_inter_token_latency", default=None
    )
    """Most seconds from one step of a request to its next, as far as shorter chunks can achieve
    this; None: on a GPU, a multiple of the time that decoding alone takes."""
    state_rollback: Rollback = field_of(EngineOptions, "state_rollback")
    enable_prefix_caching: bool = field_of(EngineOptions, "enable_prefix_caching", default=False)
    """Off by default, as there are no checkpoints by default."""
    num_checkpoints: Annotated[int, Field(ge=0)] = 0
    """Room for checkpoints of the prefix cache."""
    prefix_cache_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of recurrent state in checkpoints."""
    prefix_cache_interval: int = field_of(EngineOptions, "prefix_cache_interval")
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = field_of(
        LLMOptions, "logprobs_mode"
    )
    draft_sampling: bool = field_of(EngineOptions, "draft_sampling")
    async_scheduling: bool = False
    """Launch a step before the results of the last one are read."""
    num_batches: Count = 1
    """Number of batches that requests are divided into, one per pipeline stage. Each step belongs
    to one batch; the steps of the batches are planned and launched in turn, and follow one another
    through the stages."""
    graphs: bool = False
    """Replay steps as CUDA graphs."""
    seed: int | None = field_of(EngineOptions, "seed")

    _check_budget = field_validator("max_num_batched_tokens")(check_width)

    @property
    def drafts(self) -> DraftShape:
        """The most drafts of a decoding request: the tree, or else the longest chain."""
        return self.tree or self.num_speculative_tokens

    @property
    def decode_width(self) -> int:
        """Most tokens that a decoding request feeds in a step: its newest one and the drafts."""
        return width_of(self.drafts)

    @property
    def draft_distributions(self) -> int:
        """Number of distributions of a decoding request's drafts that one verification reads."""
        if not self.draft_sampling:
            return 0
        return (
            len(self.tree.expanded)
            if isinstance(self.tree, TokenTree)
            else self.num_speculative_tokens
        )

    @property
    def lookahead(self) -> int:
        """Cache positions beyond the committed ones that a decode step may write.

        1 + K tokens are verified; when all are accepted, K - 1 draft entries follow the newest one.
        For a tree, as many entries follow as there are drafts that get children.
        """
        if self.tree:
            return max(self.tree.tokens, 1 + self.num_speculative_tokens + self.tree.entries)
        return max(1, 2 * self.num_speculative_tokens)

    @property
    def window(self) -> int:
        """Cache positions from 0 on that a step may write however few are committed: distinct heads
        run over the tokens of a decode row and the K - 1 positions before them, and begin at
        position 0 where there are fewer."""
        return self.decode_width + max(0, self.num_speculative_tokens - 1)

    @property
    def timed_position(self) -> int:
        """The position of steps that are only timed, by which rings are full."""
        return min(_TIMED_POSITION, self.max_model_len // 2)

    def reach(self, committed: int) -> int:
        """Cache positions that the next decode step of a request may write, after this many
        committed ones."""
        return max(committed + self.lookahead, self.window)

    def blocks_for(self, positions: int) -> int:
        """Number of blocks that hold this many positions."""
        return -(-positions // self.block_size)
