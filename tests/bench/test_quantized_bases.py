"""`benchmarks.quantized`: copies of a base in published layouts, and what the script makes of
them."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks.quantized.__main__ import compare, log_probs
from benchmarks.quantized.write import copies, group_of, linears_of, write_copy
from mtpkit.checkpoint.directory import HFDirectory
from mtpkit.errors import UserError
from mtpkit.kernels.quantized import NOT_QUANTIZED
from mtpkit.model.formats import Quantized
from tests.checkpoint.builders import edit, write_base
from tests.checkpoint.family_models import write_family

TEXTS = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(0))


def test_copies_leave_out_what_quantisers_do(tmp_path: Path) -> None:
    """`gate_proj` is a linear, `gate` a router."""
    source = HFDirectory(write_family("deepseek_v3", tmp_path / "base", dtype=torch.bfloat16))
    count = write_copy(source, copies(16)["fp8 blocks"], tmp_path / "copy", TEXTS)
    copy = HFDirectory(tmp_path / "copy")
    assert len(copy.matrices) == count
    heads = source.table.mtp_names(source.stored)
    left = {
        re.sub(r"layers\.\d+", "layers.N", name)
        for name, info in copy.reader.tensors.items()
        if info.dtype == torch.bfloat16 and len(info.shape) > 1 and name not in heads
    }
    assert left == {
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.N.mlp.gate.weight",
    }


@pytest.mark.parametrize("name", copies(16))
def test_a_copy_moves_a_base_by_the_rounding_of_its_linears(name: str, tmp_path: Path) -> None:
    """4 bits more than fp8; without quantised inputs as a base whose weights were rounded."""
    write_base(tmp_path / "base", "M*", dtype=torch.float32)
    source = HFDirectory(tmp_path / "base")
    assert group_of(source) == 32
    copy = copies(32)[name]
    write_copy(source, copy, tmp_path / "copy", TEXTS)
    before = log_probs(tmp_path / "base", TEXTS)
    assert compare(before, before) == {"KL": 0.0, "same token": 1.0}
    after = log_probs(tmp_path / "copy", TEXTS)
    moved = compare(before, after)

    def round_weights(tensors: dict[str, torch.Tensor]) -> None:
        for place in linears_of(source):
            weight = tensors[place].float()
            parts = copy.format.quantize(weight)
            tensors[place] = Quantized(copy.format, tuple(weight.shape), parts).widen()

    edit(tmp_path / "base", round_weights)
    rounded = log_probs(tmp_path / "base", TEXTS)
    if copy.format.inputs == NOT_QUANTIZED:
        assert moved["KL"] > 1e-3
        assert compare(rounded, after)["KL"] < 1e-6
    else:
        # fp8, whose inputs are rounded on top
        assert compare(before, rounded)["KL"] < moved["KL"] < 1e-3
        assert compare(rounded, after)["KL"] > 1e-5


def test_widths_without_a_group_are_refused(tmp_path: Path) -> None:
    write_base(tmp_path / "base", "*E", dtype=torch.float32)
    with pytest.raises(UserError, match=r"some widths are no multiples of 16: .*24"):
        group_of(HFDirectory(tmp_path / "base"))
