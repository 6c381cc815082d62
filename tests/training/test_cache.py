"""Heads trained on cached hidden states learn what they learn beside the base, and the cache is the
base's own."""

import fcntl
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpkit.checkpoint import load_config as load_model_config
from mtpkit.checkpoint import load_model, save_model
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.cli import run as run_command
from mtpkit.cli.main import app
from mtpkit.data.build import build_dataset
from mtpkit.data.loader import PackedLoader
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.errors import MtpkitError, UserError
from mtpkit.model import build_model
from mtpkit.training import cache as cache_format
from mtpkit.training import cache_write
from mtpkit.training.batches import ReadAhead, open_dataset
from mtpkit.training.cache import HiddenStates, Split
from mtpkit.training.cache_write import _share, attach_cache, write_cache
from mtpkit.training.config.reading import load_config
from mtpkit.training.loop import train
from tests.ranks import fork, fork_ranks, run_ranks
from tests.training.parallel_ranks import EXPERTS, work
from tests.training.toy import CONFIG


@pytest.fixture
def settings(toy_base, text_files, tmp_path):
    """Settings of a short run with held-out data, a dict to change."""
    return {
        "model": toy_base,
        "output": tmp_path / "run",
        "data.train": f"[{text_files[0]}]",
        "data.eval": f"[{text_files[1]}]",
        "data.sequence_length": 32,
        "data.micro_batch_size": 2,
        "data.global_batch_size": 4,
        "data.eval_sequences": 5,
        "heads.num_depths": 2,
        "heads.init": "fresh",
        "optimizer.warmup_steps": 2,
        "steps": 4,
        "log_interval": 1,
        "eval_interval": 2,
        "save_interval": 100,
        "keep_best": "false",
    }


def overrides(settings, **changes):
    return [f"{key}={value}" for key, value in {**settings, **changes}.items()]


def run(settings, **changes):
    return train(load_config(None, overrides(settings, **changes)))


def numbers(output):
    """Losses and acceptance of each line of the metrics."""
    lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: line[key] for key in ("kind", "step", "loss", "acceptance_length")} for line in lines
    ]


