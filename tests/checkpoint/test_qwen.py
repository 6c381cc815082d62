"""Qwen3-Next and Qwen3.5: config and weights in both directions, logits of transformers' models,
heads, traps."""

import functools
import json
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from mtpkit import LLM
from mtpkit.checkpoint import load_config, load_model, save_model
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.directory import open_directory
from mtpkit.checkpoint.families import get_family, qwen3_next
from mtpkit.checkpoint.lint import lint
from mtpkit.checkpoint.original import ORIGINAL
from mtpkit.checkpoint.tensors import bits_equal
from mtpkit.errors import UserError
from mtpkit.kernels.norm import norm_gate
from mtpkit.model import SequenceInput, base_forward, compute_logits, unroll_depths
from mtpkit.model.layers.delta import GatedDeltaNet
from tests.checkpoint.block_models import edit_config
from tests.checkpoint.builders import differing_after_round_trip, edit, write_megatron_copy
from tests.checkpoint.qwen_models import VISION, add_heads, edit_text, make, text_config, write
from tests.checkpoint.qwen_oracle import Head
from tests.checkpoint.test_blocks import YARN, read_all
from tests.engine.tiny import decode, generate, greedy, guide, make_llm, make_prompts
from tests.kernels.recurrence import relative
from tests.shared import each

IDS = torch.randint(96, (2, 13), generator=torch.Generator().manual_seed(4))
ODD = dict(
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=24,
    linear_num_key_heads=3,
    linear_num_value_heads=9,
    linear_key_head_dim=10,
    linear_value_head_dim=7,
)
SHAPES = {
    "usual": dict(),
    "odd": ODD,
    "one_head": dict(
        num_attention_heads=3,
        num_key_value_heads=1,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
    ),
    "interval": dict(num_hidden_layers=5, full_attention_interval=2, linear_conv_kernel_dim=2),
    "types": dict(
        num_hidden_layers=3, layer_types=["full_attention", "full_attention", "linear_attention"]
    ),
    "rotary": dict(
        rope_parameters=dict(rope_type="default", rope_theta=50.0, partial_rotary_factor=0.5)
    ),
    "tied": dict(
        tie_word_embeddings=True, rms_norm_eps=1e-3, num_hidden_layers=2, linear_num_value_heads=6
    ),
}
EXPERTS = dict(
    num_experts=5,
    num_experts_per_tok=3,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=20,
    norm_topk_prob=True,
)
DENSE = dict(mlp_only_layers=[0, 1, 2, 3, 4])
VARIANTS = {
    "next": ("qwen3_next", EXPERTS),
    "next_raw": (
        "qwen3_next",
        EXPERTS | dict(norm_topk_prob=False, mlp_only_layers=[1], num_experts_per_tok=1),
    ),
    "next_dense": ("qwen3_next", DENSE),
    "next_sparse": ("qwen3_next", EXPERTS | dict(decoder_sparse_step=2)),
    "3.5": ("qwen3_5", dict()),
    "3.5_moe": ("qwen3_5_moe", EXPERTS),
}
CASES = [(variant, case) for variant in VARIANTS if variant != "next_sparse" for case in SHAPES]
CASES += [("next_sparse", "usual"), ("next_sparse", "interval")]


def write_variant(variant, directory, case="usual", **changes):
    family, sizes = VARIANTS[variant]
    return write(family, directory, **sizes | SHAPES[case] | changes)


def add_variant_heads(variant, directory, **changes):
    add_heads(VARIANTS[variant][0], directory, **changes)


@torch.no_grad()
def own_logits(directory, ids=IDS):
    model = load_model(directory)
    return compute_logits(model, base_forward(model, ids, SequenceInput())).transpose(0, 1)


@pytest.mark.parametrize(("variant", "case"), CASES)
def test_logits_are_those_of_transformers(tmp_path, variant, case):
    """And all tensors come back to the bit."""
    model = write_variant(variant, tmp_path, case)
    with torch.no_grad():
        assert relative(own_logits(tmp_path), model(IDS, use_cache=False).logits.double()) < 1e-5
    assert differing_after_round_trip(tmp_path) == []


