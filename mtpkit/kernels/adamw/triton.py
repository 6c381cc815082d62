"""AdamW in one pass over gradient, weights and moments.

torch's fused AdamW rounds otherwise, and would need a second pass to put the new weights in the
gradient's place, from where ranks gather them.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
NUM_WARPS = 8


@triton.jit
def _adamw_kernel(
    grad,
    master,
    exp_avg,
    exp_avg_sq,
    size,
    shrink,
    rate,
    gain1,
    beta2,
    gain2,
    root,
    eps,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    weight = tl.load(master + place, mask=mask)
    first = tl.load(exp_avg + place, mask=mask)
    second = tl.load(exp_avg_sq + place, mask=mask)
    slope = tl.load(grad + place, mask=mask)
    first += (slope - first) * gain1
    second = second * beta2 + slope * slope * gain2
    weight -= shrink * weight
    # Triton's own `/` and sqrt are approximations in fp32.
    weight -= rate * tl.div_rn(first, tl.div_rn(tl.sqrt_rn(second), root) + eps)
    tl.store(exp_avg + place, first, mask=mask)
    tl.store(exp_avg_sq + place, second, mask=mask)
    tl.store(master + place, weight, mask=mask)
    tl.store(grad + place, weight, mask=mask)


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
    """See the reference."""
    beta1, beta2 = betas
    _adamw_kernel[(triton.cdiv(len(grad), BLOCK),)](
        grad,
        master,
        exp_avg,
        exp_avg_sq,
        len(grad),
        lr * weight_decay,
        lr / (1 - beta1**step),
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        eps,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
