"""Tiny random hybrid models, what decoding without an engine makes of them, and spies on the
engine."""

import functools
import math

import torch

from mtpkit.config import ModelConfig
from mtpkit.engine import LLM, SamplingParams
from mtpkit.engine.steps.plan import Drafts
from mtpkit.model import (
    SequenceInput,
    base_forward,
    build_model,
    compute_logits,
    normed_states,
    unroll_depths,
)
from tests.engine.fakes import KnownTokens
from tests.model.toy import MLA
from tests.toy_config import toy_config

VOCAB_SIZE = 61
PROMPT_LENGTHS = (1, 4, 8, 9, 21)
"""1; 1 + K for K = 3; a block and a block + 1 at block size 8; several chunks."""


def tiny_config(
    heads: str = "repeated", pattern: str = "M-*M-", mtp_pattern: str = "*-", distinct: int = 3
) -> ModelConfig:
    """2 repeated or `distinct` distinct heads, wide initialisation so that logits are far apart."""
    repeated = heads == "repeated"
    experts = dict(
        num_moe_experts=6,
        moe_router_topk=2,
        moe_ffn_hidden_size=24,
        moe_shared_expert_intermediate_size=16,
        moe_router_topk_scaling_factor=2.5,
    )
    return toy_config(
        **(experts if "E" in pattern + mtp_pattern else {}),
        **(MLA | {"qk_layernorm": True} if "+" in pattern + mtp_pattern else {}),
        vocab_size=VOCAB_SIZE,
        pattern=pattern,
        max_position_embeddings=128,
        mtp_pattern=mtp_pattern,
        mtp_num_depths=2 if repeated else distinct,
        mtp_use_repeated_layer=repeated,
        init_std=0.3,
    )


@functools.cache
def tiny_model(
    heads: str = "repeated",
    pattern: str = "M-*M-",
    mtp_pattern: str = "*-",
    device: str | None = "cpu",
    distinct: int = 3,
):
    """A model of `tiny_config`."""
    return build_model(tiny_config(heads, pattern, mtp_pattern, distinct), device=device, seed=1)


@functools.cache
def ruled_model(
    heads: str = "repeated",
    mtp_pattern: str = "*-",
    device: str = "cpu",
    vocab_size: int = VOCAB_SIZE,
    **rules,
):
    """A `tiny_model` (4 distinct heads) whose heads read as `rules`, fields of `MtpConfig`, say.

    The weights of the final norms are far apart: with equal ones norms after them would make all
    states alike.
    """
    config = tiny_model(heads, mtp_pattern=mtp_pattern, distinct=4).mtpkit_config
    keys = {f"mtp_{name}": value for name, value in rules.items()}
    model = build_model(config.replace(vocab_size=vocab_size, **keys), device=device, seed=1)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for norm in (
            model.decoder.final_norm,
            *(layer.final_layernorm for layer in model.mtp.layers),
        ):
            norm.weight.copy_(torch.randn(norm.weight.shape, generator=generator).exp())
    return model


def headless_model():
    """The base of `tiny_model`'s kind, without heads."""
    return build_model(tiny_model().mtpkit_config.replace(mtp_pattern="", mtp_num_depths=0))


def make_prompts(lengths=PROMPT_LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths
    ]


@functools.cache
def _continued(model, prompt: tuple[int, ...]) -> list[int]:
    """As many tokens after a prompt as any test has asked for so far, each of which takes a whole
    forward pass."""
    return []


