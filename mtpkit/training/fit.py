"""Least squares for the input projection of heads that are copies of the base's last layers.

A head reads h_i and the embedding of t_{i+1}, and should give h_{i+1}. Its layers are copies of the
base's last layers, so `eh_proj` has to replace all earlier layers: it should map the head's two
inputs to the input of the copied layers at i + 1. A few thousand tokens give this linear map in
closed form. The map is the same for every depth, since each depth hands on approximately the base's
next state.

Shape legend: s sequence, b batch, h hidden size, n tokens in the fit.
"""

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from mtpkit.data.dataset import PackedBatch
from mtpkit.errors import MtpkitError
from mtpkit.model import (
    SequenceInput,
    base_forward,
    depth_embedding,
    gather_sequence,
    normed_states,
    shift_tokens,
)
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.stages import first_layer
from mtpkit.training.parallel import from_last_stage, own_rows, stream_base

RIDGE = 1e-2
"""Ridge penalty, in units of the mean square of the inputs."""


@torch.no_grad()
def fit_input_projection(model: HybridModel, batches: Iterable[PackedBatch]) -> float:
    """Set every head's `eh_proj` by ridge regression onto the input of the copied layers one token
    later.

    Collective; all ranks must be given the same batches.

    Returns:
        1 - (squared norm of the error) / (squared norm of the target) on these batches: 1 where the
        projection gives the copied layers exactly the inputs that they have in the base.

    Raises:
        MtpkitError: the base's states are not finite, or there is nothing to fit; raised on all
            ranks.
    """
    sums: tuple[Tensor, ...] | None = None  # over tokens: x^T x, x^T y and y^T y
    for batch, states in stream_base(model, batches, partial(_run_base, model), width=2):
        # fp64, since the sums square the condition number of the inputs.
        x, y = (part.double() for part in _pairs(model, batch, states))
        parts = (x.t() @ x, x.t() @ y, y.square().sum())
        sums = parts if sums is None else tuple(a + b for a, b in zip(sums, parts, strict=True))

    # The last stage has the heads. All stages learn the share, so that all raise if there is none.
    explained = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    if model.mtp_process:
        assert sums is not None, "no batch was given"
        explained += _solve(model, *sums)
    share = float(from_last_stage(model, explained))
    if not math.isfinite(share):
        raise MtpkitError(
            "the projection of the heads' inputs cannot be fitted: the base's states on the first"
            " training data hold NaN or infinity, or there is nothing to learn; look into its"
            " weights, or set heads.fit_tokens=0"
        )
    return share


def _solve(model: HybridModel, inputs: Tensor, targets: Tensor, total: Tensor) -> Tensor:
    """Set the projections from the sums over tokens; returns the explained share, NaN without a
    solution."""
    # A solver may raise on such sums, or return numbers that look sound.
    if not (inputs.isfinite().all() and targets.isfinite().all() and total > 0):
        return torch.full_like(total, torch.nan)

    identity = torch.eye(len(inputs), dtype=inputs.dtype, device=inputs.device)
    penalty = RIDGE * inputs.diagonal().mean() * identity
    solution = torch.linalg.solve(inputs + penalty, targets)  # [2h, h]
    for head in model.mtp.layers:
        head.eh_proj.weight.copy_(own_rows(solution.t(), head.eh_proj.weight, model))

    # The squared error is total - sum(solution * (2 x^T y - x^T x solution)).
    return (solution * (2 * targets - inputs @ solution)).sum() / total


def _pairs(model: HybridModel, batch: PackedBatch, states: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs of a head's projection [n, 2h] and its targets [n, h], both from the same document.

    Padding, which follows the last prediction target, is left out.
    """
    head = model.mtp.layers[0]
    inputs = SequenceInput(batch.documents, batch.positions)
    embedding = depth_embedding(model, shift_tokens(batch.token_ids, 1), inputs)
    embedding, hidden, residual = (gather_sequence(model, t) for t in (embedding, *states))
    # The last token of the sequence has no next one.
    x = torch.cat([head.enorm(embedding[:-1]), head.hnorm(hidden[:-1])], -1)

    # Real tokens are those up to the last prediction target.
    real = batch.loss_mask.flip(1).cumsum(1).flip(1) > 0
    same_document = batch.documents[:, 1:] == batch.documents[:, :-1]
    counts = (real[:, 1:] & same_document).t()
    return x[counts], residual[1:][counts]


def _run_base(model: HybridModel, batch: PackedBatch, received: Tensor | None = None) -> Tensor:
    """Run a pipeline stage; returns its hidden states and its part of the regression's target, [2,
    s, b, h].

    The target is the base's last residual stream minus the outputs that the copied layers added to
    it. Earlier stages hand on the negated sum of these outputs so far.
    """
    config = model.mtpkit_config
    final_norm = model.decoder.final_norm if model.post_process else None
    taken = []

    def note(module: nn.Module, args: tuple, kwargs: dict, output: Tensor | tuple) -> None:
        before = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        after = output[0] if isinstance(output, tuple) else output
        # The final norm reads the last residual stream; a layer adds `after - before` to it.
        taken.append(before if module is final_norm else before - after)

    if received is not None:
        hidden, so_far = received
        model.set_input_tensor(hidden)
        taken.append(so_far)

    # Each letter of a head's pattern is a copy of the base's last layer of that kind.
    copied = {config.pattern.rindex(letter) - first_layer(model) for letter in config.mtp.pattern}
    modules = [layer for number, layer in enumerate(model.decoder.layers) if number in copied]
    if final_norm is not None:
        modules.append(final_norm)

    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    try:
        inputs = SequenceInput(batch.documents, batch.positions, batch.document_lens)
        hidden = base_forward(model, batch.token_ids, inputs)
        if model.post_process:
            # so that the final norm's hook notes the stream, whichever state heads read
            normed_states(model, hidden)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([hidden, sum(taken, torch.zeros_like(hidden))])
