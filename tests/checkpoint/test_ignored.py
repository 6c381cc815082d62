"""How each server reads the list of modules that are not quantised, by method: which key, and which
names in it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from mtpkit.checkpoint.families import get_family
from mtpkit.checkpoint.families.serving import SERVERS, USUAL
from mtpkit.checkpoint.ignored import IgnoreList
from mtpkit.checkpoint.lint import lint
from mtpkit.checkpoint.quantized import FP8
from mtpkit.checkpoint.stitch import stitch
from tests.checkpoint.builders import edit, edit_config
from tests.checkpoint.family_models import write_family
from tests.shared import each

ATTENTION = "mtp.layers.0.self_attn"
PARTS = [f"{ATTENTION}.{part}_proj" for part in "qkv"]
STACK = "mtp.layers.0.mlp.experts"
EXPERTS = [f"{STACK}.{expert}.{part}_proj" for expert in "01" for part in ("gate", "up", "down")]
SHARED = ["mtp.layers.0.mlp.shared_experts.down_proj"]
OUT = f"{ATTENTION}.o_proj"
LATENT = [f"{ATTENTION}.{part}" for part in ("q_a_proj", "kv_a_proj_with_mqa")]


def by_server(config, modules, facts=USUAL, letters=0):
    """Servers by which all of the modules are left out; none may be left out in part."""
    ignored = IgnoreList.of(config, facts, letters)
    answers = {}
    for server in SERVERS:
        (answers[server],) = {
            ignored.leaves_out(server, one) for one in ignored.modules(server, modules).values()
        }
    return {server for server, answer in answers.items() if answer}


BOTH = {"vllm", "sglang"}
VLLM = {"vllm"}
SGLANG = {"sglang"}
NEITHER = set()
AWQ = "modules_to_not_convert"
GPTQ = "dynamic"
COMPRESSED = "ignore"
FP8_KEY = "modules_to_not_convert"


@each(
    ("method", "key", "entries", "modules", "found"),
    [
        ("fp8", FP8_KEY, PARTS, PARTS, BOTH),
        ("fp8", FP8_KEY, [f"{ATTENTION}.qkv_proj"], PARTS, VLLM),
        ("fp8", FP8_KEY, LATENT, LATENT, BOTH),
        ("fp8", FP8_KEY, [f"{ATTENTION}.fused_qkv_a_proj"], LATENT, VLLM),
        ("fp8", FP8_KEY, [f"model.{SHARED[0]}"], SHARED, BOTH),
        ("compressed-tensors", COMPRESSED, PARTS, PARTS, BOTH),
        ("compressed-tensors", COMPRESSED, [f"{ATTENTION}.qkv_proj"], PARTS, BOTH),
        ("compressed-tensors", COMPRESSED, ["re:.*qkv_proj"], PARTS, VLLM),
        ("compressed-tensors", COMPRESSED, [STACK], EXPERTS, NEITHER),
        ("compressed-tensors", COMPRESSED, EXPERTS[:3], EXPERTS, BOTH),
        ("compressed-tensors", COMPRESSED, EXPERTS[3:], EXPERTS, NEITHER),
        ("modelopt", "ignore", PARTS, PARTS, BOTH),
        ("modelopt", "ignore", [f"*.{part}_proj" for part in "qkv"], PARTS, NEITHER),
        ("modelopt", "ignore", ["*.qkv_proj"], PARTS, BOTH),
        ("modelopt", "ignore", ["mtp.layers.0"], PARTS, BOTH),
        ("modelopt", "ignore", ["mtp.layers.0"], EXPERTS, VLLM),
        ("modelopt", "ignore", [EXPERTS[4]], EXPERTS, VLLM),
        ("modelopt", "ignore", ["model.layers.7.self_attn.kv_a_proj_with_mqa"], LATENT, SGLANG),
        ("awq", AWQ, PARTS, PARTS, VLLM),
        ("awq", AWQ, [f"{ATTENTION}.qkv_proj"], PARTS, BOTH),
        ("awq", AWQ, EXPERTS, EXPERTS, NEITHER),
        ("awq", AWQ, [STACK], EXPERTS, BOTH),
        ("gptq", GPTQ, {f"-:{part}": {} for part in PARTS}, PARTS, NEITHER),
        ("gptq", GPTQ, {f"-:{ATTENTION}.qkv_proj": {}}, PARTS, BOTH),
        ("gptq", GPTQ, {"-:mtp": {}}, EXPERTS, VLLM),
        ("gptq", GPTQ, {"+:mtp": {"bits": 8}, "-:mtp": {}}, [OUT], NEITHER),
        ("gptq", GPTQ, {"-:mtp": {}, "+:mtp": {"bits": 8}}, [OUT], BOTH),
    ],
)
def test_names_that_servers_look_for(method, key, entries, modules, found):
    """Those of a file's modules, of the matrix that is built from them, or of a stack of
    experts."""
    assert by_server({"quant_method": method, key: entries}, modules) == found


@each(
    ("config", "found"),
    [
        ({"quant_method": "fp8", "ignored_layers": [], "modules_to_not_convert": [OUT]}, VLLM),
        ({"quant_method": "fp8", "ignored_layers": [OUT], "modules_to_not_convert": []}, BOTH),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": [OUT]}, VLLM),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": [OUT]}, BOTH),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "modules_to_not_convert": [OUT]},
            SGLANG,
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": [],
                "exclude_modules": [OUT],
            },
            NEITHER,
        ),
        (
            {
                "quant_method": "modelopt",
                "quantization": {"quant_algo": "FP8", "exclude_modules": [OUT]},
            },
            BOTH,
        ),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "ignore": [OUT]}},
            NEITHER,
        ),
    ],
)
def test_keys_that_servers_read(config, found):
    """What is added is read by both, and what was listed stays so."""
    assert by_server(config, [OUT]) == found
    ignored = IgnoreList.of(config)
    changed = ignored.with_entries(config, [OUT, "lm_head"])
    assert by_server(changed, [OUT]) == BOTH == by_server(changed, ["lm_head"])


@pytest.mark.parametrize("nested", [False, True])
def test_mixed_precision_lists_what_is_quantised(nested):
    layers = {OUT: {"quant_algo": "FP8"}, f"{STACK}.0.up_proj": {"quant_algo": "NVFP4"}}
    settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    config = {"quant_method": "modelopt"} | ({"quantization": settings} if nested else settings)
    assert [by_server(config, modules) for modules in (PARTS, [OUT], EXPERTS)] == [
        BOTH,
        NEITHER,
        NEITHER,
    ]


def test_deepseek_in_sglang_is_the_layer_61_of_the_list():
    """Whatever the number of layers: entries with this number are renamed, unless the method is
    AWQ's or GPTQ's."""
    facts = get_family("deepseek_v3").serving
    own = ["model.layers.61.self_attn.o_proj"]
    for entry in ("model.layers.61.self_attn.o_proj", "model.decoder.self_attn.o_proj"):
        for method, key in (
            ("fp8", FP8_KEY),
            ("compressed-tensors", "ignore"),
            ("modelopt", "ignore"),
        ):
            assert "sglang" in by_server({"quant_method": method, key: [entry]}, own, facts)
        assert ("sglang" in by_server({"quant_method": "awq", AWQ: [entry]}, own, facts)) == (
            "decoder" in entry
        )
    pattern = "re:model\\.layers\\.61\\..*"
    assert (
        by_server({"quant_method": "compressed-tensors", "ignore": [pattern]}, own, facts) == VLLM
    )


@each(
    ("family", "found"),
    [("glm4_moe", VLLM), ("mimo", VLLM), ("deepseek_v3", VLLM), ("qwen3_5", BOTH)],
)
def test_models_that_do_not_say_what_their_matrices_consist_of(family, found):
    """SGLang then finds the matrix under compressed-tensors, not its modules."""
    facts = get_family(family).serving
    start = {
        "glm4_moe": "model.layers.4.",
        "mimo": "model.mtp_layers.0.",
        "deepseek_v3": "model.layers.4.",
    }
    modules = [f"{start.get(family, 'mtp.layers.0.')}mlp.{part}_proj" for part in ("gate", "up")]
    ignored = IgnoreList.of({"quant_method": "compressed-tensors"}, facts, 8)
    names = [own.name for server in SERVERS for own in ignored.modules(server, modules).values()]
    assert (
        by_server({"quant_method": "compressed-tensors", "ignore": names}, modules, facts, 8)
        == found
    )
    (matrix,) = {own.matrix for own in ignored.modules("sglang", modules).values()}
    assert (
        by_server({"quant_method": "compressed-tensors", "ignore": [matrix]}, modules, facts, 8)
        >= SGLANG
    )


def test_mimos_heads_are_layers_after_the_base_in_vllm():
    facts = get_family("mimo").serving
    modules = ["model.mtp_layers.0.mlp.down_proj"]
    config = {"quant_method": "fp8", FP8_KEY: ["model.layers.36.mlp.down_proj"]}
    assert by_server(config, modules, facts, 72) == VLLM


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories with heads that a test may copy, by family."""
    sizes = {"deepseek_v3": dict(num_hidden_layers=2)}
    qwen = dict(num_hidden_layers=2, full_attention_interval=2)
    return {
        name: write_family(name, tmp_path_factory.mktemp(name), **sizes.get(name, qwen))
        for name in ("deepseek_v3", "qwen3_next", "qwen3_5")
    }


