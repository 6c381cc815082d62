"""Where the code runs: devices, process groups, and what megatron-core needs in order to run without a GPU."""

import functools
import gc
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mtpkit.errors import MtpkitError, UserError

# megatron-core warns, while it is imported, of every optional GPU package that is absent.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
warnings.filterwarnings("ignore", message="Apex is not installed")
# torch warns of its own call when megatron-core loads a checkpoint.
warnings.filterwarnings("ignore", message="The argument order of load has been changed")
# The same when a process without others loads one.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized, assuming")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _keep_megatron_eager() -> None:
    """megatron-core compiles small functions at import; without a GPU that costs 20 s a process and a C++ compiler.

    Its package imports most of its modules before its switch for this can be reached, so `torch.compile` stands aside.
    """
    compile_function = torch.compile
    torch.compile = lambda function=None, **_: function or (lambda wrapped: wrapped)  # type: ignore[assignment]
    try:
        from megatron.core import jit
    finally:
        torch.compile = compile_function
    jit.disable_jit_fuser()


def _choose_cudnn() -> None:
    """Name the cuDNN that torch came with, before megatron-core imports Transformer Engine.

    Transformer Engine would load the system's where there is one, and parts of two versions do not work together.
    """
    if {"CUDNN_HOME", "CUDNN_PATH"} & os.environ.keys() or importlib.util.find_spec("transformer_engine") is None:
        return
    try:
        found = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:  # torch was built with another one
        return
    if found is not None and found.submodule_search_locations:
        os.environ["CUDNN_HOME"] = next(iter(found.submodule_search_locations))


_choose_cudnn()
if not torch.cuda.is_available():
    _keep_megatron_eager()


def default_device() -> torch.device:
    """The current GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def device_name(device: torch.device) -> str:
    """A GPU's name as its driver has it; `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class _CpuInsteadOfCuda(TorchFunctionMode):
    """Redirects `device="cuda"` to the CPU inside factory calls, and `tensor.cuda()` to the tensor itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def to_device(values: Sequence | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy of `values`, lists or an array, as a tensor on the device, without waiting for what is under way there."""
    host = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """fp32 matrices are multiplied so inside, see `torch.set_float32_matmul_precision`, and as before after it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@functools.cache
def prepare_megatron() -> None:
    """Let megatron-core run on a machine without a GPU; does nothing where there is one.

    megatron-core asks torch.cuda for the current device when it allocates. Idempotent.
    """
    if torch.cuda.is_available():
        return
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda device=None: None


def accumulate_weight_gradients(accumulate: Callable[[Tensor, Tensor, Tensor], None]) -> None:
    """Have megatron-core's linears add weight gradients to `main_grad` by accumulate(inputs, grad_output, main_grad).

    They call an extension of apex for this; it is replaced where it is installed, too, for the same sums everywhere.
    """
    from megatron.core.tensor_parallel import layers

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)


def cpu_redirect() -> TorchFunctionMode:
    """A context in which `device="cuda"` means the CPU; for building megatron-core modules without a GPU."""
    return _CpuInsteadOfCuda()


def ensure_distributed(tensor_parallel: int = 1, pipeline_parallel: int = 1, expert_parallel: int = 1) -> None:
    """Initialise torch.distributed and megatron-core's process groups, once.

    Under torchrun its environment is used; otherwise a group of one process is made without opening a port.

    Raises:
        UserError: the number of processes does not divide, groups of another shape exist already, or there are more
            processes on this machine than GPUs.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    prepare_megatron()
    # Sequence-parallel embeddings fork megatron-core's CUDA random states for a dropout that is never applied here.
    initialize_rng_tracker(inference_rng_tracker=True)
    if not dist.is_initialized():
        # gloo for tensors on the CPU: a model may be loaded there on a machine that has a GPU.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            if torch.cuda.is_available():
                torch.cuda.set_device(_own_gpu())
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model_parallel = tensor_parallel * pipeline_parallel * expert_parallel
    if dist.get_world_size() % model_parallel:
        raise UserError(
            f"{dist.get_world_size()} processes cannot be split into groups of {model_parallel} (tensor-parallel "
            f"{tensor_parallel} x pipeline-parallel {pipeline_parallel} x expert-parallel {expert_parallel}); change "
            "--nproc-per-node or the parallel sizes"
        )
    if parallel_state.model_parallel_is_initialized():
        sizes = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        if sizes != (tensor_parallel, pipeline_parallel, expert_parallel):
            raise UserError(
                f"process groups exist with (tensor, pipeline, expert) parallel sizes {sizes}, asked for "
                f"{(tensor_parallel, pipeline_parallel, expert_parallel)}; use one shape in a process"
            )
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        expert_model_parallel_size=expert_parallel,
    )


def close_distributed() -> None:
    """Destroy all process groups and wait for their threads; does nothing where there are none.

    For the end of a process that met no failure: others may wait for what one that did has not sent. Without it a
    thread of gloo that lets go of a tensor while the interpreter shuts down aborts the process.
    """
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        gc.collect()  # models hold groups, and the last to let go of one waits for its threads


def _own_gpu() -> int:
    """The GPU of this process, by its place among those that torchrun started on this machine."""
    place, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if place >= gpus:
        raise UserError(f"process {place} has no GPU, there are {gpus} here; start --nproc-per-node={gpus} processes")
    return place


def on_first_rank[T](action: Callable[[], T]) -> T:
    """What rank 0 makes of `action`, on all ranks, which wait for it. Collective.

    Raises:
        MtpkitError, OSError: what rank 0 met, on every rank.
    """
    found: list = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = action()
        except (MtpkitError, OSError) as error:
            found[1] = error
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise found[1]
    return found[0]
