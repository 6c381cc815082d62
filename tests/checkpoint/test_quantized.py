"""Weights in fp8 with a scale per block, some of them partial, against the definition element by
element."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.directory import load_config, open_directory
from mtpkit.checkpoint.quantized import FP8, SCALE, BlockFp8
from mtpkit.errors import UserError
from tests.checkpoint.builders import add_heads, edit, edit_config, write_base
from tests.checkpoint.odd_family import read_config
from tests.checkpoint.test_round_trip import read_all
from tests.shared import each

BLOCK = 12
"""Divides none of the toy's sizes but 24 and 48."""


def widened(weight, scale, rows=BLOCK, columns=BLOCK):
    """Each value times the scale of its block, in fp64."""
    i, j = torch.meshgrid(
        torch.arange(weight.shape[-2]), torch.arange(weight.shape[-1]), indexing="ij"
    )
    return weight.double() * scale.double()[..., i // rows, j // columns]


@each("shape", [(576, 300), (128, 128), (1, 5), (129, 127), (3, 200, 140)])
@each("dtype", [torch.bfloat16, torch.float32])
def test_partial_blocks(shape, dtype):
    block = BlockFp8()
    weight = torch.randn(shape).to(FP8)
    scale = torch.rand(block.scale_shape(shape)) + 0.5
    found = block.dequantize(weight, scale, dtype)
    assert found.dtype == dtype and found.shape == shape
    assert torch.equal(found, widened(weight, scale, 128, 128).float().to(dtype))
    shifted = widened(weight, scale.roll(1, -1), 128, 128)
    assert scale.shape[-1] == 1 or not torch.equal(found, shifted.float().to(dtype))


@pytest.fixture
def fp8_dir(tmp_path):
    """A checkpoint whose matrices are fp8, but for the projection of the heads, the embedding and
    lm_head."""
    directory = tmp_path / "hf"
    write_base(directory, "*-E", dtype=torch.bfloat16)
    add_heads(directory, "*-")
    tensors = load_file(directory / "model.safetensors")
    block = BlockFp8(BLOCK, BLOCK)
    for name in [
        n for n, t in tensors.items() if t.dim() == 2 and "proj.weight" in n and "eh_proj" not in n
    ]:
        tensors[name] = (tensors[name] * 4).to(FP8)
        tensors[name + SCALE] = torch.rand(block.scale_shape(tuple(tensors[name].shape))) + 0.1
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    edit_config(
        directory, quantization_config={"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    )
    return directory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_import_widens_and_export_says_so(fp8_dir, tmp_path, dtype):
    import_checkpoint(fp8_dir, tmp_path / "megatron", fp8_as=dtype)
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    before = load_file(fp8_dir / "model.safetensors")
    after = read_all(tmp_path / "back")
    scales = {name for name in before if name.endswith(SCALE)}
    assert len(scales) > 12 and after.keys() == before.keys() - scales
    for name, tensor in after.items():
        want = before[name]
        if name + SCALE in scales:
            want = widened(want, before[name + SCALE]).float().to(dtype)
        assert torch.equal(tensor, want) and tensor.dtype == want.dtype, name
    assert "quantization_config" not in read_config(tmp_path / "back")
    assert load_config(tmp_path / "back") == load_config(fp8_dir)


@pytest.mark.parametrize("what", ["missing", "odd"])
def test_every_missing_and_every_odd_scale_is_named(fp8_dir, what):
    first, second = (f"backbone.layers.0.mixer.{name}_proj.weight{SCALE}" for name in "kv")

    def damage(tensors):
        scales = tensors.pop(first), tensors.pop(second)
        if what == "odd":
            tensors |= {first: torch.ones(2, 2), second: scales[1].bfloat16()}

    edit(fp8_dir, damage)
    with pytest.raises(UserError) as caught:
        open_directory(fp8_dir).weights()
    wrong = (f"{first} [2, 2] float32 instead of [2, 3] float32", f"{second} [2, 3] bfloat16")
    for words in ("2 missing", first, second) if what == "missing" else wrong:
        assert words in str(caught.value)


def test_a_scale_without_its_weight_is_named(fp8_dir):
    edit(fp8_dir, lambda tensors: tensors.update({"lm_head.weight" + SCALE: torch.ones(8, 3)}))
    with pytest.raises(UserError, match=r"1 unexpected: lm_head\.weight_scale_inv"):
        open_directory(fp8_dir).weights()


@each(
    "config",
    [
        3,
        {},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        {"quant_method": "fp8", "weight_block_size": [128, True]},
        {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]},
        {"quant_method": "modelopt", "weight_block_size": [128, 128]},
    ],
)
def test_other_quantisations_are_refused(fp8_dir, config):
    edit_config(fp8_dir, quantization_config=config)
    with pytest.raises(UserError, match="quantization_config"):
        load_config(fp8_dir)


def test_fp8_weights_need_the_config_that_says_so(fp8_dir):
    edit_config(fp8_dir, quantization_config=None)
    with pytest.raises(UserError, match="not stored as fp64"):
        open_directory(fp8_dir).weights()
