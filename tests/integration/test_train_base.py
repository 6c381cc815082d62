"""The script that trained the tiny base, for a step: its twin with experts begins with what the
dense base knows, is a checkpoint like any other, and its experts' loads become even."""

import json
import shutil
import sys

import pytest
import torch

from mtpkit.checkpoint import load_config, load_model
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.engine import LLM
from mtpkit.model import SequenceInput, base_forward, compute_logits
from mtpkit.model.kinds import kinds_in
from mtpkit.model.layers.moe import Router
from tests.integration.front_doors import ROOT, TINY_BASE, call_in_fork, greedy

FOLDER = ROOT / "examples" / "tiny_base"
TEXT = (FOLDER / "corpus.py").read_text(encoding="utf-8")


@pytest.fixture
def scripts(monkeypatch):
    """Scripts find the modules beside them, as when Python runs them."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    yield
    sys.modules.pop("mixture", None)


@pytest.fixture
def train(tmp_path, scripts):
    """Train one step with these options; returns the checkpoint and its held-out loss."""

    def run(*options):
        model = tmp_path / "model"
        model.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY_BASE / file, model)
        for name, part in (("train", TEXT), ("heldout", TEXT[:2000])):
            (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": part}) + "\n")
        sizes = ["--steps", 1, "--batch", 1, "--length", 64, "--lr", 1e-5]
        command = ["", FOLDER / "train_base.py", "--corpus", tmp_path, "--model", model]
        # In a process of its own, since the script sets the precision of products.
        done = call_in_fork([*map(str, [*command, *options, *sizes])])
        assert done.returncode == 0, done.stdout
        return model, json.loads(done.stdout.splitlines()[-1])["heldout_loss"]

    return run


def test_the_dense_base_begins_with_equally_likely_tokens(train):
    model, loss = train()
    assert loss == pytest.approx(8.3, abs=0.5) and load_config(model) == load_config(TINY_BASE)


@torch.no_grad()
def test_the_mixture_begins_with_the_dense_base(train):
    from transformers import NemotronHForCausalLM

    path, loss = train("--mixture")
    assert loss < 5.0  # far from the 8.3 of equally likely tokens
    assert (path / "model.safetensors").stat().st_size < 19.5e6

    # Blocks of 128 x 128 and groups of 128 fit into all matrices of layers but these.
    config = load_config(path)
    odd = {
        name
        for kind in kinds_in(config.pattern)
        for name, shape in kind.tensors(config).items()
        if len(shape) > 1 and "conv1d" not in name and any(size % 128 for size in shape[-2:])
    }
    assert odd == {"mixer.in_proj.weight.dt", "mlp.router.weight"}

    model = load_model(path)
    biases = [one.expert_bias for one in model.modules() if isinstance(one, Router)]
    assert [bias.abs().max().item() for bias in biases] == pytest.approx([0.002] * 3)
    prompt = load_tokenizer(path).encode(TEXT)[:65]
    oracle = NemotronHForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    want = oracle(torch.tensor([prompt])).logits
    have = compute_logits(model, base_forward(model, torch.tensor([prompt]), SequenceInput()))
    assert (have.transpose(0, 1) - want).abs().max() < 1e-4 * want.abs().max()
    answer = LLM(path).generate([prompt], greedy(8))[0].outputs[0].token_ids
    logits = oracle(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == answer


def test_experts_with_few_tokens_become_likelier(scripts):
    import mixture

    router = torch.nn.Module()
    router.expert_bias = torch.zeros(3)
    chosen = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 0]])
    with torch.no_grad():
        mixture._balance(router, None, (chosen.float(), chosen))
    assert not router.expert_bias.any()  # evaluation changes nothing
    mixture._balance(router, None, (chosen.float(), chosen))
    assert router.expert_bias.tolist() == pytest.approx([-0.002, 0.0, 0.002])
