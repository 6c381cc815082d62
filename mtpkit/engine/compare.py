"""Comparison of the decoding of two model directories: the tokens that they choose, and the drafts
that they make."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from mtpkit.checkpoint import load_config, open_directory
from mtpkit.engine.drafting import Drafter
from mtpkit.engine.llm import LLM
from mtpkit.engine.requests.params import SamplingParams
from mtpkit.engine.steps.plan import Batch, Drafts, Verdict
from mtpkit.errors import UserError
from mtpkit.platform import default_device

_BESIDE_WEIGHTS = 2 * 10**9
"""Bytes needed besides the weights, for libraries and for the caches and activations of a few short
requests."""


@dataclass(frozen=True)
class DecodingAgreement:
    """Agreement of two models that decoded the same prompts."""

    num_drafts: int
    """K, drafts per step."""
    same_tokens: float
    """Share of the output tokens that come before the first difference of their prompt."""
    same_drafts: float
    """Share of equal drafts among those that both models made after the same tokens; 1 if there are
    none."""
    acceptance_lengths: tuple[float, float]

    @property
    def identical(self) -> bool:
        """Whether all tokens and drafts are the same."""
        return self.same_tokens == self.same_drafts == 1


class Recorder:
    """A drafter that records the drafts that another one makes for the only request, by the number
    of known tokens.

    Args:
        known: length of the request's prompt.
    """

    def __init__(self, inner: Drafter, known: int) -> None:
        self._inner = inner
        self._known = known
        self.span = inner.span
        self.head_bytes = inner.head_bytes
        self.widened_bytes = inner.widened_bytes
        self.drafts: dict[int, list[int]] = {}

    def draft(self, hidden: Tensor, batch: Batch, verdict: Verdict) -> Drafts:
        """Return the drafts of the inner drafter, and record them."""
        made = self._inner.draft(hidden, batch, verdict)
        for accepted, token_ids in zip(
            verdict.accepted.tolist(), made.token_ids.tolist(), strict=False
        ):
            self._known += accepted + 1
            self.drafts[self._known] = token_ids
        return made


def lack_of_memory(directory: Path | str) -> str:
    """Clause that says why a model is too large to be decoded on this machine; empty if it fits."""
    device = default_device()
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    weights = open_directory(directory).weights()
    count = sum(torch.Size(info.shape).numel() for info in weights.tensors.values())
    # Elements of bfloat16 on a GPU and of float32 on a CPU, as "auto" chooses.
    needed = count * (2 if on_gpu else 4) + _BESIDE_WEIGHTS
    return (
        f"needs {needed / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free"
        if needed > free
        else ""
    )


def compare_decoding(
    first: Path | str,
    second: Path | str,
    num_drafts: int | None = None,
    num_prompts: int = 4,
    prompt_length: int = 12,
    max_tokens: int = 24,
    seed: int = 0,
) -> DecodingAgreement:
    """Decode random prompts greedily with two models, one after the other, and compare.

    Args:
        num_drafts: K; None: the smaller of the two models' defaults, which is 0 if one has no
            heads.

    Raises:
        UserError: the models have vocabularies of different sizes, or heads that cannot make
            `num_drafts` drafts.
    """
    configs = [load_config(directory) for directory in (first, second)]
    if configs[0].vocab_size != configs[1].vocab_size:
        raise UserError(
            f"{first} and {second} differ in vocabulary; their tokens cannot be compared"
        )
    k = min(config.mtp.default_drafts if config.mtp.num_depths else 0 for config in configs)
    k = k if num_drafts is None else num_drafts
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(
        configs[0].vocab_size, (num_prompts, prompt_length), generator=generator
    ).tolist()
    (tokens, drafts, length), (others, other_drafts, other_length) = (
        _decode(directory, k, prompts, max_tokens) for directory in (first, second)
    )
    same = [_common(a, b) for a, b in zip(tokens, others, strict=True)]
    pairs = [
        (draft, there)
        for made, also, common in zip(drafts, other_drafts, same, strict=True)
        for known, one in made.items()
        if known <= prompt_length + common and known in also
        for draft, there in zip(one, also[known], strict=True)
    ]
    alike = sum(draft == there for draft, there in pairs) / len(pairs) if pairs else 1.0
    total = sum(max(len(a), len(b)) for a, b in zip(tokens, others, strict=True))
    return DecodingAgreement(k, sum(same) / total, alike, (length, other_length))


def _decode(
    directory: Path | str, k: int, prompts: Sequence[list[int]], max_tokens: int
) -> tuple[list[list[int]], list[dict[int, list[int]]], float]:
    """Tokens and recorded drafts of each prompt, decoded by itself, and the acceptance length."""
    # One request, with steps one at a time: `Recorder` counts its known tokens itself. Eagerly,
    # since the replay of a graph calls no drafter.
    llm = LLM(
        directory,
        k,
        max_model_len=len(prompts[0]) + max_tokens,
        max_num_seqs=1,
        num_blocks=64,
        enable_prefix_caching=False,
        enforce_eager=True,
        async_scheduling=False,
        warm_up=False,
    )
    drafter = llm.engine.executor.drafter
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    tokens = []
    drafts = []
    for prompt in prompts:
        recorder = llm.engine.executor.drafter = Recorder(drafter, len(prompt))
        tokens.append(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)
        drafts.append(recorder.drafts)
    return tokens, drafts, llm.stats().acceptance_length


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two token sequences."""
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
