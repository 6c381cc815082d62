"""Rules of the lint for quantised bases: which modules of the heads the config must name, how, and
for which server."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from mtpkit.checkpoint import load_config
from mtpkit.checkpoint.families.serving import SERVERS
from mtpkit.checkpoint.ignored import METHODS, IgnoreList
from mtpkit.checkpoint.lint import lint
from mtpkit.checkpoint.quantized import FP8, SCALE
from mtpkit.errors import UserError
from tests.checkpoint.builders import edit, edit_config
from tests.checkpoint.family_models import write_family
from tests.checkpoint.test_cli import convert
from tests.shared import each

BLOCK = 8
FP8_CONFIG = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
HEAD = "mtp.layers.0."


def quantize(tensors, names):
    for name in names:
        weight = tensors[name]
        tensors[name] = weight.to(FP8)
        tensors[name + SCALE] = torch.ones(
            -(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK)
        )


def linears(tensors, start):
    return [
        n
        for n in tensors
        if n.startswith(start) and n.endswith("_proj.weight") and "eh_proj" not in n
    ]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Nemotron-H and DeepSeek-V3 with a base in fp8 and heads that are not."""
    found = {}
    for family, start in (("nemotron_h", "backbone."), ("deepseek_v3", "model.layers.0")):
        found[family] = write_family(family, tmp_path_factory.mktemp(family))
        edit(found[family], lambda tensors, start=start: quantize(tensors, linears(tensors, start)))
        edit_config(found[family], quantization_config=FP8_CONFIG)
        (found[family] / "tokenizer.json").write_text("{}")
    return found


@pytest.fixture
def hf(published, tmp_path):
    return shutil.copytree(published["nemotron_h"], tmp_path / "hf")


def fatal(directory, ranks=1):
    """What fails about quantisation, by server."""
    found = [
        finding
        for finding in lint(directory, ranks=ranks)
        if finding.fatal and "quanti" in finding.text
    ]
    return {
        server: "\n".join(one.text for one in found if server in one.servers) for server in SERVERS
    }


def heads_of(directory):
    """Modules of the heads that may be quantised, by their names in the file."""
    names = load_file(directory / "model.safetensors")
    return [
        n.removesuffix(".weight")
        for n in names
        if n.startswith("mtp.") and n.endswith("_proj.weight")
    ]


def test_every_module_must_be_named(hf):
    """By whole names for one server, by parts of the path for the other."""
    found = fatal(hf)
    assert all(
        "not quantised, but not listed in quantization_config's" in text for text in found.values()
    )
    assert all(
        "modules_to_not_convert: add mtp.layers.0.eh_proj" in text for text in found.values()
    )
    assert not any("mixer.gate" in text for text in found.values())
    for ignored, servers in (
        (["mtp"], {"sglang"}),
        (["mtp.layers.0", "layers.1.mixer"], {"sglang"}),
        (["mtp.*"], set()),
        (["re:mtp.*"], set()),
        (heads_of(hf), {"vllm", "sglang"}),
        (heads_of(hf)[1:], set()),
    ):
        edit_config(hf, quantization_config=FP8_CONFIG | {"modules_to_not_convert": ignored})
        assert {server for server, text in fatal(hf).items() if not text} == servers, ignored
        edit_config(
            hf,
            quantization_config=FP8_CONFIG
            | {
                "ignored_layers": ignored,
                "modules_to_not_convert": ["x"],
            },
        )
        assert {server for server, text in fatal(hf).items() if not text} == servers, ignored


def test_experts_are_left_out_together(hf):
    experts = f"{HEAD.replace('0', '1')}mixer.experts"
    others = [module for module in heads_of(hf) if ".experts." not in module]
    for entry in (experts, f"{experts}.3.up_proj"):
        edit_config(
            hf, quantization_config=FP8_CONFIG | {"modules_to_not_convert": [*others, entry]}
        )
        assert fatal(hf) == {"vllm": "", "sglang": ""}, entry


def test_matrices_that_are_built_as_one(hf):
    without = [module for module in heads_of(hf) if "k_proj" not in module]
    edit_config(hf, quantization_config=FP8_CONFIG | {"modules_to_not_convert": without})
    says = (
        f"of {HEAD}mixer.{{q_proj,k_proj,v_proj}}, which are one matrix, only q_proj, v_proj"
        " left out"
    )
    assert all(says in text for text in fatal(hf).values())


