"""DeepSeek-V3: logits, drafts and tokens of transformers' model, conversion in both directions,
parallel imports."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

from mtpkit.checkpoint import load_config, load_model
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.lint import lint
from mtpkit.checkpoint.tensors import bits_equal
from mtpkit.engine import LLM
from mtpkit.errors import UserError
from mtpkit.kernels.rotary.reference import rotate
from mtpkit.model import SequenceInput, base_forward, compute_logits
from mtpkit.model.layers import mla
from tests.checkpoint.block_models import add_glm_heads, edit_config, write_deepseek
from tests.checkpoint.builders import GOLDEN, differing_after_round_trip
from tests.engine.tiny import generate, greedy, record_drafts
from tests.kernels.recurrence import relative
from tests.ranks import run_ranks

IDS = torch.randint(96, (2, 13), generator=torch.Generator().manual_seed(4))
YARN = dict(
    type="yarn",
    factor=40,
    original_max_position_embeddings=5,
    beta_fast=2,
    beta_slow=0.2,
    mscale=1.0,
    mscale_all_dim=1.0,
)
UNBOUNDED = dict(
    type="yarn", factor=40, original_max_position_embeddings=400, mscale=1.0, mscale_all_dim=1.0
)
"""Both betas are left to their defaults, and each changes several frequencies."""
CASES = {
    "usual": dict(rope_scaling=YARN),
    "plain rope": dict(q_lora_rank=None, rope_theta=50.0),
    "odd": dict(
        num_attention_heads=5,
        num_key_value_heads=5,
        qk_nope_head_dim=7,
        v_head_dim=13,
        kv_lora_rank=11,
    ),
    "one group": dict(
        n_routed_experts=7, n_group=1, topk_group=1, num_experts_per_tok=3, n_shared_experts=3
    ),
    "odd groups": dict(
        n_routed_experts=15,
        n_group=5,
        topk_group=3,
        num_experts_per_tok=6,
        routed_scaling_factor=1.3,
    ),
    "most groups": dict(n_routed_experts=12, n_group=4, topk_group=3, num_experts_per_tok=3),
    "one of two groups": dict(n_routed_experts=12, n_group=2, topk_group=1, num_experts_per_tok=3),
    "other scales": dict(
        rope_scaling=YARN | dict(mscale=0.7, mscale_all_dim=0.4, factor=9.0), q_lora_rank=None
    ),
    "no scales": dict(
        rope_scaling={k: v for k, v in YARN.items() if "mscale" not in k}, first_k_dense_replace=0
    ),
    "no betas": dict(rope_scaling=UNBOUNDED, rope_theta=100.0, qk_rope_head_dim=20),
    "dense": dict(
        first_k_dense_replace=3,
        rope_scaling=YARN | dict(beta_fast=32, beta_slow=1),
        qk_rope_head_dim=10,
    ),
}


@torch.no_grad()
def transformers_logits(directory):
    from transformers import DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    return model(IDS).logits


@torch.no_grad()
def own_logits(directory, **sizes):
    model = load_model(directory, **sizes)
    return compute_logits(model, base_forward(model, IDS[:, :12], SequenceInput())).transpose(0, 1)


def test_what_is_null_is_absent(tmp_path):
    write_deepseek(tmp_path, rope_scaling=YARN)
    usual = load_config(tmp_path)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    (name,) = {"rope_scaling", "rope_parameters"} & {key for key in settings if settings[key]}
    settings[name] |= {"type": "yarn", "rope_type": None}
    path.write_text(json.dumps(settings))
    assert load_config(tmp_path) == usual


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path, case):
    """And all tensors come back to the bit."""
    write_deepseek(tmp_path, **CASES[case])
    assert relative(own_logits(tmp_path), transformers_logits(tmp_path)[:, :12].double()) < 1e-5
    assert differing_after_round_trip(tmp_path) == []


@pytest.mark.parametrize("wrong", ["halves", "megatron's mscale_all_dim", "plain frequencies"])
def test_another_rotation_or_scale_would_be_seen(tmp_path, wrong, monkeypatch):
    write_deepseek(tmp_path, **CASES["usual"])
    want = transformers_logits(tmp_path)[:, :12].double()
    if wrong == "halves":  # the pairs (2i, 2i + 1) of the weights are not sorted
        monkeypatch.setattr(mla, "rotate", lambda *args, paired: rotate(*args))
    elif wrong == "plain frequencies":
        monkeypatch.setattr(
            mla, "yarn_frequencies", lambda width, base, *_: mla.frequencies(width, base)
        )
    else:
        edit_config(
            tmp_path,
            rope_parameters={k: v for k, v in YARN.items() if k != "mscale_all_dim"},
            rope_theta=1e4,
        )
    assert relative(own_logits(tmp_path), want) > 1e-3


@pytest.fixture(scope="module")
def with_head(tmp_path_factory):
    """A checkpoint with one head; index 0 of it is below `first_k_dense_replace`, and yet it has
    experts."""
    directory = tmp_path_factory.mktemp("deepseek")
    write_deepseek(directory, rope_scaling=YARN, initializer_range=0.3)
    add_glm_heads(directory, writer=write_deepseek)
    return directory


def transformers_with_mtp(directory, prompt, count, monkeypatch):
    """(tokens, {known tokens: drafts}) of transformers' own speculative decoding."""
    from transformers import DeepseekV3ForCausalLM
    from transformers.modeling_layers import MtpModel

    layer = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    # Otherwise it looks for the heads at layer 61, and refuses to load those after this base.
    monkeypatch.setattr(
        DeepseekV3ForCausalLM,
        "_keys_to_ignore_on_load_unexpected",
        [rf"model\.layers\.{layer + i}\." for i in (0, 1)],
    )
    model = DeepseekV3ForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    known = {}
    drafts = {}
    forward = MtpModel.forward

    def noted(self, input_ids, last_hidden_states, attention_mask, position_ids, *args, **kwargs):
        result = forward(
            self, input_ids, last_hidden_states, attention_mask, position_ids, *args, **kwargs
        )
        known.update(zip(position_ids[0].tolist(), input_ids[0].tolist(), strict=True))
        newest = int(position_ids[0, -1])
        drafts[(prompt[0], *(known[p] for p in range(1, newest + 1)))] = result[0][0].tolist()
        return result

    monkeypatch.setattr(MtpModel, "forward", noted)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        use_mtp=True,
        max_new_tokens=count,
        do_sample=False,
    )
    return out[0, len(prompt) :].tolist(), drafts


