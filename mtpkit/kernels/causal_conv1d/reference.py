"""Depthwise causal convolution followed by silu, as Mamba2 uses it before its scan."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    documents: Tensor | None = None,
    initial: Tensor | None = None,
) -> Tensor:
    """Convolve whole sequences.

    Args:
        x: [b, s, c].
        weight: [c, 1, w]; tap w - 1 multiplies the current token.
        bias: [c] or None.
        documents: [b, s] int; taps that reach into another document read zero. None: one document
            per row.
        initial: [b, c, w - 1], the inputs before x. None: zeros.

    Returns:
        silu of the convolution, [b, s, c], in the dtype of x.
    """
    width = weight.shape[-1]
    inputs = x.transpose(1, 2)
    padded = (
        F.pad(inputs, (width - 1, 0)) if initial is None else torch.cat([initial.to(x), inputs], -1)
    )
    out = F.conv1d(padded, weight, bias, groups=weight.shape[0])
    if documents is not None:
        out = _restart(out, padded, weight, bias, documents, continued=initial is not None)
    return F.silu(out).transpose(1, 2)


def _restart(
    out: Tensor,
    padded: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    documents: Tensor,
    continued: bool,
) -> Tensor:
    """Recompute out [b, c, s] in place at the few positions whose taps on padded [b, c, w - 1 + s]
    reach another document."""
    taps = weight.shape[-1]
    # The inputs before the row belong to its first document if it is continued, otherwise to none
    # of its documents.
    before = documents[:, :1] if continued else documents[:, :1] - 1
    around = torch.cat([before.expand(-1, taps - 1), documents], 1).unfold(1, taps, 1)  # [b, s, w]
    same = around == documents[..., None]
    rows, places = (~same).any(-1).nonzero(as_tuple=True)
    if not len(rows):
        return out
    columns = places[:, None] + torch.arange(taps, device=out.device)
    windows = padded.transpose(1, 2)[rows[:, None], columns]  # [n, w, c]
    values = (windows * same[rows, places, :, None] * weight[:, 0].t()).sum(1)
    out[rows, :, places] = (values if bias is None else values + bias).to(out.dtype)
    return out


def causal_conv1d_varlen(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor,
    windows: Tensor | None = None,
    slots: Tensor | None = None,
    context_lens: Tensor | None = None,
) -> Tensor:
    """Convolve R concatenated rows, each after a window of its earlier inputs, and replace that
    window by the row's next one.

    With w the kernel width, row r continues windows[slots[r]] if context_lens[r] > 0. Otherwise it
    starts from zeros, and the old contents of its slot are ignored. Afterwards the slot holds the
    row's last w - 1 inputs; for a row of fewer tokens, these include inputs from before the row. No
    size depends on the contents of `starts`, so a CUDA graph can be captured.

    Args:
        x: [T, c]; may be a view of a larger tensor.
        weight: [c, 1, w]; bias: [c] or None.
        starts: [R + 1] int64, first token of each row and the end of the last row; x begins at
            token starts[0]. Rows may be empty: an empty row leaves its window unchanged, or sets it
            to zero if the row has no context.
        windows: [slots, w - 1, c], updated in place at `slots`; may be a view. None: every row
            starts from zeros, and no window is kept.
        slots, context_lens: [R] int64, needed with `windows`. A row at slot -1 is padding: it
            touches no window, and its outputs are zero.

    Returns:
        silu of the convolution [T, c], in the dtype of x.

    Example, w = 4, starts [7, 9, 12], context_lens [5, 0]: row 0 has the inputs d e after the
    window a b c; row 1 has the inputs x y z after zeros. The windows become c d e and x y z.
    """
    bounds = (starts - starts[0]).tolist()
    assert bounds[-1] == len(x), f"rows end at token {bounds[-1]} of {len(x)}"
    outputs = []
    taps = weight.shape[-1] - 1
    for row, (begin, end) in enumerate(pairwise(bounds)):
        part = x[begin:end]
        if windows is None:
            outputs.append(_convolve_row(part, weight, bias, x.new_zeros(taps, x.shape[1])))
            continue
        assert slots is not None and context_lens is not None
        if slots[row] < 0:
            outputs.append(torch.zeros_like(part))
            continue
        own = windows[slots[row]]
        continued = bool(context_lens[row] > 0)
        window = own.clone() if continued else torch.zeros_like(own)
        outputs.append(_convolve_row(part, weight, bias, window))
        own.copy_(torch.cat([window, part.to(window)])[len(part) :])
    return torch.cat(outputs)


def _convolve_row(x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor) -> Tensor:
    """silu of the convolution of x [s, c] after the inputs `window` [w - 1, c]; s may be 0."""
    return causal_conv1d(x[None], weight, bias, initial=window.t()[None])[0] if len(x) else x


def causal_conv1d_update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    committed: Tensor,
    parents: Tensor | None = None,
) -> Tensor:
    """Convolve the next T tokens of R rows and advance the rows' windows.

    With w the kernel width, `state` holds the inputs that each row's last step left. The window of
    row r consists of the state's columns committed[r] .. committed[r] + w - 2. The state is
    replaced by the window and the new inputs, without the oldest column: whichever new token is the
    last one accepted, the window that ends with it is then again a range of columns of `state`. If
    the new tokens are a tree, each is convolved with its ancestors; before the next step, the
    accepted path's inputs must be moved to adjacent columns.

    Args:
        x: [R, T, c]; may be a view of a larger tensor.
        state: [slots, at least w - 2 + T, c], updated in place at `slots`.
        weight: [c, 1, w]; bias: [c] or None.
        slots, committed: [R] int64. A row at slot -1 is padding: it touches no state, and its
            outputs are zero.
        parents: [R, T] int64, the token that each new token follows, see `kernels.ancestors`; None:
            a chain.

    Returns:
        silu of the convolution, [R, T, c], in the dtype of x.

    Example, w = 4, T = 3, window a b c, new tokens x y z: state becomes b c x y z. If y is the last
    token accepted (committed = 1), the next window is c x y.
    """
    if bool((slots < 0).any()):
        live = slots >= 0
        y = x.new_zeros(x.shape)
        own = None if parents is None else parents[live]
        y[live] = causal_conv1d_update(
            x[live], state, weight, bias, slots[live], committed[live], own
        )
        return y
    width = weight.shape[-1]
    tokens = x.shape[1]
    columns = committed[:, None] + torch.arange(width - 1, device=x.device)
    window = state[slots[:, None], columns].to(x)
    inputs = torch.cat([window, x], 1)  # [R, w - 1 + T, c]
    state[slots, : width - 2 + tokens] = inputs[:, 1:].to(state)
    # For a few tokens this is faster than conv1d.
    windows = (
        inputs.unfold(1, width, 1) if parents is None else _windows_of_paths(inputs, parents, width)
    )
    out = (windows * weight[:, 0]).sum(-1)
    return F.silu(out if bias is None else out + bias)


def _windows_of_paths(inputs: Tensor, parents: Tensor, width: int) -> Tensor:
    """Gather from inputs [R, width - 1 + T, c] the last `width` inputs along the path to each of T
    tokens: [R, T, c, width]."""
    at = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    columns: list[Tensor] = []
    for _ in range(width):
        columns.insert(0, at + width - 1)
        at = torch.where(at >= 0, parents.gather(1, at.clamp_min(0)), at - 1)
    rows = torch.arange(len(inputs), device=inputs.device)[:, None, None]
    return inputs[rows, torch.stack(columns, -1)].transpose(2, 3)