def test_what_is_quantised_must_not_be_named(hf):
    edit(hf, lambda tensors: quantize(tensors, linears(tensors, f"{HEAD}mixer.o_proj")))
    edit_config(hf, quantization_config=FP8_CONFIG | {"modules_to_not_convert": heads_of(hf)})
    says = f"quantised, though quantization_config says that they are not: {HEAD}mixer.o_proj"
    assert all(text == says for text in fatal(hf).values())
    edit(hf, lambda tensors: tensors.pop(f"{HEAD}mixer.o_proj.weight{SCALE}"))
    assert f"{HEAD}mixer.o_proj.weight is fp8 without {HEAD}mixer.o_proj.weight{SCALE}" in str(
        lint(hf)
    )
    edit(
        hf, lambda tensors: tensors.update({f"{HEAD}mixer.o_proj.weight{SCALE}": torch.ones(1, 4)})
    )
    assert f"{HEAD}mixer.o_proj.weight{SCALE} [1, 4] instead of [4, 4]" in str(lint(hf))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"activation_scheme": None}, "activation_scheme None instead of 'dynamic' or 'static'"),
        (
            {"activation_scheme": "static"},
            "activation_scheme 'static' is refused with weight_block_size",
        ),
        ({"weight_block_size": [128]}, "no blocks of two sizes"),
        ({"quant_method": None}, "names no quant_method"),
    ],
)
def test_settings_that_servers_refuse(hf, changes, says):
    config = FP8_CONFIG | {"modules_to_not_convert": heads_of(hf)}
    edit_config(hf, quantization_config=config)
    assert fatal(hf) == {"vllm": "", "sglang": ""}
    edit_config(
        hf, quantization_config={k: v for k, v in (config | changes).items() if v is not None}
    )
    assert all(says in text for text in fatal(hf).values())


def test_quantised_weights_need_a_config(hf):
    edit_config(hf, quantization_config=None)
    assert all(
        "quantised weights without quantization_config" in text for text in fatal(hf).values()
    )


@each(
    ("block", "ranks", "says"),
    [
        (8, 1, []),
        (16, 1, []),
        (8, 2, ["up_proj has 24 rows, 12 per rank", "down_proj has 24 columns, 12 per rank"]),
        (32, 1, ["k_proj has 16 rows, 16 per rank", "up_proj has 16 rows, 16 per rank"]),
        (
            16,
            4,
            [
                f"{part}, 8 per rank"
                for part in ("k_proj has 16 rows", "q_proj has 32 rows", "o_proj has 32 columns")
            ],
        ),
    ],
)
def test_rows_and_columns_of_a_rank_are_whole_blocks(hf, block, ranks, says):
    """Of attention, MLPs and experts; two groups of keys and values are not split over four
    ranks."""
    edit_config(hf, quantization_config=FP8_CONFIG | {"weight_block_size": [block, block]})
    found = [finding.text for finding in lint(hf, ranks=ranks) if finding.text.startswith("fp8:")]
    assert bool(found) == bool(says)
    assert [
        text
        for text in says
        if f"fp8: {text}, not a multiple of the block size {block}" not in found
    ] == []


def test_matrices_of_several_modules_are_whole_blocks(published, tmp_path):
    """vLLM lets the last module end in a part of a block; SGLang takes latent attention's first two
    as one matrix."""
    hf = shutil.copytree(published["deepseek_v3"], tmp_path / "hf")
    edit_config(hf, quantization_config=FP8_CONFIG | {"weight_block_size": [32, 32]})
    found = [finding for finding in lint(hf) if finding.text.startswith("fp8:")]
    parts = {
        server: {one.text.split()[1] for one in found if server in one.servers}
        for server in SERVERS
    }
    assert parts["vllm"] - {"q_a_proj"} == {"gate_proj"} == parts["sglang"] - {"up_proj"}
    assert "q_a_proj" in parts["vllm"] and "up_proj" in parts["sglang"]


def test_rows_of_the_heads_input_projection_are_split(hf):
    name = f"{HEAD}eh_proj.weight"
    edit(hf, lambda tensors: quantize(tensors, [name]))
    rows, _ = load_file(hf / "model.safetensors")[name].shape
    edit_config(hf, quantization_config=FP8_CONFIG | {"weight_block_size": [rows, BLOCK]})
    says = (
        f"fp8: eh_proj has {rows} rows, {rows // 2} per rank, not a multiple of the block size"
        f" {rows}"
    )
    assert [says in {finding.text for finding in lint(hf, ranks=ranks)} for ranks in (1, 2)] == [
        False,
        True,
    ]


