"""The tiny base of the examples computes the same in transformers as in mtpkit."""

import json

import pytest
import torch

from mtpkit.checkpoint import load_config, load_model
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.engine import LLM
from mtpkit.model import SequenceInput, base_forward, compute_logits
from tests.integration.front_doors import ROOT, TINY_BASE, greedy

TEXT = (ROOT / "mtpkit" / "kernels" / "sampling" / "reference.py").read_text(encoding="utf-8")
"""Python that the base was not trained on."""
NEW_TOKENS = 48


@pytest.fixture(scope="module")
def oracle() -> torch.nn.Module:
    """The base as transformers loads it, in fp32."""
    from transformers import NemotronHForCausalLM

    return NemotronHForCausalLM.from_pretrained(TINY_BASE, dtype=torch.float32).eval()


def test_no_server_clamps_dt() -> None:
    """Transformers clamps at `time_step_min`, Megatron-LM and vLLM do not: one range must be the
    same for all."""
    assert load_config(TINY_BASE).mamba2.dt_limit == (0.0, float("inf"))
    assert json.loads((TINY_BASE / "config.json").read_text())["time_step_min"] == 0.0


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 5, 64, 65, 500])
def test_logits_equal_transformers(oracle: torch.nn.Module, length: int) -> None:
    tokens = torch.tensor([load_tokenizer(TINY_BASE).encode(TEXT)[:length]])
    want = oracle(tokens).logits
    model = load_model(TINY_BASE)
    have = compute_logits(model, base_forward(model, tokens, SequenceInput())).transpose(0, 1)
    assert (have - want).abs().max() < 1e-4 * want.abs().max()


@torch.no_grad()
def test_greedy_tokens_equal_transformers(oracle: torch.nn.Module) -> None:
    """Each token that the engine chose is the best one of one forward pass of transformers over all
    of them."""
    tokens = load_tokenizer(TINY_BASE).encode(TEXT)
    prompts = [
        tokens[start : start + length] for start, length in ((0, 1), (40, 16), (100, 33), (200, 64))
    ]
    for prompt, output in zip(
        prompts, LLM(TINY_BASE).generate(prompts, greedy(NEW_TOKENS)), strict=True
    ):
        answer = output.outputs[0].token_ids
        logits = oracle(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == answer