@pytest.mark.parametrize("variant", ["3.5", "3.5_moe"])
def test_text_models_alone_as_transformers_saves_them(tmp_path, variant):
    """Read, written and, with heads, computed as the same weights beside a vision tower are."""
    from transformers import AutoModelForCausalLM

    family, sizes = VARIANTS[variant]
    text = tmp_path / "text"
    whole = tmp_path / "whole"
    back = tmp_path / "back"
    model = make(family, 0, **sizes, tie_word_embeddings=variant == "3.5")
    model.save_pretrained(text)
    config = load_config(text)
    assert config.family == f"{family}_text" and config.mtp.num_depths == 0
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits.double()
        assert relative(own_logits(text), expected) < 1e-5

    write_variant(variant, whole, tie_word_embeddings=variant == "3.5")
    for directory in (text, whole):
        add_variant_heads(variant, directory)
        edit_text(directory, full_attention_interval=4, mamba_ssm_dtype="float32")
        (directory / "tokenizer.json").write_text("{}")
    assert load_config(text).replace(family=family) == load_config(whole)
    import_checkpoint(text, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", back)
    before = read_all(text)
    after = read_all(back)
    assert before.keys() == after.keys()
    assert [name for name in before if not bits_equal(before[name], after[name])] == []
    first, second = (
        json.loads((directory / "config.json").read_text()) for directory in (text, back)
    )
    assert first | second == second and load_config(back) == load_config(text)
    again = AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32).eval()
    with torch.no_grad():
        assert relative(again(IDS, use_cache=False).logits, expected) < 1e-6
    assert lint(back) == []

    models = [load_model(directory) for directory in (back, whole)]
    states = [
        [*unroll_depths(one, base_forward(one, IDS, SequenceInput()), IDS, 2)][1] for one in models
    ]
    assert torch.equal(*states)


@pytest.mark.parametrize(
    "own", [{}, {"attention_factor": 1.4}, {"mscale": 0.7, "mscale_all_dim": 0.4}], ids=str
)
@pytest.mark.parametrize("variant", ["next", "3.5", "3.5_moe"])
def test_logits_with_yarn_are_those_of_transformers(tmp_path, variant, own):
    """On a quarter or half of a head's channels."""
    rope = YARN | own | {"partial_rotary_factor": 0.25 if own else 0.5}
    model = write_variant(variant, tmp_path, head_dim=32, rope_parameters=rope)
    with torch.no_grad():
        assert relative(own_logits(tmp_path), model(IDS, use_cache=False).logits.double()) < 1e-5
    config = load_config(tmp_path)
    assert config.attention.yarn_factor == 4
    family = get_family(config.family)
    original = json.loads((tmp_path / "config.json").read_text())
    for written in (family.config_to_hf(config, original), family.config_to_hf(config)):
        assert family.config_from_hf(written) == config