def test_each_server_has_its_own_names(published, tmp_path):
    """What SGLang calls DeepSeek's head, unless it is layer 61; and what is built without
    quantisation anyway."""
    hf = shutil.copytree(published["deepseek_v3"], tmp_path / "hf")
    names = load_file(hf / "model.safetensors")
    modules = [
        n.removesuffix(".weight") for n in names if n.startswith("model.layers.3.") and "_proj" in n
    ]
    edit_config(hf, quantization_config=FP8_CONFIG | {"modules_to_not_convert": modules})
    found = fatal(hf)
    assert found["vllm"] == "" and "model.decoder.self_attn.q_a_proj" in found["sglang"]
    assert "eh_proj" not in found["sglang"]
    renamed = [module.replace("model.layers.3", "model.decoder") for module in modules]
    edit_config(
        hf, quantization_config=FP8_CONFIG | {"modules_to_not_convert": [*modules, *renamed]}
    )
    assert fatal(hf) == {"vllm": "", "sglang": ""}
    edit(hf, lambda tensors: quantize(tensors, ["model.layers.3.eh_proj.weight"]))
    says = "quantised, but built without quantisation; store them in bf16: model.layers.3.eh_proj"
    assert fatal(hf) == {"vllm": says, "sglang": says}


ENTRIES = {
    "compressed-tensors": ("ignore", ["re:^mtp\\..*"], {"vllm", "sglang"}),
    "modelopt": ("ignore", ["mtp*"], {"vllm", "sglang"}),
    "awq": ("modules_to_not_convert", ["mtp."], {"vllm", "sglang"}),
    "gptq": ("dynamic", {"-:mtp\\.": {}}, {"vllm"}),
}
STORED = {
    "compressed-tensors": lambda w: {
        "weight_packed": w.to(torch.int32),
        "weight_scale": w[:, :1],
        "weight_shape": w,
    },
    "modelopt": lambda w: {
        "weight": w[:, ::2].to(torch.uint8),
        "weight_scale": w[:, :1].to(FP8),
        "weight_scale_2": w,
    },
    "awq": lambda w: {
        "qweight": w.t().to(torch.int32),
        "qzeros": w.to(torch.int32),
        "scales": w.half(),
    },
    "gptq": lambda w: {
        "qweight": w.to(torch.int32),
        "qzeros": w.to(torch.int32),
        "scales": w,
        "g_idx": w[0].int(),
    },
}


@pytest.mark.parametrize("method", ENTRIES)
def test_other_quantisations_are_judged(published, tmp_path, method, capsys):
    """Although their weights cannot be read: all that is wrong is said, not that alone."""
    hf, (key, ignored, servers) = tmp_path / "hf", ENTRIES[method]
    write_family("nemotron_h", hf)

    def store(tensors):
        for name in linears(tensors, "backbone."):
            start = name.removesuffix("weight")
            weight = tensors.pop(name)
            tensors |= {
                start + end: part.contiguous().clone()
                for end, part in STORED[method](weight).items()
            }

    edit(hf, store)
    config = {"quant_method": method}
    edit_config(hf, quantization_config=config)
    with pytest.raises(UserError, match="quantization_config"):
        load_config(hf)
    found = fatal(hf)
    assert all(f"not listed in quantization_config's {key}" in found[server] for server in SERVERS)
    assert not [
        finding.text
        for finding in lint(hf)
        if "missing" in finding.text or "unexpected" in finding.text
    ]
    edit(hf, lambda tensors: tensors.pop("lm_head.weight"))
    assert convert("lint", hf) == 2
    out = capsys.readouterr().out
    assert (
        "1 tensors missing: lm_head.weight" in out
        and "modules of the heads are not quantised" in out
    )
    edit_config(hf, quantization_config=config | {key: ignored})
    assert {server for server, text in fatal(hf).items() if not text} == servers
    if method == "gptq":
        assert fatal(hf)["sglang"].startswith("experts of the heads are not quantised, which")
    edit_config(hf, quantization_config={"quant_method": "other"})
    assert "quant_method 'other': not known" in str(lint(hf)) and fatal(hf) == {
        "vllm": "",
        "sglang": "",
    }


ROTATION = {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight"}]}}
THREE_BITS = {"type": "int", "num_bits": 3, "strategy": "group", "group_size": 16}
CANNOT_BE_READ = {
    "W4A8_AWQ": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
    "config_groups.group_0": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": THREE_BITS}},
    },
    "config_groups": {"quant_method": "compressed-tensors", "config_groups": {}},
    "transform_config": {
        "quant_method": "compressed-tensors",
        "transform_config": {"config_groups": ROTATION},
    },
    "bits 3": {"quant_method": "gptq", "bits": 3},
    "'activation_scheme': 'dynamic'": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}
