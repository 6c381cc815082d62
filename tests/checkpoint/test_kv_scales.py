"""Scales of keys and values: read from either layout, given to the layers, carried by conversions,
and refused by name if they are wrong."""

import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

from mtpkit.checkpoint import load_model, load_model_weights, save_model
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.directory import open_directory
from mtpkit.checkpoint.kv_scales import RenamedScales
from mtpkit.checkpoint.run import load_checkpoint
from mtpkit.checkpoint.stitch import stitch
from mtpkit.checkpoint.tensors import bits_equal
from mtpkit.checkpoint.verify import compare_weights
from mtpkit.engine import LLM
from mtpkit.errors import UserError
from mtpkit.kernels.kv_store import UNSCALED, KVScales
from mtpkit.model import build, build_model
from mtpkit.model.kinds import layers_of
from tests.checkpoint.builders import add_heads, edit, edit_config, write_base
from tests.checkpoint.family_models import FAMILIES, write_family
from tests.checkpoint.test_quantizers import PLACE
from tests.checkpoint.test_round_trip import disk_items, read_all
from tests.engine.tiny import greedy
from tests.ranks import run_ranks
from tests.shared import each

BASE = "backbone.layers.2.mixer"
LATER = "backbone.layers.6.mixer"
HEAD = "mtp.layers.0.mixer"


def scales_of(model) -> dict[str, KVScales]:
    return {
        name: layer.self_attention.kv_scales
        for name, layer, kind in layers_of(model)
        if kind.name == "attention"
    }


def attentions(directory) -> list[str]:
    """Names of the attentions of a file, in their order."""
    found = (
        re.fullmatch(r"(.+)\.(?:k_proj|qkv_proj|kv_a_proj_with_mqa)\.weight", name)
        for name in read_all(directory)
    )
    return sorted(match[1] for match in found if match)


def number(value: float, dtype=torch.float32, shape=()) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype)


@pytest.fixture
def scaled_dir(tmp_path):
    """Three base layers and a head with attention, all but one base layer with scales."""
    directory = tmp_path / "hf"
    write_base(directory, "M-*-*-*-")
    add_heads(directory, "*-")
    new = {
        f"{BASE}.k_proj.k_scale": number(0.25),
        f"{BASE}.v_proj.v_scale": number(3.7),
        f"{LATER}.k_proj.k_scale": number(0.5),
        f"{HEAD}.v_proj.v_scale": number(1.5),
    }
    edit(directory, lambda tensors: tensors.update(new))
    return directory


WANT = {
    "decoder.layers.2": KVScales(0.25, number(3.7).item()),
    "decoder.layers.4": UNSCALED,
    "decoder.layers.6": KVScales(0.5, 1.0),
    "mtp.layers.0.layers.0": KVScales(1.0, 1.5),
}


def test_layers_get_their_scales_from_either_layout(scaled_dir, tmp_path):
    import_checkpoint(scaled_dir, tmp_path / "megatron")
    for directory in (scaled_dir, tmp_path / "megatron"):
        model = load_model(directory)
        assert scales_of(model) == WANT
        other = build_model(model.mtpkit_config)
        load_model_weights(other, directory)
        assert scales_of(other) == WANT


def test_megatrons_names_are_those_of_its_modules(scaled_dir, tmp_path):
    import_checkpoint(scaled_dir, tmp_path / "megatron")
    items = disk_items(tmp_path / "megatron" / "release")
    assert {name: info for name, info in items.items() if name.endswith("_scale")} == {
        f"{name}_scale": ((), torch.float32)
        for name in (
            "decoder.layers.2.self_attention.k",
            "decoder.layers.2.self_attention.v",
            "decoder.layers.6.self_attention.k",
            "mtp.layers.0.mtp_model_layer.layers.0.self_attention.v",
        )
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["modelopt", "compressed-tensors"])
def test_every_family_and_both_quantisers_come_back_bit_for_bit(family, method, tmp_path):
    """One scale has the shape [1] and another dtype, as compressed-tensors has them."""
    directory = write_family(family, tmp_path / "hf")
    names = attentions(directory)
    assert len(names) > 1
    between = ("k_proj.", "v_proj.") if method == "modelopt" else ("", "")
    dtype, shape = (torch.float32, ()) if method == "modelopt" else (torch.bfloat16, (1,))
    new = {}
    for at, name in enumerate(names):
        new[f"{name}.{between[0]}k_scale"] = number(0.5 + at, dtype, shape)
        new[f"{name}.{between[1]}v_scale"] = number(2.5 + at, dtype, shape)
    edit(directory, lambda tensors: tensors.update(new))
    import_checkpoint(directory, tmp_path / "megatron")
    if method == "compressed-tensors":
        # Its other settings are the concern of the weights.
        settings = {"quant_method": method}
        edit_config(tmp_path / "megatron", quantization_config=settings)
    held = open_directory(tmp_path / "megatron").kv_scales.by_attention
    assert sorted(one.value - one.key for one in held.values()) == [2.0] * len(names)
    assert sorted(one.key for one in held.values()) == [0.5 + at for at in range(len(names))]
    if method == "compressed-tensors":
        return
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    before = read_all(directory)
    after = read_all(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(bits_equal(before[name], after[name]) for name in before)
    assert compare_weights(directory, tmp_path / "back").identical
    assert compare_weights(directory, tmp_path / "megatron").identical


COMPRESSED = "compressed-tensors"
KV_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}


