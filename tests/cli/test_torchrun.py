"""What several processes of one command say together."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import mtpkit
from mtpkit.cli import errors
from mtpkit.cli import torchrun as report

ROOT = Path(mtpkit.__file__).parent.parent


@pytest.fixture
def installed(tmp_path):
    """The environment in which torchrun finds the entry point that pyproject.toml declares."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    about = tmp_path / "site" / "declared-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 1\n")
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items())
        for group, names in points.items()
    ]
    (about / "entry_points.txt").write_text("".join(lines))
    return {**os.environ, "PYTHONPATH": f"{about.parent}:{ROOT}", "OMP_NUM_THREADS": "1"}


def torchrun(env, *words):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *words,
    ]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=env, cwd=ROOT, timeout=120
    )


def test_an_error_of_all_ranks_is_one_line(installed):
    done = torchrun(
        installed, "train/train_mtp.py", "model=nowhere", "output=none", "data.train=[a.txt]"
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "mtpkit: error: nowhere: no such model directory; name one that holds config.json or a"
        " Megatron checkpoint"
    ]


SCRIPT = """
import logging, os, sys, time, warnings
from pathlib import Path
from mtpkit.cli import run
from mtpkit.errors import UserError

def job():
    rank = os.environ["RANK"]
    logging.getLogger("x").warning("logged by %s", rank)
    warnings.warn(f"warned by {rank}")
    told = Path(__file__).with_suffix(".told")
    if rank == "0":
        told.touch()
    if rank == "1":
        while not told.exists():  # torchrun ends rank 0 as soon as this one fails
            time.sleep(0.05)
        raise UserError("late")

run(job)
"""


def test_rank_0_alone_warns_but_no_error_is_lost(installed, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    done = torchrun(installed, script)
    assert done.returncode == 1
    said = done.stderr
    assert said.count("logged by 0") == said.count("warned by 0") == 1
    assert "by 1" not in said and "torch" not in said
    assert [line for line in said.splitlines() if "error:" in line] == ["mtpkit: error: late"]


def test_one_process_speaks_for_those_of_a_torchrun(tmp_path, monkeypatch):
    (tmp_path / "attempt_0" / "3").mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / "3" / "error.json"))
    assert [errors._speaks_for_all(line) for line in ("a", "a", "b", "a")] == [
        True,
        False,
        True,
        False,
    ]
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert errors._speaks_for_all("a") and errors._speaks_for_all("a")


@pytest.mark.parametrize(
    ("codes", "told", "quiet"),
    [
        ((2, 2), (0, 1), True),
        ((2, -15), (0,), True),
        ((2, -11), (0,), False),  # a crash beside an error
        ((1, 2), (1,), False),  # a bug beside an error
        ((-15, -15), (), False),
    ],
)
def test_only_what_was_told_is_left_out_of_the_report(tmp_path, monkeypatch, codes, told, quiet):
    failures = {}
    for rank, code in enumerate(codes):
        file = tmp_path / str(rank) / "error.json"
        file.parent.mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        if rank in told:
            errors._tell_torchrun("k is -1")
        failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=str(file))
    error = ChildFailedError("job", failures)
    shown = []
    monkeypatch.setattr(sys, "__excepthook__", lambda *args: shown.append(args))
    report._report(type(error), error, None)
    assert bool(shown) is not quiet and (not told or "k is -1" in str(error))
    report._report(KeyError, KeyError("bug"), None)
    assert shown[-1][0] is KeyError


def test_other_programs_are_left_alone(tmp_path, monkeypatch):
    other = tmp_path / "other.py"
    other.write_text("import torch\n")
    before = sys.excepthook
    for words in (
        ["--nproc-per-node", "2", str(other)],
        ["-m", "mtpkitten"],
        [str(tmp_path / "gone.py")],
    ):
        monkeypatch.setattr(sys, "argv", ["torchrun", *words])
        report.handler()
        assert sys.excepthook is before
    own = (ROOT / "train" / "train_mtp.py", "mtpkit", "/env/bin/mtpkit", "mtpkit.cli.main")
    assert all(report._is_own(str(word)) for word in own)