OUT_NORM = "model.language_model.layers.0.linear_attn.norm.weight"
ROUNDED = [0.1, -0.3, 1e-7, 321.0, -0.0, 3e7, -1.7]
"""Values of which one subtracted and added again leaves something else, in fp32 or in bf16."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_megatron_rounds_comes_back(tmp_path, dtype):
    """Through an import and through a run; but a weight that was changed since is what it was
    changed to."""
    hf = tmp_path / "hf"
    megatron = tmp_path / "megatron"
    back = tmp_path / "back"
    write("qwen3_5", hf, dtype=dtype, num_hidden_layers=2, linear_value_head_dim=len(ROUNDED))
    edit(hf, lambda tensors: tensors[OUT_NORM].copy_(torch.tensor(ROUNDED)))
    import_checkpoint(hf, megatron)
    export_checkpoint(megatron, back)
    before = read_all(hf)
    after = read_all(back)
    assert [name for name in before if not bits_equal(before[name], after[name])] == []
    for run_dtype in (torch.float32, torch.bfloat16):
        save_model(load_model(megatron, run_dtype), tmp_path / "run", companions=megatron)
        export_checkpoint(tmp_path / "run", tmp_path / "of_run", force=True)
        after = read_all(tmp_path / "of_run")
        assert [name for name in before if not bits_equal(before[name], after[name])] == []

    def scale(tensors):
        tensors["decoder.layers.0.self_attention.out_norm.weight"].mul_(2)

    write_megatron_copy(megatron, tmp_path / "changed", scale)
    shutil.copy(megatron / ORIGINAL, tmp_path / "changed" / ORIGINAL)
    export_checkpoint(tmp_path / "changed", tmp_path / "of_changed", family="qwen3_5")
    scaled = ((before[OUT_NORM].float() - 1) * 2 + 1).to(dtype)
    assert torch.equal(read_all(tmp_path / "of_changed")[OUT_NORM], scaled)


@pytest.mark.parametrize("variant", ["next", "3.5"])
def test_small_weights_of_the_output_norm_are_not_rounded(tmp_path, variant):
    """A file in bf16 is computed as stored. In bf16, w - 1 is off by up to 40% at 0.005."""
    hf = tmp_path / "hf"
    megatron = tmp_path / "megatron"
    back = tmp_path / "back"
    model = write_variant(variant, hf, dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(3)

    def shrink(tensors):
        norms = [
            tensor for name, tensor in tensors.items() if name.endswith("linear_attn.norm.weight")
        ]
        assert len(norms) == 3
        for norm in norms:
            norm.copy_(0.005 + 0.5 * torch.rand(norm.shape, generator=draw))

    edit(hf, shrink)
    stored = {
        name.replace("language_model.", ""): tensor.float() for name, tensor in read_all(hf).items()
    }
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    import_checkpoint(hf, megatron)
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits.double()
    for directory in (hf, megatron):
        assert relative(own_logits(directory), expected) < 1e-5

    export_checkpoint(megatron, back)
    before = read_all(hf)
    after = read_all(back)
    assert [name for name in before if not bits_equal(before[name], after[name])] == []
    save_model(load_model(hf, torch.bfloat16), tmp_path / "run")
    norm = "decoder.layers.0.self_attention.out_norm.weight"
    exact = stored["model.layers.0.linear_attn.norm.weight"] - 1
    for directory in (hf, megatron, tmp_path / "run"):
        assert bits_equal(open_directory(directory).weights().read(norm), exact)


def test_the_engine_keeps_the_output_norm_in_fp32(tmp_path):
    """A model in bf16 has this weight, and no other norm's, in fp32; every backend's layer is the
    same."""
    write("qwen3_5", tmp_path, dtype=torch.bfloat16)
    edit(tmp_path, lambda tensors: tensors[OUT_NORM].fill_(0.00512695))
    llm = LLM(
        tmp_path,
        dtype="bfloat16",
        num_speculative_tokens=0,
        device="cpu",
        max_num_seqs=2,
        max_model_len=64,
    )
    norms = {n: p for n, p in llm.model.named_parameters() if "norm" in n}
    assert {n.rpartition(".layers.")[2] for n, p in norms.items() if p.dtype == torch.float32} == {
        f"{layer}.self_attention.out_norm.weight" for layer in (0, 2, 4)
    }
    (weight,) = (
        p for n, p in norms.items() if n.endswith("layers.0.self_attention.out_norm.weight")
    )
    assert torch.equal(weight, torch.full((6,), 0.00512695, dtype=torch.bfloat16).float() - 1)


def test_the_form_of_published_norms_is_no_finding(tmp_path):
    write("qwen3_5", tmp_path, dtype=torch.bfloat16)
    edit(
        tmp_path,
        lambda tensors: tensors.update(
            {n: t.float() for n, t in tensors.items() if n.endswith("A_log")}
        ),
    )
    assert not [finding for finding in lint(tmp_path) if "fp32" in finding.text]


def test_what_is_not_rounded_needs_no_record(tmp_path):
    write("qwen3_5", tmp_path / "hf", num_hidden_layers=1)
    edit(tmp_path / "hf", lambda tensors: tensors[OUT_NORM].uniform_(0.5, 2))
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron")
    assert not (tmp_path / "megatron" / ORIGINAL).exists()


@each(
    ("value", "words"),
    [
        ([1.0], "is no tensor"),
        ({"dtype": "int8", "values": [1.0]}, "is no tensor"),
        ({"dtype": "float32", "values": ["1"]}, "is no tensor"),
        ({"dtype": "float32", "values": [1.0, 2.0]}, f"{OUT_NORM} has 2 values, not 6"),
    ],
)
def test_a_damaged_record_of_what_is_rounded_is_refused(rounded, tmp_path, value, words):
    (rounded / ORIGINAL).write_text(json.dumps({"rounded": {OUT_NORM: value}}))
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        export_checkpoint(rounded, tmp_path / "back")
    assert ORIGINAL in str(caught.value) and "import the checkpoint again" in str(caught.value)


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """A Megatron directory."""
    folder = tmp_path_factory.mktemp("rounded")
    write("qwen3_5", folder / "hf", num_hidden_layers=1)
    import_checkpoint(folder / "hf", folder / "megatron")
    return folder / "megatron"


@pytest.mark.parametrize(
    ("variant", "case", "heads", "dtype"),
    [
        ("next", "odd", True, torch.bfloat16),
        ("next_raw", "types", False, torch.float32),
        ("next_sparse", "interval", False, torch.float32),
        ("3.5", "tied", True, torch.bfloat16),
        ("3.5_moe", "odd", True, torch.float32),
        ("3.5_moe", "interval", False, torch.bfloat16),
    ],
)
def test_round_trip_is_bitwise_equal(tmp_path, variant, case, heads, dtype):
    hf = tmp_path / "hf"
    back = tmp_path / "back"
    family = VARIANTS[variant][0]
    write_variant(variant, hf, case, dtype=dtype)
    if heads:
        add_variant_heads(variant, hf)
    import_checkpoint(hf, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", back)
    before = read_all(hf)
    after = read_all(back)
    assert before.keys() == after.keys()
    assert [name for name in before if not bits_equal(before[name], after[name])] == []
    assert (VISION.keys() <= after.keys()) == (family != "qwen3_next")
    config = load_config(hf)
    assert config == load_config(tmp_path / "megatron") == load_config(back)
    assert config.mtp.pattern == (
        ("*-" if variant == "3.5" else "*E") if heads else ""
    ) and config.mtp.depths_known == (not heads)
    first, second = (json.loads((d / "config.json").read_text()) for d in (hf, back))
    assert first.keys() <= second.keys()
    inner = text_config(hf)
    again = text_config(back)
    differing = {key for key in inner if inner[key] != again.get(key)}
    assert differing <= {"transformers_version", "full_attention_interval"}, differing
    types = again["layer_types"]
    if (every := again["full_attention_interval"]) is not None:
        assert [t == "full_attention" for t in types] == [
            (n + 1) % every == 0 for n in range(len(types))
        ]


def error_of_depths(directory, model, own=None, depths: int = 3) -> float:
    """Worst relative error of g^1, g^2, .. against the reference, from transformers' hidden
    states."""
    own = own or load_model(directory)
    ids = IDS[:1]
    head = Head(directory)
    hidden = model.model(ids, use_cache=False).last_hidden_state[0]
    states = unroll_depths(own, hidden[:, None], ids, depths, attention="per_depth")
    want = hidden.double()
    errors = []
    for depth, state in enumerate(states, 1):
        count = ids.shape[1] - depth
        want = head.depth(want[:count], ids[0, depth:])
        errors.append(relative(state[:count, 0], want))
    return max(errors)


@torch.no_grad()
@pytest.mark.parametrize(
    ("variant", "case"),
    [("next", "odd"), ("next_raw", "rotary"), ("3.5", "usual"), ("3.5_moe", "usual")],
)
def test_heads_are_those_of_the_reference(tmp_path, variant, case):
    model = write_variant(variant, tmp_path, case)
    add_variant_heads(variant, tmp_path)
    assert error_of_depths(tmp_path, model) < 1e-5
    swapped = load_model(tmp_path)
    joined = swapped.mtp.layers[0].eh_proj.weight
    joined.copy_(joined.roll(32, 1))
    assert error_of_depths(tmp_path, model, swapped) > 1e-2


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Model of a variant with a head; made once."""

    @functools.cache
    def make(variant):
        directory = tmp_path_factory.mktemp(variant)
        write_variant(variant, directory)
        add_variant_heads(variant, directory)
        return load_model(directory)

    return make


