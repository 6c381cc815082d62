"""What a run leaves of its base: exported, the tensors and dtypes of the directory that it came
from."""

import re

import pytest
import torch
from megatron.core import parallel_state

from mtpkit.checkpoint import load_model, save_checkpoint, save_model
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.directory import load_config, open_directory
from mtpkit.checkpoint.families import get_family
from mtpkit.checkpoint.lint import lint
from mtpkit.checkpoint.tensors import bits_equal
from tests.checkpoint.builders import edit
from tests.checkpoint.family_models import FAMILIES, write_family
from tests.checkpoint.test_blocks import read_all
from tests.ranks import run_ranks

WIDE = re.compile(
    r"(A_log|\.D|linear_attn\.norm\.weight|e_score_correction_bias|layers\.1\.\w*norm\w*\.weight)$"
)
"""Names of tensors that are in fp32, some of them in every family."""


def write_mixed(family, directory):
    """A directory with heads in bf16 and fp32, whose values in fp32 a run in bf16 rounds."""
    generator = torch.Generator().manual_seed(3)

    def widen(tensors):
        for name in filter(WIDE.search, tensors):
            noise = 1e-3 * torch.rand(tensors[name].shape, generator=generator)
            tensors[name] = tensors[name].float() + noise

    write_family(family, directory, dtype=torch.bfloat16)
    edit(directory, widen)
    return directory


@torch.no_grad()
def trained(directory, dtype, **sizes):
    """The model with other heads."""
    model = load_model(directory, dtype, **sizes)
    for name, parameter in model.named_parameters():
        if name.startswith("mtp."):
            parameter.add_(0.25)
    return model


def differing(before, after):
    """Names of tensors that have other bits or another dtype."""
    first = read_all(before)
    second = read_all(after)
    assert first.keys() == second.keys() and len({tensor.dtype for tensor in first.values()}) == 2
    return {name for name in first if not bits_equal(first[name], second[name])}


def head_names(directory):
    config = load_config(directory)
    table = get_family(config.family).table(config)
    return table.mtp_names(table.stored_in(read_all(directory)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_gives_its_base_back(family, tmp_path):
    """Whatever dtype it ran in, whichever layout it came from, and with the base in memory or
    not."""
    hf = write_mixed(family, tmp_path / "hf")
    megatron = tmp_path / "megatron"
    import_checkpoint(hf, megatron)
    heads = head_names(hf)
    for source, dtype in ((hf, torch.bfloat16), (megatron, torch.bfloat16), (hf, torch.float32)):
        model = trained(source, dtype)
        run = tmp_path / f"run_{dtype}_{source.name}"
        back = tmp_path / "back"
        save_model(model, run, companions=source)
        export_checkpoint(run, back, force=True)
        changed = differing(hf, back)
        assert changed and changed <= heads
    state = {
        name: part for name, part in model.sharded_state_dict().items() if name.startswith("mtp.")
    }
    save_checkpoint(tmp_path / "heads", 3, state, {}, model.mtpkit_config, hf, base=hf)
    export_checkpoint(tmp_path / "heads", back, force=True)
    assert differing(hf, back) == changed
    assert not [finding for finding in lint(back) if "and so rounded" in finding.text]


NORM = "decoder.layers.0.self_attention.out_norm.weight"
HF_NORM = "model.language_model.layers.0.linear_attn.norm.weight"


@torch.no_grad()
def test_what_a_run_changed_of_its_base_is_kept(tmp_path):
    hf = write_mixed("qwen3_5", tmp_path / "hf")
    model = trained(hf, torch.bfloat16)
    model.get_parameter(NORM).mul_(2)
    model.decoder.layers[0].self_attention.in_proj.weight[-1].add_(1)
    save_model(model, tmp_path / "run", companions=hf)
    export_checkpoint(tmp_path / "run", tmp_path / "back")
    base = differing(hf, tmp_path / "back") - head_names(hf)
    parts = {
        f"model.language_model.layers.0.linear_attn.in_proj_{part}.weight"
        for part in ("qkv", "z", "a", "b")
    }
    assert HF_NORM in base and f"{HF_NORM.rpartition('norm')[0]}in_proj_a.weight" in base
    assert base <= {HF_NORM, *parts}
    assert torch.equal(read_all(tmp_path / "back")[HF_NORM], (model.get_parameter(NORM) + 1).cpu())


def test_files_beside_another_model_give_it_no_tensors(tmp_path):
    hf = write_mixed("qwen3_5", tmp_path / "hf")
    other = tmp_path / "other"
    write_family("qwen3_5", other, dtype=torch.bfloat16, num_hidden_layers=8)
    save_model(load_model(hf, torch.bfloat16), tmp_path / "run", companions=other)
    weights = open_directory(tmp_path / "run").weights()
    stored = open_directory(hf).weights().read("embedding.word_embeddings.weight")
    assert bits_equal(weights.read("embedding.word_embeddings.weight"), stored.bfloat16())
    assert weights.tensors.keys() == open_directory(hf).weights().tensors.keys()


def save_rank(rank, hf, run):
    """Save twice; the second time the last rank's part of the last expert is changed."""
    for sizes in (dict(tensor_parallel=2), dict(expert_parallel=2)):
        parallel_state.destroy_model_parallel()
        model = trained(hf, torch.bfloat16, **sizes)
        save_model(model, run / f"same_{next(iter(sizes))}", companions=hf)
        if rank == 1:
            with torch.no_grad():
                *_, last = [
                    p
                    for n, p in model.named_parameters()
                    if "decoder.layers.1." in n and "local_experts" in n
                ]
                last[-1].add_(1)
        save_model(model, run / f"changed_{next(iter(sizes))}", companions=hf)


def test_ranks_agree_on_what_is_unchanged(tmp_path):
    hf = write_mixed("qwen3_5_moe", tmp_path / "hf")
    run_ranks(save_rank, hf, tmp_path)
    heads = head_names(hf)
    for sizes in ("tensor_parallel", "expert_parallel"):
        export_checkpoint(tmp_path / f"same_{sizes}", tmp_path / "back", force=True)
        assert differing(hf, tmp_path / "back") <= heads
        export_checkpoint(tmp_path / f"changed_{sizes}", tmp_path / "back", force=True)
        (name,) = differing(hf, tmp_path / "back") - heads
        assert name == "model.language_model.layers.0.mlp.experts.3.down_proj.weight"
