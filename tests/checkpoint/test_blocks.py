"""GLM-4-MoE and MiMo: config and weights in both directions, and the logits of transformers'
models."""

import json
import re
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from mtpkit.checkpoint import load_config, load_model
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.families import get_family
from mtpkit.checkpoint.lint import lint
from mtpkit.checkpoint.tensors import bits_equal
from mtpkit.errors import UserError
from mtpkit.model import SequenceInput, base_forward, compute_logits, normed_states
from tests.checkpoint.block_models import (
    add_glm_heads,
    add_mimo_heads,
    edit_config,
    write_deepseek,
    write_glm,
    write_mimo,
)
from tests.checkpoint.builders import differing_after_round_trip, edit
from tests.engine.tiny import decode, generate, greedy, guide, make_llm, make_prompts
from tests.kernels.recurrence import relative
from tests.shared import each

IDS = torch.randint(96, (2, 13), generator=torch.Generator().manual_seed(4))
YARN = dict(
    rope_type="yarn",
    rope_theta=100.0,
    factor=4.0,
    original_max_position_embeddings=6,
    beta_fast=1.5,
    beta_slow=0.1,
)
"""Of four frequencies, YaRN leaves one, divides one and blends two."""
SCALED = YARN | dict(mscale=0.7, mscale_all_dim=0.4)
GLM = {
    "usual": dict(),
    "odd": dict(
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=12,
        n_routed_experts=5,
        num_experts_per_tok=3,
    ),
    "air": dict(
        use_qk_norm=False, first_k_dense_replace=2, n_shared_experts=2, routed_scaling_factor=1.0
    ),
    "all_experts": dict(
        first_k_dense_replace=0, attention_bias=False, num_attention_heads=6, num_key_value_heads=3
    ),
    "groups": dict(
        n_routed_experts=12, n_group=4, topk_group=2, num_experts_per_tok=4, moe_intermediate_size=7
    ),
    "groups_of_any": dict(
        n_routed_experts=9, n_group=3, topk_group=2, num_experts_per_tok=5, norm_topk_prob=False
    ),
    "most_groups": dict(n_routed_experts=12, n_group=4, topk_group=3, num_experts_per_tok=3),
    "one_of_two_groups": dict(n_routed_experts=12, n_group=2, topk_group=1, num_experts_per_tok=3),
    "one_expert": dict(num_experts_per_tok=1, norm_topk_prob=True, routed_scaling_factor=0.7),
    "one_expert_as_scored": dict(num_experts_per_tok=1, norm_topk_prob=False),
    "rotary": dict(
        rope_parameters=dict(rope_type="default", rope_theta=50.0, partial_rotary_factor=0.25),
        head_dim=16,
    ),
    "dense": dict(
        first_k_dense_replace=3, rope_theta=1e6, partial_rotary_factor=1.0, rms_norm_eps=1e-3
    ),
    "yarn": dict(rope_parameters=YARN | dict(partial_rotary_factor=0.5), head_dim=16),
    "yarn_scales": dict(rope_parameters=SCALED | dict(partial_rotary_factor=0.25), head_dim=32),
}
MIMO = {
    "usual": dict(),
    "odd": dict(num_attention_heads=7, num_key_value_heads=7, hidden_size=42, intermediate_size=35),
    "one_group": dict(num_attention_heads=3, num_key_value_heads=1, hidden_size=24),
    "head_dim": dict(head_dim=10, num_attention_heads=6, num_key_value_heads=3),
    "theta": dict(rope_theta=11.0, rms_norm_eps=1e-3, num_hidden_layers=3),
    "tied": dict(tie_word_embeddings=True, num_hidden_layers=1),
    "yarn": dict(rope_parameters=YARN | dict(beta_slow=0.5)),
    "yarn_factor": dict(rope_parameters=YARN | dict(attention_factor=1.7)),
    "yarn_scales": dict(rope_parameters=SCALED),
}
FAMILIES = {"glm": (write_glm, add_glm_heads, GLM), "mimo": (write_mimo, add_mimo_heads, MIMO)}
CASES = [(family, case) for family, (*_, cases) in FAMILIES.items() for case in cases]


CLASSES = {
    "glm4_moe": ("Glm4MoeForCausalLM", {"experts_implementation": "eager"}),
    "mimo": ("Qwen2ForCausalLM", {}),
}
"""transformers' class of each `model_type`, with settings."""


