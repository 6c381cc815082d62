"""Devices, process groups, and all patches of megatron-core, most of which let it run without a
GPU."""

import ctypes
import functools
import gc
import importlib.util
import logging
import os
import queue
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal, overload

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mtpkit.errors import MtpkitError, UserError

# On import, megatron-core warns of every optional GPU package that is not installed.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
warnings.filterwarnings("ignore", message="Apex is not installed")
# torch warns of one of its own calls when megatron-core loads a checkpoint.
warnings.filterwarnings("ignore", message="The argument order of load has been changed")
# torch warns when a single process loads a checkpoint.
warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized, assuming"
)
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

Dtype = Literal["float32", "bfloat16"]
"""Names of the dtypes that weights and activations can have."""


def _compile_when_called(function: Callable | None = None, **options: Any) -> Callable:
    """Stand-in for `torch.compile` that imports the compiler, which takes seconds, when `function`
    is first called."""
    if function is None:
        return functools.partial(_compile_when_called, **options)
    compiled = functools.cache(lambda: torch.compile(function, **options))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if torch.compiler.is_compiling() else compiled())(*args, **kwargs)

    return call


def _never_compile(function: Callable | None = None, **_: Any) -> Callable:
    """Stand-in for `torch.compile` that leaves functions as they are."""
    return function or (lambda wrapped: wrapped)


def _import_megatron(compile_function: Callable) -> None:
    """Import megatron-core with its small functions decorated by `compile_function` instead of
    `torch.compile`.

    On a CPU, compiling them takes 20 s and a C++ compiler. megatron-core's own switch comes too
    late, after the import of most of its modules, so `torch.compile` is replaced during the import;
    later modules get the same function.
    """
    original = torch.compile
    torch.compile = compile_function
    try:
        from megatron.core import jit
    finally:
        torch.compile = original
    jit.jit_fuser = compile_function


def _choose_cudnn() -> None:
    """Point Transformer Engine to torch's cuDNN before megatron-core imports it.

    Transformer Engine would prefer the system's cuDNN, and parts of two versions do not work
    together.
    """
    if {"CUDNN_HOME", "CUDNN_PATH"} & os.environ.keys() or importlib.util.find_spec(
        "transformer_engine"
    ) is None:
        return
    try:
        found = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:  # torch does not use the package nvidia-cudnn
        return
    if found is not None and found.submodule_search_locations:
        os.environ["CUDNN_HOME"] = next(iter(found.submodule_search_locations))


_choose_cudnn()
_import_megatron(_compile_when_called if torch.cuda.is_available() else _never_compile)


def default_device() -> torch.device:
    """The current GPU, or the CPU if there is none."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def device_name(device: torch.device) -> str:
    """Name of a GPU as its driver reports it; `cpu` for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@overload
def resolve_dtype(dtype: Dtype | Literal["auto"], device: torch.device) -> Dtype: ...
@overload
def resolve_dtype(dtype: str, device: torch.device) -> str: ...
def resolve_dtype(dtype: str, device: torch.device) -> str:
    """Resolve `auto` to the dtype of a model's weights: bfloat16 on a GPU, float32 on a CPU; keep
    any other dtype."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if device.type == "cuda" else "float32"


class CpuInsteadOfCuda(TorchFunctionMode):
    """A context in which `device="cuda"` means the CPU, to build megatron-core modules without a
    GPU.

    It redirects factory calls, and `tensor.cuda()` returns the tensor itself.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def to_device(values: Sequence | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy `values`, lists or an array, to a tensor on the device, without a host-device sync."""
    host = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set `torch.set_float32_matmul_precision` inside the context, and restore it after."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@functools.cache
def prepare_megatron() -> None:
    """Let megatron-core run on a machine without a GPU; do nothing if there is one. Idempotent.

    megatron-core asks torch.cuda for the current device when it allocates memory.
    """
    if torch.cuda.is_available():
        return
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda device=None: None


def accumulate_weight_gradients(accumulate: Callable[[Tensor, Tensor, Tensor], None]) -> None:
    """Have megatron-core's linears add weight gradients to `main_grad` by accumulate(inputs,
    grad_output, main_grad).

    The linears call an extension of apex for this. It is replaced even where it is installed, so
    that sums are the same everywhere.
    """
    from megatron.core.tensor_parallel import layers

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)


def save_checkpoints_in_threads() -> None:
    """Let megatron-core's checkpoint writers, threads of this process, report through a queue of
    this process.

    megatron-core's own queue would start a helper process, which survives if this process is
    killed.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()


