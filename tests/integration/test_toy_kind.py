"""A layer kind from outside of mtpkit is built, trained, saved, loaded and decoded with like those within."""

import json

import pytest
import torch

from mtpkit.bench.roofline import Roofline
from mtpkit.checkpoint import load_config, load_model, save_model
from mtpkit.config import ModelConfig
from mtpkit.engine import LLM, SamplingParams
from mtpkit.errors import UserError
from mtpkit.model import SequenceInput, base_forward, build_model, compute_logits, unroll_depths
from tests import toy_kind
from tests.engine.tiny import make_llm, record_drafts, teacher_forced_drafts
from tests.toy_config import toy_config

VOCAB = 40
MODELS = {"base and heads": ("MA*-A", "A-"), "heads with attention": ("M-A-", "A*-")}


@pytest.fixture(autouse=True)
def known_kind():
    with toy_kind.known():
        yield


def toy_model(pattern, mtp_pattern, **changes):
    config = toy_config(pattern=pattern, mtp_pattern=mtp_pattern, vocab_size=VOCAB, average_decay=0.7, **changes)
    return build_model(config, device="cpu", seed=2)


def tokens(length, batch=1, seed=0):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_its_section_is_in_files_of_models_that_have_it(tmp_path):
    config = toy_config(pattern="MA*-", average_decay=0.7)
    assert config.section(toy_kind.AverageConfig).decay == 0.7 and config.to_dict()["average_decay"] == 0.7
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert "average_decay" not in toy_config().to_dict()
    with pytest.raises(UserError, match="average_decay is 1, must be above 0 and below 1"):
        toy_config(pattern="MA*-", average_decay=1)


@pytest.mark.parametrize("name", MODELS)
def test_heads_are_trained_and_megatrons_layout_keeps_them(name, tmp_path):
    model = toy_model(*MODELS[name])
    heads = [parameter for name, parameter in model.named_parameters() if name.startswith("mtp.")]
    assert any(name.endswith("mixer.decay") for name, _ in model.named_parameters() if name.startswith("mtp."))
    optimizer, ids, losses = torch.optim.AdamW(heads, lr=1e-2), tokens(24, batch=4), []
    for _ in range(30):
        with torch.no_grad():
            hidden = base_forward(model, ids, SequenceInput())
        states = list(unroll_depths(model, hidden, ids, 2))
        parts = [
            torch.nn.functional.cross_entropy(
                compute_logits(model, state)[: -depth - 1].flatten(0, 1), ids.t()[depth + 1 :].flatten()
            )
            for depth, state in enumerate(states, 1)
        ]
        loss = torch.stack(parts).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    save_model(model, tmp_path / "megatron")
    loaded = load_model(tmp_path / "megatron", device="cpu")
    assert load_config(tmp_path / "megatron") == model.mtpkit_config
    want, got = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert want.keys() == got.keys() and all(torch.equal(want[key], got[key]) for key in want)


@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
@pytest.mark.parametrize("name", MODELS)
def test_drafts_change_no_token_under_either_rollback(name, rollback):
    model = toy_model(*MODELS[name], init_std=0.3)
    prompts = [tokens(length, seed=length)[0].tolist() for length in (1, 4, 9, 21)]
    said = []
    for k in range(4):
        llm = LLM(
            model,
            num_speculative_tokens=k,
            state_rollback=rollback,
            max_model_len=96,
            max_num_batched_tokens=16,
            block_size=8,
            max_num_seqs=3,
            device="cpu",
        )
        given, greedy = (
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=40),
        )
        outputs = llm.generate(given, greedy)
        said.append([output.outputs[0].token_ids for output in outputs])
    with torch.inference_mode():
        plain = [list(prompt) for prompt in prompts]
        for known in plain:
            for _ in range(40):
                hidden = base_forward(model, torch.tensor([known]), SequenceInput())
                known.append(int(compute_logits(model, hidden[-1, 0]).argmax()))
    assert said == [[known[len(prompt) :] for known, prompt in zip(plain, prompts, strict=True)]] * 4


@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
@pytest.mark.parametrize("k", [2, 3])
def test_distinct_heads_draft_as_without_caches(k, rollback):
    model = toy_model("MA*-", "A-", init_std=0.3, mtp_num_depths=3, mtp_use_repeated_layer=False)
    prompts = [tokens(length, seed=length)[0].tolist() for length in (1, 2, 3, 9)]
    drafts = record_drafts(make_llm(model, k, state_rollback=rollback, max_num_batched_tokens=8), prompts, 12)
    assert len(drafts) > 20
    assert drafts == {known: teacher_forced_drafts(model, known, k) for known in drafts}


def test_the_memory_plan_and_the_roofline_count_it():
    with_it, without = (toy_model(pattern, "*-") for pattern in ("M*-A", "M*-"))
    sizes = [
        LLM(model, num_speculative_tokens=3, state_rollback="snapshot", max_model_len=64, device="cpu").memory_plan
        for model in (with_it, without)
    ]
    width, drafts = with_it.mtpkit_config.hidden_size, 3
    assert sizes[0].slot_bytes - sizes[1].slot_bytes == (1 + drafts) * width * 4
    costs = [Roofline(model.mtpkit_config, torch.float32).decode(2, [0.5]) for model in (with_it, without)]
    by_name = [{work.name: work for work in cost.phases[0].works} for cost in costs]
    more = by_name[0]["state"].flops - by_name[1]["state"].flops
    assert more == 3 * width * 2 * 2, "3 FLOPs for each channel of 2 tokens of 2 rows"
    assert by_name[0]["matrices"].bytes - by_name[1]["matrices"].bytes == width**2 * 4
