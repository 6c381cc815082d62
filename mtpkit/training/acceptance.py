"""What a head's acceptance will be in serving, measured without an engine on text that the base wrote."""

import torch
from torch import Tensor

from mtpkit.errors import MtpkitError
from mtpkit.model import SequenceInput, base_forward, compute_logits, unroll_depths
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.mtp import DepthAttention
from mtpkit.training.depths import DepthSums


@torch.no_grad()
def served_acceptance(
    model: HybridModel, token_ids: Tensor, prompt_length: int, num_depths: int, attention: DepthAttention = "serving"
) -> DepthSums:
    """Drafts offered and accepted at the positions where greedy speculative decoding would start a step.

    A step that starts at p drafts t_{p+2} .. t_{p+K+1}; after n accepted drafts the next one starts at p + n + 1.
    Example, K = 2, a prompt of 3 tokens: the first step starts at p = 2, where t_3 is known from the prompt's own
    forward pass; if the draft of t_4 is right and that of t_5 is wrong, the base supplies t_5 and the next step starts
    at p = 4.

    Args:
        token_ids: [s], a prompt and what the base answers greedily.

    Returns:
        Sums over the steps whose K drafts all lie in the text, for `conditional_acceptance` and `acceptance_length`;
        its losses are 0.

    Raises:
        MtpkitError: logits where a step may start are not finite.
    """
    batch = token_ids[None]
    hidden = base_forward(model, batch, SequenceInput())
    starts = max(0, len(token_ids) - num_depths - 1)  # positions from 0 on whose K drafts lie in the text
    right = []
    for depth, states in enumerate(unroll_depths(model, hidden, batch, num_depths, attention), start=1):
        logits = compute_logits(model, states[:starts, 0])
        if not logits[prompt_length - 1 :].isfinite().all():
            raise MtpkitError(f"NaN or infinity in the logits of depth {depth}; look for it in the model's weights")
        drafts = logits.argmax(dim=-1)
        right.append((drafts == token_ids[depth + 1 : depth + 1 + starts]).tolist())
    sums = DepthSums.zero(num_depths, torch.device("cpu"))
    position = prompt_length - 1
    while position < starts:
        sums.values[1] += 1
        accepted = 0
        while accepted < num_depths:
            sums.values[2, accepted] += 1
            if not right[accepted][position]:
                break
            sums.values[3, accepted] += 1
            accepted += 1
        position += accepted + 1
    return sums