@pytest.mark.parametrize("variant", ["next", "3.5", "3.5_moe"])
@pytest.mark.parametrize(
    ("k", "settings"),
    [
        (1, {"state_rollback": "snapshot"}),
        (2, {"state_rollback": "replay", "max_num_batched_tokens": 10}),
        (3, {"state_rollback": "snapshot", "block_size": 2, "num_blocks": 34}),
        (4, {"state_rollback": "replay", "async_scheduling": True}),
    ],
)
def test_drafts_change_no_token(written, variant, k, settings):
    """Chunked prompts and mixed steps, preemption, steps ahead of their results."""
    model = written(variant)
    prompts = make_prompts((1, 1 + k, 9, 21))
    llm = guide(make_llm(model, k, **settings), prompts, 10)
    assert generate(llm, prompts, greedy(10)) == [decode(model, prompt, 10) for prompt in prompts]
    assert (llm.stats().preemptions > 0) == ("num_blocks" in settings)


def test_plain_decoding_is_that_of_transformers(tmp_path):
    model = write("qwen3_5", tmp_path, num_hidden_layers=4)
    (prompt,) = make_prompts((9,))
    with torch.no_grad():
        want = model.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None
        )
    assert generate(make_llm(load_model(tmp_path), 0), [prompt], greedy(10)) == [
        want[0, 9:].tolist()
    ]


