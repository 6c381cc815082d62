"""One optimizer step over a global batch, and one evaluation."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from megatron.core.models.hybrid.hybrid_model import HybridModel

from mtpkit.data import PackedBatch
from mtpkit.training.config import TrainConfig
from mtpkit.training.depths import DepthSums, run_depths, select_targets
from mtpkit.training.loss import LossOptions
from mtpkit.training.mixing import HiddenMix
from mtpkit.training.optimizer import HeadOptimizer


def loss_options(config: TrainConfig) -> LossOptions:
    """What `head_losses` needs of the settings."""
    loss = config.loss
    return LossOptions(loss.kind, loss.temperature, loss.chunk_size, loss.top_k)


def train_step(
    model: HybridModel,
    batches: Sequence[PackedBatch],
    optimizer: HeadOptimizer,
    config: TrainConfig,
    lr: float,
    group: dist.ProcessGroup | None = None,
) -> tuple[DepthSums, float]:
    """Train on this rank's micro-batches of one global batch.

    The loss is the depth-weighted sum of each depth's mean over *all* its selected tokens, those of every micro-batch
    of every rank in `group`: however the tokens are spread, each counts the same.

    Returns:
        The sums over the global batch, and the gradient's norm before clipping.
    """
    num_depths = config.heads.num_depths
    selected = [select_targets(batch.loss_mask, batch.documents, num_depths) for batch in batches]
    tokens = torch.stack([mask.flatten(1).sum(dim=1) for mask in selected]).sum(dim=0)
    dist.all_reduce(tokens, group=group)
    weights = torch.tensor(config.depth_weights(), dtype=torch.float32, device=tokens.device)
    scale = weights / tokens.clamp(min=1)
    sums = DepthSums.zero(num_depths, tokens.device)
    mix = HiddenMix(config.loss.hidden_mix, config.loss.hidden_mix_kind) if config.loss.hidden_mix else None
    for batch in batches:
        losses, batch_sums = run_depths(model, batch, num_depths, config.heads.attention, loss_options(config), mix)
        (losses * scale).sum().backward()
        optimizer.accumulate()
        sums += batch_sums
    norm = optimizer.step(lr, group)
    return sums.all_reduce(group), norm


@torch.no_grad()
def evaluate(
    model: HybridModel, batches: Iterable[PackedBatch], config: TrainConfig, group: dist.ProcessGroup | None = None
) -> DepthSums:
    """Losses and acceptance on held-out batches, against the base's own greedy choice.

    The heads read the text's tokens (teacher forcing). On text that the base itself wrote greedily this is what the
    engine sees at each position.
    """
    sums = DepthSums.zero(config.heads.num_depths, next(model.parameters()).device)
    for batch in batches:
        num_depths, attention = config.heads.num_depths, config.heads.attention
        sums += run_depths(model, batch, num_depths, attention, loss_options(config))[1]
    return sums.all_reduce(group)
