"""Compiles kernels for an H100 on a machine without a GPU, as their launchers call them.

Triton's interpreter, which the other tests run kernels in, replaces its compiler, so that this runs
in a process of its own:

    python -m tests.kernels.compiled [GROUP ...]      # of `compiled_cases`; prints a line of JSON
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from mtpkit.kernels import device

_TARGET = GPUTarget("cuda", 90, 32)


class Kernel(NamedTuple):
    """What one compiled kernel needs."""

    case: str
    name: str
    warps: int
    shared: int
    """Bytes of shared memory per program."""
    registers: int
    """Registers per thread."""
    spilled: int
    """Bytes of registers that a thread stores to memory and loads again."""
    serialized: bool
    """Whether products on tensor cores wait for each other."""


class _Driver:
    """What Triton asks of a driver before it launches a kernel."""

    def get_current_target(self) -> GPUTarget:
        return _TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(case: str) -> Iterator[list[Kernel]]:
    """Compile kernels instead of launching them, and collect them in the list that is yielded."""
    found: dict[str, Kernel] = {}
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **rest: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **rest)
        if compiled.hash not in found:
            sizes = compiled.metadata.num_warps, compiled.metadata.shared
            found[compiled.hash] = Kernel(case, self.__name__, *sizes, *_resources(compiled))
        return compiled

    kernels: list[Kernel] = []
    overlaps = device.overlaps
    # Kernels that start early are other kernels, and an H100 runs those.
    device.overlaps = lambda _: True
    triton.runtime.driver.set_active(_Driver())
    JITFunction.run = compile_only
    try:
        yield kernels
    finally:
        JITFunction.run = run
        device.overlaps = overlaps
    kernels += found.values()


def _resources(compiled: Any) -> tuple[int, int, bool]:
    """Registers per thread, bytes that are spilled, and whether products wait for each other."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "kernel"
        place.write_bytes(compiled.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.check_output([tool, "--dump-resource-usage", place], text=True)
        registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
        place.write_text(compiled.asm["ptx"])
        tool = triton.knobs.nvidia.ptxas.path
        arguments = [tool, "-v", f"--gpu-name=sm_{_TARGET.arch}a", place, "-o", "/dev/null"]
        text = subprocess.run(arguments, check=True, capture_output=True, text=True).stderr
        # Local memory may also be an array, as for the sine of a large number.
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", text))) if stack else 0
        return registers, spilled, "wgmma.mma_async instructions are serialized" in text


def main(groups: list[str]) -> None:
    """Compile the cases of some groups, or all, and print the kernels."""
    from tests.kernels.compiled_cases import GROUPS

    found = []
    for group in groups or GROUPS:
        for case, launch in GROUPS[group]():
            with compiling(case) as kernels:
                launch()
            found += kernels
    print(json.dumps([kernel._asdict() for kernel in found]))


if __name__ == "__main__":
    main(sys.argv[1:])
