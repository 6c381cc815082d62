"""Ranks at the front doors; ranks that differ, that die, and sizes that cannot be split."""

import atexit
import contextlib
import importlib.metadata
import io
import json
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer

from mtpkit.checkpoint import save_hf_model, save_model
from mtpkit.checkpoint.convert import import_checkpoint
from mtpkit.cli import bench, generate, speedup
from mtpkit.cli.errors import run
from mtpkit.config import ModelConfig
from mtpkit.engine import LLM, SamplingParams
from mtpkit.engine.ranks import join, watch
from mtpkit.engine.ranks.join import _digest, _problems, reports
from mtpkit.errors import MtpkitError, UserError
from mtpkit.model import build_model
from tests.engine.rank_cases import config
from tests.ranks import free_port, in_rank, need_gpus, run_ranks, share_device
from tests.toy_config import toy_config

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
RANKS = dict(tensor_parallel_size=2)
STAGES = dict(pipeline_parallel_size=2)
LIMIT = 10.0
"""Seconds in which the others must have ended."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A base with all its heads, in both layouts, a third that differs in a weight, and prompts."""
    path = tmp_path_factory.mktemp("models")
    model = build_model(config("mamba2"), device="cpu", seed=1)
    save_hf_model(model, path / "hf")
    save_model(model, path / "megatron")
    with torch.no_grad():
        model.decoder.final_norm.weight[0] += 1
    save_hf_model(model, path / "other")
    lines = [json.dumps(dict(prompt_token_ids=prompt)) for prompt in PROMPTS]
    (path / "prompts.jsonl").write_text("\n".join(lines))
    return path


def commands(path: Path, ranks: int, out: Path) -> dict[str, tuple[typer.Typer, list[str]]]:
    split = ["--tensor-parallel-size", str(ranks)] if ranks > 1 else []
    prompts = ["--prompts", str(path / "prompts.jsonl")]
    brief = ["--num-speculative-tokens", "2", "--temperature", "0"]
    hf, megatron = (["--model", str(path / name)] for name in ("hf", "megatron"))
    again = [
        "--num-speculative-tokens",
        "0",
        "2",
        "--batch-size",
        "2",
        "--repeats",
        "1",
        "--max-tokens",
        "6",
    ]
    report = ["--output", str(out / "report")]
    timed = [
        "--prompt-length",
        "6",
        "--max-tokens",
        "12",
        "--num-speculative-tokens",
        "1",
        "--batch-size",
        "2",
    ]
    return {
        "generate": (generate.app, [*hf, *prompts, *brief, "--max-tokens", "6", "--json", *split]),
        "megatron": (
            generate.app,
            [*megatron, *prompts, *brief, "--max-tokens", "6", "--json", *split],
        ),
        "speedup": (speedup.app, [*hf, *prompts, *again, *report, *split]),
        "bench": (
            bench.app,
            ["decode", *hf, *timed, "--repeats", "1", "--output", str(out / "bench"), *split],
        ),
    }


def run_commands(rank: int, path: Path, ranks: int, out: Path) -> None:
    for name, (app, arguments) in commands(path, ranks, out).items():
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(io.StringIO()):
            typer.main.get_command(app)(arguments, standalone_mode=False)
        (out / f"{name}.{rank}").write_text(stdout.getvalue())


def refused(rank: int, path: Path, out: Path) -> None:
    """One rank has another model, another version; then both decode."""
    settings = dict(num_blocks=40, max_num_seqs=2, warm_up=False, tensor_parallel_size=2)
    with pytest.raises(
        UserError, match=r"rank 1 differs from rank 0: the content of the model's files is \w+, not"
    ):
        LLM(path / ("other" if rank else "hf"), **settings)
    with pytest.raises(
        UserError,
        match=r"rank 1 differs from rank 0: num_blocks is 41, not 40; start all ranks alike",
    ):
        LLM(path / "hf", **settings | dict(num_blocks=40 + rank))
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setitem(join.__globals__, "__version__", "0+mine")
        with pytest.raises(
            UserError, match=r"rank 1 differs from rank 0: version of mtpkit is 0\+mine, not"
        ):
            LLM(path / "hf", **settings)
    version = importlib.metadata.version
    with pytest.MonkeyPatch.context() as patch:  # run from its sources
        patch.setattr(
            importlib.metadata,
            "version",
            lambda name: version({"mtpkit": "not installed"}.get(name, name)),
        )
        llm = LLM(path / "hf", 2, **settings)
    outputs = llm.generate(
        [dict(prompt_token_ids=prompt) for prompt in PROMPTS], SamplingParams(temperature=0)
    )
    (out / f"tokens.{rank}").write_text(
        json.dumps([output.outputs[0].token_ids for output in outputs])
    )


