"""Checks decoded tokens against one plain forward pass of the base, without caches, rewinds or
graphs."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtpkit.engine import SamplingParams
from mtpkit.errors import MtpkitError
from mtpkit.kernels.linear import FP8
from mtpkit.kernels.moe import reference
from mtpkit.kernels.sampling import apply_penalties
from mtpkit.model import SequenceInput, base_forward, compute_logits, normed_states
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.kinds import kinds_in, layers_of
from mtpkit.model.kinds.base import LayerKind
from mtpkit.model.quantized import quantizes_inputs

_NEAR_TIE = {torch.bfloat16: 0.25, torch.float32: 1e-3}
"""Largest gap between the best logit and a near tie, in standard deviations of the logits at that
place, by the precision that is rounded to. Of 131,072 random logits all but a few lie further
below, most of them four deviations."""
_STRAYS = {torch.bfloat16: 0.05, torch.float32: 0.0}
"""Share of tokens that may lie further below. A wrong cache or rewind affects a larger share."""
_NOISE_TOKENS = 256
"""Tokens from which the effect of rounding is measured."""
_EXPERTS_APART = {torch.bfloat16: 0.03, torch.float32: 1e-3}
"""Largest relative difference of a mixture's output from megatron-core's, which rounds after each
matrix product."""


@torch.inference_mode()
def check_greedy(
    model: HybridModel,
    prompt: Sequence[int],
    tokens: Sequence[int],
    places: Sequence[int],
    precision: torch.dtype,
    params: SamplingParams | None = None,
    near_tie: float = 1.0,
) -> None:
    """Refuse tokens that the base would not choose.

    In bf16, a rounding may send a token to other experts, in every layer of a mixture of experts,
    and move a number to the next one of fp8, 16 times as far away, where inputs are quantised.
    For such models the mean distance of tokens below the best one is checked instead: rounding must
    explain it. The effect of rounding is measured by a second pass, in which each embedding is
    moved by one rounding. The plain pass runs the same experts as decoding, so each mixture's
    output is also compared with megatron-core's own output for the same input.

    Args:
        tokens: what follows `prompt`, decoded with temperature 0.
        places: indices of `tokens` that are the base's own choice; the tokens at other indices may
            be any.
        precision: the coarsest dtype of weights, keys, values and state.
        params: what the request was sampled with; its penalties count.
        near_tie: a bound on near ties, in standard deviations, used where it is below the
            precision's own.

    Raises:
        MtpkitError: more tokens than the tolerance allows are neither the base's top choice nor a
            near tie.
    """
    if not places:
        return
    known = torch.tensor([[*prompt, *tokens]], device=next(model.parameters()).device)
    experts = any(kind.experts(model.mtpkit_config).count for kind in _kinds(model))
    rounded = precision == torch.bfloat16 and (experts or quantizes_inputs(model))
    # Both passes are collective over pipeline stages, so that a stage without logits takes part in
    # them before it leaves.
    with _compared_experts(model, precision):
        hidden = _normed_base(model, known)
    moved = _normed_base(model, known, moved=True)[-_NOISE_TOKENS:] if rounded else hidden
    if not model.post_process:  # the last pipeline stage has the logits
        return
    index = torch.tensor(list(places), device=known.device)
    # A token is chosen from the logits of the token before it.
    before = len(prompt) + index - 1
    logits = compute_logits(model, hidden[before])
    if params is not None and params.has_penalties:
        logits = _penalised(logits, known[0], len(prompt), index, params)
    gaps = _gaps(logits, known[0, before + 1])
    if rounded:
        _check_mean(model, hidden, moved, gaps)
        return
    wrong = int((gaps > min(near_tie, _NEAR_TIE[precision])).sum())
    if wrong > _STRAYS[precision] * len(index):
        worst = int(gaps.argmax())
        raise MtpkitError(
            f"{wrong} of {len(index)} tokens are not those of a plain forward pass: number"
            f" {int(index[worst])} of the output lies {float(gaps[worst]):.2f} standard deviations"
            " below the best"
        )


@contextmanager
def kv_as_cached(model: HybridModel, dtype: torch.dtype | None) -> Iterator[None]:
    """Round keys and values in plain passes as a cache of this dtype does; None: not at all."""
    hooks = []
    if dtype is not None:
        assert dtype == FP8
        mixers: Iterator[Any] = (
            getattr(layer, kind.mixer, None) for _, layer, kind in layers_of(model)
        )
        for mixer in mixers:
            if hasattr(mixer, "round_sequences"):
                hooks += mixer.round_sequences()
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _normed_base(model: HybridModel, known: Tensor, moved: bool = False) -> Tensor:
    """The base's hidden states [s, h] of tokens known [1, s], after its final norm. A pipeline
    stage before the last one returns the states that it sends on. Collective over stages.

    Args:
        moved: move each embedding by one rounding first.
    """

    def move(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        embedded = kwargs["hidden_states"]
        generator = torch.Generator(embedded.device).manual_seed(0)
        signs = torch.rand(embedded.shape, generator=generator, device=embedded.device) - 0.5
        by_one = embedded * (1 + torch.finfo(torch.bfloat16).eps * signs.sign()).to(embedded.dtype)
        return args, kwargs | dict(hidden_states=by_one)

    group = model.pg_collection.pp
    hook = None
    if not model.pre_process:
        received = torch.empty(
            known.shape[1],
            1,
            model.config.hidden_size,
            dtype=model.config.params_dtype,
            device=known.device,
        )
        dist.recv(received, group=group, group_src=group.rank() - 1)
        model.set_input_tensor(received)
    elif moved:
        hook = model.decoder.register_forward_pre_hook(move, with_kwargs=True)
    try:
        hidden = base_forward(model, known, SequenceInput())
    finally:
        # The engine goes on with the same model, whose inputs nothing may move.
        if hook is not None:
            hook.remove()
    if not model.post_process:
        dist.send(hidden, group=group, group_dst=group.rank() + 1)
        return hidden[:, 0]
    return normed_states(model, hidden[:, 0])


def _penalised(
    logits: Tensor, known: Tensor, prompt_len: int, places: Tensor, params: SamplingParams
) -> Tensor:
    """Apply a request's penalties to logits [n, V], from which the output's tokens at indices
    `places` [n] are chosen.

    Args:
        known: [s] tokens of prompt and output.
    """
    before = (known[prompt_len : prompt_len + place] for place in places.tolist())
    seen = torch.stack([output.bincount(minlength=logits.shape[1]) for output in before]).int()
    in_prompt = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    in_prompt[:, known[:prompt_len]] = True
    repetition, frequency, presence = (
        torch.full((len(places),), size, device=logits.device)
        for size in (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    )
    rows = torch.arange(len(places), device=logits.device)
    # Each place is a row of its own, which counts its whole output in `seen`: no drafts come on
    # top.
    drafts = rows.new_empty(len(places), 0)
    return apply_penalties(
        logits.float(), in_prompt, seen, repetition, frequency, presence, rows, drafts
    )


def _gaps(logits: Tensor, tokens: Tensor) -> Tensor:
    """Distances [n] of `tokens` [n] below the best of logits [n, V], in standard deviations."""
    logits = logits.float()
    return (logits.amax(-1) - logits.gather(1, tokens[:, None])[:, 0]) / logits.std(-1)


def _kinds(model: HybridModel) -> list[LayerKind]:
    """Kinds of the base's layers."""
    return kinds_in(model.mtpkit_config.pattern)


