"""Experts packed or not, copies, tensors of other models: each original comes back as it was."""

import json

import pytest
import torch

from mtpkit.checkpoint import load_model, save_checkpoint
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.directory import open_directory
from mtpkit.checkpoint.families.table import Entry, Join, Stack, Stored, Table, Ways
from mtpkit.checkpoint.original import CARRIED as CARRIED_FILE
from mtpkit.checkpoint.original import ORIGINAL
from mtpkit.checkpoint.tensors import bits_equal
from mtpkit.errors import MtpkitError, UserError
from tests.checkpoint.builders import edit
from tests.checkpoint.odd_family import CARRIED, COPIES, known, write_odd
from tests.checkpoint.test_cli import convert
from tests.checkpoint.test_round_trip import read_all

BASE = "backbone.layers.1."
HEAD = "mtp.layers.1."


@pytest.fixture(autouse=True)
def odd_family():
    with known():
        yield


@pytest.mark.parametrize(
    ("packed", "copies"),
    [((), True), ((BASE,), True), ((BASE, HEAD), False), ((), False)],
)
def test_each_original_comes_back(tmp_path, packed, copies, capsys):
    before = write_odd(tmp_path / "hf", packed, copies)
    assert convert("import", tmp_path / "hf", tmp_path / "megatron") == 0
    assert (
        convert("export", tmp_path / "megatron", tmp_path / "back", "--max-shard-gb", "0.001") == 0
    )
    listing = "carried 5 tensors outside the text model: audio.mask, audio.small, visual.bad"
    assert capsys.readouterr().out.count(listing) == 2
    after = read_all(tmp_path / "back")
    assert before.keys() == after.keys()
    assert [name for name in before if not bits_equal(before[name], after[name])] == []
    assert not (tmp_path / "back" / ORIGINAL).exists()
    plain = not packed and copies
    assert (tmp_path / "megatron" / ORIGINAL).exists() != plain


def test_weights_are_the_same_whichever_way_they_are_stored(tmp_path):
    write_odd(tmp_path / "single")
    write_odd(tmp_path / "packed", (BASE, HEAD))
    one = open_directory(tmp_path / "single").weights()
    other = open_directory(tmp_path / "packed").weights()
    assert one.tensors == other.tensors
    assert all(bits_equal(one.read(name), other.read(name)) for name in one.tensors)


def test_experts_that_are_stored_half_packed(tmp_path):
    tensors = write_odd(tmp_path / "hf", (BASE,))
    stray = f"{BASE}mixer.experts.1.up_proj.weight"
    edit(tmp_path / "hf", lambda found: found.update({stray: torch.ones(16, 32)}))
    with pytest.raises(UserError, match="unexpected") as caught:
        open_directory(tmp_path / "hf").weights()
    assert "mixer.experts" in str(caught.value) and len(tensors) > 20


def test_a_copy_that_is_none_is_refused(tmp_path):
    write_odd(tmp_path / "hf")
    edit(tmp_path / "hf", lambda found: found["mtp.head.weight"][0].add_(1))
    with pytest.raises(UserError, match=r"mtp\.head\.weight and lm_head\.weight differ"):
        import_checkpoint(tmp_path / "hf", tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()


@pytest.mark.parametrize("layout", ["hf", "megatron"])
def test_a_run_keeps_what_its_base_has(tmp_path, layout):
    write_odd(tmp_path / "hf", (BASE,), copies=False)
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron")
    model = load_model(tmp_path / "hf")
    for iteration in (1, 2):
        state = {"model": model.sharded_state_dict()}
        save_checkpoint(
            tmp_path / "run", iteration, state, {}, model.mtpkit_config, tmp_path / layout
        )
    assert export_checkpoint(tmp_path / "run", tmp_path / "back") == sorted(CARRIED)
    assert read_all(tmp_path / "back").keys() == read_all(tmp_path / "hf").keys()
    link = (tmp_path / "run" / CARRIED_FILE).samefile(tmp_path / "megatron" / CARRIED_FILE)
    assert link == (layout == "megatron")


def test_a_damaged_record_is_refused(tmp_path):
    write_odd(tmp_path / "hf", (BASE,))
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron")
    for text in (
        '{"ways": 3}',
        '{"lacking": [1]}',
        '{"rounded": []}',
        '{"rounded": {"a": 3}}',
        "{",
    ):
        (tmp_path / "megatron" / ORIGINAL).write_text(text)
        with pytest.raises(UserError, match=ORIGINAL):
            export_checkpoint(tmp_path / "megatron", tmp_path / "back")


def test_an_unknown_way_is_refused(tmp_path):
    """It would be written as by default; what the record says of tensors that a model lacks has no
    effect."""
    write_odd(tmp_path / "hf", (BASE,))
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron")
    record = json.loads((tmp_path / "megatron" / ORIGINAL).read_text())
    key = f"{BASE}mixer.experts.up_proj"
    assert record["ways"][key] == "packed"
    record["ways"] |= {key: "stacked", "mtp.layers.7.mixer.experts.up_proj": "stacked"}
    (tmp_path / "megatron" / ORIGINAL).write_text(json.dumps(record))
    with pytest.raises(UserError) as caught:
        export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    said = f"{key} is stored 'stacked', not 'one by one', 'packed'; import the checkpoint again"
    assert str(caught.value) == f"{ORIGINAL} of {tmp_path / 'megatron'}: {said}"
    assert not (tmp_path / "back").exists()
    record["ways"][key] = "packed"
    (tmp_path / "megatron" / ORIGINAL).write_text(json.dumps(record))
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")


def test_heads_are_named_with_their_copies(tmp_path):
    ways = Ways(
        "b", {"one": (Entry(("b", "c"), ("mtp.b",), Join()),), "two": (Entry(("bc",), ("mtp.b",)),)}
    )
    table = Table([Entry(("a",), ("a",)), ways], {"a": (2, 3), "mtp.b": (4, 3)}, {"copy": "a"})
    assert table.mtp_names() == {"b", "c", "copy"}
    assert table.hf_shapes() == {"a": (2, 3), "b": (2, 3), "c": (2, 3), "copy": (2, 3)}
    stored = table.stored_in({"a", "bc"})
    assert stored == Stored({"b": "two"}, ("copy",)) and table.mtp_names(stored) == {"bc"}


def test_every_way_must_name_every_tensor():
    ways = Ways(
        "w",
        {"one": (Entry(("b",), ("b",)),), "packed": (Entry(("c",), ("c[0]", "c[1]"), Stack(2)),)},
    )
    with pytest.raises(MtpkitError, match=r"no Hugging Face name for c\[0\], c\[1\]"):
        Table([ways], {"b": (1,), "c[0]": (1,), "c[1]": (1,)})


def test_copies_are_written_from_the_base(tmp_path):
    tensors = write_odd(tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron")
    names = open_directory(tmp_path / "megatron").weights().tensors
    assert not [name for name in names if "embed.weight" in name]
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    after = read_all(tmp_path / "back")
    assert all(bits_equal(after[copy], tensors[name]) for copy, name in COPIES.items())


def test_verify_compares_carried_tensors_too(tmp_path, capsys):
    write_odd(tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron")
    assert convert("verify", tmp_path / "hf", tmp_path / "megatron") == 0
    edit(tmp_path / "hf", lambda found: (found["visual.steps"].add_(1), found.pop("audio.mask")))
    assert convert("verify", tmp_path / "hf", tmp_path / "megatron") == 1
    out = capsys.readouterr().out
    assert (
        "1 differ: visual.steps (differs by up to 1)" in out
        and f"1 only in {tmp_path / 'megatron'}: audio.mask" in out
    )