def packed(weight):
    """NVFP4 as ModelOpt stores it, as far as names and dtypes go."""
    codes = weight[:, ::2].to(torch.uint8).contiguous()
    return {
        "weight": codes,
        "weight_scale": weight[:, :1].to(FP8).contiguous(),
        "weight_scale_2": torch.ones(1),
    }


def store(tensors, names, pack=packed):
    for name in names:
        start = name.removesuffix("weight")
        weight = tensors.pop(name)
        tensors |= {start + end: part for end, part in pack(weight).items()}


def quantised(directory, source, start, config, pack=packed):
    """A copy whose base has quantised projections."""
    shutil.copytree(source, directory)

    def change(tensors):
        names = [n for n in tensors if n.startswith(start) and n.endswith("_proj.weight")]
        store(tensors, names, pack)

    edit(directory, change)
    edit_config(directory, quantization_config=config)
    return directory


def complaints(directory):
    """What fails about quantisation, by server."""
    found = [one for one in lint(directory) if one.fatal and "quanti" in one.text]
    return {
        server: "\n".join(one.text for one in found if server in one.servers) for server in SERVERS
    }


@pytest.mark.parametrize(
    ("family", "algorithm", "wants"),
    [
        ("qwen3_next", "NVFP4", False),
        ("qwen3_5", "NVFP4", False),
        ("qwen3_5", "W4A16_NVFP4", False),
        ("qwen3_5", "FP8", True),
        ("qwen3_next", "FP8", True),
    ],
)
def test_the_heads_input_projection_is_never_four_bit(models, tmp_path, family, algorithm, wants):
    """Published lists do not name `mtp.fc`, and vLLM does without; under fp8 it does not. SGLang
    never quantises it."""
    # The list leaves out layer 0, under which SGLang builds the heads too.
    start = "model.layers.1." if family == "qwen3_next" else "model.language_model.layers."
    config = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["mtp.layers*", "model.layers.0*"],
    }
    hf = quantised(tmp_path / "hf", models[family], start, config)
    says = (
        "modules of the heads are not quantised, but not listed in quantization_config's ignore:"
        " add mtp.fc"
    )
    assert complaints(hf) == {"vllm": says if wants else "", "sglang": ""}
    edit(hf, lambda tensors: store(tensors, ["mtp.fc.weight"]))
    plain = "quantised, but built without quantisation; store them in bf16: "
    found = complaints(hf)
    assert (f"{plain}mtp.fc" in found["vllm"]) == (not wants)
    assert f"{plain}mtp.fc" in found["sglang"]


