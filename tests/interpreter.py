"""Triton's interpreter without what it does anew for every operation of a kernel, most of the time
that one takes.

Faults of it are mended too, see `_drop_nan` and `_convert_exactly`.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from triton.language import core
from triton.runtime import interpreter


def hasten() -> None:
    """Have the interpreter compute the same in a third of the time; of all kernels from then on."""
    interpreter._patch_lang = _once_a_module(interpreter._patch_lang)
    interpreter._get_np_dtype = _once_a_type(interpreter._get_np_dtype)
    _hold_block_types()
    _hold_shapes()
    _drop_nan()
    _convert_exactly()
    # It would compute every sum of integers in 64 bits too, to compare, and pass on the outcome to
    # nobody.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "sums that overflow would be reported"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _drop_nan() -> None:
    """Let `tl.maximum` and `tl.minimum` return the other number where one is NaN, as a GPU does
    unless it is told to propagate NaN."""
    builder = interpreter.InterpreterBuilder
    builder.create_maxnumf = lambda self, one, other: self.binary_op(one, other, np.fmax)
    builder.create_minnumf = lambda self, one, other: self.binary_op(one, other, np.fmin)


def _convert_exactly() -> None:
    """Let numbers become e4m3 as on a GPU, rounded to the nearest even one, and let e4m3 and bf16
    come back whole: the interpreter loses carries, subnormal numbers and NaN. Numbers beyond the
    largest become NaN, as in PyTorch: a GPU clamps them, and a kernel that relies on it should be
    noticed."""
    others = interpreter._convert_float
    wide = {core.float32: torch.float32, core.float16: torch.float16}

    def convert(
        data: np.ndarray, source: core.dtype, target: core.dtype, mode: object
    ) -> np.ndarray:
        flat = torch.from_numpy(np.ascontiguousarray(data))
        if target == core.float8e4nv and source in wide:
            found = flat.view(wide[source]).float().to(torch.float8_e4m3fn).view(torch.uint8)
        elif source == core.float8e4nv and target in wide:
            found = flat.view(torch.float8_e4m3fn).to(wide[target])
        elif source == core.bfloat16 and target == core.float32:
            found = flat.view(torch.bfloat16).float()
        else:
            return others(data, source, target, mode)
        return found.numpy().reshape(data.shape)

    interpreter._convert_float = convert


def _once_a_module(patch: Callable[[Callable], object]) -> Callable[[Callable], object]:
    """Replace the language's operations by the interpreter's for good.

    It does so at each launch and each call of a function within a kernel, going through all names
    of the language.
    """
    patched: dict[int, dict] = {}

    def patch_once(function: Callable) -> object:
        if id(function.__globals__) not in patched:
            # held, so that no other gets its id
            patched[id(function.__globals__)] = function.__globals__
            patch(function)
        return interpreter._LangPatchScope()  # that restores nothing

    return patch_once


def _once_a_type(find: Callable[[core.dtype], np.dtype]) -> Callable[[core.dtype], np.dtype]:
    """NumPy's type of each of the language's, for which it makes a table of all of them."""
    found: dict[str, np.dtype] = {}

    def find_once(kind: core.dtype) -> np.dtype:
        if kind.name not in found:
            found[kind.name] = find(kind)
        return found[kind.name]

    return find_once


def _hold_block_types() -> None:
    """Let the type of a block hold those that are made from it: with other elements, and the
    interpreter's own."""
    change = core.block_type.with_element_ty
    lower = core.block_type.to_ir

    def with_element_ty(self: core.block_type, element: core.dtype) -> core.block_type:
        held = self.__dict__.setdefault("with_elements", {})
        if element.name not in held:
            held[element.name] = change(self, element)
        return held[element.name]

    def to_ir(self: core.block_type, builder: interpreter.InterpreterBuilder) -> core.block_type:
        if "lowered" not in self.__dict__:
            self.lowered = lower(self, builder)
        return self.lowered

    core.block_type.with_element_ty = with_element_ty
    core.block_type.to_ir = to_ir


def _hold_shapes() -> None:
    """Let tensors of one type have the same objects for their shape and size."""
    make = core.tensor.__init__

    def __init__(self: core.tensor, handle: object, kind: core.dtype) -> None:
        if held := kind.__dict__.get("shape_and_size"):
            self.handle = handle
            self.type = kind
            self.dtype = kind.scalar
            self.shape, self.numel = held
        else:
            make(self, handle, kind)
            kind.shape_and_size = self.shape, self.numel

    core.tensor.__init__ = __init__
