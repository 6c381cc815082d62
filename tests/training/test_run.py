"""Whole runs: learning, resuming, stopping, many ranks, and what goes wrong."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mtpkit.checkpoint import load_config as load_model_config
from mtpkit.checkpoint import load_model, open_directory, save_model
from mtpkit.checkpoint.layouts.torch_dist import MegatronReader
from mtpkit.cli import run as run_command
from mtpkit.cli.acceptance import app as acceptance_app
from mtpkit.cli.train import app as train_app
from mtpkit.data.options import DataOptions
from mtpkit.data.samples import Columns
from mtpkit.data.tokenizer import fingerprint, load_tokenizer
from mtpkit.errors import MtpkitError, StorageError, UserError
from mtpkit.platform import ensure_distributed
from mtpkit.training import batches, loop, plan
from mtpkit.training import metrics as metrics_log
from mtpkit.training.config.reading import load_config
from mtpkit.training.config.settings import DataConfig
from mtpkit.training.loop import Trainer, train
from mtpkit.training.optimizer import learning_rate
from mtpkit.training.plan import Plan
from mtpkit.training.run import read_best
from tests.checkpoint.test_hostile_files import put_common_state
from tests.ranks import fork, fork_ranks, need_gpus, run_ranks
from tests.training.toy import toy_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def settings(run_settings):
    """Overrides of a short run; more of them can be added."""
    values = {
        "data.micro_batch_size": 2,
        "data.global_batch_size": 4,
        "data.eval_sequences": 6,
        "loss.chunk_size": 16,
        "steps": 6,
        "log_interval": 1,
        "eval_interval": 100,
        "save_interval": 100,
    }
    return run_settings(**values)


def run(settings, *overrides):
    return train(load_config(None, [*settings, *overrides]))


def metrics(output, kind="train"):
    lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == kind}


def losses(output):
    return {step: line["loss"] for step, line in metrics(output).items()}


@pytest.mark.parametrize("kind", ["kl", "tv", "ce"])
def test_heads_learn_what_the_base_says(settings, kind, device):
    optimizer = ["heads.init=fresh", "optimizer.lr=1e-2", "optimizer.min_lr=1e-3"]
    heads = ["heads.num_depths=3", "heads.pattern=*-"]
    output = run(settings, "steps=40", *heads, f"loss.kind={kind}", "eval_interval=40", *optimizer)
    evals = metrics(output, "eval")
    assert evals[40]["loss"] < 0.7 * evals[0]["loss"]
    assert evals[0]["acceptance_length"] < 1.5 and evals[40]["acceptance_length"] > 2.5


def test_the_checkpoint_is_the_base_with_trained_heads(settings, toy_base):
    output = run(settings)
    config = load_model_config(output)
    assert (config.mtp.pattern, config.mtp.num_depths, config.mtp.repeated) == ("*", 2, True)
    trained, base = (load_model(path).state_dict() for path in (output, toy_base))
    assert all(
        torch.equal(tensor, trained[name]) for name, tensor in base.items() if tensor is not None
    )
    assert any(name.startswith("mtp.") for name in trained)
    assert (output / "tokenizer.json").exists() and load_config(
        output / "config.yaml"
    ).heads.attention == "serving"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resuming_gives_the_same_losses_to_the_bit(settings, tmp_path, dtype, optimizer):
    settings = [
        *settings,
        f"dtype={dtype}",
        f"optimizer.kind={optimizer}",
        "heads.init=base",
        "loss.hidden_mix=0.5",
    ]
    whole = run(settings)
    run(settings, f"output={tmp_path / 'parts'}", "save_interval=2")
    parts = tmp_path / "parts"
    # As if the run was killed after step 5 while it saved a checkpoint.
    shutil.rmtree(parts / "iter_0000006")
    (parts / ".iter_0000006.writing").mkdir()
    (parts / "latest_checkpointed_iteration.txt").write_text("4")
    expected = dict(losses(parts))
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    run(settings, f"output={parts}", "save_interval=2")
    assert losses(whole) == losses(parts) == expected and len(expected) == 6
    first, second = (load_model(path).state_dict() for path in (whole, parts))
    assert all(
        torch.equal(tensor, second[name]) for name, tensor in first.items() if tensor is not None
    )


def test_each_step_has_its_learning_rate_and_counts_the_tokens_of_all_ranks(settings, monkeypatch):
    counted = []

    class Counting(loop.Throughput):
        def step(self, tokens):
            counted.append(tokens)
            return super().step(tokens)

    monkeypatch.setattr(loop, "Throughput", Counting)
    overrides = ["data.eval=[]", "optimizer.lr=1e-3", "optimizer.min_lr=1e-5"]
    lines = metrics(run(settings, *overrides))
    config = load_config(None, [*settings, *overrides])
    want = [learning_rate(config.optimizer, number, 6) for number in range(6)]
    assert [line["lr"] for line in lines.values()] == want and len(set(want)) == 5
    assert counted == [4 * 32] * 6


@pytest.mark.parametrize(("tokens", "batches"), [(64, 1), (65, 2), (128, 2), (10**6, None)])
def test_new_heads_are_fitted_to_as_many_tokens_as_asked_for(
    settings, monkeypatch, tokens, batches
):
    """Use batches of two sequences of 32 tokens, at most all the data."""
    given = []
    monkeypatch.setattr(
        loop, "fit_input_projection", lambda model, found: given.extend(found) or 0.5
    )
    config = load_config(None, [*settings, "heads.init=base", f"heads.fit_tokens={tokens}"])
    ensure_distributed()
    trainer = Trainer(Plan(config))
    everything = -(-len(trainer.loader.dataset) // 2)
    assert len(given) == (batches or everything) and everything > 2
    assert all(batch.token_ids.shape == (2, 32) for batch in given)


def test_only_the_newest_checkpoints_are_kept(settings, capsys):
    """Also when the finished run is asked for once more, which says that it is finished."""
    for again in (False, True):
        output = run(settings, "save_interval=1", "keep_checkpoints=2", "keep_best=false")
        assert sorted(path.name for path in output.glob("*iter_*")) == [
            "iter_0000005",
            "iter_0000006",
        ]
        assert (
            "all 6 steps are done already; set steps higher to go on" in capsys.readouterr().out
        ) == again


def test_checkpoints_share_the_files_of_the_base(settings, toy_base, tmp_path):
    """Each is whole; the base has the dtype that it had, not that of the training."""
    output = run(settings, "save_interval=3", "dtype=bfloat16")
    first, second = (output / name for name in ("iter_0000003", "iter_0000006"))
    names = [path.name for path in first.glob("base_*.distcp")]
    assert names and all((first / name).samefile(second / name) for name in names)
    save_model(load_model(output), tmp_path / "whole")
    readers = [MegatronReader(path) for path in (tmp_path / "whole" / "release", second)]
    shapes = [
        {key: key in found.on_disk and found.on_disk[key].shape for key in found.keys}
        for found in readers
    ]
    assert shapes[0] == {
        key: shape for key, shape in shapes[1].items() if not key.startswith("optimizer.")
    }
    stored = open_directory(output).weights().tensors
    base = open_directory(toy_base).weights().tensors
    assert all(stored[name].dtype == info.dtype == torch.float32 for name, info in base.items())


def test_a_checkpoint_that_a_killed_run_left_ahead_does_not_push_out_the_newest(settings):
    settings = [*settings, "keep_checkpoints=1", "keep_best=false"]
    output = run(settings, "steps=2")
    shutil.copytree(output / "iter_0000002", output / "iter_0000005")
    run(settings, "steps=3")
    assert iterations(output) == [3, 5]
    load_model(output)
    run(settings, "steps=6")
    assert iterations(output) == [6]


def plan_lengths(monkeypatch, lengths):
    """Let evaluations find these acceptance lengths, by step."""
    monkeypatch.setattr(Trainer, "_evaluate", lambda self: lengths.get(self.step))


def iterations(output):
    return sorted(int(path.name[5:]) for path in output.glob("iter_*"))


def weights(path):
    return {
        name: tensor for name, tensor in load_model(path).state_dict().items() if tensor is not None
    }


def test_the_best_checkpoint_is_kept(settings, monkeypatch):
    settings = [*settings, "eval_interval=1", "keep_checkpoints=1"]
    plan_lengths(
        monkeypatch, {0: 1.2, 1: 1.5, 2: 2.5, 3: 2.0, 4: 2.5, 5: 2.4, 6: 2.3, 7: 2.6, 8: 2.0}
    )
    output = run(settings)
    assert iterations(output) == [2, 6]
    assert json.loads((output / "best.json").read_text()) == {
        "iteration": 2,
        "acceptance_length": 2.5,
    }
    best, own, newest = (
        weights(path) for path in (output / "best", output / "iter_0000002", output)
    )
    assert all(torch.equal(best[name], own[name]) for name in own)
    assert not all(torch.equal(best[name], newest[name]) for name in own)
    assert (open_directory(output / "best").companions / "tokenizer.json").exists()

    # As if the run was killed before it had marked its best checkpoint, and in the middle of
    # another.
    (output / "best").unlink()
    (output / "best.json").write_text("{")
    (output / ".iter_0000004.writing").mkdir()
    (output / ".iter_0000003.removing").mkdir()
    (output / ".best.writing").symlink_to("iter_0000002")
    (output / ".best.json.writing-123").write_text("{")
    run(settings, "steps=6")
    assert (
        json.loads((output / "best.json").read_text())["iteration"] == 2
        and (output / "best" / ".metadata").exists()
    )
    assert not list(output.glob(".*"))
    run(settings, "steps=8")
    assert (
        iterations(output) == [7, 8]
        and (output / "best").resolve() == (output / "iter_0000007").resolve()
    )


def test_the_best_step_may_be_the_one_before_the_first(settings, tmp_path, monkeypatch):
    """Heads that training only makes worse, in a run that is resumed at step 0 too."""
    plan_lengths(monkeypatch, {0: 2.5, 1: 1.5, 2: 2.4})
    settings = [*settings, "eval_interval=1", "save_interval=2", "keep_checkpoints=1"]
    train_step = loop.train_step
    with monkeypatch.context() as killed, pytest.raises(ZeroDivisionError):
        killed.setattr(
            loop, "train_step", lambda *args: train_step(*args) if args[-1] == 0 else 1 / 0
        )
        run(settings, "steps=2")
    assert iterations(tmp_path / "run") == [0]
    output = run(settings, "steps=2")
    assert iterations(output) == [0, 2]
    assert json.loads((output / "best.json").read_text()) == {
        "iteration": 0,
        "acceptance_length": 2.5,
    }
    best, newest = (weights(path) for path in (output / "best", output))
    assert not all(torch.equal(best[name], newest[name]) for name in newest)


def test_no_best_checkpoint_is_kept_where_none_is_wanted(settings, monkeypatch):
    plan_lengths(monkeypatch, {3: 2.5, 6: 2.0})
    output = run(settings, "eval_interval=3", "keep_best=false")
    assert iterations(output) == [6] and not list(output.glob("best*"))


def test_evaluations_are_by_source(settings, text_files):
    output = run(settings, f"data.eval=[first={text_files[0]},second={text_files[1]}]", "steps=2")
    line = metrics(output, "eval")[2]
    assert list(line["sources"]) == ["first", "second"] and line["sampling_acceptance_length"] >= 1
    assert (
        json.loads((output / "best.json").read_text())["acceptance_length"]
        == line["acceptance_length"]
    )


def test_an_output_that_cannot_be_written_is_one_line(settings, monkeypatch):
    monkeypatch.setattr(
        loop, "build_with_heads", lambda *_, **__: pytest.fail("it is found out too late")
    )
    with pytest.raises(
        StorageError, match="/proc/run: cannot write: No such file or directory"
    ) as error:
        run(settings, "output=/proc/run")
    assert "\n" not in str(error.value)


def test_a_failed_save_leaves_the_previous_checkpoint(settings, monkeypatch):
    output = run(settings, "steps=2", "save_interval=2")

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("megatron.core.dist_checkpointing.save", full_disk)
        with pytest.raises(MtpkitError, match="No space left") as error:
            run(settings, "steps=4", "save_interval=2")
    assert error.value.exit_code == 1
    assert (output / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert sorted(path.name for path in output.glob("*iter_*")) == ["iter_0000000", "iter_0000002"]
    run(settings, "steps=4", "save_interval=2")
    assert sorted(losses(output)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (
            "mtp.layers.0.eh_proj.weight",
            "step 4: NaN or infinity in the loss of depth 1, 2; the gradient's",
        ),
        ("held-out", "step 4: held-out data .*: NaN or infinity in the loss of depth 1, 2; "),
        ("loss", "step 4: NaN or infinity in the loss of depth 2; "),
    ],
)
def test_what_is_not_finite_ends_the_run_as_it_was_saved_last(settings, monkeypatch, where, says):
    """After the third step a weight is NaN, or a sum alone, as a loss may be whose gradient is
    finite."""

    step = loop.train_step

    def spoiled(model, batches, optimizer, config, lr, number):
        if number == 3 and where.startswith("mtp"):
            model.get_parameter(where).data[0, 0] = torch.nan
        sums, norm = step(model, batches, optimizer, config, lr, number)
        if number == 3 and where == "loss":
            sums.values[0, 1] = torch.inf
        if number == 3 and where == "held-out":
            model.get_parameter("mtp.layers.0.eh_proj.weight").data[0, 0] = torch.nan
        return sums, norm

    monkeypatch.setattr(loop, "train_step", spoiled)
    with pytest.raises(MtpkitError, match=f"^{says}"):
        run(settings, "save_interval=1", "eval_interval=1", "keep_checkpoints=1")
    output = Path(
        next(text for text in settings if text.startswith("output=")).removeprefix("output=")
    )
    best = json.loads((output / "best.json").read_text())
    assert (output / "latest_checkpointed_iteration.txt").read_text() == "3" and best[
        "iteration"
    ] <= 3
    assert iterations(output) == sorted({best["iteration"], 3})
    assert all(
        math.isfinite(line["loss"])
        for kind in ("train", "eval")
        for line in metrics(output, kind).values()
    )
    monkeypatch.undo()
    run(settings)
    assert max(losses(output)) == 6


def test_training_goes_on_from_the_checkpoints_own_heads(settings, tmp_path):
    first = run(settings, "heads.init=fresh")
    second = run(
        settings,
        f"model={first}",
        f"output={tmp_path / 'more'}",
        "eval_interval=1",
        "heads.num_depths=3",
    )
    assert metrics(second, "eval")[0]["loss"] < 2 * metrics(first, "eval")[6]["loss"]
    fresh = run(settings, f"model={first}", f"output={tmp_path / 'fresh'}", "heads.init=fresh")
    assert losses(fresh) == losses(first)


@pytest.mark.parametrize("init", ["auto", "base"])
def test_a_mixture_without_mlps_is_trained_by_default(settings, tmp_path, tokenizer_dir, init):
    """The pattern of the shape nemotron-3-nano in small, whose config gives no size of an MLP."""
    experts = dict(
        num_moe_experts=4, moe_ffn_hidden_size=16, moe_shared_expert_intermediate_size=16
    )
    sizes = dict(
        pattern="ME*EME", ffn_hidden_size=0, mtp_pattern="", mtp_num_depths=0, vocab_size=300
    )
    save_model(toy_model(**sizes, **experts), tmp_path / "base")
    shutil.copytree(tokenizer_dir, tmp_path / "base", dirs_exist_ok=True)
    output = run(settings, f"model={tmp_path / 'base'}", f"heads.init={init}", "save_interval=3")
    assert (
        load_model_config(output).mtp.pattern
        == load_config(output / "config.yaml").heads.pattern
        == "*E"
    )
    assert losses(output)[6] < losses(output)[1]
    run(settings, f"model={tmp_path / 'base'}", f"heads.init={init}", "steps=7")
    assert max(losses(output)) == 7


def test_distinct_heads(settings):
    output = run(settings, "heads.repeated=false")
    assert load_model_config(output).mtp.num_layers == 2
    assert load_config(output / "config.yaml").heads.attention == "per_depth"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model=/nowhere"], "/nowhere"),
        (["data.train=[/nowhere.txt]"], "/nowhere.txt"),
        (["heads.init=checkpoint"], "set heads.init=auto"),
        (["heads.repeated=false", "heads.attention=serving"], "heads.attention=per_depth"),
    ],
)
def test_user_errors(settings, overrides, says):
    with pytest.raises(UserError, match=says):
        run(settings, *overrides)


def test_less_data_than_a_sequence_is_padded(settings, tmp_path):
    (tmp_path / "little.txt").write_text("the cat sat on the mat\n")
    output = run(settings, f"data.train=[{tmp_path / 'little.txt'}]", "data.eval=[]", "steps=2")
    assert list(metrics(output)) == [1, 2]


@pytest.mark.parametrize("place", ["train", "eval"])
def test_data_of_which_a_server_drafts_nothing_is_refused(settings, toy_base, tmp_path, place):
    """Answers of one token: the loss of such a run would be 0, and its acceptance length 1."""
    row = {
        "prompt": "the",
        "response": "a",
        "prompt_token_ids": [5, 6],
        "completion_token_ids": [9],
    }
    own = fingerprint(load_tokenizer(toy_base))
    (tmp_path / "short.jsonl").write_text((json.dumps({**row, "tokenizer": own}) + "\n") * 50)
    with pytest.raises(
        UserError, match="short: nothing is drafted, since no answer has more than one token"
    ):
        run(settings, f"data.{place}=[{tmp_path / 'short.jsonl'}]")
    assert not (tmp_path / "run").exists()


def test_acceptance_is_measured_at_the_length_of_the_run(settings, text_files, tmp_path):
    """`acceptance` finds the same numbers as the run printed for its held-out data."""
    output = run(settings, "data.eval_sequences=1000")
    measured = tmp_path / "acceptance.json"
    command = ["--model", output / "best", "--data", text_files[1], "--output", measured]
    assert CliRunner().invoke(acceptance_app, list(map(str, command))).exit_code == 0
    best = json.loads((output / "best.json").read_text())["iteration"]
    found = json.loads(measured.read_text())
    last = metrics(output, "eval")[best]
    assert found["acceptance_length"] == pytest.approx(last["acceptance_length"], rel=1e-4)
    assert found["loss"] == pytest.approx(last["loss"], rel=1e-4)


def test_columns_of_any_name_are_read(settings, monkeypatch):
    names = ["text_column=body", "prompt_column=q", "response_column=a", "messages_column=talk"]
    config = load_config(None, [*settings, *(f"data.{name}" for name in names)])
    monkeypatch.setattr(batches, "build_dataset", lambda *arguments: arguments)
    assert batches.open_dataset(config, config.data.train)[3] == Columns("body", "q", "a", "talk")


def test_options_of_the_data_are_read(settings, monkeypatch):
    values = [
        "loss=last_turn",
        "sample_per_turn=true",
        "long_conversations=drop",
        "on_bad_row=skip",
    ]
    values += ["bad_rows_allowed=0.5", "chat_template_kwargs={enable_thinking: false}"]
    config = load_config(None, [*settings, *(f"data.{value}" for value in values)])
    monkeypatch.setattr(batches, "build_dataset", lambda *arguments: arguments)
    options = DataOptions("last_turn", True, "drop", "skip", 0.5, {"enable_thinking": False})
    assert batches.open_dataset(config, config.data.train)[-1] == options
    with pytest.raises(
        UserError, match="chat_template_kwargs has 'tokenize', no variable of chat templates"
    ):
        load_config(None, [*settings, "data.chat_template_kwargs={tokenize: false}"])


def test_a_run_is_not_mixed_with_another(settings, toy_base):
    run(settings)
    with pytest.raises(UserError, match=r"loss\.kind was kl, is tv.*set another output"):
        run(settings, "loss.kind=tv")
    with pytest.raises(UserError, match="resume=true"):
        run(settings, "resume=false")
    with pytest.raises(UserError, match="at step 6 already"):
        run(settings, "steps=5")
    with pytest.raises(UserError, match="model's own directory"):
        run(settings, f"output={toy_base}")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_another_models_directory_is_left_alone(settings, tmp_path, file):
    place = tmp_path / "mine"
    place.mkdir()
    (place / "notes.txt").write_text("of the user's")
    (place / file).write_text("{}")
    with pytest.raises(
        UserError, match=rf"mine holds a model \({file}\) and no run; set output to another one"
    ):
        run(settings, f"output={place}")
    assert {path.name: path.read_text() for path in place.iterdir()} == {
        "notes.txt": "of the user's",
        file: "{}",
    }
    (place / file).unlink()
    run(settings, f"output={place}")
    assert (place / "notes.txt").read_text() == "of the user's"


def start(settings, *overrides, ranks=1, **pipes):
    """`train/train_mtp.py` in a process of its own, under torchrun when there are more ranks."""
    script = [str(ROOT / "train" / "train_mtp.py"), "--config", "/dev/null", *settings, *overrides]
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.Popen(
        [*launcher, *script], env=environment, text=True, preexec_fn=heed_ctrl_c, **pipes
    )


def heed_ctrl_c():
    """A parent in the background has it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def command(overrides, deaf=False, printed=None):
    """`mtpkit train` in a fork, which may print into a file; a deaf one trains on after a
    signal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if printed:
        file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
    if deaf:
        loop.StopSignal.on_any_rank = lambda self, device: False
    run_command(train_app, overrides)


def listing(path):
    """Everything below a directory, and what is in the files."""
    return {
        str(file.relative_to(path)): file.is_file() and file.read_bytes()
        for file in path.rglob("*")
    }


REFUSED = {
    "a base of NaN": "step 0: held-out data",
    "wandb": "log.wandb=heads",
    "no fit": "cannot be fitted",
    "loss.top_k=301": (
        r"loss\.top_k 301 exceeds the vocabulary of .*, 300 tokens; set loss\.top_k=0"
    ),
    "seed=10000000000000000000000": (
        "seed is 10000000000000000000000, must be from 0 to 9223372036854775807"
    ),
    "heads.init=checkpoint": "heads.init=auto",
}


@pytest.mark.parametrize("before", ["nothing", "notes", "an earlier try"])
@pytest.mark.parametrize("fault", REFUSED)
def test_a_run_that_is_refused_leaves_what_was_there_before(
    settings, tmp_path, monkeypatch, fault, before
):
    output = tmp_path / "deep" / "down" / "run"
    if before != "nothing":
        output.mkdir(parents=True)
        (output / "notes.txt").write_text("mine")
    if before == "an earlier try":
        (output / "config.yaml").write_text("steps: 3\n")
        (output / "train.log").write_text("2026-01-01 00:00:00  an earlier try\n")
        (output / "metrics.jsonl").write_text('{"kind": "eval", "step": 0}\n')
    there = listing(tmp_path)
    overrides = [fault] if "=" in fault else []
    build = loop.build_with_heads

    def broken(*args, **named):
        model = build(*args, **named)
        model.decoder.final_norm.weight.data[3] = torch.nan
        return model

    if fault in ("a base of NaN", "no fit"):
        monkeypatch.setattr(loop, "build_with_heads", broken)
        overrides = ["heads.init=base" if fault == "no fit" else "heads.init=fresh"]
    if fault == "wandb":
        monkeypatch.setattr(plan, "check_wandb", lambda project: None)
        monkeypatch.setattr(metrics_log, "_start_wandb", refuse_wandb)
        overrides = ["log.wandb=heads"]
    with pytest.raises(MtpkitError, match=REFUSED[fault]) as error:
        run(settings, f"output={output}", *overrides)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    assert listing(tmp_path) == there


def refuse_wandb(project, output, settings):
    (output / "wandb_id.txt").write_text("id")
    raise UserError(f"log.wandb={project}: no")


def test_a_run_that_ends_in_its_first_step_leaves_nothing(settings, tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train_step", fail)
    with pytest.raises(KeyboardInterrupt):
        run(settings)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_read_keeps_all_that_is_in_it(settings, tmp_path):
    """A run that could not take note of what is there takes nothing back."""
    output = tmp_path / "run"
    (output / "config.yaml").mkdir(parents=True)
    (output / "notes.txt").write_text("mine")
    there = listing(output)
    with pytest.raises(StorageError, match="run"):
        run(settings, f"output={output}")
    assert listing(output) == there


@pytest.mark.parametrize("link", ["loop", "loop/run", "dangling"])
def test_an_output_behind_a_link_that_leads_nowhere_is_refused_at_once(
    settings, tmp_path, monkeypatch, link
):
    monkeypatch.setattr(
        loop, "build_with_heads", lambda *_, **__: pytest.fail("it is found out too late")
    )
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    with pytest.raises(
        UserError, match="is a symbolic link that leads nowhere; name another output"
    ):
        run(settings, f"output={tmp_path / link}")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe\n", "is not UTF-8"),
        (b"5\n", "line 2 is no line of a run's metrics"),
        (b"[]\n", "line 2 is no line of a run's metrics"),
        (b'{"kind": "train"}\n', "line 2 is no line of a run's metrics"),
        (b'{"kind": "train", "step": "3"}\n', "line 2 is no line of a run's metrics"),
        (b'{"kind": 3, "step": 3}\n', "line 2 is no line of a run's metrics"),
        (b"[" * 100_000 + b"\n", "line 2 cannot be read as JSON: it is nested too deeply"),
        (b'{"kind": "tr\n', "line 2 cannot be read as JSON"),
    ],
)
def test_metrics_that_no_run_wrote_are_refused_before_the_model_is_read(
    settings, monkeypatch, content, says
):
    """A last line that was cut off is what a killed run leaves:
    `test_resuming_gives_the_same_losses_to_the_bit`."""
    output = run(settings, "steps=2", "data.eval=[]")
    first = (output / "metrics.jsonl").read_bytes().splitlines(keepends=True)[0]
    (output / "metrics.jsonl").write_bytes(first + content + first)
    before = listing(output)
    monkeypatch.setattr(
        loop, "build_with_heads", lambda *_, **__: pytest.fail("it is found out too late")
    )
    with pytest.raises(UserError, match=f"metrics.jsonl.*{says}") as error:
        run(settings, "data.eval=[]")
    assert "\n" not in str(error.value) and listing(output) == before


@pytest.mark.parametrize("link", ["metrics.jsonl", "nothing"])
def test_metrics_behind_a_link_that_leads_nowhere_are_refused(settings, link):
    output = run(settings, "steps=2", "data.eval=[]")
    (output / "metrics.jsonl").unlink()
    (output / "metrics.jsonl").symlink_to(link)
    before = listing(output)
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read"):
        run(settings, "data.eval=[]")
    assert listing(output) == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.pop("iteration"), "iteration is missing"),
        (lambda state: state.update(iteration="2"), "iteration is '2', must be a whole number"),
        (lambda state: state.update(iteration=1), "is damaged: step 1 after 8 sequences"),
        (lambda state: state.update(loader=[]), "loader is [], must be a group of values"),
        (
            lambda state: state["loader"].update(consumed=8.0),
            "consumed is 8.0, must be a whole number",
        ),
        (lambda state: state["loader"].update(consumed=10**30), "is damaged: step 2 after 1000"),
        (lambda state: state["loader"].update(order=None), "order is None, must be an object"),
        (lambda state: state.update(best=True), "best is True, must be a group of values"),
        (lambda state: state.update(best={"iteration": 2}), "acceptance_length is missing"),
    ],
)
def test_a_checkpoint_whose_state_is_not_a_runs_is_refused(settings, change, says):
    output = run(settings, "steps=2", "data.eval=[]")
    state = MegatronReader(output / "iter_0000002").read_common_state()
    change(state)
    put_common_state(output / "iter_0000002", [state])
    before = listing(output)
    with pytest.raises(UserError, match=re.escape(says)) as error:
        run(settings, "data.eval=[]")
    assert "iter_0000002" in str(error.value) and listing(output) == before


@pytest.mark.parametrize(
    "best",
    [
        *("{", "5", "{}", '{"iteration": "x", "acceptance_length": "y"}', "\ud800"),
        *(
            '{"iteration": 2, "acceptance_length": NaN}',
            '{"iteration": true, "acceptance_length": 2.0}',
        ),
    ],
)
def test_a_best_that_no_run_wrote_is_one_line(tmp_path, best):
    (tmp_path / "best.json").write_text(best, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(UserError, match=r"best\.json") as error:
        read_best(tmp_path)
    assert "\n" not in str(error.value)


def train_rank(rank, overrides):
    train(load_config(None, overrides))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_ranks_train_to_the_losses_of_one(settings, tmp_path, device, optimizer):
    need_gpus(2, device)
    settings = [
        *settings,
        f"optimizer.kind={optimizer}",
        "heads.init=base",
        "loss.hidden_mix=0.5",
        "save_interval=3",
    ]
    alone = run(settings, "eval_interval=3")
    together = tmp_path / "together"
    resumed = tmp_path / "resumed"
    run_ranks(train_rank, [*settings, f"output={together}", "eval_interval=3"], device=device)
    assert list(losses(together).values()) == pytest.approx(list(losses(alone).values()), rel=1e-5)
    shutil.copytree(together, resumed, symlinks=True)
    shutil.rmtree(resumed / "iter_0000006")
    (resumed / "latest_checkpointed_iteration.txt").write_text("3")
    run(settings, f"output={resumed}")
    assert list(losses(resumed).values()) == pytest.approx(list(losses(alone).values()), rel=1e-5)
    for step, line in metrics(alone, "eval").items():
        other = metrics(together, "eval")[step]
        assert other["loss"] == pytest.approx(line["loss"], rel=1e-5)
        assert other["acceptance_length"] == pytest.approx(line["acceptance_length"], rel=1e-2)


def wait_for_a_step(ended, output, step=1):
    while not (output / "metrics.jsonl").exists() or max(losses(output), default=0) < step:
        assert ended() is None
        time.sleep(0.05)


def test_sigterm_saves_and_the_run_goes_on(settings, tmp_path):
    whole = run(settings, "steps=30")
    output = tmp_path / "stopped"
    process = fork(command, [*settings, "steps=30", f"output={output}"])
    wait_for_a_step(lambda: process.exitcode, output)
    for _ in range(3):  # a scheduler and a launcher may both say it
        process.terminate()
        time.sleep(0.05)
    process.join()
    assert process.exitcode == 0
    step = int((output / "latest_checkpointed_iteration.txt").read_text())
    assert step == max(losses(output)) < 30
    run(settings, "steps=30", f"output={output}")
    assert losses(output) == losses(whole)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_saves_and_the_run_goes_on(settings, tmp_path, ranks):
    """A fork for one rank, since starting a process takes seconds; under torchrun for two."""
    output = tmp_path / "stopped"
    printed = tmp_path / "printed"
    settings = [*settings, f"output={output}"]
    if ranks == 1:
        process = fork(command, [*settings, "steps=200"], False, printed)
        ended = lambda: process.exitcode  # noqa: E731
    else:
        with printed.open("w") as file:
            process = start(
                settings, "steps=200", ranks=ranks, stdout=file, stderr=subprocess.STDOUT
            )
        ended = process.poll
    wait_for_a_step(ended, output)
    os.kill(process.pid, signal.SIGINT)
    (process.join if ranks == 1 else process.wait)()
    assert ended() == (130 if ranks == 1 else 1)  # torchrun's own
    said = printed.read_text()
    assert "of 200; run the same command again to go on" in said and "mtpkit: interrupted" in said
    step = int((output / "latest_checkpointed_iteration.txt").read_text())
    assert step == max(losses(output)) < 200
    run(settings, f"steps={step + 1}")


def test_a_second_ctrl_c_ends_the_run_at_once(settings, tmp_path):
    """Where the first one alone would let it train on."""
    output = tmp_path / "stopped"
    printed = tmp_path / "printed"
    process = fork(command, [*settings, "steps=100000", f"output={output}"], True, printed)
    try:
        wait_for_a_step(lambda: process.exitcode, output)
        os.kill(process.pid, signal.SIGINT)
        wait_for_a_step(lambda: process.exitcode, output, max(losses(output)) + 3)
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
    finally:
        process.kill()
    assert process.exitcode == 130 and "mtpkit: interrupted" in printed.read_text().splitlines()
    assert (output / "latest_checkpointed_iteration.txt").read_text() == "0"


def test_a_run_that_stops_before_its_first_line_of_metrics_ends_well(settings, monkeypatch):
    monkeypatch.setattr(loop.StopSignal, "on_any_rank", lambda self, device: True)
    settings = [*settings, "data.eval=[]", "steps=20", "log_interval=10"]
    output = run(settings)
    assert iterations(output) == [0] and not metrics(output, "train")
    monkeypatch.undo()
    run(settings)
    assert iterations(output) == [0, 20]
    assert list(metrics(output, "train")) == [10, 20]


def test_a_signal_to_one_of_two_ranks_stops_both(settings, tmp_path):
    settings = [*settings, "heads.init=fresh"]
    whole = run(settings, "steps=60")
    output = tmp_path / "stopped"
    ranks = fork_ranks(command, [*settings, "steps=60", f"output={output}"])
    wait_for_a_step(lambda: ranks[0].exitcode, output)
    ranks[1].terminate()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    step = int((output / "latest_checkpointed_iteration.txt").read_text())
    assert step == max(losses(output)) < 60
    run(settings, "steps=60", f"output={output}")
    assert list(losses(output).values()) == pytest.approx(list(losses(whole).values()), rel=1e-5)


def test_matmul_precision_and_wandb_reach_the_run(settings, monkeypatch):
    asked = []
    made = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    monkeypatch.setattr(plan, "check_wandb", lambda project: made.append(project))
    log = loop.MetricsLog
    monkeypatch.setattr(
        loop, "MetricsLog", lambda *args, wandb, **named: made.append(wandb) or log(*args, **named)
    )
    run(settings, "steps=2", "matmul_precision=medium", "log.wandb=heads")
    assert asked == ["medium", torch.get_float32_matmul_precision()] and made == ["heads", "heads"]


def test_a_run_that_cannot_begin_leaves_the_matmul_precision_alone(settings, monkeypatch):
    def refuse(project):
        raise UserError(f"{project} with {torch.get_float32_matmul_precision()}")

    monkeypatch.setattr(plan, "check_wandb", refuse)
    with pytest.raises(UserError, match="heads with medium"):
        run(settings, "matmul_precision=medium", "log.wandb=heads")
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_run_may_go_on_with_another_backend(settings):
    output = run(settings, "steps=3", "backend=local")
    config = output / "config.yaml"
    config.write_text(config.read_text().replace("backend: local", "backend: te"))
    run(settings, "backend=local")
    assert max(losses(output)) == 6 and load_config(config).backend == "local"


@pytest.mark.gpu
def test_transformer_engine_trains_and_the_run_goes_on_without_it(settings, tmp_path):
    pytest.importorskip("transformer_engine.pytorch")
    local = run(settings, "backend=local")
    mixed = tmp_path / "mixed"
    run(settings, "backend=te", f"output={mixed}", "save_interval=3")
    assert list(losses(mixed).values()) == pytest.approx(list(losses(local).values()), rel=1e-2)
    shutil.rmtree(mixed / "iter_0000006")
    (mixed / "latest_checkpointed_iteration.txt").write_text("3")
    run(settings, "backend=local", f"output={mixed}")
    assert list(losses(mixed).values()) == pytest.approx(list(losses(local).values()), rel=1e-2)


def test_bad_settings_are_one_line_and_exit_code_2(settings):
    process = start(settings, "stepz=3", stderr=subprocess.PIPE)
    _, stderr = process.communicate()
    assert process.returncode == 2
    assert stderr.count("\n") == 1 and "stepz" in stderr


def test_without_a_terminal_a_line_is_printed_at_each_interval(settings, capsys):
    run(settings, "log_interval=4", "data.eval=[]")
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split(":")[0] for line in steps] == ["step 4 of 6", "step 6 of 6"]
    assert all("loss " in line and "tokens/s" in line for line in steps)


def test_held_out_data_that_is_trained_on_is_told(settings, text_files, tmp_path, caplog):
    link = tmp_path / "again.txt"
    link.symlink_to(text_files[0])
    run(settings, "steps=2", f"output={tmp_path / 'first'}", f"data.eval=[same={link}]")
    (told,) = [message for message in caplog.messages if "held out" in message]
    assert told == f"data.eval is not held out: {text_files[0]} is in data.train too"
    caplog.clear()
    run(settings, "steps=2", f"output={tmp_path / 'second'}")
    run(settings, "steps=2", f"output={tmp_path / 'third'}", "data.eval=")
    assert "held out" not in caplog.text


def test_a_file_inside_a_folder_and_prepared_data_are_shared(tmp_path, caplog):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text\n")
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    (prepared / "mtpkit_data.json").write_text("{}")

    def shared(train, heldout):
        return batches.shared_data(DataConfig(train=(str(train),), eval=tuple(map(str, heldout))))

    assert shared(tmp_path / "*.txt", [tmp_path / "b.txt"]) == [str(tmp_path / "b.txt")]
    assert shared(prepared, [tmp_path / "b.txt", prepared]) == [str(prepared)]
    assert shared(tmp_path / "a.txt", [tmp_path / "b.txt"]) == []
    assert shared(tmp_path / "a.txt", [tmp_path / "b.txt", tmp_path / "b.txt"]) == []
    assert not caplog.messages  # that a file is named twice was told when the data was read


def test_a_resumed_run_tells_settings_that_changed(settings, capsys):
    run(settings, "steps=3")
    assert "settings changed" not in capsys.readouterr().out
    output = run(settings, "steps=4", "eval_interval=2")
    lines = capsys.readouterr().out.splitlines()
    assert (
        "settings changed since the last part of the run: steps was 3, is 4; eval_interval was 100,"
        " is 2" in lines
    )
    assert sorted(metrics(output)) == [1, 2, 3, 4]
    run(settings, "steps=4", "eval_interval=2")
    assert "settings changed" not in capsys.readouterr().out


def test_a_best_checkpoint_that_was_removed_is_forgotten(settings, monkeypatch):
    """Otherwise a resumed run would name a directory that is gone, and keep no better one than
    that."""
    lengths = {2: 3.0}
    monkeypatch.setattr(Trainer, "_evaluate", lambda self: lengths.get(self.step, 1.5))
    output = run(settings, "eval_interval=2", "keep_checkpoints=1")
    assert read_best(output).iteration == 2 and iterations(output) == [2, 6]
    shutil.rmtree(output / "iter_0000002")
    lengths[8] = 2.0
    run(settings, "eval_interval=2", "keep_checkpoints=1", "steps=8")
    assert (read_best(output).iteration, read_best(output).acceptance_length) == (8, 2.0)
    assert (output / "best").resolve().name == "iter_0000008"