def scaled(directory, source, **settings):
    """A copy of a quantiser's checkpoint with scales for all keys and values, and settings about
    them in `hf_quant_config.json`, or in `config.json` where there is no such file."""
    shutil.copytree(source, directory)
    compressed = "compressed" in source.name or settings.get("quant_method") == COMPRESSED
    new = {}
    for name in attentions(directory):
        k, v = (f"{name}." if compressed else f"{name}.{part}_proj." for part in "kv")
        new |= {f"{k}k_scale": number(0.5), f"{v}v_scale": number(2.0)}
    edit(directory, lambda tensors: tensors.update(new))
    file = directory / "hf_quant_config.json"
    if file.exists():
        own = json.loads(file.read_text())
        file.write_text(json.dumps({"quantization": own["quantization"] | settings}))
    elif settings:
        found = json.loads((directory / "config.json").read_text())
        own = found.get("quantization_config", {"quant_method": "modelopt"})
        edit_config(directory, quantization_config=own | settings)
    return directory


@pytest.mark.parametrize("source", ["modelopt_fp8", "modelopt_nvfp4", "compressed_tensor"])
def test_quantised_checkpoints_keep_theirs_and_decode_alike_from_each_layout(source, tmp_path):
    settings = {"kv_cache_quant_algo": "FP8"}
    if source.startswith("compressed"):
        settings = {"kv_cache_scheme": KV_FP8}
    directory = scaled(tmp_path / "hf", PLACE / source, **settings)
    import_checkpoint(directory, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    assert compare_weights(directory, tmp_path / "back").identical
    assert read_all(directory).keys() == read_all(tmp_path / "back").keys()
    outputs = []
    for name in ("hf", "megatron", "back"):
        llm = LLM(tmp_path / name, 0, num_blocks=20, warm_up=False, kv_cache_dtype="fp8_e4m3")
        assert {*scales_of(llm.model).values()} == {KVScales(0.5, 2.0)}
        (output,) = llm.generate([[1, 2, 3]], greedy(12), use_tqdm=False)
        outputs.append(output.outputs[0].token_ids)
    assert outputs[0] == outputs[1] == outputs[2]


@each(
    ("file", "settings"),
    [
        ("config.json", {"quant_algo": None, "kv_cache_scheme": KV_FP8}),
        ("config.json", {"quant_method": COMPRESSED, "kv_cache_scheme": KV_FP8}),
        ("hf_quant_config.json", {"quant_algo": None, "kv_cache_quant_algo": "FP8"}),
    ],
)
def test_settings_about_keys_and_values_alone(file, settings, tmp_path):
    """The weights are in bf16; the settings come back, wherever they were."""
    plain = tmp_path / "plain"
    write_base(plain, "M-*-", dtype=torch.bfloat16)
    add_heads(plain, "*-")
    if file == "hf_quant_config.json":
        (plain / file).write_text(json.dumps({"quantization": {"quant_algo": None}}))
    directory = scaled(tmp_path / "hf", plain, **settings)
    import_checkpoint(directory, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    assert compare_weights(directory, tmp_path / "back").identical
    before, after = (json.loads((tmp_path / name / file).read_text()) for name in ("hf", "back"))
    if file == "config.json":
        before, after = (one["quantization_config"] for one in (before, after))
    assert before == after
    for name in ("hf", "megatron", "back"):
        assert {*scales_of(load_model(tmp_path / name)).values()} == {KVScales(0.5, 2.0)}


@each("kind", ["NVFP4", "NVFP4_AFFINE", "INT8"])
def test_scales_of_another_type_are_not_taken_for_fp8s(kind, tmp_path, caplog):
    """Those of NVFP4 are a sixth: nearly all keys would be clamped."""
    directory = scaled(tmp_path / "hf", PLACE / "modelopt_fp8", kv_cache_quant_algo=kind)
    import_checkpoint(directory, tmp_path / "megatron")
    for name in ("hf", "megatron"):
        caplog.clear()
        assert {*scales_of(load_model(tmp_path / name)).values()} == {UNSCALED}
        assert f"scales of keys and values are for {kind}" in caplog.text


def test_an_export_has_the_names_of_the_originals_quantiser():
    source = SimpleNamespace(tensors={"decoder.layers.0.self_attention.k_scale": None})
    names = {"model.layers.0.self_attn": "decoder.layers.0.self_attention"}
    for settings, want in (
        (None, "k_proj.k_scale"),
        ({"quant_method": "modelopt"}, "k_proj.k_scale"),
        ({"quant_method": "compressed-tensors"}, "k_scale"),
        (3, "k_proj.k_scale"),
    ):
        original = {"quantization_config": settings}
        assert [*RenamedScales(source, names, original).tensors] == [
            f"model.layers.0.self_attn.{want}"
        ]


def test_a_comparison_sees_another_scale(scaled_dir, tmp_path):
    import_checkpoint(scaled_dir, tmp_path / "megatron")
    edit(scaled_dir, lambda tensors: tensors.update({f"{BASE}.k_proj.k_scale": number(0.26)}))
    import_checkpoint(scaled_dir, tmp_path / "other")
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    for pair in (("megatron", "other"), ("back", "hf"), ("megatron", "hf")):
        result = compare_weights(*(tmp_path / name for name in pair))
        assert [text for text in result.different if "k_scale" in text] and not result.identical


@each(
    ("name", "tensor", "says"),
    [
        (f"{BASE}.k_proj.k_scale", number(0.0), "is 0.0, not a positive"),
        (f"{BASE}.k_proj.k_scale", number(-1.0), "is -1.0, not a positive"),
        (f"{BASE}.k_proj.k_scale", number(math.nan), "is nan, not a positive"),
        (f"{BASE}.v_proj.v_scale", number(math.inf), "is inf, not a positive"),
        (f"{BASE}.v_proj.v_scale", number(1e-45), "not a positive finite"),
        (f"{BASE}.k_proj.k_scale", number(1.0, shape=(2,)), "is [2] float32 instead of one number"),
        (f"{BASE}.k_proj.k_scale", number(1.0, torch.float64), "is [] float64 instead of"),
        (f"{BASE}.k_proj.k_scale", torch.tensor(1), "is [] int64 instead of"),
        (f"{BASE}.k_scale", number(1.0), "is a second scale of the same keys"),
        (f"{BASE}.k_proj.v_scale", number(1.0), "belongs to no attention"),
        ("backbone.layers.0.mixer.k_proj.k_scale", number(1.0), "belongs to no attention"),
        ("k_scale.v_scale", number(1.0), "belongs to no attention"),
    ],
)
def test_wrong_scales_are_refused_by_name(name, tensor, says, tmp_path):
    directory = tmp_path / "hf"
    write_base(directory, "M-*-")
    own = {f"{BASE}.k_proj.k_scale": number(1.0), name: tensor}
    edit(directory, lambda tensors: tensors.update(own))
    doors = (
        lambda: load_model(directory),
        lambda: import_checkpoint(directory, tmp_path / "megatron"),
        lambda: LLM(directory, kv_cache_dtype="fp8_e4m3"),
        lambda: LLM(directory),
    )
    for door in doors:
        with pytest.raises(UserError) as caught:
            door()
        text = str(caught.value)
        assert name in text and says in text and str(directory) in text and "\n" not in text
    assert not (tmp_path / "megatron").exists()


def test_a_wrong_scale_in_megatrons_layout_is_refused(scaled_dir, tmp_path, monkeypatch):
    import_checkpoint(scaled_dir, tmp_path / "megatron")
    opened = open_directory(tmp_path / "megatron")
    read = type(opened.reader).read
    monkeypatch.setattr(
        type(opened.reader),
        "read",
        lambda self, name: -read(self, name) if name.endswith("v_scale") else read(self, name),
    )
    for door in (load_model, lambda path: export_checkpoint(path, tmp_path / "back")):
        with pytest.raises(
            UserError, match=r"decoder\.layers\.2\.self_attention\.v_scale is -3\.7"
        ):
            door(tmp_path / "megatron")


def test_a_saved_model_and_a_run_keep_those_of_the_base(scaled_dir, tmp_path):
    """The heads are the run's own, and new."""
    model = load_model(scaled_dir)
    save_model(model, tmp_path / "saved", companions=scaled_dir)
    assert scales_of(load_model(tmp_path / "saved")) == WANT | {"mtp.layers.0.layers.0": UNSCALED}
    # what a run resumes from
    load_checkpoint(tmp_path / "saved" / "release", model.sharded_state_dict())


def test_new_heads_do_not_get_the_scales_of_old_ones(scaled_dir, tmp_path):
    """They get their own, if they have some."""
    other = tmp_path / "other"
    write_base(other, "M-*-*-*-", seed=3)
    add_heads(other, "*-")
    stitch(scaled_dir, other, tmp_path / "without")
    edit(other, lambda tensors: tensors.update({f"{HEAD}.k_proj.k_scale": number(9.0)}))
    stitch(scaled_dir, other, tmp_path / "with")
    for name, own in (("without", UNSCALED), ("with", KVScales(9.0, 1.0))):
        assert scales_of(load_model(tmp_path / name)) == WANT | {"mtp.layers.0.layers.0": own}


def test_the_engine_decodes_with_the_scales_of_the_file(scaled_dir, tmp_path):
    """Otherwise keys and values would be clamped or lose their bits."""
    prompt = [5, 3, 60, 2, 9, 11]

    def decode(**settings):
        llm = LLM(scaled_dir, 0, num_blocks=20, warm_up=False, **settings)
        return llm.generate(prompt, greedy(24), use_tqdm=False)[0].outputs[0].token_ids

    def change(factor):
        names = (f"{BASE}.k_proj.k_scale", f"{BASE}.v_proj.v_scale")
        edit(scaled_dir, lambda tensors: tensors.update({n: number(factor) for n in names}))

    outputs = [decode()]
    for factor in (2.0**-9, 1e-5):
        change(factor)
        outputs.append(decode(kv_cache_dtype="fp8_e4m3"))
    assert outputs[0] != outputs[2], "all keys and values are clamped"
    change(1e-5)
    assert decode() == outputs[0], "a cache in another dtype takes no scales"


def _halve():
    """Both stages have layers of attention then."""
    build.stage_patterns = lambda config, stages, _: (
        ["M-*-*", "-*-"] if stages == 2 else [config.pattern]
    )


def _in_stage(rank, path):
    _halve()
    model = load_model(path, pipeline_parallel=2, sequence_parallel=False)
    before = len(model.stage_patterns[0]) if rank else 0
    for name, found in scales_of(model).items():
        *kind, layer = name.split(".")
        own = int(layer) + before * (kind[0] == "decoder")
        assert found == WANT[".".join([*kind, str(own)])], name
    assert len(scales_of(model)) == 2


def test_each_pipeline_stage_gets_those_of_its_layers(scaled_dir):
    """Layers of a stage are counted from its first."""
    run_ranks(_in_stage, str(scaled_dir))


PROMPTS = [[5, 3, 60, 2, 9, 11], [7], list(range(17))]


def _decode_on_ranks(rank, path, want, sizes):
    _halve()
    llm = LLM(path, 3, num_blocks=20, warm_up=False, kv_cache_dtype="fp8_e4m3", **sizes)
    outputs = llm.generate(PROMPTS, greedy(12), use_tqdm=False)
    assert [one.outputs[0].token_ids for one in outputs] == want


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_decode_as_one_does(size, scaled_dir):
    llm = LLM(scaled_dir, 0, num_blocks=20, warm_up=False, kv_cache_dtype="fp8_e4m3")
    outputs = llm.generate(PROMPTS, greedy(12), use_tqdm=False)
    want = [one.outputs[0].token_ids for one in outputs]
    run_ranks(_decode_on_ranks, str(scaled_dir), want, {size: 2})