def weights(directory, dtype=torch.float32):
    return {
        name: tensor
        for name, tensor in load_model(directory, dtype).state_dict().items()
        if tensor is not None
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss.hidden_mix": 0.4},
        {"heads.init": "base", "heads.fit_tokens": 512, "loss.kind": "tv"},
        {"heads.repeated": "false", "dtype": "bfloat16"},
        {"heads.init": "base", "heads.fit_tokens": 512, "heads.reads_of_base": "before_final_norm"},
    ],
)
def test_heads_learn_the_same_to_the_bit(settings, tmp_path, changes):
    alone = run(settings, **changes)
    cached = run(settings, **changes, output=tmp_path / "cached", cache=tmp_path / "cache")
    assert numbers(cached) == numbers(alone)
    first, second = (
        weights(path, getattr(torch, changes.get("dtype", "float32"))) for path in (alone, cached)
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize(("dtype", "rel"), [("bfloat16", 2e-3), ("float8_e4m3fn", 2e-2)])
def test_narrow_caches_give_nearly_the_same_losses(settings, tmp_path, dtype, rel):
    alone = run(settings)
    cached = run(settings, output=tmp_path / "cached", cache=tmp_path / "cache", cache_dtype=dtype)
    first, second = ([line["loss"] for line in numbers(output)] for output in (alone, cached))
    assert first != second and second == pytest.approx(first, rel=rel)


def test_fp8_comes_back_within_its_rounding():
    hidden = torch.randn(3, 5, 257, generator=torch.Generator().manual_seed(0)) * torch.logspace(
        -6, 6, 15
    ).view(3, 5, 1)
    hidden[1, 2] = 0
    hidden[0, 0, 1:] *= 1e-6
    states = HiddenStates.encode(hidden, torch.float8_e4m3fn)
    assert states.values.dtype == torch.float8_e4m3fn and states.values.element_size() == 1
    back = states.decode(torch.float32)
    largest = hidden.abs().amax(-1, keepdim=True)
    error = (back - hidden).abs()
    assert (error <= torch.maximum(hidden.abs() / 16, largest / 448 / 1024) * (1 + 1e-5)).all()
    assert (back[1, 2] == 0).all() and torch.equal(
        states.values.float().abs().amax(-1)[0], torch.full((5,), 448.0)
    )
    assert error.max() > 0.02 * hidden.abs().max(), "e4m3 has three bits after the point"


@pytest.mark.parametrize(("rows", "multiple"), [(127, 2), (1, 4), (8, 4), (9, 4), (1000, 3)])
def test_shards_hold_every_sequence_once(monkeypatch, rows, multiple):
    monkeypatch.setattr(cache_format, "SHARD_BYTES", 1000)
    split = Split.plan("train", "", rows, 100, multiple)
    parts = [split.rows(shard) for shard in range(len(split.files))]
    assert [row for part in parts for row in part] == list(range(rows))
    assert all(0 < len(part) <= max(multiple, 10) for part in parts)
    assert all(part.start % multiple == 0 for part in parts)


def test_a_stopped_run_goes_on_without_its_base(settings, tmp_path):
    whole = run(settings, cache=tmp_path / "cache", save_interval=2)
    parts = tmp_path / "parts"
    run(settings, output=parts, cache=tmp_path / "cache", save_interval=2)
    shutil.rmtree(parts / "iter_0000004")
    (parts / "latest_checkpointed_iteration.txt").write_text("2")
    shutil.copytree(tmp_path / "cache", tmp_path / "moved")
    run(settings, output=parts, cache=tmp_path / "moved")
    assert numbers(parts) == numbers(whole)
    first = weights(whole)
    second = weights(parts)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_checkpoints_share_the_base_and_hold_it_whole(settings, tmp_path, toy_base):
    output = run(settings, cache=tmp_path / "cache", save_interval=2)
    older, newer = (output / f"iter_000000{step}" / "base_0.distcp" for step in (2, 4))
    assert older.stat().st_ino == newer.stat().st_ino
    shutil.rmtree(older.parent)
    export_checkpoint(output, tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "back")
    base = weights(toy_base)
    first = weights(output)
    second = weights(tmp_path / "back")
    assert first.keys() == second.keys() > base.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert all(torch.equal(tensor, first[name]) for name, tensor in base.items())


@pytest.mark.parametrize("init", ["fresh", "base"])
def test_the_base_is_not_in_memory(settings, tmp_path, monkeypatch, init):
    write_cache(load_config(None, overrides(settings, cache=tmp_path / "cache")))
    monkeypatch.setattr("mtpkit.training.loop.Trainer.run", lambda self, stop: self.model)
    if init == "fresh":  # it never was
        monkeypatch.setattr("mtpkit.training.loop.drop_base_layers", lambda model: None)
    model = run(settings, cache=tmp_path / "cache", **{"heads.init": init, "heads.fit_tokens": 64})
    assert {name for name, _ in model.named_parameters() if not name.startswith("mtp.")} == {
        "embedding.word_embeddings.weight",
        "decoder.final_norm.weight",
        "output_layer.weight",
    }
    with monkeypatch.context() as patch:
        patch.setattr("mtpkit.training.cache_write.build_with_heads", None)
        run(settings, output=tmp_path / "again", cache=tmp_path / "cache")


@pytest.fixture
def cached(settings, tmp_path):
    """Settings of a run whose cache is there."""
    settings["cache"] = tmp_path / "cache"
    write_cache(load_config(None, overrides(settings)))
    return settings


def test_writing_ahead_leaves_the_matmul_precision_alone(settings, tmp_path, monkeypatch):
    """Later products in the same process are not rounded to bf16 on a CPU that supports bf16."""
    before = torch.get_float32_matmul_precision()
    inside = []
    attach = cache_write.attach_cache

    def watch(*args):
        inside.append(torch.get_float32_matmul_precision())
        attach(*args)

    monkeypatch.setattr(cache_write, "attach_cache", watch)
    write_cache(
        load_config(None, overrides(settings, cache=tmp_path / "cache", matmul_precision="medium"))
    )
    assert inside == ["medium"] and torch.get_float32_matmul_precision() == before == "highest"


def files(directory):
    return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"data.sequence_length": 16},
            r"data\.sequence_length 32, not 16; data\.train of 127 sequences .*, not 2",
        ),
        (
            {"data.train": "[{text}]"},
            r"data\.train of 127 sequences \(.{8}\), not 19 \(.{8}\); set cache to another",
        ),
        ({"dtype": "bfloat16"}, r"dtype float32, not bfloat16; cache_dtype float32, not bfloat16"),
        (
            {"cache_dtype": "float8_e4m3fn"},
            "was written for other inputs: cache_dtype float32, not float8_e4m3fn",
        ),
        ({"model": "{other}"}, r"other inputs: base /.*\), not /.*/other \(.{8}\); set cache"),
        (
            {"model": "{turned}"},
            r"other inputs: config of the base \(.{8}\), not \(.{8}\); set cache",
        ),
        ({"model": "{spoken}"}, r"other inputs: tokenizer .{8}, not .{8}; data\.train"),
        ({"cache": "{full}"}, "holds other files, but no cache of hidden states"),
    ],
)
def test_a_cache_of_something_else_is_refused(
    cached, toy_base, text_files, tmp_path, changes, says
):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for name in ("other", "spoken", "turned"):
        shutil.copytree(toy_base, tmp_path / name)
    model = load_model(toy_base)
    with torch.no_grad():
        model.decoder.layers[-1].mlp.linear_fc2.weight[3, 4] += 1e-3
    save_model(model, tmp_path / "other")
    turned = tmp_path / "turned" / "mtpkit.json"
    turned.write_text(json.dumps(json.loads(turned.read_text()) | {"layernorm_epsilon": 1e-3}))
    tokenizer = tmp_path / "spoken" / "tokenizer.json"
    tokenizer.write_text(
        tokenizer.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true')
    )
    places = {name: tmp_path / name for name in ("other", "spoken", "turned", "full")} | {
        "text": text_files[1]
    }
    before = files(tmp_path / "cache")
    with pytest.raises(UserError, match=says) as error:
        run(cached, **{key: str(value).format(**places) for key, value in changes.items()})
    assert "\n" not in str(error.value) and files(tmp_path / "cache") == before
    assert not (tmp_path / "run").exists()