"""Settings by what is said of them."""


@each(("says", "config"), CANNOT_BE_READ.items())
def test_settings_that_mtpkit_cannot_read_are_said(published, tmp_path, says, config):
    hf = shutil.copytree(published["nemotron_h"], tmp_path / "hf")
    edit_config(hf, quantization_config=config)
    found = [one for one in lint(hf) if "not supported" in one.text]
    assert len(found) == 1 and not found[0].fatal and found[0].servers == SERVERS
    assert says in found[0].text and "quantised weights are not checked" in found[0].text


def test_a_base_that_may_be_rotated_is_said(hf):
    rotated = CANNOT_BE_READ["transform_config"]
    edit_config(hf, quantization_config=rotated)
    assert "may rotate hidden states" in str(lint(hf))
    edit_config(hf, quantization_config=rotated | {"transform_config": {}})
    assert "may rotate hidden states" not in str(lint(hf))


def test_settings_beside_the_config(hf):
    """ModelOpt's own file, where config.json says nothing."""
    edit_config(hf, quantization_config=None)
    settings = {"quant_algo": "FP8", "exclude_modules": ["mtp*"]}
    (hf / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    assert fatal(hf) == {"vllm": "", "sglang": ""}
    (hf / "hf_quant_config.json").write_text(
        json.dumps({"quantization": settings | {"exclude_modules": ["zz"]}})
    )
    assert all("quantization_config's exclude_modules" in text for text in fatal(hf).values())
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    edit_config(hf, quantization_config=mixed)
    layers = {f"{HEAD}mixer.o_proj": {"quant_algo": "FP8"}}
    own = {"quant_algo": "MIXED_PRECISION", "exclude_modules": [], "quantized_layers": layers}
    (hf / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    assert all(
        text.endswith(f"exclude_modules: add {HEAD}mixer.o_proj") for text in fatal(hf).values()
    )
    (hf / "hf_quant_config.json").write_text("{")
    with pytest.raises(UserError, match=r"hf_quant_config\.json"):
        lint(hf)


@each("entries", [3, "mtp", [None, 3, "re:(", "-:("], {"-:(": 1, "re:(": {}}])
@each("method", METHODS)
def test_entries_that_mean_nothing(method, entries):
    for key in (*METHODS[method].keys, "exclude_modules"):
        ignored = IgnoreList.of({"quant_method": method, key: entries, "quantization": 3})
        assert left_out(ignored, ["mtp.fc"]) == {"vllm": [False], "sglang": [False]}


MODULES = [
    "mtp.fc",
    *(f"mtp.layers.0.self_attn.{part}_proj" for part in "qkvo"),
    *(
        f"mtp.layers.0.mlp.experts.{expert}.{part}_proj"
        for expert in "01"
        for part in ("gate", "up", "down")
    ),
    "model.mtp_layers.0.up",
]
OTHERS = [
    "model.fc_in",
    *(module.replace("mtp.", "model.") for module in MODULES[1:-1]),
]


def left_out(ignored, modules):
    """Whether each module is left out, by server."""
    own = {server: ignored.modules(server, modules).values() for server in SERVERS}
    return {
        server: [ignored.leaves_out(server, module) for module in own[server]] for server in SERVERS
    }


@pytest.mark.parametrize("method", METHODS)
def test_entries_leave_out_what_they_are_for_and_nothing_else(method):
    """SGLang quantises the experts of GPTQ whatever the list says."""
    for config in (
        {"quant_method": method},
        {"quant_method": method, "quantization": {"exclude_modules": ["zz"]}},
    ):
        ignored = IgnoreList.of(config)
        assert not any(
            found for answers in left_out(ignored, MODULES).values() for found in answers
        )
        for server in SERVERS:
            names = [
                ignored.to_list(server, module)
                for module in ignored.modules(server, MODULES).values()
            ]
            changed = ignored.with_entries(config, map(ignored.method.entry, names))
            after = IgnoreList.of(changed)
            for name, found in zip(MODULES, left_out(after, MODULES)[server], strict=True):
                assert found != (method == "gptq" and server == "sglang" and "experts" in name), (
                    server,
                    name,
                )
            assert left_out(after, OTHERS)[server] == [False] * len(OTHERS)
            assert after.with_entries(changed, after.entries) == changed
