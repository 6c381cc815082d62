"""Least squares for the input projection of heads that are copies of the base's last layers.

A head reads h_i and the embedding of t_{i+1}, and should come out where the base is one token later. Its layers are the
base's last ones already. What is left for `eh_proj` is to stand in for all layers before them: the linear map from the
head's two inputs to what enters those layers at i + 1. Some thousands of tokens tell it in closed form, without a
single step of training, and at every depth alike, since each depth hands on about the base's own next state.

Shape legend: s sequence, b batch, h hidden size, n tokens that count.
"""

from collections.abc import Iterable

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor, nn

from mtpkit.data import PackedBatch
from mtpkit.model import SequenceInput, base_forward, embed

RIDGE = 1e-2
"""Penalty on the weights, in units of the inputs' mean square."""


@torch.no_grad()
def fit_input_projection(model: HybridModel, batches: Iterable[PackedBatch]) -> float:
    """Set every head's `eh_proj` to the ridge regression onto what enters the copied layers one token later.

    All ranks must be given the same batches.

    Returns:
        The share of the target's square that the regression explains on these batches, at most 1.
    """
    sums: tuple[Tensor, ...] | None = None  # over tokens: x^T x, x^T y and y^T y
    for batch in batches:
        x, y = (part.double() for part in _pairs(model, batch))
        parts = (x.t() @ x, x.t() @ y, y.square().sum())
        sums = parts if sums is None else tuple(a + b for a, b in zip(sums, parts, strict=True))
    assert sums is not None, "no batch was given"
    inputs, targets, total = sums
    penalty = RIDGE * inputs.diagonal().mean() * torch.eye(len(inputs), dtype=inputs.dtype, device=inputs.device)
    solution = torch.linalg.solve(inputs + penalty, targets)  # [2h, h]
    for head in model.mtp.layers:
        head.eh_proj.weight.copy_(_own_rows(solution.t(), head.eh_proj.weight, model))
    return float((solution * (2 * targets - inputs @ solution)).sum() / total)


def _pairs(model: HybridModel, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """What a head reads [n, 2h], and what should enter its layers [n, h], wherever both are of one document."""
    head = model.mtp.layers[0]
    hidden, residual = _run_base(model, batch)
    x = torch.cat([head.enorm(embed(model, batch.token_ids[:, 1:])), head.hnorm(hidden[:-1])], -1)
    same = (batch.documents[:, 1:] == batch.documents[:, :-1]).t()
    return x[same], residual[1:][same]


def _run_base(model: HybridModel, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """The base's hidden states, and its last residual stream less what the copied layers added to it, [s, b, h]."""
    config, added = model.mtpkit_config, {}

    def note(module: nn.Module, args: tuple, kwargs: dict, output: Tensor | tuple) -> None:
        before = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        after = output[0] if isinstance(output, tuple) else output
        added[module] = before if module is model.decoder.final_norm else before - after

    copied = {config.pattern.rindex(letter) for letter in config.mtp_pattern}
    modules = [model.decoder.final_norm, *(model.decoder.layers[index] for index in copied)]
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    try:
        hidden = base_forward(model, batch.token_ids, SequenceInput(batch.documents, batch.positions))
    finally:
        for hook in hooks:
            hook.remove()
    return hidden, torch.stack(list(added.values())).sum(0)


def _own_rows(weight: Tensor, local: Tensor, model: HybridModel) -> Tensor:
    """This tensor-parallel rank's rows of a whole weight [h, 2h], of which `local` is its part."""
    return weight.chunk(weight.shape[0] // local.shape[0])[model.pg_collection.tp.rank()]
