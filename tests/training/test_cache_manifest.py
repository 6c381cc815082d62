"""The manifest and the shards of a cache, changed by somebody else."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from mtpkit.errors import UserError
from mtpkit.training.cache import FORMAT, HiddenReader, Manifest, Split, read_manifest
from tests.mutations import cases

MANIFEST = Manifest(
    format=FORMAT,
    base="0" * 32,
    base_config="1" * 32,
    base_name="base",
    base_files={"model.safetensors": [10, 20]},
    tokenizer="2" * 32,
    dtype="float32",
    cache_dtype="float8_e4m3fn",
    hidden_size=4,
    sequence_length=6,
    splits=[Split("train", "3" * 32, 5, 2), Split("eval", "4" * 32, 1, 1)],
)


def test_manifests(tmp_path):
    path = tmp_path / "cache.json"
    path.write_text(MANIFEST.to_json())
    assert read_manifest(tmp_path) == MANIFEST
    whole = path.read_text()
    assert len(cases(whole)) > 300
    for what, content in cases(whole):
        path.write_bytes(content)
        try:
            found = read_manifest(tmp_path)
        except UserError as error:
            assert len(" ".join(str(error).split())) < 400 and str(path) in str(error), (
                what,
                error,
            )
            continue
        # Of the right types, and it says in what it differs.
        assert all(len(text) < 400 for text in found.differences(MANIFEST)), what


def test_a_manifest_of_format_2_says_nothing_of_the_config(tmp_path):
    """Its digest covered other keys of the config; everything else is compared."""
    old = replace(MANIFEST, format=2, base_config="5" * 32)
    (tmp_path / "cache.json").write_text(old.to_json())
    found = read_manifest(tmp_path)
    assert found == old and found.differences(MANIFEST) == []
    assert found.differences(replace(MANIFEST, dtype="bfloat16")) == ["dtype float32, not bfloat16"]
    assert len(replace(old, format=FORMAT).differences(MANIFEST)) == 1


@pytest.mark.parametrize("version", [1, FORMAT + 1])
def test_manifests_of_unknown_formats_are_refused(tmp_path, version):
    (tmp_path / "cache.json").write_text(replace(MANIFEST, format=version).to_json())
    with pytest.raises(UserError, match=f"has format {version}, this mtpkit reads {FORMAT}"):
        read_manifest(tmp_path)


def test_other_counts_of_the_same_sequences_are_a_difference():
    more = replace(MANIFEST, splits=[replace(MANIFEST.splits[0], num_sequences=10**15)])
    assert more.differences(MANIFEST) == [
        "data.train of 1,000,000,000,000,000 sequences (33333333), not 5 (33333333)"
    ]


@pytest.mark.parametrize(
    "damage",
    [
        {"hidden": torch.zeros(1, 6, 4)},
        {"hidden": torch.zeros(1, 6, 5, dtype=torch.float8_e4m3fn)},
        {"hidden": torch.zeros(24, dtype=torch.float8_e4m3fn)},
        {"scale": torch.zeros(1, 6, dtype=torch.bfloat16)},
        {"scale": torch.zeros(1, 5)},
        {"scale": None},
    ],
)
def test_shards_of_other_shapes_and_dtypes(tmp_path, damage):
    tensors = {
        "hidden": torch.zeros(1, 6, 4, dtype=torch.float8_e4m3fn),
        "scale": torch.zeros(1, 6),
    }
    split = MANIFEST.splits[1]
    save_file(tensors, tmp_path / split.files[0])
    HiddenReader(tmp_path, MANIFEST, split)
    save_file(
        {key: tensor for key, tensor in (tensors | damage).items() if tensor is not None},
        tmp_path / split.files[0],
    )
    with pytest.raises(UserError, match=r"eval-00000-of-00001\.safetensors .*it is written again"):
        HiddenReader(tmp_path, MANIFEST, split)
