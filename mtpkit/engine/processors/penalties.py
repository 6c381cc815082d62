"""Presence, frequency and repetition penalties, as vLLM defines them."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from mtpkit.engine.params import SamplingParams
from mtpkit.engine.processors.base import Column, Columns, Processor
from mtpkit.engine.request import Request
from mtpkit.kernels import sampling as ops
from mtpkit.platform import to_device

_OFF = {"repetition": 1.0, "frequency": 0.0, "presence": 0.0}


class Penalties(Processor):
    """Presence and frequency look at the output, repetition at prompt and output; drafts before a position count.

    The device knows of each slot which tokens the prompt has and how often the output has them: 5 bytes per token of
    the vocabulary. They are allocated with the engine and stand in the memory plan, since CUDA graphs need them at one
    address. The rows of requests without penalties may hold anything.
    """

    name = "penalties"

    def columns(self, vocab_size: int) -> dict[str, Column]:
        """See `Processor.columns`."""
        numbers = {name: Column((), torch.float32, off) for name, off in _OFF.items()}
        prompt, output = Column((vocab_size,), torch.bool, 0), Column((vocab_size,), torch.int32, 0)
        return numbers | {"in_prompt": prompt, "output_counts": output}

    def used(self, params: SamplingParams, vocab_size: int) -> bool:
        """See `Processor.used`."""
        return params.has_penalties

    def numbers(self, params: SamplingParams, vocab_size: int) -> dict[str, float]:
        """See `Processor.numbers`."""
        return {name: getattr(params, f"{name}_penalty") for name in _OFF}

    def admit(self, columns: Columns, slots: Tensor, requests: Sequence[Request]) -> None:
        """See `Processor.admit`. A preempted request's newest token is left to `count`, as a new one's first is."""
        counted = [request for request in requests if request.params.has_penalties]
        if not counted:
            return
        prompt, output = columns["in_prompt"], columns["output_counts"]
        prompt[slots], output[slots] = False, 0
        prompt[_entries(counted, [r.prompt_token_ids for r in counted], slots.device)] = True
        known = _entries(counted, [r.token_ids[len(r.prompt_token_ids) : r.prefill_end] for r in counted], slots.device)
        output.index_put_(known, output.new_ones(len(known[0])), accumulate=True)

    def count(self, columns: Columns, slots: Tensor, accepted: Tensor, token_ids: Tensor) -> None:
        """See `Processor.count`. Rejected drafts and `NO_TOKEN` are left out."""
        output = columns["output_counts"]
        index = torch.arange(token_ids.shape[1], device=slots.device)
        new = (index <= accepted[:, None]) & (token_ids >= 0)
        places = (slots % len(output))[:, None] * output.shape[1] + token_ids.clamp_min(0)
        output.view(-1).scatter_add_(0, places.flatten(), new.flatten().to(output.dtype))

    def apply(self, logits: Tensor, columns: Columns, slots: Tensor, drafts: Tensor) -> Tensor:
        """See `Processor.apply`."""
        return ops.apply_penalties(
            logits,
            columns["in_prompt"],
            columns["output_counts"],
            columns["repetition"],
            columns["frequency"],
            columns["presence"],
            slots,
            drafts,
        )


def _entries(
    requests: Sequence[Request], token_ids: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """[n] slot and [n] token of all `token_ids`, a list for each of `requests`."""
    slots = np.repeat([request.slot for request in requests], [len(tokens) for tokens in token_ids])
    return to_device(slots, torch.int64, device), to_device(list(chain(*token_ids)), torch.int64, device)
