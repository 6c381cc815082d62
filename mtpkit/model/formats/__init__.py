"""Quantisation formats, a file each. Layer kinds, families and the engine do not know them."""

from mtpkit.model.formats.base import (
    INPUT_SCALE,
    CutGroup,
    Format,
    Part,
    Quantized,
    join,
    odd_values,
)
from mtpkit.model.formats.columnwise import Awq, Gptq
from mtpkit.model.formats.fp8 import ONLINE, WEIGHTS_ALONE, Fp8
from mtpkit.model.formats.int4 import Int4
from mtpkit.model.formats.nvfp4 import Nvfp4

__all__ = [
    "INPUT_SCALE",
    "ONLINE",
    "WEIGHTS_ALONE",
    "Awq",
    "CutGroup",
    "Format",
    "Fp8",
    "Gptq",
    "Int4",
    "Nvfp4",
    "Part",
    "Quantized",
    "join",
    "odd_values",
]