def test_modelopt_wants_one_answer_for_the_modules_of_a_matrix(models, tmp_path):
    """Although another entry leaves out the matrix: both servers compare the modules first, vLLM
    unless its name is listed."""
    config = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["mtp*", "model.layers.0*"],
    }
    hf = quantised(tmp_path / "hf", models["qwen3_5"], "model.language_model.layers.", config)
    assert complaints(hf) == {"vllm": "", "sglang": ""}
    edit_config(
        hf, quantization_config=config | {"ignore": [*config["ignore"], f"{ATTENTION}.q_proj"]}
    )
    found = [one.text for one in lint(hf) if one.fatal and len(one.servers) == 2]
    assert [
        text
        for text in found
        if f"of {ATTENTION}.{{q_proj,k_proj,v_proj}}, which are one matrix" in text
    ]
    listed = [*config["ignore"], f"{ATTENTION}.q_proj", f"{ATTENTION}.qkv_proj"]
    edit_config(hf, quantization_config=config | {"ignore": listed})
    assert [one.servers for one in lint(hf) if "which are one matrix" in one.text] == [("sglang",)]


def test_sglang_keeps_some_of_next_out_of_four_bits(models, tmp_path):
    """Queries, keys and values of Qwen3-Next; under fp8 they are quantised like the others."""
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["zz"]}
    hf = quantised(tmp_path / "hf", models["qwen3_next"], "model.layers.", config)
    for algorithm, named in (("NVFP4", False), ("FP8", True)):
        edit_config(hf, quantization_config=config | {"quant_algo": algorithm})
        found = complaints(hf)["sglang"]
        assert "model.layers.0.self_attn.o_proj" in found
        assert ("model.layers.0.self_attn.q_proj" in found) == named
        assert not any("shared_expert_gate" in text for text in complaints(hf).values())