def decode(model, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy decoding by computing the whole sequence anew for every token."""
    found = _continued(model, tuple(prompt))
    device = next(model.parameters()).device
    with torch.inference_mode():
        while len(found) < max_tokens:
            hidden = base_forward(
                model, torch.tensor([[*prompt, *found]], device=device), SequenceInput()
            )
            found.append(int(compute_logits(model, normed_states(model, hidden[-1, 0])).argmax()))
    return found[:max_tokens]


def greedy(max_tokens: int = 20) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def penalised(max_tokens: int = 20, **settings) -> SamplingParams:
    """Greedy, with penalties that change most tokens."""
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": -0.9, "presence_penalty": 0.7}
    return SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **penalties, **settings}
    )


def make_llm(model, k: int, **settings) -> LLM:
    """A small engine. Without a prefix cache, so that prompts are computed as often as a test has
    them."""
    small = dict(
        num_blocks=200, block_size=8, max_num_seqs=8, warm_up=False, enable_prefix_caching=False
    )
    return LLM(model, k, **small | settings)


def generate(
    llm: LLM, prompts, params: SamplingParams | None = None, poison: bool = True
) -> list[list[int]]:
    """Output tokens of each prompt, all with the same parameters; what nobody holds is NaN before
    each step."""
    engine = llm.engine
    ids = [engine.add_request(prompt, params or greedy()) for prompt in prompts]
    finished = {}
    while engine.has_unfinished:
        if poison:
            poison_free(engine)
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.size
    return [finished[request_id].outputs[0].token_ids for request_id in ids]


def poison_free(engine) -> None:
    """Fill free blocks and slots with NaN, and with tokens that were nobody's."""
    slots = engine.scheduler.slots.free_ids
    free = {"block": engine.scheduler.blocks.free_ids, "slot": slots}
    for state in engine.executor.states.all():
        for tensor in state.tensors.values():
            tensor[free[state.unit]] = math.nan
    if engine.executor.state.earlier is not None:
        engine.executor.state.earlier.hidden[slots] = math.nan
        engine.executor.state.earlier.token_ids[slots] = VOCAB_SIZE - 1
    for column in engine.executor.state.columns.values():
        if column.dim() > 1:  # the others have a number for every request
            column[slots] = True if column.dtype == torch.bool else 1 << 20


def held_bytes(engine) -> int:
    """Bytes of the states of all layers."""
    return sum(
        tensor.nbytes for state in engine.executor.states.all() for tensor in state.tensors.values()
    )


class Guided:
    """A drafter around the heads' own that makes some of their drafts right, so that all lengths
    are accepted."""

    def __init__(self, inner, truth: list[list[int]]) -> None:
        self.inner, self.known = inner, KnownTokens()
        self.truth = truth

    def draft(self, hidden, batch, verdict) -> Drafts:
        drafts = self.inner.draft(hidden, batch, verdict)
        token_ids = drafts.token_ids.clone()
        for row, known in enumerate(self.known.after(batch, verdict)):
            for truth in self.truth:
                if truth[: len(known)] == known:
                    right = (5 * len(known) + sum(known)) % (token_ids.shape[1] + 1)
                    following = truth[len(known) : len(known) + right]
                    token_ids[row, : len(following)] = torch.tensor(following)
        return Drafts(token_ids, drafts.probs)


def guide(llm: LLM, prompts, max_tokens: int = 20, truth: list[list[int]] | None = None) -> LLM:
    """Make some drafts right.

    Args:
        truth: what follows each prompt, the prompt included; None: greedy decoding.
    """
    count = max_tokens + 2 * llm.engine.config.num_speculative_tokens
    truth = truth or [prompt + decode(llm.model, prompt, count) for prompt in prompts]
    llm.engine.executor.drafter = Guided(llm.engine.executor.drafter, truth)
    return llm


class Recorder:
    """A drafter that notes the drafts that another makes after each sequence of known tokens."""

    def __init__(self, inner) -> None:
        self.inner, self.drafts, self.known = inner, {}, KnownTokens()

    def draft(self, hidden, batch, verdict) -> Drafts:
        drafts = self.inner.draft(hidden, batch, verdict)
        for known, token_ids in zip(
            self.known.after(batch, verdict), drafts.token_ids.tolist(), strict=True
        ):
            self.drafts[tuple(known)] = token_ids
        return drafts


def record_drafts(
    llm: LLM, prompts, max_tokens: int = 20, guided: bool = True
) -> dict[tuple, list[int]]:
    """The heads' own drafts after each sequence of known tokens."""
    recorder = llm.engine.executor.drafter = Recorder(llm.engine.executor.drafter)
    if guided:
        guide(llm, prompts, max_tokens)
    generate(llm, prompts, greedy(max_tokens))
    return recorder.drafts


@functools.cache
def _forced(model, known: tuple[int, ...]) -> list[int]:
    """The drafts after `known` tokens of as many depths as any test has asked for so far."""
    return []


@torch.inference_mode()
def teacher_forced_drafts(model, known: tuple[int, ...], depths: int) -> list[int]:
    """The drafts after `known` tokens, from whole sequences without caches: each depth reads the
    drafts before it."""
    attention = "serving" if model.mtpkit_config.mtp.repeated else "per_depth"
    newest = len(known) - 2
    found = _forced(model, known)
    while len(found) < depths:
        ids = torch.tensor([[*known, *found]])
        hidden = base_forward(model, ids, SequenceInput())
        *_, state = unroll_depths(model, hidden, ids, len(found) + 1, attention)
        found.append(int(compute_logits(model, state[newest, 0]).argmax()))
    return found[:depths]
