"""The memory plan, made before caches are allocated."""

from dataclasses import dataclass, replace

import psutil
import torch

from mtpkit.config import LARGEST_COUNT, ModelConfig
from mtpkit.engine.device.checkpoints import checkpoint_bytes
from mtpkit.engine.device.graphs import largest_step
from mtpkit.engine.ranks import Ranks
from mtpkit.engine.requests.config import EngineConfig
from mtpkit.engine.steps.device_state import DeviceState
from mtpkit.engine.steps.plan import NO_HEADS, HeadSpan
from mtpkit.errors import UserError
from mtpkit.model.kinds import kinds_in
from mtpkit.model.state import StateLayout

_CPU_CACHE_BYTES = 4 << 30
"""Limit of the caches on a CPU if `num_blocks` is not given."""
_CHECKPOINTS = 2
"""Checkpoints of the prefix cache for each request that may run: the end of a prompt, and that of
its output."""
_LEAST_CHECKPOINTS = 16
"""Least number of checkpoints by default, if there is memory for them: with fewer, those that one
request leaves would evict those that the next could use."""
_CHECKPOINTS_SHARE = 10
"""By default, checkpoints may take all memory that requests of full length leave, or one tenth of
what the fewest blocks leave if that is more."""
_LIVE_COPIES = 3
"""Number of the widest layer's activations that are live at once."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose. Weights are measured, activations and logits estimated, caches exact."""

    total: int
    """Memory of the device; 0 on a CPU, where only caches are limited."""
    in_use: int
    """Weights, and everything else that was on the device before the engine."""
    activations: int
    """Activations of the largest step, at `max_num_batched_tokens`, outside CUDA graphs. They
    include the copies of recurrent states that depths change, the distributions that drafts are
    drawn from, the hidden states that pipeline stages exchange, and the largest quantised matrix in
    the activations' dtype, if products widen it."""
    graphs: int
    """Private memory of the CUDA graphs: the activations of the largest captured step."""
    slot_bytes: int
    """Recurrent state, convolution windows and rings of one request, and its share of
    `DeviceState`."""
    ring_bytes: int
    """The part of `slot_bytes` that rings take."""
    max_num_seqs: int
    max_model_len: int
    block_bytes: int
    num_blocks: int
    block_size: int
    lookahead: int
    window: int
    """See `EngineConfig.window`."""
    checkpoint_bytes: int
    """One checkpoint of the prefix cache."""
    num_checkpoints: int
    draft_embedding: int
    """Part of `in_use`: the draft embedding on each rank of the last of several pipeline stages."""
    draft_head: int
    """Part of `in_use`: the copy of the lm_head's rows that drafts alone read, on each rank."""
    null_blocks: int
    """Blocks besides those of requests: 1 for the null rows of CUDA graphs, 0 without graphs."""

    @property
    def state_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slot_bytes * self.max_num_seqs

    @property
    def kv_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.block_bytes * (self.num_blocks + self.null_blocks)

    @property
    def prefix_bytes(self) -> int:
        """Bytes of all checkpoints."""
        return self.checkpoint_bytes * self.num_checkpoints

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a request of `tokens` tokens needs, with the lookahead of one step."""
        return -(-max(tokens + self.lookahead, self.window) // self.block_size)

    def requests_that_fit(self, tokens: int) -> int:
        """Number of requests of `tokens` tokens that can run at once."""
        if not self.block_bytes:
            return self.max_num_seqs
        return min(self.max_num_seqs, self.num_blocks // self.blocks_for(tokens))

    def __str__(self) -> str:
        def gb(value: int) -> str:
            return f"{value / 1e9:.2f} GB"

        lengths = sorted(
            {n for n in (512, 2048, 8192, 32768) if n < self.max_model_len} | {self.max_model_len}
        )
        fitting = ", ".join(f"{self.requests_that_fit(n)} of {n:,} tokens" for n in lengths)
        slots = (
            f"{self.max_num_seqs} x {self.slot_bytes / 1e6:.1f} MB, rings"
            f" {self.ring_bytes / 1e6:.1f} MB of it"
        )
        cache = ""
        if self.checkpoint_bytes:
            cache = (
                f"prefix cache {gb(self.prefix_bytes)} ({self.num_checkpoints} checkpoints x "
                f"{self.checkpoint_bytes / 1e6:.1f} MB), "
            )
        device = ""
        if self.total:
            device = f"device {gb(self.total)}: weights and other memory in use {gb(self.in_use)}, "
        if self.draft_embedding:
            size = f"{self.draft_embedding / 1e6:.1f} MB"
            device += f"of it a draft embedding of {size} on the last stage, "
        if self.draft_head:
            device += f"of it an lm_head for drafts of {self.draft_head / 1e6:.1f} MB, "
        return (
            f"memory plan: {device}activations {gb(self.activations)}, graphs {gb(self.graphs)},"
            f" state {gb(self.state_bytes)} ({slots}), {cache}keys and values {gb(self.kv_bytes)}"
            f" ({self.num_blocks} blocks of {self.block_size} tokens); requests that fit at once:"
            f" {fitting}"
        )


def plan_memory(
    model: ModelConfig,
    layout: StateLayout,
    config: EngineConfig,
    device: torch.device,
    utilization: float,
    num_blocks: int | None = None,
    span: HeadSpan = NO_HEADS,
    prefix_bytes: int | None = None,
    ranks: Ranks | None = None,
    draft_embedding: int = 0,
    draft_head: int = 0,
    widened: int = 0,
) -> MemoryPlan:
    """Divide the memory that the loaded weights leave free. Each rank plans its own memory; the
    numbers of blocks and checkpoints are those of the rank with the fewest.

    Args:
        num_blocks: number of blocks; None: enough for `max_num_seqs` requests of full length, with
            the prefix cache for twice as many, or as many as fit.
        span: see `Drafter.span`.
        prefix_bytes: bytes of the checkpoints of the prefix cache, if it is enabled; None:
            `_CHECKPOINTS` for each request, within the limit of `_CHECKPOINTS_SHARE`.
        draft_embedding: see `draft_embedding_bytes`.
        draft_head: see `Drafter.head_bytes`.
        widened: see `widened_bytes`.

    Raises:
        UserError: `num_blocks`, or one request of full length, does not fit; the message has the
            numbers and what to change.
    """
    ranks = ranks or Ranks()
    vocabulary = ranks.vocabulary(model.vocab_size)
    # Distinct heads run over a window that is longer than the step, see `DistinctDrafter`.
    again = config.max_num_seqs * (span.before + config.decode_width) if span.before else 0
    tokens = config.max_num_batched_tokens
    logit_rows = config.max_num_seqs * (1 + config.decode_width)
    rows = config.max_num_seqs
    if config.graphs:
        # Null rows pad a captured step, so that it may be larger than any plan.
        tokens, logit_rows, rows = largest_step(config)
    logits = logit_rows * vocabulary.width
    activations = _activation_bytes(
        model, layout.sizes.dtype, tokens + again, logits, ranks.tensor_size
    )
    activations += rows * _draft_bytes(vocabulary.width, layout, config, span)
    activations += widened
    transfers = ranks.stage.copies * tokens * model.hidden_size * layout.sizes.dtype.itemsize
    graphs = activations if config.graphs else 0  # a graph is warmed up outside its private memory
    total, in_use = _device_bytes(device)
    if total:
        available = int(total * utilization) - in_use - activations - transfers - graphs
    else:
        available = _CPU_CACHE_BYTES if num_blocks is None else psutil.virtual_memory().available
    # The state of one slot on device meta has the exact bytes, without a second list of tensors.
    meta = torch.device("meta")
    sizes = layout.sizes
    hidden_size = model.hidden_size if ranks.stage.last else 0
    state = DeviceState.allocate(
        1, config, vocabulary, meta, layout.counters, span, sizes.dtype, hidden_size
    )

    plan = MemoryPlan(
        total=total,
        in_use=in_use,
        activations=activations + transfers,
        graphs=graphs,
        slot_bytes=layout.slot_bytes + sum(tensor.nbytes for tensor in state.tensors),
        ring_bytes=layout.ring_bytes,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        block_bytes=layout.block_bytes,
        num_blocks=num_blocks or 0,
        block_size=config.block_size,
        lookahead=config.lookahead,
        window=config.window,
        checkpoint_bytes=_checkpoint_bytes(layout, config, state),
        num_checkpoints=0,
        draft_embedding=ranks.all_reduce_max(draft_embedding),
        draft_head=ranks.all_reduce_max(draft_head),
        null_blocks=int(config.graphs),
    )
    # Allocators on all ranks must hand out the same blocks and checkpoints, so that the rank with
    # the least room decides.
    if config.enable_prefix_caching:
        plan = replace(
            plan,
            num_checkpoints=ranks.all_reduce_min(
                _checkpoints(plan, available, num_blocks, prefix_bytes)
            ),
        )
    fitting = (available - plan.state_bytes - plan.prefix_bytes) // max(
        1, layout.block_bytes
    ) - config.graphs
    return replace(
        plan, num_blocks=ranks.all_reduce_min(_blocks(plan, fitting, available, num_blocks))
    )


def _checkpoint_bytes(layout: StateLayout, config: EngineConfig, state: DeviceState) -> int:
    """Bytes of a checkpoint of the prefix cache; 0 without the cache."""
    if not config.enable_prefix_caching:
        return 0
    kept = list(vars(state.earlier).values()) if state.earlier else []
    return checkpoint_bytes(layout, getattr(torch, config.prefix_cache_dtype), kept)


def _checkpoints(
    plan: MemoryPlan, available: int, num_blocks: int | None, prefix_bytes: int | None
) -> int:
    """Number of prefix cache checkpoints that a rank has room for; see `plan_memory`. By default
    they leave room for the fewest blocks that must fit."""
    if prefix_bytes is None:
        least = num_blocks or plan.blocks_for(plan.max_model_len)
        useful = num_blocks or _useful_blocks(plan, cached=False)
        rest = available - plan.state_bytes - plan.null_blocks * plan.block_bytes
        if not plan.total:  # all free memory of the host, which other processes use, too
            rest = min(rest, least * plan.block_bytes + _CPU_CACHE_BYTES)
        prefix_bytes = max(
            0,
            rest - useful * plan.block_bytes,
            (rest - least * plan.block_bytes) // _CHECKPOINTS_SHARE,
        )
        most = max(_LEAST_CHECKPOINTS, _CHECKPOINTS * plan.max_num_seqs)
    else:
        most = LARGEST_COUNT
    # The checkpoints of a stage without recurrent layers take no memory.
    return min(most, prefix_bytes // plan.checkpoint_bytes) if plan.checkpoint_bytes else most


def _device_bytes(device: torch.device) -> tuple[int, int]:
    """Total memory of a GPU, and the part in use; what torch reserves without using it counts as
    free. CPU: (0, 0)."""
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    # What torch has reserved and does not use can still be allocated by this process.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return total, total - free


def _blocks(plan: MemoryPlan, fitting: int, available: int, num_blocks: int | None) -> int:
    """The number of blocks: `num_blocks` if given, else those that are useful, or fewer if fewer
    fit.

    Raises:
        UserError: the blocks do not fit; see `plan_memory`.
    """
    one = plan.blocks_for(plan.max_model_len)
    least = one
    name = "max_model_len"
    what = f"one request of max_model_len {plan.max_model_len} needs"
    if num_blocks is not None:
        least = num_blocks
        name = "num_blocks"
        what = f"num_blocks {num_blocks} needs"
    if fitting < least:
        cache = (
            f", prefix_cache_bytes {plan.prefix_bytes / 1e9:.2f} GB" if plan.prefix_bytes else ""
        )
        raise UserError(
            f"{available / 1e9:.2f} GB are left for caches; the state of {plan.max_num_seqs}"
            f" requests takes {plan.state_bytes / 1e9:.2f} GB{cache} and {what}"
            f" {least * plan.block_bytes / 1e9:.2f} GB: lower max_num_seqs, {name} or"
            " max_num_batched_tokens, or raise gpu_memory_utilization"
        )
    if num_blocks is not None:
        return num_blocks
    return min(fitting, _useful_blocks(plan, cached=plan.num_checkpoints > 0))


def _useful_blocks(plan: MemoryPlan, cached: bool) -> int:
    """Blocks for as many requests of full length as may run, and with a prefix cache for as many
    that have ended, from whose prompts others may go on."""
    running = plan.blocks_for(plan.max_model_len) * plan.max_num_seqs
    return 2 * running if cached else running


def _draft_bytes(width: int, layout: StateLayout, config: EngineConfig, span: HeadSpan) -> int:
    """Bytes that drafting takes per row besides activations. First, copies of the states that
    depths 2 .. K change (see `StepInput.continued`): one for a chain of a repeated head; for a tree
    one, and one more for each draft that gets children. Second, distributions of drafts in three
    places: as each is made, stacked, and under verification."""
    depths = config.num_speculative_tokens
    # Distinct heads run over known tokens, from committed states, and change no copy.
    copies = 0 if span.before else 1
    if config.tree:
        copies = 1 + config.tree.entries
    forked = layout.head_slot_bytes * copies if depths > 1 else 0
    return forked + 3 * config.draft_distributions * width * torch.float32.itemsize


def _activation_bytes(
    model: ModelConfig, dtype: torch.dtype, tokens: int, logits: int, ranks: int
) -> int:
    """Estimate the bytes of activations: `_LIVE_COPIES` of the widest layer's, which are divided by
    the ranks except for hidden states, and this rank's logits in the model's dtype and in fp32."""
    widest = max(kind.activations(model) for kind in kinds_in(model.letters)) // ranks
    hidden = (widest + 4 * model.hidden_size) * _LIVE_COPIES * dtype.itemsize
    return tokens * hidden + logits * (dtype.itemsize + 4)