def test_commands_of_two_ranks_say_what_those_of_one_say(model_dir, tmp_path):
    """And the other rank says nothing."""
    one = tmp_path / "one"
    two = tmp_path / "two"
    one.mkdir()
    two.mkdir()
    run_commands(0, model_dir, 1, one)
    run_ranks(run_commands, model_dir, 2, two)
    for name in commands(model_dir, 1, one):
        assert not (two / f"{name}.1").read_text()
        said = [(path / f"{name}.0").read_text() for path in (one, two)]
        if "index" in said[0]:
            assert said[0] == said[1] and said[0].count("\n") == len(PROMPTS)
        else:
            rows = [json.loads(text.splitlines()[-1])["rows"] for text in said]
            lengths = [[row["acceptance_length"] for row in one] for one in rows]
            assert lengths[0] == lengths[1]
    assert (two / "report" / "report.json").exists() and (two / "bench" / "decode.json").exists()


def test_ranks_that_differ_are_refused(model_dir, tmp_path):
    run_ranks(refused, model_dir, tmp_path)
    assert (tmp_path / "tokens.0").read_text() == (tmp_path / "tokens.1").read_text()


class Ending:
    """A drafter at whose third step something happens."""

    def __init__(self, llm: LLM, what: str) -> None:
        self.inner = llm.engine.executor.drafter
        self.what = what
        self.steps = 0
        self.span = self.inner.span

    def draft(self, hidden, batch, verdict):
        self.steps += 1
        if self.steps == 3:
            if self.what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "fails":
                raise MtpkitError("the paper ran out")
            if self.what == "leaves":
                sys.exit(0)
        return self.inner.draft(hidden, batch, verdict)


def ends(
    rank: int, path: Path, out: Path, what: str, victim: int, split: dict[str, int], **settings
) -> None:
    """Decode, in which one rank does what it is told; what each says goes to a file."""
    file = os.open(out / f"{rank}.err", os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 2)
    watch._PATIENCE = 1.0
    watch._GRACE = 0.2

    def work() -> None:
        llm = LLM(path / "hf", 2, num_blocks=40, max_num_seqs=2, warm_up=False, **split, **settings)
        if rank == victim:
            llm.engine.executor.drafter = Ending(llm, what)
        (out / f"{rank}.began").touch()
        prompts = [[7] * (3 + rank)] if what == "other prompts" else PROMPTS
        llm.generate(
            [dict(prompt_token_ids=prompt) for prompt in prompts],
            SamplingParams(max_tokens=40, seed=0),
        )

    try:
        run(work)
    finally:
        atexit._run_exitfuncs()  # which processes of multiprocessing leave out


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("killed", "rank 1 has died"),
        ("fails", "rank 1 failed: the paper ran out"),
        ("leaves", "rank 1 has ended while rank 0 decodes"),
        ("other prompts", "rank 1 failed: rank 0 plans another step than rank 1: "),
    ],
)
def test_a_rank_that_ends_ends_the_others(model_dir, tmp_path, what, said):
    require_end(model_dir, tmp_path, what, said)


def test_a_stage_that_dies_ends_the_others(model_dir, tmp_path):
    require_end(model_dir, tmp_path, "killed", "rank 1 has died", split=STAGES)


def test_the_first_rank_dies(model_dir, tmp_path):
    """Which the others are connected to."""
    require_end(model_dir, tmp_path, "killed", "rank 0 has died", victim=0)


def test_one_of_four_ranks_dies(model_dir, tmp_path):
    """Those with the same stage, with the same part, and with neither end."""
    require_end(model_dir, tmp_path, "killed", "rank 3 has died", victim=3, split=RANKS | STAGES)


def ends_on_gpu(rank: int, *args) -> None:
    share_device("cuda")
    ends(rank, *args, disable_custom_all_reduce=False, enforce_eager=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("what", "said"), [("killed", "rank 1 has died"), ("fails", "rank 1 failed: the paper ran out")]
)
def test_a_rank_that_waits_in_a_kernel_is_ended(model_dir, tmp_path, what, said):
    require_end(model_dir, tmp_path, what, said, function=ends_on_gpu, method="spawn")