@torch.no_grad()
def transformers_logits(directory):
    import transformers

    name, settings = CLASSES[json.loads((directory / "config.json").read_text())["model_type"]]
    kind = getattr(transformers, name)
    model = kind.from_pretrained(directory, dtype=torch.float32, **settings).eval()
    return model(IDS).logits


@torch.no_grad()
def own_logits(directory):
    model = load_model(directory)
    return compute_logits(
        model, normed_states(model, base_forward(model, IDS, SequenceInput()))
    ).transpose(0, 1)


@pytest.mark.parametrize(("family", "case"), CASES)
def test_logits_are_those_of_transformers(tmp_path, family, case):
    """And all tensors come back to the bit."""
    write, _, cases = FAMILIES[family]
    write(tmp_path, **cases[case])
    assert relative(own_logits(tmp_path), transformers_logits(tmp_path).double()) < 1e-5
    assert differing_after_round_trip(tmp_path) == []


@torch.no_grad()
def test_heads_of_mimo_read_the_base_before_its_final_norm(tmp_path):
    """As transformers' base has it there, and a depth its own after; a checkpoint may say
    otherwise."""
    from transformers import Qwen2ForCausalLM

    hf = tmp_path / "hf"
    streams = []
    write_mimo(hf)
    add_mimo_heads(hf)
    theirs = Qwen2ForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    theirs.model.norm.register_forward_hook(
        lambda _, args, output: streams.extend((args[0], output))
    )
    theirs(IDS)
    for own, want in (({}, streams[0]), ({"mtp_reads_of_base": "after_final_norm"}, streams[1])):
        edit_config(hf, mtpkit=own)
        assert not load_config(hf).mtp.zero_first_embedding and load_config(hf).mtp.hands_on_normed(
            1
        )
        hidden = base_forward(load_model(hf), IDS, SequenceInput()).transpose(0, 1)
        assert relative(hidden, want.double()) < 1e-5 and relative(*streams) > 1e-2
        import_checkpoint(hf, tmp_path / "megatron", force=True)
        export_checkpoint(tmp_path / "megatron", tmp_path / "back", force=True)
        written = json.loads((tmp_path / "back" / "config.json").read_text())
        assert written.get("mtpkit", {}) == own and load_config(tmp_path / "back") == load_config(
            hf
        )


@pytest.mark.parametrize("own", [{}, {"attention_factor": 1.0}], ids=str)
def test_every_style_of_yarn_is_one_config(tmp_path, own):
    """Read from the older key, the newer one or both; an export has the keys of the original, and
    one without an original has both."""
    write_mimo(tmp_path)
    older = {
        "type": "yarn",
        **{key: value for key, value in YARN.items() if key != "rope_type"},
        **own,
    }
    top = {"rope_theta": older.pop("rope_theta")}
    newer = YARN | own
    family = get_family("mimo")
    found = []
    for given in (
        {"rope_scaling": older} | top,
        {"rope_parameters": newer},
        {"rope_scaling": older, **top},
    ):
        edit_config(
            tmp_path, **{"rope_theta": None, "rope_scaling": None, "rope_parameters": None} | given
        )
        found.append(load_config(tmp_path))
        original = json.loads((tmp_path / "config.json").read_text())
        written = family.config_to_hf(found[-1], original)
        assert {key: written.get(key) for key in given} == given
        assert family.config_from_hf(written) == found[-1]
    assert found[0] == found[1] == found[2] and found[0].attention.yarn_factor == 4
    alone = family.config_to_hf(found[0])
    assert alone["rope_scaling"]["factor"] == alone["rope_parameters"]["factor"] == 4
    assert alone["rope_parameters"]["rope_theta"] == alone["rope_theta"] == 100
    assert family.config_from_hf(alone) == found[0]
    plain = found[0].replace(yarn_factor=1.0, yarn_attention_factor=1.0)
    assert family.config_from_hf(family.config_to_hf(plain, original)).attention.yarn_factor == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_with_yarn_is_that_of_sequences(tmp_path, family):
    """Chunks of prompts and decode steps rotate as whole sequences do. Attention is strong, so that
    other tokens come out where the factor is left out."""
    write, add_heads, cases = FAMILIES[family]
    rope = cases["yarn"]["rope_parameters"] | {"attention_factor": 6.0}
    write(tmp_path, **cases["yarn"] | {"rope_parameters": rope})
    add_heads(tmp_path)
    model = load_model(tmp_path)
    prompts = make_prompts((1, 9, 21))
    for layer in (module for module in model.modules() if hasattr(module, "rotary_factor")):
        layer.linear_qkv.weight.data.mul_(4)
        layer.linear_proj.weight.data.mul_(4)
    want = [decode(model, prompt, 8) for prompt in prompts]
    assert generate(guide(make_llm(model, 2), prompts, 8), prompts, greedy(8)) == want


