"""Activations of feed-forward layers."""

import inspect
from collections.abc import Iterator

from benchmarks.kernels.case import Case, Shapes, size
from benchmarks.kernels.cases.linears import fused
from benchmarks.kernels.cases.training import differentiated
from mtpkit.config.sections import MlpConfig
from mtpkit.kernels import activation as activations
from mtpkit.model.kinds import KINDS


def decode(shapes: Shapes) -> Iterator[Case]:
    """The activation of feed-forward layers, unless fc1 fuses it."""
    count = shapes.count
    width = shapes.config.mlp.ffn_hidden_size
    if shapes.config.mlp.activation == "swiglu":
        yield Case(
            activations.swiglu,
            f"[{count}, {2 * width}]",
            lambda: (shapes.normal(count, 2 * width),),
            lambda args: 1.5 * size(args[0]),
        )
    elif not any(
        "relu2" in fused(shapes, one) for one in KINDS[MlpConfig.letter].linears(shapes.config)
    ):
        yield Case(
            activations.relu2,
            f"[{count}, {width}]",
            lambda: (shapes.normal(count, width),),
            lambda args: 2 * size(args[0]),
        )


def heads(shapes: Shapes, length: int) -> Iterator[Case]:
    """The activation of feed-forward layers, and its backward."""
    config = shapes.config
    gated = config.mlp.activation == "swiglu"
    op = activations.swiglu if gated else activations.relu2
    width = config.mlp.ffn_hidden_size * (2 if gated else 1)
    yield Case(
        differentiated(op),
        f"[{length}, {width}], with backward",
        lambda: (shapes.normal(length, width),),
        # Input and output; then the input, its gradient and the output's.
        lambda args: size(args[0]) * (3 + 2 * config.mlp.ffn_hidden_size / width),
        name=f"{config.mlp.activation} training",
        reference=differentiated(inspect.unwrap(op)),
    )