TRAPS = {
    "the output norm is not shifted": (
        qwen3_next.Centered,
        "to_megatron",
        lambda self, tensors: list(tensors),
    ),
    "projections are taken for ungrouped": (
        qwen3_next.Ungroup,
        "to_megatron",
        lambda self, tensors: list(tensors[0].split([rows * self.heads for rows in self.rows])),
    ),
    "gates are taken to follow all queries": (
        qwen3_next.FuseGatedQKV,
        "_turned",
        lambda self, q, first, second: q,
    ),
    "the gate comes before the norm": (
        GatedDeltaNet,
        "normed",
        lambda self, y, z: (
            norm_gate(y * F.silu(z), torch.full_like(z, 30.0), self.out_norm.weight, 1e-6, True)
            / 30
        ),
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_traps_would_be_seen(tmp_path, monkeypatch, trap):
    model = write("qwen3_next", tmp_path, **DENSE)
    with torch.no_grad():
        want = model(IDS, use_cache=False).logits.double()
    assert relative(own_logits(tmp_path), want) < 1e-5
    monkeypatch.setattr(*TRAPS[trap])
    assert relative(own_logits(tmp_path), want) > 1e-2


def test_betas_and_alphas_in_each_others_place_would_be_seen(tmp_path):
    model = write("qwen3_5", tmp_path)

    def swap(tensors):
        for name in [n for n in tensors if "in_proj_a" in n]:
            other = name.replace("in_proj_a", "in_proj_b")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    edit(tmp_path, swap)
    with torch.no_grad():
        assert relative(own_logits(tmp_path), model(IDS, use_cache=False).logits.double()) > 1e-2


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("qwen3_next", dict(layer_types=["full_attention"] * 3), ["layer_types", "4 layers"]),
        (
            "qwen3_next",
            dict(full_attention_interval=3),
            ["layer_types", "full_attention_interval 3", "contradict"],
        ),
        ("qwen3_next", dict(num_hidden_layers=10**30), ["num_hidden_layers", "1024"]),
        ("qwen3_next", dict(decoder_sparse_step="x"), ["decoder_sparse_step"]),
        ("qwen3_next", dict(mlp_only_layers=[1.5]), ["mlp_only_layers"]),
        ("qwen3_5", dict(attention_bias=True, hidden_act="gelu"), ["attention_bias", "hidden_act"]),
        ("qwen3_5", dict(output_gate_type="sigmoid"), ["output_gate_type", "swish"]),
        ("qwen3_5", dict(attn_output_gate=False), ["attn_output_gate"]),
        (
            "qwen3_5",
            dict(tie_word_embeddings=True),
            ["text_config.tie_word_embeddings", "agree"],
        ),
    ],
)
def test_what_cannot_be_represented_is_named(tmp_path, family, changes, named):
    write(family, tmp_path, **(DENSE if family == "qwen3_next" else {}), tie_word_embeddings=False)
    edit_text(tmp_path, **changes)
    with pytest.raises(UserError) as caught:
        load_config(tmp_path)
    assert all(name in str(caught.value) for name in named), caught.value


