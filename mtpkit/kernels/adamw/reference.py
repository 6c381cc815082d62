"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) by torch's own function."""

import torch
from torch import Tensor
from torch.optim.adamw import adamw


def adamw_(
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update weights and moments in place, as update number `step` (1 is the first); the new
    weights overwrite `grad`.

    Args:
        grad: [n] fp32.
        master, exp_avg, exp_avg_sq: [n] fp32, on the device of `grad`.
        betas: decay rates of the first and second moment.
        eps: added to the square root of the second moment.
        weight_decay: decoupled; multiplied by `lr`.
    """
    adamw(
        [master],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.tensor(step - 1.0)],  # torch adds 1
        foreach=False,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
    grad.copy_(master)