@pytest.mark.parametrize("physical", [1, 2])
def test_drafts_and_tokens_are_those_of_transformers(with_head, tmp_path, physical, monkeypatch):
    """Drafts after the same known tokens; transformers asks for fewer of them near the end. Two
    heads have a cache each."""
    directory = with_head
    settings = dict(dtype="float32", device="cpu", max_model_len=64, warm_up=False)
    if physical > 1:
        directory = tmp_path
        write_deepseek(directory, q_lora_rank=None, initializer_range=0.3)
        add_glm_heads(directory, physical, writer=write_deepseek)
    seen = 0
    for seed, length in ((1, 3), (2, 9)):
        prompt = torch.randint(
            96, (length,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        with monkeypatch.context() as patch:
            tokens, drafts = transformers_with_mtp(directory, prompt, 16, patch)
        assert generate(
            LLM(directory, physical, **settings), [prompt], greedy(16), poison=False
        ) == [tokens]
        mine = record_drafts(LLM(directory, physical, **settings), [prompt], 16, guided=False)
        both = [key for key in drafts.keys() & mine.keys() if len(drafts[key]) == physical]
        assert [mine[key] for key in both] == [drafts[key] for key in both]
        seen += len(both)
    assert seen > 12


def test_drafts_change_no_token(with_head):
    prompts = [IDS[0, :5].tolist(), IDS[1].tolist()]
    said = [
        generate(
            LLM(
                with_head,
                k,
                dtype="float32",
                device="cpu",
                max_model_len=64,
                warm_up=False,
                block_size=2,
            ),
            prompts,
            greedy(16),
        )
        for k in range(5)
    ]
    assert said == [said[0]] * 5


def read_all(directory):
    return {
        name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("case", "physical", "dtype"),
    [
        ("usual", 1, torch.bfloat16),
        ("plain rope", 2, torch.float32),
        ("odd groups", 0, torch.float32),
    ],
)
def test_round_trip_is_bitwise_equal(tmp_path, case, physical, dtype):
    hf = tmp_path / "hf"
    back = tmp_path / "back"
    write_deepseek(hf, dtype=dtype, **CASES[case])
    if physical:
        add_glm_heads(hf, physical, writer=write_deepseek)
    import_checkpoint(hf, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", back)
    before = read_all(hf)
    after = read_all(back)
    assert before.keys() == after.keys()
    assert [name for name in before if not bits_equal(before[name], after[name])] == []
    config = load_config(hf)
    assert config == load_config(tmp_path / "megatron") == load_config(back)
    assert (config.mtp.num_layers, config.mtp.pattern) == (physical, "+E" if physical else "")
    first, second = (json.loads((d / "config.json").read_text()) for d in (hf, back))
    assert {key for key in first if first[key] != second.get(key)} <= {"transformers_version"}


def test_a_model_without_an_original_is_written_with_both_styles_of_keys(tmp_path):
    """As older and newer readers want them; transformers reads the result, and it computes the
    same."""
    write_deepseek(tmp_path / "hf", **CASES["other scales"])
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron")
    (tmp_path / "megatron" / "config.json").unlink()
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (
        written["rope_scaling"]["type"] == "yarn"
        and written["rope_parameters"]["rope_type"] == "yarn"
    )
    assert (written["scoring_func"], written["topk_method"], written["q_lora_rank"]) == (
        "sigmoid",
        "noaux_tc",
        None,
    )
    assert (
        relative(
            own_logits(tmp_path / "back"), transformers_logits(tmp_path / "back")[:, :12].double()
        )
        < 1e-5
    )
    for style in ("rope_scaling", "rope_parameters"):
        edit_config(tmp_path / "back", **{style: None})
        assert load_config(tmp_path / "back").mla == load_config(tmp_path / "hf").mla
        edit_config(tmp_path / "back", **{style: written[style]})


def parallel_rank(rank, directory, want):
    torch.set_num_threads(1)
    from megatron.core import parallel_state

    for sizes in (dict(tensor_parallel=2), dict(expert_parallel=2)):
        parallel_state.destroy_model_parallel()
        assert relative(own_logits(directory, **sizes), want) < 1e-5, sizes


def test_tensor_and_expert_parallel_imports_compute_the_same(with_head):
    run_ranks(parallel_rank, with_head, own_logits(with_head).double())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(rope_scaling={"type": "linear", "factor": 2.0}), ["rope_scaling", "linear", "yarn"]),
        (
            dict(rope_scaling=YARN | {"mscale_all_dim": 0, "mscale": 0.5}),
            ["mscale", "mscale_all_dim"],
        ),
        (
            dict(rope_scaling={"type": "yarn", "factor": 4.0}),
            ["lacks original_max_position_embeddings"],
        ),
        (dict(rope_scaling=[1]), ["rope_scaling", "not an object"]),
        (
            dict(rope_scaling=YARN, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
            [
                "rope_scaling and rope_parameters contradict each other: rope_type 'yarn' and"
                " 'default'"
            ],
        ),
        (
            dict(rope_scaling={"type": "default"}, rope_parameters=YARN | {"rope_theta": 1e4}),
            [
                "rope_scaling and rope_parameters contradict each other: rope_type 'default' and"
                " 'yarn'"
            ],
        ),
        (
            dict(rope_scaling=YARN, rope_parameters=YARN | {"factor": 2.0}),
            ["contradict each other: factor"],
        ),
        (
            dict(
                rope_scaling=dict(type="yarn", factor=40, original_max_position_embeddings=400),
                rope_parameters=UNBOUNDED,
            ),
            ["contradict each other: mscale_all_dim 0 and 1.0"],
        ),
        (
            dict(rope_scaling=UNBOUNDED | {"beta_fast": 16}, rope_parameters=UNBOUNDED),
            ["contradict each other: beta_fast 16 and 32"],
        ),
        (dict(scoring_func="softmax"), ["scoring_func", "sigmoid"]),
        (dict(topk_method="greedy"), ["topk_method", "noaux_tc"]),
        (dict(rope_interleave=False), ["rope_interleave"]),
        (dict(num_key_value_heads=2), ["num_key_value_heads", "num_attention_heads 4"]),
        (dict(num_experts_per_tok=6), ["num_experts_per_tok", "topk_group"]),
        (dict(attention_bias=True, kv_lora_rank="x"), ["attention_bias"]),
    ],
)
def test_what_cannot_be_represented_is_named(tmp_path, changes, named):
    write_deepseek(tmp_path, num_hidden_layers=2)
    edit_config(tmp_path, **{"rope_parameters": None} | changes)
    with pytest.raises(UserError) as caught:
        load_config(tmp_path)
    assert all(name in str(caught.value) for name in named), caught.value


def test_what_servers_would_stumble_over(with_head, tmp_path):
    """Nothing but the width of the toy; without the keys that transformers does not know, wrong
    routing."""
    fatal = {
        name: [one.text for one in lint(with_head, name) if one.fatal]
        for name in ("vllm", "sglang")
    }
    assert fatal["vllm"] == [] and [text.partition(":")[0] for text in fatal["sglang"]] == [
        "hidden_size 32"
    ]
    shutil.copytree(with_head, tmp_path / "hf")
    edit_config(tmp_path / "hf", scoring_func=None, topk_method=None)
    said = " ".join(finding.text for finding in lint(tmp_path / "hf", "vllm"))
    assert "scoring_func" in said and "topk_method" in said


@torch.no_grad()
def test_megatrons_own_checkpoint_in_transformers(tmp_path):
    """The golden weights, exported, give Megatron's logits in transformers' model; its norms of low
    ranks have another epsilon."""
    from transformers import DeepseekV3ForCausalLM

    golden = load_file(GOLDEN / "tp1/mla/golden.safetensors")
    export_checkpoint(GOLDEN / "tp1/mla", tmp_path)
    model = DeepseekV3ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    for layer in model.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = (
            layer.self_attn.kv_a_layernorm.variance_epsilon
        ) = 1e-5
    assert relative(model(golden["ids"]).logits, golden["logits"].double()) < 1e-5


def test_scales_of_the_published_model():
    """Scores times 0.13523, rotated channels as they are: m(1) = 0.1 ln 40 + 1."""
    whole = mla.yarn_scale(40, 1.0)
    assert whole**2 / math.sqrt(192) == pytest.approx(0.13523, abs=1e-5)
    assert mla.yarn_scale(1, 1.0) == 1
