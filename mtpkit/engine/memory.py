"""Where the memory goes, decided before anything is allocated."""

from dataclasses import dataclass

import torch

from mtpkit.config import ModelConfig
from mtpkit.engine.params import EngineConfig
from mtpkit.engine.states import CacheLayout
from mtpkit.errors import UserError

_CPU_CACHE_BYTES = 4 << 30
"""What caches may take on a CPU when `num_blocks` is not given."""
_LIVE_COPIES = 3
"""Activations of the widest layer that are alive at once."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose. Weights are measured, activations estimated, caches exact."""

    total: int
    """Of the device; 0 on a CPU, where only caches are limited."""
    in_use: int
    """Weights, and whatever else was on the device before the engine."""
    activations: int
    """Largest step outside CUDA graphs, at `max_num_batched_tokens`."""
    graphs: int
    """Private memory of the CUDA graphs: the activations of the largest decode step."""
    slot_bytes: int
    """Recurrent state, convolution windows and rings of one request."""
    num_slots: int
    block_bytes: int
    num_blocks: int
    block_size: int
    lookahead: int

    @property
    def state_bytes(self) -> int:
        """All slots."""
        return self.slot_bytes * self.num_slots

    @property
    def kv_bytes(self) -> int:
        """All blocks."""
        return self.block_bytes * self.num_blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a request of `tokens` tokens needs, the room that a step reserves ahead included."""
        return -(-(tokens + self.lookahead) // self.block_size)

    def requests_that_fit(self, tokens: int) -> int:
        """How many requests of `tokens` tokens can run at once."""
        return min(self.num_slots, self.num_blocks // self.blocks_for(tokens)) if self.block_bytes else self.num_slots

    def __str__(self) -> str:
        def gb(value: int) -> str:
            return f"{value / 1e9:.2f} GB"

        lengths = ", ".join(f"{self.requests_that_fit(n)} of {n:,} tokens" for n in (512, 2048, 8192, 32768))
        device = f"device {gb(self.total)}: weights {gb(self.in_use)}, " if self.total else ""
        return (
            f"memory plan: {device}activations {gb(self.activations)}, graphs {gb(self.graphs)}, state "
            f"{gb(self.state_bytes)} ({self.num_slots} x {self.slot_bytes / 1e6:.1f} MB), keys and values "
            f"{gb(self.kv_bytes)} ({self.num_blocks} blocks of {self.block_size} tokens); requests that fit at once: "
            f"{lengths}"
        )


def plan_memory(
    model: ModelConfig,
    layout: CacheLayout,
    config: EngineConfig,
    device: torch.device,
    utilization: float,
    num_blocks: int | None = None,
) -> MemoryPlan:
    """Divide what the loaded weights leave of the device's memory.

    Args:
        num_blocks: as many blocks; None: enough for `max_num_seqs` requests of full length, or what fits.

    Raises:
        UserError: not even one request of full length fits, with the numbers and what to change.
    """
    if not 0 < utilization <= 1:
        raise UserError(f"gpu_memory_utilization is {utilization}, must be in (0, 1]")
    num_slots = config.max_num_seqs + config.graphs
    activations = _activation_bytes(model, layout.dtype, config.max_num_batched_tokens, config.max_num_seqs)
    decode_tokens = config.max_num_seqs * config.decode_width
    graphs = _activation_bytes(model, layout.dtype, decode_tokens, decode_tokens) if config.graphs else 0
    total = in_use = 0
    available = _CPU_CACHE_BYTES
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        in_use = total - free
        available = int(total * utilization) - in_use - activations - graphs
    plan = MemoryPlan(
        total,
        in_use,
        activations,
        graphs,
        layout.slot_bytes,
        num_slots,
        layout.block_bytes,
        num_blocks or 0,
        config.block_size,
        config.lookahead,
    )
    one = plan.blocks_for(config.max_model_len)
    fitting = (available - plan.state_bytes) // max(1, layout.block_bytes) - config.graphs
    if num_blocks is None and fitting < one:
        raise UserError(
            f"{available / 1e9:.2f} GB are left for caches; the state of {config.max_num_seqs} requests takes "
            f"{plan.state_bytes / 1e9:.2f} GB and one request of max_model_len {config.max_model_len} needs "
            f"{one * layout.block_bytes / 1e9:.2f} GB: lower max_num_seqs, max_model_len or max_num_batched_tokens, or "
            "raise gpu_memory_utilization"
        )
    blocks = min(fitting, one * config.max_num_seqs) if num_blocks is None else num_blocks
    return MemoryPlan(**vars(plan) | {"num_blocks": blocks})


def _activation_bytes(model: ModelConfig, dtype: torch.dtype, tokens: int, logit_rows: int) -> int:
    """An estimate: the widest layer's activations a few times over, and logits in the model's dtype and in fp32."""
    inner = model.mamba_num_heads * model.mamba_head_dim
    widest = max(
        2 * (model.ffn_hidden_size or 0),
        3 * inner + 4 * model.mamba_num_groups * model.mamba_state_dim,
        2 * model.moe_router_topk * (model.moe_ffn_hidden_size or 0) if model.num_moe_experts else 0,
        2 * model.num_attention_heads * model.kv_channels,
    )
    hidden = (widest + 4 * model.hidden_size) * _LIVE_COPIES * dtype.itemsize
    return tokens * hidden + logit_rows * model.vocab_size * (dtype.itemsize + 4)