def test_the_same_base_in_another_place_and_layout_is_known(cached, toy_base, tmp_path):
    before = files(tmp_path / "cache")
    export_checkpoint(toy_base, tmp_path / "hf")
    run(cached, model=tmp_path / "hf")
    assert files(tmp_path / "cache") == before


def test_held_out_data_may_be_added_and_left_out(settings, tmp_path):
    settings["cache"] = tmp_path / "cache"
    write_cache(load_config(None, overrides(settings, **{"data.eval": "[]"})))
    before = files(tmp_path / "cache")
    run(settings)
    after = files(tmp_path / "cache")
    assert after.keys() - before.keys() == {"eval-00000-of-00001.safetensors"}
    assert all(
        after[name] == time for name, time in before.items() if name.endswith(".safetensors")
    )
    run(settings, output=tmp_path / "blind", **{"data.eval": "[]"})
    assert files(tmp_path / "cache") == after


def test_too_little_space_is_said_before_anything_is_written(
    settings, tmp_path, monkeypatch, capsys
):
    usage = shutil.disk_usage(tmp_path)._replace(free=500_000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(
        UserError, match=r"needs 0\.0006 GB, but 0\.0005 GB are free in .*cache_dtype=float8_e4m3fn"
    ):
        run(settings, cache=tmp_path / "deep" / "cache")
    assert not (tmp_path / "deep").exists() and not (tmp_path / "run").exists()
    assert "127 train and 19 eval sequences of 32 tokens" in capsys.readouterr().out
    run(settings, cache=tmp_path / "deep" / "cache", cache_dtype="bfloat16")


def test_only_what_is_missing_has_to_fit(settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cache_format, "SHARD_BYTES", 40 * 32 * 32 * 4)
    settings["cache"] = tmp_path / "cache"
    write_cache(load_config(None, overrides(settings)))
    assert "0.0006 GB to write in 5 of 5 shards" in capsys.readouterr().out
    (tmp_path / "cache" / "train-00001-of-00004.safetensors").unlink()
    write_cache(load_config(None, overrides(settings)))
    assert "0.00013 GB to write in 1 of 5 shards" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["cut", "shape", "gone"])
