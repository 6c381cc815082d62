"""Each rule of the lint finds what it is for, and nothing in a directory as published ones are."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from mtpkit.checkpoint.families.nemotron_h import NEMOTRON_H, SERVING
from mtpkit.checkpoint.families.serving import Finding, Need
from mtpkit.checkpoint.lint import lint
from tests.checkpoint.builders import GOLDEN, add_heads, edit, edit_config, write_base
from tests.checkpoint.family_models import FAMILIES
from tests.checkpoint.odd_family import known, write_odd
from tests.checkpoint.test_cli import convert


def made(directory, pattern="M*-E", heads="*E", **options):
    write_base(directory, pattern)
    add_heads(directory, heads, **options)
    config = json.loads((directory / "config.json").read_text())
    letters = {"hybrid_override_pattern": pattern, "mamba_ssm_cache_dtype": "float32"}
    config = {key: value for key, value in config.items() if key != "layers_block_type"} | letters
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A directory as the makers publish theirs."""
    return made(tmp_path_factory.mktemp("lint") / "hf")


@pytest.fixture
def hf(published, tmp_path):
    """A copy of it that a test may change."""
    directory = tmp_path / "hf"
    directory.mkdir()
    for file in published.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def texts(findings: list[Finding], fatal: bool = True) -> str:
    return "\n".join(finding.text for finding in findings if finding.fatal == fatal)


def test_a_published_directory_has_no_findings(published, capsys):
    assert lint(published) == []
    assert convert("lint", published) == 0
    assert "vLLM 0.33 should load it and draft with its heads" in capsys.readouterr().out


EXTRA = "mtp.layers.9.norm.weight"
NORM = "mtp.layers.1.final_layernorm.weight"
K_PROJ = "mtp.layers.0.mixer.k_proj.weight"


def test_every_wrong_tensor_is_named(hf, capsys):
    def damage(tensors):
        tensors[EXTRA] = tensors.pop(NORM)
        tensors[K_PROJ] = torch.ones(3, 32)
        tensors["mtp.layers.0.norm.weight"] = torch.ones(32, dtype=torch.int64)
        del tensors["backbone.norm_f.weight"]

    edit(hf, damage)
    found = texts(lint(hf))
    for words in (
        f"1 tensors of the heads missing: {NORM}",
        "1 tensors missing: backbone.norm_f.weight",
        f"1 tensors unexpected: {EXTRA}",
        f"{K_PROJ} [3, 32] instead of [16, 32]",
        "not floating-point numbers: mtp.layers.0.norm.weight",
    ):
        assert words in found
    assert convert("lint", hf) == 2
    out, error = capsys.readouterr()
    assert error.count("\n") == 1 and f"{hf} cannot be served" in error
    assert f"fails (vLLM 0.33, SGLang 0.5.23): 1 tensors unexpected: {EXTRA}" in out
    assert "SGLang 0.5.23 would not load it, or draft wrongly" in out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["NemotronForCausalLM"]}, "architectures ['NemotronForCausalLM']"),
        ({"architectures": None}, "write NemotronHForCausalLM"),
        ({"num_nextn_predict_layers": 0}, "no heads to draft with"),
        (
            {"auto_map": {"AutoModel": "modeling_x.Model", "AutoConfig": "far/repo--x.C"}},
            "not there: modeling_x.py",
        ),
    ],
)
def test_wrong_settings_are_fatal(hf, changes, words):
    edit_config(hf, **changes)
    assert words in texts(lint(hf))


