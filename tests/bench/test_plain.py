"""Decoded tokens beside a plain forward pass."""

import pytest
import torch

from mtpkit.bench.plain import check_greedy, kv_as_cached
from mtpkit.bench.sizes import NEMOTRON_3_TINY, NEMOTRON_H_TINY
from mtpkit.errors import MtpkitError
from mtpkit.kernels.linear import FP8
from mtpkit.model import build_model, quantize_base
from tests.engine.test_kv_fp8 import fp8_model, truth
from tests.engine.tiny import VOCAB_SIZE, decode, tiny_model
from tests.ranks import run_ranks

PROMPT = [3, 1, 4, 1, 5]
EXPERTS = NEMOTRON_3_TINY.replace(init_std=0.3)


@pytest.mark.parametrize("length", [1, 12])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]])
def test_every_token_counts_and_no_other(prompt, length):
    model = tiny_model()
    tokens = decode(model, prompt, length)
    check_greedy(model, prompt, tokens, range(length), torch.float32)
    for place in range(length):
        wrong = [*tokens[:place], (tokens[place] + 1) % VOCAB_SIZE]
        with pytest.raises(
            MtpkitError, match=rf"1 of {place + 1} tokens .* number {place} of the output lies \d"
        ):
            check_greedy(model, prompt, wrong, range(len(wrong)), torch.float32)
        check_greedy(model, prompt, wrong, range(place), torch.float32)


@pytest.mark.parametrize(("pattern", "mtp_pattern"), [("*-*-", "*-"), ("+-M+", "+-")])
def test_keys_and_values_are_rounded_as_in_the_cache(pattern, mtp_pattern):
    model = fp8_model(pattern, mtp_pattern)
    (tokens,) = truth(model, [PROMPT], 12)
    arguments = (model, PROMPT, tokens, range(12), torch.float32)
    for _ in range(2):  # nothing of the rounding stays
        with kv_as_cached(model, FP8):
            check_greedy(*arguments)
        with kv_as_cached(model, None), pytest.raises(MtpkitError, match="of 12 tokens are not"):
            check_greedy(*arguments)


def test_near_ties_and_strays_are_for_bf16_alone(monkeypatch):
    """Logits of which the chosen one lies a tenth of a deviation below the best."""
    model = tiny_model()
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits[0, 7] = logits.max() + 1
    logits[0, 5] = logits[0, 7] - 0.1 * logits.std()
    monkeypatch.setattr("mtpkit.bench.plain.compute_logits", lambda model, hidden: logits)
    check_greedy(model, PROMPT, [5], [0], torch.bfloat16)
    with pytest.raises(MtpkitError, match="1 of 1 tokens"):
        check_greedy(model, PROMPT, [5], [0], torch.bfloat16, near_tie=0.05)
    spread = torch.cat([logits] * 40)
    monkeypatch.setattr("mtpkit.bench.plain.compute_logits", lambda model, hidden: spread)
    for strays, refused in ((2, False), (3, True)):
        tokens = [6] * strays + [7] * (40 - strays)
        if refused:
            with pytest.raises(MtpkitError, match="3 of 40 tokens"):
                check_greedy(model, PROMPT, tokens, range(40), torch.bfloat16)
        else:
            check_greedy(model, PROMPT, tokens, range(40), torch.bfloat16)
    monkeypatch.setattr("mtpkit.bench.plain.compute_logits", lambda model, hidden: logits)
    for token, precision in ((5, torch.float32), (6, torch.bfloat16)):
        with pytest.raises(MtpkitError, match="standard deviations below the best"):
            check_greedy(model, PROMPT, [token], [0], precision)


def decoded_with_experts():
    """A mixture in fp32, a prompt and what it decodes."""
    exact = build_model(EXPERTS, torch.float32, "cpu", seed=1)
    prompt = torch.randint(512, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    return exact, prompt, decode(exact, prompt, 40)


def test_rounding_sends_tokens_to_other_experts():
    """A mixture in bf16 is held to what rounding does to it; tokens that are simply wrong lie much
    further below."""
    model = build_model(EXPERTS, torch.bfloat16, "cpu", seed=1)
    exact, prompt, tokens = decoded_with_experts()
    assert tokens != decode(model, prompt, 40)
    check_greedy(model, prompt, tokens, range(40), torch.bfloat16)
    check_greedy(model, prompt, tokens, [0], torch.bfloat16)
    check_greedy(exact, prompt, tokens, range(40), torch.float32)
    wrong = [(token + 1) % 512 for token in tokens]
    for places in (range(40), [0]):
        with pytest.raises(
            MtpkitError,
            match=rf"{len(places)} of {len(places)} tokens .* of which rounding explains",
        ):
            check_greedy(model, prompt, wrong, places, torch.bfloat16)
    some = [tokens[i] if i % 4 else wrong[i] for i in range(40)]
    with pytest.raises(MtpkitError, match="of which rounding explains"):
        check_greedy(model, prompt, some, range(40), torch.bfloat16)


def test_rounding_moves_inputs_to_other_numbers_of_fp8():
    """A base whose inputs are quantised is held to what rounding does to it. Decoding in other
    chunks, as here in fp32, is not held to bf16's near ties."""
    exact = build_model(NEMOTRON_H_TINY, torch.float32, "cpu", seed=1)
    model = build_model(NEMOTRON_H_TINY, torch.bfloat16, "cpu", seed=1)
    for each in (exact, model):
        quantize_base(each)
    prompt = torch.randint(512, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    tokens = decode(exact, prompt, 40)
    check_greedy(model, prompt, tokens, range(40), torch.bfloat16)
    wrong = [(token + 1) % 512 for token in tokens]
    with pytest.raises(MtpkitError, match="of which rounding explains"):
        check_greedy(model, prompt, wrong, range(40), torch.bfloat16)
    some = [tokens[i] if i % 4 else wrong[i] for i in range(40)]
    with pytest.raises(MtpkitError, match="of which rounding explains"):
        check_greedy(model, prompt, some, range(40), torch.bfloat16)


def two_ranks(rank, prompt, tokens):
    split = dict(
        tensor_parallel=2, sequence_parallel=False, expert_parallel=2, expert_tensor_parallel=1
    )
    model = build_model(EXPERTS, torch.bfloat16, "cpu", seed=1, **split)
    check_greedy(model, prompt, tokens, range(40), torch.bfloat16)
    with pytest.raises(MtpkitError, match="of which rounding explains"):
        check_greedy(
            model, prompt, [(token + 1) % 512 for token in tokens], range(40), torch.bfloat16
        )


def test_rounding_is_measured_on_two_ranks():
    _, prompt, tokens = decoded_with_experts()
    run_ranks(two_ranks, prompt, tokens)