def init_processes() -> None:
    """Initialise torch.distributed, once: under torchrun from its environment, otherwise for one
    process.

    Raises:
        UserError: this machine has more processes than GPUs.
    """
    if dist.is_initialized():
        return
    # gloo for CPU tensors: a model may be loaded on the CPU of a machine with GPUs.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(_own_gpu())
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def num_processes() -> int:
    """Number of processes that torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def require_one_process(what: str = "this command runs in one") -> None:
    """Refuse to run in several processes, each of which would do and print the same.

    Args:
        what: why there can be only one process, for the message.

    Raises:
        UserError: there are several processes.
    """
    if (processes := num_processes()) > 1:
        raise UserError(f"there are {processes} processes, but {what}: start it without torchrun")


def ensure_distributed(
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    expert_tensor_parallel: int | None = None,
) -> None:
    """Initialise torch.distributed and megatron-core's process groups, once.

    Under torchrun, use its environment; otherwise make a group of one process without opening a
    port.

    Args:
        expert_tensor_parallel: ranks that each expert is split over; None: `tensor_parallel`.

    Raises:
        UserError: the parallel sizes do not divide the number of processes, groups of other sizes
            exist already, or this machine has more processes than GPUs.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    prepare_megatron()
    # Sequence-parallel embeddings fork megatron-core's CUDA random states for a dropout that is
    # never applied here.
    initialize_rng_tracker(inference_rng_tracker=True)
    init_processes()
    split_over = tensor_parallel if expert_tensor_parallel is None else expert_tensor_parallel
    model_parallel = tensor_parallel * pipeline_parallel * expert_parallel
    if expert_tensor_parallel is not None:
        model_parallel = pipeline_parallel * max(tensor_parallel, split_over * expert_parallel)
    if dist.get_world_size() % model_parallel:
        raise UserError(
            f"the number of processes, {dist.get_world_size()}, is no multiple of {model_parallel}"
            f" (tensor-parallel {tensor_parallel} x pipeline-parallel {pipeline_parallel} x"
            f" expert-parallel {expert_parallel}): change --nproc-per-node of torchrun, or the"
            " parallel sizes"
        )
    if parallel_state.model_parallel_is_initialized():
        sizes = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
        asked = (tensor_parallel, pipeline_parallel, expert_parallel, split_over)
        if sizes != asked:
            raise UserError(
                "process groups exist with (tensor, pipeline, expert, expert-tensor) parallel"
                f" sizes {sizes}, asked for {asked}; use one set of sizes per process"
            )
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=split_over,
    )


before_closing: list[Callable[[], object]] = []
"""Functions that `close_distributed` calls once, the newest first, while all process groups still
exist."""


def close_distributed() -> None:
    """Destroy all process groups and wait for their threads; do nothing if there are none.

    Only for a process that ends without a failure; after a failure, the other processes may never
    answer. Without this call, a gloo thread that frees a tensor during interpreter shutdown aborts
    the process.
    """
    while before_closing:
        before_closing.pop()()
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        # models hold groups, and freeing the last reference to a group waits for its threads
        gc.collect()


def _own_gpu() -> int:
    """The GPU of this process, by its rank on this machine."""
    place = int(os.environ.get("LOCAL_RANK", 0))
    gpus = torch.cuda.device_count()
    if place >= gpus:
        processes = os.environ.get("LOCAL_WORLD_SIZE", place + 1)
        raise UserError(
            f"{processes} processes need a GPU each, this machine has {gpus}; start with"
            f" --nproc-per-node={gpus}"
        )
    return place


_NATIVE_ATOMICS = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the CUDA driver."""


def gpu_uuid(device: int) -> str:
    """Identifier of a GPU that is unique across all hosts."""
    return str(torch.cuda.get_device_properties(device).uuid)


def shares_memory(device: int, peer: int) -> bool:
    """Whether kernels on a GPU can read memory of `peer` and set flags there, as over NVLink; True
    for the same GPU."""
    return device == peer or (
        torch.cuda.can_device_access_peer(device, peer) and _has_peer_atomics(device, peer)
    )


def _has_peer_atomics(device: int, peer: int) -> bool:
    """Whether atomic operations of a GPU work in the memory of `peer`, which torch does not
    report."""
    found = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuDeviceGetP2PAttribute(
        ctypes.byref(found), _NATIVE_ATOMICS, device, peer
    ) == 0 and bool(found.value)


def on_first_rank[T](action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its result on all ranks. Collective.

    Raises:
        MtpkitError, OSError: the error of rank 0, on every rank.
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
