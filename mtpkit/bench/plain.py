"""Decoded tokens beside one plain forward pass of the base, without caches, rewinds or graphs."""

from collections.abc import Sequence
from typing import Any

import torch

from mtpkit.errors import MtpkitError
from mtpkit.model import SequenceInput, base_forward, compute_logits

_NEAR_TIE = {torch.bfloat16: 0.25, torch.float32: 1e-3}
"""How far a token's logit may lie below the best one, in standard deviations of the logits there, by the precision that
is rounded to. Of 131,072 random logits all but a few lie further below; most by four deviations."""
_STRAYS = {torch.bfloat16: 0.05, torch.float32: 0.0}
"""Share of tokens that may lie further below: rounding may send one to another expert. What a cache or a rewind gets
wrong shows in more."""


@torch.inference_mode()
def check_greedy(
    model: Any,
    prompt: Sequence[int],
    tokens: Sequence[int],
    places: Sequence[int],
    precision: torch.dtype,
    near_tie: float = 1.0,
) -> None:
    """Refuse tokens that the base would not choose.

    Args:
        tokens: what follows `prompt`, decoded with temperature 0.
        places: indices of `tokens` that are the base's own choice; the others may be any.
        precision: the coarsest of weights, keys, values and state.
        near_tie: a bound below the precision's own, in standard deviations.

    Raises:
        MtpkitError: more than strays are neither the base's best token nor nearly as good.
    """
    if not places:
        return
    known = torch.tensor([[*prompt, *tokens]], device=next(model.parameters()).device)
    index = torch.tensor(list(places), device=known.device)
    before = len(prompt) + index - 1
    logits = compute_logits(model, base_forward(model, known, SequenceInput())[before, 0]).float()
    chosen = logits.gather(1, known[0, len(prompt) + index, None])[:, 0]
    gaps = (logits.amax(-1) - chosen) / logits.std(-1)
    wrong = int((gaps > min(near_tie, _NEAR_TIE[precision])).sum())
    if wrong > _STRAYS[precision] * len(index):
        worst = int(gaps.argmax())
        raise MtpkitError(
            f"{wrong} of {len(index)} tokens are not those of a plain forward pass: "
            f"number {int(index[worst])} of the output lies {float(gaps[worst]):.2f} standard deviations below the best"
        )
