"""Depthwise causal convolution with silu, as Mamba2 uses it before its scan."""

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None = None, initial: Tensor | None = None
) -> Tensor:
    """Convolve whole sequences.

    Args:
        x: [b, s, c].
        weight: [c, 1, w]; tap w - 1 multiplies the current token.
        bias: [c] or None.
        documents: [b, s] int; taps that reach into another document read zero. None: one document a row.
        initial: [b, c, w - 1], the inputs before x. None: zeros.

    Returns:
        silu of the convolution, [b, s, c], dtype of x.
    """
    width = weight.shape[-1]
    padded = F.pad(x.transpose(1, 2), (width - 1, 0)) if initial is None else torch.cat([initial.to(x), x.transpose(1, 2)], -1)
    if documents is None:
        return F.silu(F.conv1d(padded, weight, bias, groups=weight.shape[0])).transpose(1, 2)
    length = x.shape[1]
    out = padded[..., width - 1 :] * weight[:, 0, -1, None]
    # A document index that no token has marks the positions before the row, unless they continue its first document.
    before = documents[:, :1] if initial is not None else torch.full_like(documents[:, :1], -1)
    padded_documents = torch.cat([before.expand(-1, width - 1), documents], 1)
    for lag in range(1, width):
        start = width - 1 - lag
        same = padded_documents[:, start : start + length] == documents
        out = out + padded[..., start : start + length] * weight[:, 0, start, None] * same[:, None]
    return F.silu(out if bias is None else out + bias[:, None]).transpose(1, 2)


def causal_conv1d_update(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, committed: Tensor
) -> Tensor:
    """Convolve the next tokens of R rows and slide their windows.

    With w the kernel width and T new tokens, `state` holds the inputs that the rows' last step left behind; the window of
    row r is its columns committed[r] .. committed[r] + w - 2. It is replaced by window and new inputs, less the oldest
    column, so that whichever new token is accepted last, its window is again an index into `state`.

    Args:
        x: [R, T, c].
        state: [slots, c, at least w - 2 + T], updated in place at `slots`.
        weight: [c, 1, w]; bias: [c] or None.
        slots: [R] int64; committed: [R] int64.

    Returns:
        silu of the convolution, [R, T, c], dtype of x.

    Example, w = 4, T = 3, window a b c, new tokens x y z: state becomes b c x y z; if y is the last token accepted
    (committed = 1) the next window is c x y.
    """
    width, tokens = weight.shape[-1], x.shape[1]
    columns = committed[:, None] + torch.arange(width - 1, device=x.device)
    window = state[slots].gather(2, columns[:, None].expand(-1, state.shape[1], -1)).to(x)
    inputs = torch.cat([window, x.transpose(1, 2)], -1)
    state[slots, :, : width - 2 + tokens] = inputs[..., 1:].to(state)
    return F.silu(F.conv1d(inputs, weight, bias, groups=weight.shape[0])).transpose(1, 2)