def test_words_in_place_of_letters(tmp_path):
    """As transformers 5 writes them. SGLang knows the older ones, and takes words even where there
    are letters."""
    write_base(tmp_path / "hf", "M*")
    add_heads(tmp_path / "hf", "*E")
    says = "has words that the server refuses: write letters"
    assert f"layers_block_type {says}, as hybrid_override_pattern" in texts(
        lint(tmp_path / "hf", "sglang")
    )
    assert says not in texts(lint(tmp_path / "hf", "vllm"))
    edit_config(tmp_path / "hf", hybrid_override_pattern="M*")
    assert says in texts(lint(tmp_path / "hf", "sglang"))
    edit_config(
        tmp_path / "hf", hybrid_override_pattern=None, layers_block_type=["mamba", "attention"]
    )
    assert texts(lint(tmp_path / "hf")) == ""
    edit_config(
        tmp_path / "hf",
        mtp_layers_block_type=["full_attention", "moe"],
        mtp_hybrid_override_pattern=None,
    )
    assert texts(lint(tmp_path / "hf", "vllm")) == ""
    assert f"mtp_layers_block_type {says}, as mtp_hybrid_override_pattern" in texts(
        lint(tmp_path / "hf", "sglang")
    )
    edit_config(tmp_path / "hf", mtp_layers_block_type=["attention", "moe"])
    assert texts(lint(tmp_path / "hf")) == ""


@pytest.mark.parametrize(
    ("family", "runs"), [("deepseek_v3", True), ("glm4_moe", True), ("mimo", False)]
)
def test_servers_that_run_several_layers(tmp_path, family, runs):
    """vLLM runs those of DeepSeek and GLM one after another, as distinct heads."""
    write, add = FAMILIES[family]
    write(tmp_path / "hf")
    add(tmp_path / "hf", physical=2)
    says = "2 MTP layers are stored: "
    assert (f"{says}vLLM runs only the first" in texts(lint(tmp_path / "hf", "vllm"))) != runs
    assert says in texts(
        lint(tmp_path / "hf", "sglang")
    ) and "SGLang takes no more than 1" in texts(lint(tmp_path / "hf"))


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_depths_are_no_layers(tmp_path, server):
    made(tmp_path / "hf", physical=2, depths=2, repeated=False)
    assert "2 MTP layers are stored: vLLM runs only the first" in texts(
        lint(tmp_path / "hf", server)
    )


@pytest.mark.parametrize(
    ("heads", "found"),
    [
        (
            "*-",
            [
                "heads of layers '*-': servers build layers *, E only; train heads with a"
                " heads.pattern of these"
            ]
            * 2,
        ),
        (
            "M*",
            [
                "heads of layers 'M*': servers build layers *, E only; train heads with a"
                " heads.pattern of these"
            ]
            * 2,
        ),
        ("*", ["", ""]),
        ("E*", ["", ""]),
        ("E", ["", ""]),
    ],
)
def test_letters_of_the_heads(tmp_path, heads, found):
    """Servers build them one by one, in any order; vLLM's older runner needs a cache to find the
    heads by."""
    made(tmp_path / "hf", heads=heads)
    assert [texts(lint(tmp_path / "hf", server)) for server in ("vllm", "sglang")] == found
    warnings = [texts(lint(tmp_path / "hf", server), False) for server in ("vllm", "sglang")]
    assert [("V2 model runner only" in text) for text in warnings] == [heads == "E", False]


@pytest.mark.parametrize(
    ("ranks", "keys"), [(1, []), (2, []), (3, ["num_attention_heads 4", "mamba_num_heads 4"])]
)
def test_sizes_that_ranks_divide(published, ranks, keys):
    found = texts(lint(published, ranks=ranks))
    assert [key for key in keys if key not in found] == [] and bool(found) == bool(keys)
    if keys:
        assert (
            "num_query_groups 2: tensor-parallel size 3 does not divide it, nor the other way round"
            in found
        )