BEFORE = {"mtp_reads_of_base": "before_final_norm", "mtp_reads_of_depth": "before_final_norm"}


SERVED = {"mtp_reads_of_depth": "before_final_norm", "mtp_zero_first_embedding": True}
"""What vLLM feeds the heads of GLM."""


@pytest.mark.parametrize(
    ("family", "own", "server", "named"),
    [
        ("mimo", {}, "vllm", []),
        ("mimo", {}, "sglang", ["mtp_reads_of_base"]),
        ("mimo", {"mtp_reads_of_base": "after_final_norm"}, "vllm", ["mtp_reads_of_base"]),
        (
            "mimo",
            {"mtp_reads_of_base": "after_final_norm", "mtp_zero_first_embedding": True},
            "sglang",
            [],
        ),
        ("glm", {}, None, []),
        ("glm", {"mtp_num_depths": 1}, "vllm", ["mtp_zero_first_embedding"]),
        ("glm", {"mtp_num_depths": 1}, "sglang", []),
        ("glm", {"mtp_num_depths": 3}, "vllm", ["mtp_reads_of_depth", "mtp_zero_first_embedding"]),
        ("glm", {"mtp_num_depths": 3}, "sglang", []),
        ("glm", {"mtp_num_depths": 3, **SERVED}, "vllm", []),
        (
            "glm",
            {"mtp_num_depths": 3, **SERVED},
            "sglang",
            ["mtp_reads_of_depth", "mtp_zero_first_embedding"],
        ),
        ("deepseek", {}, None, []),
        ("deepseek", {"mtp_num_depths": 2}, "vllm", ["mtp_zero_first_embedding"]),
        ("deepseek", {"mtp_num_depths": 2, "mtp_zero_first_embedding": True}, "vllm", []),
        (
            "deepseek",
            {"mtp_num_depths": 2, "mtp_zero_first_embedding": True},
            "sglang",
            ["mtp_zero_first_embedding"],
        ),
        ("mimo", {"mtp_num_depths": 2}, "vllm", ["mtp_zero_first_embedding"]),
        ("mimo", {"mtp_num_depths": 2, "mtp_zero_first_embedding": True}, "vllm", []),
        ("glm", BEFORE, "vllm", ["mtp_reads_of_base"]),
        ("glm", BEFORE, "sglang", ["mtp_reads_of_base", "mtp_reads_of_depth"]),
        ("glm", {"mtp_zero_first_embedding": True}, "vllm", []),
        ("glm", {"mtp_zero_first_embedding": True}, "sglang", ["mtp_zero_first_embedding"]),
    ],
)
def test_lint_names_heads_that_servers_feed_something_else(tmp_path, family, own, server, named):
    """It compares what the directory says about its heads' training with what the server does."""
    deepseek = write_deepseek, partial(add_glm_heads, writer=write_deepseek), {}
    write, add_heads, _ = FAMILIES.get(family, deepseek)
    write(tmp_path)
    add_heads(tmp_path)
    edit_config(tmp_path, mtpkit=own)
    found = [
        finding for finding in lint(tmp_path, server) if "but are fed otherwise" in finding.text
    ]
    assert [re.search(r"mtp_\w+", finding.text)[0] for finding in found] == named
    assert not any(finding.fatal for finding in found)


def test_lint_names_windows_that_servers_do_not_have(tmp_path):
    write, add_heads, _ = FAMILIES["glm"]
    write(tmp_path)
    add_heads(tmp_path)
    edit_config(tmp_path, mtpkit={"mtp_attention_window": 64, "mtp_attention_sinks": 4})
    for server in ("vllm", "sglang"):
        texts = [finding.text for finding in lint(tmp_path, server) if "attention" in finding.text]
        assert len(texts) == 1 and "mtp_attention_window 64, but see the whole context" in texts[0]


