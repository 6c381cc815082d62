"""Weights in fp8 with a scale per block, some of them partial, against the definition element by
element."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.directory import load_config, open_directory
from mtpkit.checkpoint.matrices import StoredMatrices, find_matrices
from mtpkit.checkpoint.quantized import FP8, SCALE, BlockFp8
from mtpkit.checkpoint.recipe import Recipe, Rule
from mtpkit.checkpoint.tensors import TensorInfo, bits_equal
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
    tensors = {"X": weight, "X" + SCALE: scale}
    infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    matrices = find_matrices(infos, Recipe("fp8", (Rule("fp8", 128, 128),)), "here")
    source = SimpleNamespace(tensors=infos, read=tensors.__getitem__)
    found = StoredMatrices(source, matrices, dtype).read("X")
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


def test_matrices_are_given_as_stored_and_widened(fp8_dir):
    source = open_directory(fp8_dir).weights()
    # Queries, keys and values of 2 groups of heads lie within blocks of 12 rows of each other.
    with pytest.raises(UserError, match=r"layers\.0\.mixer\.q_proj.*--expand-scales"):
        _ = source.formats
    source = open_directory(fp8_dir).weights(expand_scales=True)
    kinds = source.formats
    assert {kind.name for kind in kinds.values()} == {"fp8"}
    assert kinds["decoder.layers.0.self_attention.linear_qkv.weight"].rows == 1
    assert kinds["decoder.layers.1.mlp.linear_fc2.weight"].rows == BLOCK
    assert "mtp.layers.0.eh_proj.weight" not in kinds and "output_layer.weight" not in kinds
    for name, matrix in source.matrices.items():
        stored = source.quantized(name)
        assert stored.format == kinds[name] and stored.shape == source.tensors[name].shape
        assert {n: (p.shape, p.dtype) for n, p in stored.parts.items()} == {
            n: (p.shape, p.dtype) for n, p in matrix.parts.items()
        }
        assert torch.equal(stored.widen(torch.bfloat16), source.read(name)), name
    source.require_finite()


def test_scales_expanded_to_rows_become_those_of_blocks_again(fp8_dir, tmp_path):
    with pytest.raises(UserError, match=r"q_proj.*--expand-scales.*--fp8-as"):
        import_checkpoint(fp8_dir, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()
    import_checkpoint(fp8_dir, tmp_path / "megatron", expand_scales=True)
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    before = load_file(fp8_dir / "model.safetensors")
    after = read_all(tmp_path / "back")
    assert after.keys() == before.keys()
    assert all(bits_equal(after[name], tensor) for name, tensor in before.items())
    told = [read_config(each)["quantization_config"] for each in (fp8_dir, tmp_path / "back")]
    # The original does not say that the projection of the heads is not quantised.
    assert told[1] == {**told[0], "modules_to_not_convert": ["mtp.layers.0.eh_proj"]}
    stored = open_directory(tmp_path / "megatron").weights()
    original = open_directory(fp8_dir).weights(expand_scales=True)
    assert stored.formats == original.formats
    assert all(torch.equal(stored.read(name), original.read(name)) for name in original.tensors)


@pytest.mark.parametrize("what", ["missing", "odd"])
def test_every_missing_and_every_odd_scale_is_named(fp8_dir, what):
    first, second = (f"backbone.layers.0.mixer.{name}_proj.weight{SCALE}" for name in "kv")

    def damage(tensors):
        scales = tensors.pop(first), tensors.pop(second)
        if what == "odd":
            tensors |= {first: torch.ones(2, 2), second: scales[1].double()}

    edit(fp8_dir, damage)
    with pytest.raises(UserError) as caught:
        open_directory(fp8_dir).weights()
    wrong = (f"{first} [2, 2] float32 instead of [2, 3] float32", f"{second} [2, 3] float64")
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
