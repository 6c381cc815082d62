"""GLM-4-MoE and MiMo: drafts against transformers and a recurrence in fp64, decoding. Every family:
several ranks."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file

from mtpkit.checkpoint import load_config, load_model
from mtpkit.checkpoint.convert import import_checkpoint
from mtpkit.engine import LLM
from mtpkit.errors import UserError
from mtpkit.model import SequenceInput, base_forward, compute_logits, unroll_depths
from tests.checkpoint.block_models import add_glm_heads, add_mimo_heads, write_glm, write_mimo
from tests.checkpoint.family_models import FAMILIES, write_family
from tests.checkpoint.qwen_models import add_heads, write
from tests.engine.tiny import (
    decode,
    generate,
    greedy,
    make_llm,
    record_drafts,
    teacher_forced_drafts,
)
from tests.kernels.recurrence import relative
from tests.ranks import run_ranks

IDS = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(4))
PROMPTS = [[5, 7, 9, 11, 2], [1], [3, 3, 8, 60, 61, 62, 90, 4, 17]]


@pytest.fixture(scope="module")
def glm(tmp_path_factory) -> Path:
    """Two distinct heads."""
    directory = tmp_path_factory.mktemp("glm")
    write_glm(directory, initializer_range=0.3, moe_intermediate_size=16)
    add_glm_heads(directory, physical=2)
    return directory


@pytest.fixture(scope="module", params=[1, 4])
def other_glm(request, tmp_path_factory) -> Path:
    """One physical head, which is repeated, as published; or four distinct ones."""
    directory = tmp_path_factory.mktemp("other_glm")
    write_glm(directory, initializer_range=0.3, num_hidden_layers=2)
    add_glm_heads(directory, physical=request.param)
    return directory


@pytest.fixture(scope="module")
def mimo(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("mimo")
    write_mimo(
        directory, initializer_range=0.3, num_attention_heads=6, num_key_value_heads=1, head_dim=8
    )
    add_mimo_heads(directory)
    return directory


QWEN = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=8,
)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> dict[str, Path]:
    found = {}
    for family, sizes in (("qwen3_next", QWEN), ("qwen3_5", {}), ("qwen3_5_moe", QWEN)):
        found[family] = tmp_path_factory.mktemp(family)
        write(family, found[family], num_hidden_layers=2, full_attention_interval=2, **sizes)
        add_heads(family, found[family])
    return found


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> dict[str, Path]:
    """Families whose drafts are compared elsewhere; Nemotron's experts work in a latent width."""
    sizes = {"nemotron_h": dict(moe_latent_size=12), "deepseek_v3": dict(num_hidden_layers=2)}
    return {
        name: write_family(name, tmp_path_factory.mktemp(name), **changes)
        for name, changes in sizes.items()
    }


@pytest.fixture
def directory(request, glm, mimo) -> Path:
    return {"glm": glm, "mimo": mimo}[request.param]


@torch.no_grad()
@pytest.mark.parametrize("physical", [1, 2])
def test_drafts_and_tokens_of_glm_are_those_of_transformers(glm, tmp_path, physical, monkeypatch):
    """transformers makes as many drafts as there are heads."""
    from transformers import Glm4MoeForCausalLM
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    if physical == 1:
        glm = tmp_path
        write_glm(glm, initializer_range=0.3, use_qk_norm=False)
        add_glm_heads(glm)
    found = {}
    plain = MTPCandidateGenerator.get_candidates

    def record(self, input_ids, *args, **kwargs):
        candidates, logits = plain(self, input_ids, *args, **kwargs)
        if candidates.shape[1] > input_ids.shape[1]:
            found[tuple(input_ids[0].tolist())] = candidates[0, input_ids.shape[1] :].tolist()
        return candidates, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", record)
    # By these names transformers finds the heads, which it knows of published sizes alone.
    monkeypatch.setattr(
        Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[34]\."]
    )
    theirs = Glm4MoeForCausalLM.from_pretrained(
        glm, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    ours = load_model(glm)
    tokens = []
    # transformers fails on shorter ones
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 2]
    for prompt in prompts:
        settings = dict(
            max_new_tokens=12, do_sample=False, use_mtp=True, eos_token_id=None, pad_token_id=0
        )
        tokens.append(
            theirs.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist()
        )
    assert tokens == generate(make_llm(ours, physical), prompts, greedy(12))
    assert len(found) > 12 and max(map(len, found.values())) == physical
    drafts = {known: teacher_forced_drafts(ours, known, physical) for known in found}
    assert {known: made[: len(found[known])] for known, made in drafts.items()} == found
    assert len({tuple(made) for made in found.values()}) > 10