def test_experts_are_packed_one_by_one_or_both(tmp_path):
    """As Qwen3.5 has them, packed in the base and one by one in the head; packed ones have no
    `.weight`."""
    write_variant("3.5_moe", tmp_path / "hf")
    add_variant_heads("3.5_moe", tmp_path / "hf")

    def repack(tensors):
        """transformers writes the base one by one, `add_heads` the head packed."""
        packed = [
            tensors.pop(f"mtp.layers.0.mlp.experts.{name}")
            for name in ("gate_up_proj", "down_proj")
        ]
        for number, (both, down) in enumerate(zip(*packed, strict=True)):
            for name, tensor in zip(("gate", "up", "down"), (*both.chunk(2), down), strict=True):
                tensors[f"mtp.layers.0.mlp.experts.{number}.{name}_proj.weight"] = tensor.clone()
        for own in (f"model.language_model.layers.{layer}.mlp.experts." for layer in range(4)):
            gate, up, down = (
                torch.stack(
                    [tensors.pop(f"{own}{number}.{name}_proj.weight") for number in range(5)]
                )
                for name in ("gate", "up", "down")
            )
            tensors |= {f"{own}gate_up_proj": torch.cat([gate, up], 1), f"{own}down_proj": down}

    want = own_logits(tmp_path / "hf")
    edit(tmp_path / "hf", repack)
    assert torch.equal(own_logits(tmp_path / "hf"), want)
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    before = read_all(tmp_path / "hf")
    after = read_all(tmp_path / "back")
    assert before.keys() == after.keys() and all(
        bits_equal(before[name], after[name]) for name in before
    )
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    edit(tmp_path / "hf", lambda tensors: tensors.update({f"{name}.weight": tensors.pop(name)}))
    with pytest.raises(UserError, match=rf"{name}\.weight"):
        load_model(tmp_path / "hf")


def test_settings_of_the_text_model_are_missing(tmp_path):
    write("qwen3_5", tmp_path)
    edit_config(tmp_path, text_config=3)
    with pytest.raises(UserError, match="text_config 3 is not an object"):
        load_config(tmp_path)


def test_a_published_config_without_a_count_has_one_head(tmp_path):
    write("qwen3_next", tmp_path, **DENSE)
    add_heads("qwen3_next", tmp_path)
    edit_config(tmp_path, num_nextn_predict_layers=None)
    config = load_config(tmp_path)
    assert config.mtp.num_layers == 1 and not config.mtp.depths_known
    assert load_model(tmp_path).mtpkit_config == config
