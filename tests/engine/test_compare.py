"""Two directories decoded by the engine: what differs in the base shows in tokens, what differs in
heads in drafts."""

import shutil

import pytest

from mtpkit.checkpoint import load_model
from mtpkit.engine import compare
from mtpkit.engine.compare import Recorder, compare_decoding, lack_of_memory
from mtpkit.errors import UserError
from tests.checkpoint.builders import edit
from tests.checkpoint.family_models import write_family
from tests.checkpoint.test_cli import convert
from tests.engine.tiny import generate, greedy, make_llm, teacher_forced_drafts


@pytest.fixture(scope="module")
def mimo(tmp_path_factory):
    """Two layers and a head of unknown depths."""
    return write_family("mimo", tmp_path_factory.mktemp("mimo"), initializer_range=0.3)


def changed(mimo, directory, part):
    shutil.copytree(mimo, directory)
    edit(
        directory,
        lambda tensors: [t.add_(0.5 * t.roll(1)) for name, t in tensors.items() if part in name],
    )
    return directory


def test_the_same_weights_decode_alike(mimo):
    found = compare_decoding(mimo, mimo)
    assert found.identical and found.num_drafts == 3
    assert found.acceptance_lengths[0] == found.acceptance_lengths[1] >= 1


def test_other_heads_draft_otherwise_and_decode_alike(mimo, tmp_path):
    found = compare_decoding(mimo, changed(mimo, tmp_path / "other", "mtp_layers"), 2)
    assert (
        found.same_tokens == 1
        and found.same_drafts < 0.9
        and not found.identical
        and found.num_drafts == 2
    )


def test_another_base_decodes_otherwise(mimo, tmp_path):
    found = compare_decoding(mimo, changed(mimo, tmp_path / "other", "model.layers.0.mlp"))
    assert found.same_tokens < 0.9 and not found.identical


def test_what_is_recorded_are_the_drafts_of_whole_sequences(mimo):
    model = load_model(mimo)
    prompt = [5, 7, 9, 2]
    llm = make_llm(model, 3)
    recorder = llm.engine.executor.drafter = Recorder(llm.engine.executor.drafter, len(prompt))
    (tokens,) = generate(llm, [prompt], greedy(12))
    text = tuple(prompt + tokens)
    known = [count for count in recorder.drafts if count <= len(text)]
    assert known[0] == len(prompt) + 1 and len(known) > 3
    assert all(
        recorder.drafts[count] == teacher_forced_drafts(model, text[:count], 3) for count in known
    )


def test_verify_says_so(mimo, tmp_path, capsys, monkeypatch):
    assert convert("verify", mimo, mimo, "--logits") == 0
    assert (
        "decoding with K = 3: 100.0% of tokens and 100.0% of drafts the same, acceptance"
        in capsys.readouterr().out
    )
    assert (
        convert(
            "verify",
            mimo,
            changed(mimo, tmp_path / "other", "mtp_layers"),
            "--logits",
            "--tolerance",
            9,
        )
        == 1
    )
    assert "100.0% of drafts" not in capsys.readouterr().out
    assert lack_of_memory(mimo) == ""
    monkeypatch.setattr(compare, "_BESIDE_WEIGHTS", 10**16)
    monkeypatch.setattr(compare, "compare_decoding", lambda *_: pytest.fail("it does not fit"))
    assert convert("verify", mimo, mimo, "--logits") == 0
    assert f"not decoded: {mimo} needs 10000000.0 GB, but only" in capsys.readouterr().out


def test_other_vocabularies_are_refused(mimo, tmp_path):
    other = write_family("mimo", tmp_path / "other", vocab_size=40)
    with pytest.raises(UserError, match="differ in vocabulary"):
        compare_decoding(mimo, other)