@pytest.mark.parametrize("directory", ["glm", "mimo"], indirect=True)
def test_any_number_of_drafts_gives_the_tokens_of_none(directory):
    check_all_k(directory, 2 if load_config(directory).mtp.num_layers == 2 else 4)


def test_any_number_of_drafts_of_other_heads_of_glm(other_glm):
    """Four of distinct heads too; what each draft is, is that of whole sequences."""
    model = check_all_k(other_glm, 4)
    found = record_drafts(make_llm(model, 4), PROMPTS, 8)
    assert len(found) > 8
    assert all(made == teacher_forced_drafts(model, known, 4) for known, made in found.items())


def check_all_k(directory: Path, most: int):
    """Up to `most` drafts a step give the tokens of none, with room for all and without; returns
    the model."""
    model = load_model(directory)
    want = [decode(model, prompt, 14) for prompt in PROMPTS]
    for k in range(most + 1):
        assert generate(make_llm(model, k), PROMPTS, greedy(14)) == want, k
    small = make_llm(model, most, num_blocks=9, block_size=4, max_num_batched_tokens=8)
    assert generate(small, PROMPTS, greedy(14)) == want, "preempted, and prompts in chunks"
    return model


@pytest.mark.parametrize("k", [3, 4])
def test_more_drafts_than_distinct_heads_are_refused(glm, k):
    """The message says what to do."""
    with pytest.raises(UserError) as error:
        LLM(glm, k, device="cpu")
    said = (
        f"num_speculative_tokens is {k}, but the model has 2 distinct MTP heads: set it to 2 or"
        " less"
    )
    assert str(error.value) == said


@pytest.mark.parametrize("directory", ["glm", "mimo"], indirect=True)
def test_drafts_are_those_of_whole_sequences(directory):
    model = load_model(directory)
    found = record_drafts(make_llm(model, 2), PROMPTS, 8)
    assert len(found) > 8
    assert all(made == teacher_forced_drafts(model, known, 2) for known, made in found.items())