def test_a_damaged_shard_is_named_and_written_anew(cached, tmp_path, damage):
    shard = tmp_path / "cache" / "train-00000-of-00001.safetensors"
    good = shard.read_bytes()
    if damage == "cut":
        shard.write_bytes(good[:-100])
    elif damage == "shape":
        save_file({"hidden": load_file(shard)["hidden"][1:]}, shard)
    if damage != "gone":
        with pytest.raises(UserError, match=r"train-00000-of-00001\.safetensors .*remove it"):
            run(cached)
    shard.unlink()
    run(cached)
    assert shard.read_bytes() == good


def write_shards(settings, printed=None):
    """`mtpkit data cache` in a fork, with shards of two sequences; prints into a file."""
    cache_format.SHARD_BYTES = 2 * 32 * 32 * 4
    if printed:
        os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    run_command(app, ["data", "cache", "--config", "/dev/null", *settings])


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


def test_killed_and_begun_again_on_two_ranks(settings, tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    process = fork(write_shards, overrides(settings, cache=directory))
    while process.exitcode is None and len(list(directory.glob("*.safetensors"))) < 5:
        time.sleep(0.001)
    process.kill()
    process.join()
    kept = files(directory)
    shards = [name for name in kept if name.endswith(".safetensors")]
    assert process.exitcode == -signal.SIGKILL and 5 <= len(shards) < 74
    torn = directory / f".{shards[0]}.writing"
    torn.write_bytes(b"torn")
    printed = tmp_path / "printed"
    ranks = fork_ranks(write_shards, overrides(settings, cache=directory), printed)
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    assert printed.read_text().count(f"{74 - len(shards)} of 74 shards") == 1
    assert not torn.exists() and len(contents(directory)) == 74
    assert {name: files(directory)[name] for name in shards} == {
        name: kept[name] for name in shards
    }
    monkeypatch.setattr(cache_format, "SHARD_BYTES", 2 * 32 * 32 * 4)
    write_cache(load_config(None, overrides(settings, cache=tmp_path / "alone")))
    assert contents(directory) == contents(tmp_path / "alone")


@pytest.mark.parametrize("missing", [[0, 1, 2], [1, 2], [0], [2]])
def test_ranks_that_share_experts_run_as_often(missing):
    split = Split("train", "", 9, 4)  # the last of three shards has one sequence
    shares = [list(_share(split, missing, rank, 2, together=True)) for rank in range(2)]
    assert all(len(first[1]) == len(second[1]) for first, second in zip(*shares, strict=True))
    own = {
        shard: rows[: len(split.rows(shard))].tolist()
        for share in shares
        for shard, rows in share
        if shard is not None
    }
    assert own == {shard: list(split.rows(shard)) for shard in missing}


def test_two_do_not_write_at_once(settings, tmp_path):
    (tmp_path / "cache").mkdir()
    lock = os.open(tmp_path / "cache" / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with pytest.raises(UserError, match="is being written by another process; wait for it"):
            run(settings, cache=tmp_path / "cache")
    finally:
        os.close(lock)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_there_must_be_a_cache_to_write(settings):
    with pytest.raises(UserError, match="set cache=DIR"):
        write_cache(load_config(None, overrides(settings)))
    with pytest.raises(UserError, match=r"cache_dtype=bfloat16 has no effect without a cache"):
        load_config(None, overrides(settings, cache_dtype="bfloat16"))


def test_ranks_that_split_the_base_write_and_read_as_one(settings, tokenizer_dir, tmp_path):
    sizes = dict(pattern="*EM-", mtp_pattern="", mtp_num_depths=0, vocab_size=300)
    settings["model"] = tmp_path / "base"
    save_model(build_model(CONFIG.replace(**{**EXPERTS, **sizes}), device="cpu"), tmp_path / "base")
    shutil.copytree(tokenizer_dir, tmp_path / "base", dirs_exist_ok=True)
    alone = run(settings, cache=tmp_path / "alone", output=tmp_path / "run")
    runs = {
        kind: {
            f"parallel.{kind}": 2,
            "cache": tmp_path / f"cache_{kind}",
            "output": tmp_path / kind,
        }
        for kind in ("tensor", "expert")
    }
    run_ranks(
        work, tmp_path, [("train", overrides(settings, **changes)) for changes in runs.values()]
    )
    for kind, changes in runs.items():
        for name in contents(changes["cache"]).keys() | contents(tmp_path / "alone").keys():
            found, wanted = (
                load_file(path / name)["hidden"] for path in (changes["cache"], tmp_path / "alone")
            )
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        losses, expected = (
            [line["loss"] for line in numbers(output)] for output in (tmp_path / kind, alone)
        )
        assert losses == pytest.approx(expected, rel=1e-4)


def test_reading_ahead_is_in_order_and_counts_what_was_handed_out(text_files, tokenizer_dir):
    data = build_dataset([text_files[0]], load_tokenizer(tokenizer_dir), 32).with_hidden(
        lambda rows: rows.tolist()
    )
    plain = PackedLoader(data, 4, 2)
    ahead = ReadAhead(PackedLoader(data, 4, 2))
    for _ in range(40):
        state = plain.state_dict()
        assert ahead.state_dict() == state
        for batch, expected in zip(next(ahead), next(plain), strict=True):
            assert (
                torch.equal(batch.token_ids, expected.token_ids)
                and batch.hidden() == expected.hidden()
            )
    again = ReadAhead(PackedLoader(data, 4, 2))
    again.load_state_dict(ahead.state_dict())
    assert next(again)[0].hidden() == next(plain)[0].hidden()
    _, second = next(ReadAhead(PackedLoader(data, 4, 2)))
    with pytest.raises(AssertionError, match="in their order"):
        second.hidden()


@pytest.mark.gpu
def test_on_a_gpu_batches_come_from_pinned_memory(settings, tmp_path):
    alone = run(settings, dtype="bfloat16")
    cached = run(settings, output=tmp_path / "cached", cache=tmp_path / "cache", dtype="bfloat16")
    first, second = ([line["loss"] for line in numbers(output)] for output in (alone, cached))
    assert second == pytest.approx(first, rel=1e-3)
    config = load_config(None, overrides(settings, cache=tmp_path / "cache", dtype="bfloat16"))
    data = open_dataset(config, config.data.train)
    data, _ = attach_cache(config, load_model_config(config.model), data, None)
    assert data.batch([3, 1]).hidden().values.is_pinned()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("value", ["nan", "-nan", "inf", "-inf"])
def test_states_that_are_no_numbers_are_seen_in_every_dtype(dtype, value):
    for place in (0, 31, 63 * 32 - 1):
        hidden = torch.randn(3, 63, 32)
        hidden[1].view(-1)[place] = float(value)
        assert HiddenStates.encode(hidden, getattr(torch, dtype)).finite() == [True, False, True]
    assert HiddenStates.encode(torch.full((1, 2, 3), 3.4e38), torch.bfloat16).finite() == [False]


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_states_that_are_no_numbers_are_not_cached(settings, tmp_path, monkeypatch, dtype):
    build = cache_write.build_with_heads

    def broken(*args):
        model = build(*args)
        model.decoder.final_norm.weight.data[3] = torch.nan
        return model

    monkeypatch.setattr(cache_write, "build_with_heads", broken)
    with pytest.raises(
        MtpkitError, match=rf"hidden states of sequence 0, 1 hold NaN or infinity in {dtype} "
    ):
        run(settings, cache=tmp_path / "cache", cache_dtype=dtype)
    assert not list((tmp_path / "cache").glob("*.safetensors")) and not settings["output"].exists()


def test_states_in_a_cache_that_are_no_numbers_are_refused(settings, tmp_path):
    run(settings, cache=tmp_path / "cache")
    (shard,) = (tmp_path / "cache").glob("train-*.safetensors")
    stored = load_file(shard)
    stored["hidden"][:, 5, 3] = torch.inf
    save_file(stored, shard)
    with pytest.raises(
        UserError, match=f"{shard.name} holds hidden states of NaN or infinity; remove it"
    ):
        run(settings, cache=tmp_path / "cache", output=tmp_path / "again")