def ends_beside_nccl(rank: int, *args) -> None:
    ends(rank, *args, enforce_eager=True)


@pytest.mark.gpu
@pytest.mark.parametrize("function", [ends_beside_nccl, ends])
@pytest.mark.parametrize("split", [RANKS, STAGES])
def test_a_rank_that_waits_for_nccl_is_ended(model_dir, tmp_path, split, function):
    """In a step, or while steps are captured."""
    need_gpus(2)
    require_end(
        model_dir,
        tmp_path,
        "killed",
        "rank 1 has died",
        split=split,
        function=function,
        method="spawn",
    )


def require_end(
    model_dir, tmp_path, what, said, victim=1, split=RANKS, function=ends, method="forkserver"
) -> None:
    context = multiprocessing.get_context(method)
    port = free_port()
    size = math.prod(split.values())
    if method == "forkserver":
        context.set_forkserver_preload(["tests.preload", __name__])
    ranks = [
        context.Process(
            target=in_rank,
            args=(rank, size, port, function, (model_dir, tmp_path, what, victim, split)),
        )
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    ranks.pop(victim).join(120)
    began = time.monotonic()
    for process in ranks:
        process.join(LIMIT - (time.monotonic() - began))
    seconds = time.monotonic() - began
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    other = int(victim == 0)
    assert (tmp_path / f"{other}.began").exists(), (tmp_path / f"{other}.err").read_text()
    assert not {None, 0} & set(codes) and seconds < LIMIT
    assert f"mtpkit: error: {said}" in (tmp_path / f"{other}.err").read_text()


def test_a_silent_program_does_not_keep_ranks_out(monkeypatch):
    """It holds its connection as long as it likes."""
    monkeypatch.setattr(watch, "_SAYING_WHO", 0.3)
    listener = watch.listen(b"secret")
    address = ("localhost", listener.address[1])
    found = []
    with socket.create_connection(address):
        accepting = threading.Thread(
            target=lambda: found.append(watch.accept(listener, 2)), daemon=True
        )
        accepting.start()
        time.sleep(0.1)  # the silent one is first
        own = watch.connect(1, address, b"secret")
        accepting.join(10)
    assert [list(peers) for peers in found] == [[1]]
    own[0].close()


def test_programs_that_are_no_rank_connect():
    """One says nothing and ends, one sends what a rank does not, one has another secret; the rank
    comes last."""
    secret = bytes(range(16))
    listener = watch.listen(secret)
    address = ("localhost", listener.address[1])
    found = []
    accepting = threading.Thread(target=lambda: found.append(watch.accept(listener, 2)))
    accepting.start()
    for sent in (b"", b"GET / HTTP/1.1", bytes(100)):
        with socket.create_connection(address) as connection:
            connection.sendall(sent)
    with pytest.raises(MtpkitError, match="rank 1 cannot reach rank 0 at localhost:"):
        watch.connect(1, address, secret[::-1])
    own = watch.connect(1, address, secret)
    accepting.join(30)
    assert [list(peers) for peers in found] == [[1]]
    found[0][1].send("heard")
    assert own[0].recv() == "heard"
    found[0][1].close()
    own[0].close()


def test_a_rank_that_does_not_connect_is_named(monkeypatch):
    """Although a program that says nothing keeps its connection."""
    monkeypatch.setattr(watch, "_CONNECTING", 0.5)
    listener = watch.listen(b"secret")
    message = r"ranks \[1, 2\] did not connect within 0 s"
    silent = socket.create_connection(("localhost", listener.address[1]))
    with silent, pytest.raises(MtpkitError, match=message):
        watch.accept(listener, 3)


@pytest.mark.parametrize("place", [0, 0.999])
def test_models_that_differ_at_an_end_are_told_apart(tmp_path, place):
    size = 3 << 20
    changed = bytearray(size)
    changed[int(place * size)] = 1
    (file := tmp_path / "model.safetensors").write_bytes(bytes(size))
    digest = _digest(tmp_path)
    assert _digest(tmp_path) == digest
    file.write_bytes(changed)
    assert _digest(tmp_path) != digest


@pytest.mark.parametrize("layout", ["hf", "megatron"])
def test_models_of_one_base_with_other_heads_are_told_apart(tmp_path, layout, monkeypatch):
    """The usual mistake: a host has the heads of another training, in files of the same sizes."""
    monkeypatch.setitem(_digest.__globals__, "_END", 2**10)
    model = build_model(toy_config(vocab_size=512, pattern="M*-" * 4), device="cpu", seed=1)
    digests = []
    sizes = []
    for name in ("first", "second"):
        place = tmp_path / name
        save_hf_model(model, place)
        if layout == "megatron":
            place = tmp_path / f"{name}-megatron"
            import_checkpoint(tmp_path / name, place)
        digests.append(_digest(place))
        sizes.append(sorted(path.stat().st_size for path in place.rglob("*")))
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if key.startswith("mtp."):
                    weight.mul_(1.01)
    assert sizes[0] == sizes[1] and sizes[0][-1] > 100 * 2**10
    assert digests[0] != digests[1]


def test_sizes_that_cannot_be_split(model_dir):
    with pytest.raises(
        UserError,
        match="tensor_parallel_size 3: the model's hidden_size 32 cannot be divided evenly; take a",
    ):
        LLM(model_dir / "hf", tensor_parallel_size=3)
    with pytest.raises(
        UserError,
        match="tensor_parallel_size 2: enable_expert_parallel is set, but the model has no",
    ):
        LLM(model_dir / "hf", tensor_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(
        UserError,
        match=(
            "tensor_parallel_size 2 needs 2 processes, but there is 1: start them with torchrun"
            " --standalone"
        ),
    ):
        LLM(model_dir / "hf", tensor_parallel_size=2)


@pytest.mark.parametrize("split", ["--tensor-parallel-size", "--pipeline-parallel-size"])
@pytest.mark.parametrize("name", ["generate", "speedup", "bench"])
def test_commands_of_several_ranks_need_torchrun(model_dir, tmp_path, name, split):
    app, arguments = commands(model_dir, 1, tmp_path)[name]
    with pytest.raises(
        UserError, match=r"parallel[-_]size 2 needs 2 processes, but there is 1: start them"
    ):
        typer.main.get_command(app)([*arguments, split, "2"], standalone_mode=False)


def problems(model: ModelConfig, ranks: int, whole_experts: bool = False) -> list[str]:
    return [text.split()[2] for text in _problems(model, ranks, whole_experts)]


def test_every_size_that_ranks_cannot_divide_is_named():
    mamba2 = config("mamba2")
    experts = config("recurrent experts")
    assert (
        problems(mamba2, 2) == []
        and problems(experts, 2) == []
        and problems(experts, 2, True) == []
    )
    assert problems(mamba2.replace(vocab_size=61), 2) == ["vocab_size"]
    assert problems(mamba2.replace(mamba_num_heads=3, mamba_num_groups=1), 2) == [
        "mamba_num_heads",
        "mamba_num_groups",
    ]
    odd = experts.replace(moe_ffn_hidden_size=23, num_moe_experts=5)
    assert problems(odd, 2) == ["moe_ffn_hidden_size"]
    assert problems(odd, 2, whole_experts=True) == ["5"]


def test_more_processes_than_ranks_are_refused(monkeypatch, model_dir):
    """Each of them would do all of the work, and print it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        UserError,
        match="there are 2 processes, but --tensor-parallel-size is 1: set it to 2, or start 1",
    ):
        typer.main.get_command(generate.app)(
            ["--model", str(model_dir / "hf"), "a"], standalone_mode=False
        )
    with pytest.raises(
        UserError,
        match="size 1 x --pipeline-parallel-size 3 is 3: choose sizes whose product is 2, or st",
    ):
        reports(1, 3)


def test_what_processes_do_not_share_is_refused_under_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    command = ["load", "--model", "nemotron-h-tiny"]
    with pytest.raises(
        UserError,
        match="there are 2 processes, but this command runs in one: start it without torchr",
    ):
        typer.main.get_command(bench.app)(command, standalone_mode=False)


def test_a_model_that_is_split_otherwise_is_refused(monkeypatch):
    model = build_model(config("mamba2"), device="cpu")
    with pytest.raises(
        UserError,
        match="split over 1 ranks, experts over 1, layers over 1 stages: leave all sizes out",
    ):
        LLM(model, tensor_parallel_size=2)
    monkeypatch.setattr(model, "config", replace(model.config))
    model.config.sequence_parallel = True
    with pytest.raises(
        UserError,
        match="the model given is split over sequences, or over experts without the other",
    ):
        LLM(model)