def rms(x, weight, eps=1e-6):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def mimo_depth(tensors, ids, hidden, heads, groups, width, base=640000.0):
    """A depth of MiMo's head in fp64, by the published names: row t joins hidden t with token t + 1
    of `ids`."""
    w = {n.removeprefix("model.mtp_layers.0."): t.double() for n, t in tensors.items()}
    embedded = rms(w["model.embed_tokens.weight"][ids[:, 1:]], w["token_layernorm.weight"])
    x = (
        torch.cat([rms(hidden[:, :-1], w["hidden_layernorm.weight"]), embedded], -1)
        @ w["input_proj.weight"].t()
    )
    u = rms(x, w["input_layernorm.weight"])
    q, k, v = (
        (u @ w[f"self_attn.{n}_proj.weight"].t() + w[f"self_attn.{n}_proj.bias"]).unflatten(
            -1, (-1, width)
        )
        for n in "qkv"
    )
    angles = (
        torch.arange(x.shape[1])[:, None]
        * base ** (-torch.arange(0, width, 2) / width)[None].double()
    )

    def rotate(t):
        first, second = t.chunk(2, -1)
        cos = angles.cos()[:, None]
        sin = angles.sin()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    q = rotate(q)
    k = rotate(k).repeat_interleave(heads // groups, 2)
    scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(width)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    probs = scores.masked_fill(future, -math.inf).softmax(-1)
    mixed = torch.einsum("bhst,bthd->bshd", probs, v.repeat_interleave(heads // groups, 2)).flatten(
        2
    )
    x = x + mixed @ w["self_attn.o_proj.weight"].t()
    u = rms(x, w["post_attention_layernorm.weight"])
    inner = F.silu(u @ w["mlp.gate_proj.weight"].t()) * (u @ w["mlp.up_proj.weight"].t())
    return rms(x + inner @ w["mlp.down_proj.weight"].t(), w["final_layernorm.weight"])


@torch.no_grad()
def test_the_depths_of_mimo_are_those_of_its_definition(mimo):
    """The head is repeated: depth k reads the state of depth k - 1 after its final norm."""
    from transformers import Qwen2ForCausalLM

    model = load_model(mimo)
    tensors = load_file(mimo / "model.safetensors")
    states = list(
        unroll_depths(
            model, base_forward(model, IDS, SequenceInput()), IDS, 3, attention="per_depth"
        )
    )
    have = states[0].transpose(0, 1)[:, :-1]
    seen = []
    theirs = Qwen2ForCausalLM.from_pretrained(mimo, dtype=torch.float64)
    theirs.model.norm.register_forward_hook(
        lambda _, given, normed: seen.extend([given[0], normed])
    )
    theirs(IDS)
    reads, normed = seen  # what vLLM feeds the heads is the state before the final norm
    want = reads
    for depth, state in enumerate(states, 1):
        want = mimo_depth(tensors, IDS[:, depth - 1 :], want, 6, 1, 8)
        assert relative(state.transpose(0, 1)[:, :-depth], want) < 1e-5, depth
    name = "model.mtp_layers.0."
    halves = tensors[f"{name}input_proj.weight"].chunk(2, 1)
    queries = tensors[f"{name}self_attn.q_proj.bias"]
    sprung = {
        "halves": {f"{name}input_proj.weight": torch.cat(halves[::-1], 1)},
        "biases": {f"{name}self_attn.q_proj.bias": queries.roll(8)},
        "gate and up": {
            f"{name}mlp.gate_proj.weight": tensors[f"{name}mlp.up_proj.weight"],
            f"{name}mlp.up_proj.weight": tensors[f"{name}mlp.gate_proj.weight"],
        },
    }
    for trap, changed in sprung.items():
        assert relative(have, mimo_depth(tensors | changed, IDS, reads, 6, 1, 8)) > 1e-2, trap
    assert relative(have, mimo_depth(tensors, IDS, normed, 6, 1, 8)) > 1e-2


@torch.no_grad()
def outputs(model, depths):
    hidden = base_forward(model, IDS, SequenceInput())
    states = unroll_depths(model, hidden, IDS, depths, attention="per_depth")
    return {str(i): compute_logits(model, state) for i, state in enumerate((hidden, *states))}


BOTH = ("tensor_parallel", "expert_parallel")
ALONE = {"mimo", "qwen3_5"}
"""Families without experts."""


def splits(name: str) -> tuple[str, ...]:
    return BOTH[:1] if name in ALONE else BOTH


def split_rank(rank: int, out: Path, directories: dict[str, Path]) -> None:
    for name, directory in directories.items():
        depths = load_config(directory).mtp.num_layers
        for split in splits(name):
            parallel_state.destroy_model_parallel()
            found = outputs(load_model(directory, **{split: 2}), depths)
            save_file(
                {n: t.contiguous() for n, t in found.items()}, out / f"{name}.{split}.{rank}.st"
            )


def test_two_ranks_compute_what_one_does(glm, mimo, qwen, others, tmp_path):
    """Loaded from the published layout, split over tensor-parallel ranks (MiMo's one group of heads
    too) or over expert-parallel ones."""
    directories = {"glm": glm, "mimo": mimo, **qwen, **others}
    assert len(directories) == len(FAMILIES)
    run_ranks(split_rank, tmp_path, directories)
    for name, directory in directories.items():
        want = outputs(load_model(directory), load_config(directory).mtp.num_layers)
        files = sorted(tmp_path.glob(f"{name}.*.st"))
        assert len(files) == 2 * len(splits(name))
        for file in files:
            have = load_file(file)
            assert have.keys() == want.keys()
            assert all(relative(have[n], want[n].double()) < 1e-5 for n in want), file.name


def test_an_import_decodes_like_the_published_directory(glm, tmp_path):
    import_checkpoint(glm, tmp_path / "megatron")
    first, second = (make_llm(load_model(d), 2) for d in (glm, tmp_path / "megatron"))
    assert generate(first, PROMPTS, greedy(8)) == generate(second, PROMPTS, greedy(8))
