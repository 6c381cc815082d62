"""An optimizer step over a global batch."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from mtpkit.data.dataset import PackedBatch
from mtpkit.errors import MtpkitError
from mtpkit.model.hybrid import HybridModel
from mtpkit.platform import to_device
from mtpkit.training.config.settings import TrainConfig
from mtpkit.training.depths import DepthSums, HiddenMix, Selection, run_depths
from mtpkit.training.optimizer import HeadOptimizer
from mtpkit.training.parallel import stream_base


def train_step(
    model: HybridModel,
    batches: Sequence[PackedBatch],
    optimizer: HeadOptimizer,
    config: TrainConfig,
    lr: float,
    step: int = 0,
) -> tuple[DepthSums, float]:
    """Train on this rank's micro-batches of one global batch.

    The loss is a weighted sum over depths. Each depth's term is its mean loss over *all* its
    selected tokens, in every micro-batch on every data-parallel rank, so that each token counts the
    same, wherever it is.

    Returns:
        The sums over the global batch, and the gradient's norm before clipping. Both are zero on
        pipeline stages without heads, which do not wait for the last stage.

    Raises:
        MtpkitError: the gradient is not finite; nothing is updated. The caller checks the sums.
    """
    num_depths = config.heads.num_depths
    group = model.pg_collection.dp
    selections = [Selection.of(batch, num_depths) for batch in batches]
    tokens = torch.stack([selection.mask.sum(dim=1) for selection in selections]).sum(dim=0)
    dist.all_reduce(tokens, group=group)
    # Tokens of the whole global batch are counted before the first loss, so that each micro-batch
    # can add its share of the mean to the gradients at once.
    weights = to_device(config.loss.weights(num_depths), torch.float32, tokens.device)
    scale = weights / tokens.clamp(min=1)
    sums = DepthSums.zero(num_depths, tokens.device)
    attention = config.heads.attention
    options = config.loss
    # The number of this rank's first sequence in the global batch, as in `PackedLoader`.
    first = dist.get_rank(group) * sum(len(batch.token_ids) for batch in batches)
    # Stages without heads take part in the stream, which yields no batches there.
    for (batch, hidden), selection in zip(stream_base(model, batches), selections, strict=False):
        mix = _hidden_mix(model, config, step, range(first, first := first + len(batch.token_ids)))
        losses, batch_sums = run_depths(
            model,
            batch,
            num_depths,
            attention,
            options,
            mix,
            hidden,
            config.heads.recompute,
            selection,
        )
        (losses * scale).sum().backward()  # into the optimizer's fp32 gradients
        sums += batch_sums
    # A gradient that is not finite is no more than a symptom: the sums say in which depth it began.
    try:
        norm = optimizer.step(lr)
    except MtpkitError as error:
        found = sums.all_reduce(group).not_finite()
        raise MtpkitError(
            f"step {step + 1}: {f'NaN or infinity in {found}; ' * bool(found)}{error}"
        ) from error
    return sums.all_reduce(group), norm


def _hidden_mix(
    model: HybridModel, config: TrainConfig, step: int, sequences: range
) -> HiddenMix | None:
    """The mix for a micro-batch; `sequences` are the numbers of its sequences in the step's global
    batch.

    The random draws depend only on the seed, the step and the number of the sequence, so that a run
    resumes exactly, with any number of ranks and micro-batches.
    """
    loss = config.loss
    if not loss.hidden_mix:
        return None
    device = next(model.parameters()).device
    seeds = [
        np.random.SeedSequence([config.seed, step, n]).generate_state(1, np.uint64)
        for n in sequences
    ]
    generators = [torch.Generator(device).manual_seed(int(seed[0])) for seed in seeds]
    tensor = model.pg_collection.tp
    part = (tensor.rank(), tensor.size()) if model.config.sequence_parallel else (0, 1)
    return HiddenMix(loss.hidden_mix, loss.hidden_mix_kind, generators, part)