def test_modelopt_quantises_the_heads_copy_of_the_output_layer(models, tmp_path):
    """In vLLM, which looks for it under a name without `shared_head`."""
    config = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["lm_head", "model.decoder*"],
    }
    hf = quantised(tmp_path / "hf", models["deepseek_v3"], "model.layers.0", config)
    assert "model.layers.2.shared_head.head.weight" in load_file(hf / "model.safetensors")
    heads = [
        name.removesuffix(".weight")
        for name in load_file(hf / "model.safetensors")
        if ".2." in name
    ]
    config["ignore"] += [name for name in heads if "shared_head" not in name]
    edit_config(hf, quantization_config=config)
    says = (
        "modules of the heads are not quantised, but not listed in quantization_config's ignore:"
        " add "
    )
    assert complaints(hf) == {"vllm": f"{says}model.layers.2.head", "sglang": ""}
    edit_config(
        hf, quantization_config=config | {"ignore": [*config["ignore"], "model.layers.2.head"]}
    )
    assert complaints(hf) == {"vllm": "", "sglang": ""}
    stitch(hf, models["deepseek_v3"], tmp_path / "out")
    assert complaints(tmp_path / "out") == {"vllm": "", "sglang": ""}


def awq(weight):
    return {
        "qweight": weight.t().to(torch.int32).contiguous(),
        "scales": weight[:, :1].half().contiguous(),
    }


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_vllm_reads_dtypes_where_sglang_needs_a_list(models, tmp_path, method):
    """AWQ's files are read only as long as there is no list, so that a new list names the base's
    matrices too."""
    start = "model.language_model.layers."
    hf = quantised(tmp_path / "hf", models["qwen3_5"], start, {"quant_method": method}, awq)
    found = complaints(hf)
    assert found["vllm"] == "" and f"{ATTENTION}.qkv_proj" in found["sglang"]
    stitch(hf, models["qwen3_5"], tmp_path / "out")
    assert complaints(tmp_path / "out") == {"vllm": "", "sglang": ""}
    listed = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    entries = listed["modules_to_not_convert" if method == "awq" else "dynamic"]
    base = [entry for entry in entries if "in_proj_a" in entry]
    assert bool(base) == (method == "awq")
    if method == "awq":
        edit_config(hf, quantization_config={"quant_method": "awq", AWQ: ["lm_head"]})
        assert f"{ATTENTION}.q_proj" in complaints(hf)["vllm"]