CODE = {
    "AutoConfig": "configuration_mimo.MiMoConfig",
    "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
}


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_servers_read_the_config_of_mimo_by_its_own_code(tmp_path, server):
    write_mimo(tmp_path)
    add_mimo_heads(tmp_path)

    def fatal():
        return [finding.text for finding in lint(tmp_path, server) if finding.fatal]

    (lacks,) = fatal()
    assert lacks.startswith("config.json lacks auto_map.AutoConfig: ")
    edit_config(tmp_path, auto_map=CODE)
    assert fatal() == [
        "auto_map names code that is not there: configuration_mimo.py, modeling_mimo.py"
    ]
    for name in ("configuration_mimo.py", "modeling_mimo.py"):
        (tmp_path / name).touch()
    assert fatal() == []


def read_all(directory):
    return {
        name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("family", "case", "physical", "dtype"),
    [
        ("glm", "usual", 1, torch.bfloat16),
        ("glm", "odd", 2, torch.float32),
        ("glm", "groups_of_any", 0, torch.float32),
        ("mimo", "usual", 1, torch.bfloat16),
        ("mimo", "odd", 2, torch.float32),
    ],
)
def test_round_trip_is_bitwise_equal(tmp_path, family, case, physical, dtype):
    write, add_heads, cases = FAMILIES[family]
    hf = tmp_path / "hf"
    back = tmp_path / "back"
    write(hf, dtype=dtype, **cases[case])
    if physical:
        add_heads(hf, physical)
    import_checkpoint(hf, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", back)
    before = read_all(hf)
    after = read_all(back)
    assert before.keys() == after.keys()
    assert [name for name in before if not bits_equal(before[name], after[name])] == []
    config = load_config(hf)
    assert config == load_config(tmp_path / "megatron") == load_config(back)
    heads = "*E" if family == "glm" else "*-"
    assert config.mtp.num_layers == physical and config.mtp.pattern == (heads if physical else "")
    first, second = (json.loads((d / "config.json").read_text()) for d in (hf, back))
    assert {key: first[key] for key in first if first[key] != second.get(key)}.keys() <= {
        "transformers_version"
    }


def test_copies_of_the_base_are_dropped_and_written_again(tmp_path):
    hf = tmp_path / "hf"
    write_glm(hf)
    add_glm_heads(hf)
    assert len([name for name in read_all(hf) if "layers.3." in name]) == 22 + 3 * 4
    import_checkpoint(hf, tmp_path / "megatron")
    assert load_model(tmp_path / "megatron").mtpkit_config.mtp.num_layers == 1
    edit(hf, lambda tensors: tensors["model.layers.3.embed_tokens.weight"].add_(1))
    with pytest.raises(UserError, match=r"model\.layers\.3\.embed_tokens\.weight"):
        import_checkpoint(hf, tmp_path / "other")


@each(
    ("family", "changes", "named"),
    [
        (
            "glm",
            dict(rope_parameters={"type": "yarn", "factor": 4.0}),
            ["lacks original_max_position_embeddings"],
        ),
        (
            "glm",
            dict(rope_parameters={"rope_type": "llama3", "factor": 4.0}),
            ["rope_type", "llama3", "yarn"],
        ),
        ("mimo", dict(rope_parameters=YARN | {"truncate": False}), ["truncate"]),
        ("mimo", dict(rope_parameters=YARN | {"factor": "x"}), ["factor", "'x'"]),
        (
            "glm",
            dict(rope_scaling=YARN),
            ["rope_scaling and rope_parameters", "rope_type 'yarn' and 'default'"],
        ),
        (
            "mimo",
            dict(rope_parameters=YARN, rope_scaling=YARN | {"factor": 8.0}),
            ["factor 8.0 and 4.0"],
        ),
        ("glm", dict(scoring_func="softmax"), ["scoring_func", "sigmoid"]),
        ("glm", dict(tie_word_embeddings=True), ["tie_word_embeddings"]),
        ("glm", dict(num_hidden_layers=10**30), ["num_hidden_layers", "1024"]),
        ("glm", dict(n_shared_experts=0), ["n_shared_experts"]),
        ("glm", dict(hidden_act="gelu", head_dim="x"), ["hidden_act", "gelu"]),
        ("mimo", dict(attention_bias=False), ["attention_bias"]),
        ("mimo", dict(use_sliding_window=True), ["use_sliding_window"]),
        ("mimo", dict(rope_parameters=[1]), ["rope_parameters", "not an object"]),
    ],
)
def test_what_cannot_be_represented_is_named(tmp_path, family, changes, named):
    FAMILIES[family][0](tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError) as caught:
        load_config(tmp_path)
    assert all(name in str(caught.value) for name in named), caught.value