def test_one_group_of_mamba_is_copied_to_all_ranks(tmp_path):
    write_base(tmp_path / "hf", "M*", n_groups=1)
    add_heads(tmp_path / "hf", "*")
    assert "mamba_num_groups" not in texts(lint(tmp_path / "hf", ranks=2))
    edit_config(tmp_path / "hf", quantization_config={"quant_method": "modelopt"})
    says = "mamba_num_groups 1: a quantised model cannot be split over tensor-parallel size 2"
    assert [says in texts(lint(tmp_path / "hf", server, 2)) for server in ("vllm", "sglang")] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("family", "split"), [("mimo", []), ("qwen3_5", ["vllm"]), ("nemotron_h", ["vllm", "sglang"])]
)
def test_servers_that_split_the_input_projection(tmp_path, family, split):
    write, add = FAMILIES[family]
    write(tmp_path / "hf")
    add(tmp_path / "hf")
    found = {
        server: texts(lint(tmp_path / "hf", server, 5)).splitlines()
        for server in ("vllm", "sglang")
    }
    assert [
        server
        for server, lines in found.items()
        if any(line.startswith("hidden") for line in lines)
    ] == split


def test_dtypes_and_files_are_warnings(hf):
    (hf / "tokenizer.json").unlink()
    edit_config(hf, dtype="bfloat16", mamba_ssm_cache_dtype=None)
    edit(
        hf,
        lambda tensors: tensors.update(
            {n: t.bfloat16() for n, t in tensors.items() if "correction" in n}
        ),
    )
    found = lint(hf)
    assert texts(found) == ""
    for words in (
        "no tokenizer",
        "dtype 'bfloat16', but most weights are float32",
        "mamba_ssm_cache_dtype",
        "rounded: ",
    ):
        assert words in texts(found, False)
    edit_config(hf, dtype=None, torch_dtype=None)
    assert "names no dtype" in texts(lint(hf), False)


def test_norms_with_another_offset(hf):
    assert "an offset" not in texts(lint(hf), False)
    heads = [n for n in load_file(hf / "model.safetensors") if n.startswith("mtp.") and "norm" in n]
    edit(hf, lambda tensors: [tensors[name].sub_(1) for name in heads])
    (found,) = texts(lint(hf), False).splitlines()
    assert "norms of the heads" in found and "an offset of 1 may be wrong" in found
    edit(hf, lambda tensors: tensors[heads[0]].fill_(float("nan")))
    assert f"NaN or infinity in {heads[0]}" in texts(lint(hf))


def test_a_family_states_facts_and_brings_rules(tmp_path):
    """A key with one value, tied embeddings, modules that are never quantised, and a rule in
    code."""
    facts = dataclasses.replace(
        SERVING,
        count_key="heads.count",
        ties=("vllm",),
        needs=(Need("scoring", "the router chooses by softmax", "sigmoid"),),
        rules=(
            lambda subject: [
                Finding(f"{len(subject.heads)} tensors of heads", servers=("sglang",))
            ],
        ),
    )
    family = dataclasses.replace(
        NEMOTRON_H, model_type="odd", architecture="OddForCausalLM", serving=facts
    )
    with known(family):
        write_base(tmp_path / "hf", "*E")
        add_heads(tmp_path / "hf")
        edit_config(
            tmp_path / "hf",
            model_type="odd",
            architectures=["OddForCausalLM"],
            heads={"count": 1},
            scoring=3,
        )
        found = texts(lint(tmp_path / "hf"))
        assert found.splitlines() == [
            "scoring 3 instead of 'sigmoid': the router chooses by softmax",
            "22 tensors of heads",
        ]
        assert "22 tensors of heads" not in texts(lint(tmp_path / "hf", "vllm"))
        edit_config(tmp_path / "hf", heads=None)
        assert "heads.count is 0, but 1 MTP layers are stored" in texts(lint(tmp_path / "hf"))


def test_carried_tensors_and_copies_are_expected(tmp_path):
    with known():
        write_odd(tmp_path / "hf", ("backbone.layers.1.",))
        assert not [f for f in lint(tmp_path / "hf") if "tensors" in f.text]


def test_only_the_layout_of_servers(capsys):
    assert convert("lint", GOLDEN / "tp1/moe") == 2
    assert "no server reads" in capsys.readouterr().err
