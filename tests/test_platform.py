"""Devices and process groups on a machine that may have no GPU."""

import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mtpkit.errors import UserError
from mtpkit.platform import (
    CpuInsteadOfCuda,
    _choose_cudnn,
    default_device,
    ensure_distributed,
    on_first_rank,
    prepare_megatron,
    to_device,
)
from tests.ranks import free_port

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def fresh_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that no launcher started."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env
    )


AS_ON_A_GPU = """
import sys
import torch
torch.cuda.is_available = lambda: True
from mtpkit import LLM
import mtpkit.training.heads
assert not {"torch._inductor", "torch._dynamo"} & sys.modules.keys(), "the compiler was imported"
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu
made, compile_function = [], lambda function, **options: made.append(function.__name__) or function
torch.compile = compile_function
x = torch.randn(3, 8)
assert not made
for _ in range(2):
    gate, up = (x + 1).chunk(2, -1)
    assert torch.allclose(bias_swiglu(x, torch.ones(8)), torch.nn.functional.silu(gate) * up)
assert sorted(made) == ["bias_swiglu", "swiglu"], made
torch.compiler.is_compiling = lambda: True  # within a function that is being compiled
from megatron.core.jit import jit_fuser
assert jit_fuser(lambda: 5)() == jit_fuser()(lambda: 5)() == 5 and len(made) == 2
print("fine")
"""


def test_functions_are_compiled_when_they_are_called():
    result = fresh_python(AS_ON_A_GPU)
    assert result.stdout == "fine\n", result.stderr


FAKES = {
    "": "",
    "transformer_engine": "",
    "nvidia.cudnn": "",
    "transformer_engine nvidia.cudnn": "{path}/nvidia/cudnn",
}


@pytest.mark.parametrize("packages", FAKES)
@pytest.mark.parametrize("given", [None, "CUDNN_HOME", "CUDNN_PATH"])
def test_transformer_engine_is_shown_the_cudnn_of_torch(tmp_path, monkeypatch, packages, given):
    for name in ("CUDNN_HOME", "CUDNN_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # and again after the test
    if given:
        monkeypatch.setenv(given, "chosen")

    def find(name):
        if name in packages.split():
            return SimpleNamespace(
                submodule_search_locations=[f"{tmp_path}/{name.replace('.', '/')}"]
            )
        if "." in name:
            raise ModuleNotFoundError(name)  # of the parent
        return None

    monkeypatch.setattr("importlib.util.find_spec", find)
    _choose_cudnn()
    want = (
        "chosen"
        if given == "CUDNN_HOME"
        else ""
        if given
        else FAKES[packages].format(path=tmp_path)
    )
    assert os.environ.get("CUDNN_HOME", "") == want


@without_gpu
def test_cpu_stands_in_for_cuda_only_where_asked():
    prepare_megatron()
    assert default_device() == torch.device("cpu") == torch.cuda.current_device()
    torch.cuda.synchronize()
    with CpuInsteadOfCuda():
        assert torch.empty(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2, device=torch.device("cuda", 0)).cuda().device.type == "cpu"
        assert torch.empty(2, device="meta").device.type == "meta"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.empty(2, device="cuda")


def test_one_process_needs_no_launcher_and_may_ask_again():
    from megatron.core import parallel_state

    ensure_distributed()
    ensure_distributed()
    assert (
        torch.distributed.get_world_size()
        == parallel_state.get_tensor_model_parallel_world_size()
        == 1
    )


@pytest.mark.parametrize(
    "sizes", [dict(tensor_parallel=2), dict(pipeline_parallel=3), dict(expert_parallel=2)]
)
def test_sizes_that_do_not_fit(sizes):
    ensure_distributed()
    with pytest.raises(UserError, match="parallel") as error:
        ensure_distributed(**sizes)
    assert "\n" not in str(error.value)


@without_gpu
def test_a_fresh_process_is_quiet_and_checks_sizes_before_groups_exist():
    """As a command would: the import of the model, sizes that do not fit, and then those that
    do."""
    code = (
        "import mtpkit.model, mtpkit.platform as p\ntry: p.ensure_distributed(expert_parallel=2)\n"
    )
    done = fresh_python(
        f"{code}except Exception as error: print(repr(error))\np.ensure_distributed()"
    )
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.startswith("UserError('the number of processes, 1, is no multiple of"), (
        done.stdout
    )


@without_gpu
def test_megatron_compiles_nothing():
    """Compiling takes tens of seconds a process, and a C++ compiler."""
    import mtpkit.model  # noqa: F401  (imports megatron-core's layers)

    modules = [
        module for name, module in list(sys.modules.items()) if name.startswith("megatron.core")
    ]
    owners = modules + [
        value for module in modules for value in vars(module).values() if isinstance(value, type)
    ]
    functions = {
        value for owner in owners for value in vars(owner).values() if inspect.isfunction(value)
    }
    compiled = {
        f"{f.__module__}.{f.__qualname__}" for f in functions if hasattr(f, "get_compiler_config")
    }
    assert not compiled
    assert hasattr(torch.compile(lambda x: x), "get_compiler_config"), "others may still compile"


def test_more_processes_than_gpus(monkeypatch):
    ensure_distributed()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in (("RANK", "6"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match="3 processes need a GPU each, this machine has 2; start with --nproc"
    ):
        ensure_distributed()


@pytest.mark.parametrize(
    "failure", [UserError("no such base"), OSError(28, "No space left on device")]
)
def test_what_the_first_rank_meets_is_raised_as_it_is(failure):
    ensure_distributed()

    def fail():
        raise failure

    with pytest.raises(type(failure), match=str(failure.args[-1])) as error:
        on_first_rank(fail)
    assert type(error.value) is type(failure)
    assert on_first_rank(lambda: [1, 2]) == [1, 2]


ENDS = """
import torch, torch.distributed as dist
from mtpkit.cli import run
from mtpkit.platform import ensure_distributed

def command():
    from megatron.core import parallel_state
    ensure_distributed()
    group = parallel_state.get_data_parallel_group()
    for _ in range(2000):
        dist.all_reduce(torch.ones(10), group=group, async_op=True)

run(command)
"""


@without_gpu
def test_a_command_ends_while_messages_are_on_the_way():
    """A thread of gloo that has the last reference to a tensor frees it, which the interpreter must
    outlive."""
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS],
            env={**os.environ, **group, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]


FROZEN = """
import atexit, gc
from tests.engine.tiny import make_llm, tiny_model

for _ in range(2):
    make_llm(tiny_model(), 1)
assert gc.get_freeze_count() > 10_000
atexit._run_exitfuncs()
print(gc.get_freeze_count())
"""


@without_gpu
def test_engines_leave_nothing_frozen_at_exit():
    """What is frozen then is never freed, and Triton 3.9 reports 28 lines of leaked objects."""
    ended = fresh_python(FROZEN)
    assert ended.stdout.split() == ["0"]
    assert "leaked" not in ended.stderr


@pytest.mark.parametrize("values", [[3, -1], [[1, 2, 3]], [], np.array([[5, 6], [7, 8]])])
def test_lists_and_arrays_are_copied_to_the_device(values, device):
    tensor = to_device(values, torch.int64, torch.device(device))
    assert tensor.device.type == device and tensor.dtype == torch.int64
    assert tensor.tolist() == np.array(values).tolist()
    if isinstance(values, np.ndarray):
        before = values.tolist()
        values += 1
        assert tensor.tolist() == before
        values -= 1