def _mixtures(model: HybridModel) -> list[Any]:
    """The base's mixtures of experts."""
    layers = layers_of(model, heads=False)
    return [layer.mlp for _, layer, kind in layers if kind.experts(model.mtpkit_config).count]


@contextmanager
def _compared_experts(model: HybridModel, precision: torch.dtype) -> Iterator[None]:
    """Refuse mixtures whose output differs from that of megatron-core's own pass through the
    experts. Both passes choose experts with the same op, so its choice is compared with the op's
    reference."""

    def compare(layer: Any, args: tuple[Tensor], output: tuple[Tensor, Tensor | None]) -> None:
        logits = layer.router.gating(args[0])
        bias = layer.router.expert_bias
        chosen, _ = layer.router.routing(logits)
        settings = model.mtpkit_config.moe.routing
        ids, weights = reference.route(
            logits.flatten(0, -2), None if bias is None else bias.float(), *settings
        )
        apart = float(
            (chosen - torch.zeros_like(chosen).scatter(1, ids, weights)).norm() / chosen.norm()
        )
        # Not `apart > ...`: NaN must be refused, too.
        if not apart <= _EXPERTS_APART[torch.float32]:
            raise MtpkitError(
                f"a mixture of experts chooses others than the reference does, by {apart:.1e}"
            )
        want = layer.one_by_one(args[0]).float()
        error = float((output[0].float() - want).norm() / want.norm())
        if not error <= _EXPERTS_APART[precision]:
            raise MtpkitError(
                f"a mixture of experts differs from megatron-core's own by {error:.1e}"
            )

    hooks = [mixture.register_forward_hook(compare) for mixture in _mixtures(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_mean(model: HybridModel, hidden: Tensor, moved: Tensor, gaps: Tensor) -> None:
    """Refuse gaps that rounding does not explain.

    Args:
        hidden: [s, h], states of known tokens.
        moved: [n, h], the last n states, from moved embeddings.
    """
    noise = _gaps(
        compute_logits(model, hidden[-_NOISE_TOKENS:]), compute_logits(model, moved).argmax(-1)
    )
    # The engine rounds in every layer, and with few tokens a single one may lie far below.
    allowed = 2 * float(noise.mean()) + 4 * float(noise.std(correction=0)) / math.sqrt(len(gaps))
    if float(gaps.mean()) > allowed:
        raise MtpkitError(
            f"{int((gaps > 0).sum())} of {len(gaps)} tokens are not those of a plain forward pass:"
            f" they lie {float(gaps.mean()):.2f} standard deviations below the best in the mean, of"
            f" which rounding explains {allowed:.2f}"
        )
