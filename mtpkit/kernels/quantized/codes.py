"""Codes of quantised matrices as numbers, in registers of a Triton kernel.

In bf16 the bits of a code are moved to where bf16 has them, two codes at a time, and a product with
a power of two corrects the exponent. That is exact, also for numbers that are subnormal in bf16
before the product, and takes a quarter of the time of the GPU's conversions. Other types, and
Triton's interpreter, take the plain operations.

A quad is 16 bits with four codes, the first in the lowest bits.
"""

import triton
import triton.language as tl

E2M1_UNIT = tl.constexpr(2.0**119)
"""Factor of the scales that `e2m1` takes. An e4m3 number times it is exact in bf16."""
E2M1_FACTOR = tl.constexpr(2.0**7)
"""What products with numbers from `e2m1` are multiplied by."""

# In bf16 the bits of e4m3 are sign, four of the exponent, three of the mantissa: 2^-120 of the
# number. 0x7b80 is 2^120.
E4M3_PTX = """
{
    .reg .b32 both, sign, rest, unit;
    mov.b32 unit, 0x7b807b80;
    prmt.b32 both, $2, 0, 0x1404;
    shr.b32 rest, both, 4;
    and.b32 rest, rest, 0x07f007f0;
    lop3.b32 sign, both, 0x80008000, rest, 0xea;
    mul.bf16x2 $0, sign, unit;
    prmt.b32 both, $2, 0, 0x3424;
    shr.b32 rest, both, 4;
    and.b32 rest, rest, 0x07f007f0;
    lop3.b32 sign, both, 0x80008000, rest, 0xea;
    mul.bf16x2 $1, sign, unit;
}
"""
# In bf16 the bits of e2m1 are sign, two of the exponent, one of the mantissa: 2^-126 of the number.
E2M1_PTX = """
{
    .reg .b32 sign, rest;
    shl.b32 sign, $4, 12;
    shl.b32 rest, $4, 6;
    and.b32 rest, rest, 0x01c001c0;
    lop3.b32 sign, sign, 0x80008000, rest, 0xea;
    mul.bf16x2 $0, sign, $5;
    shl.b32 sign, $4, 8;
    shl.b32 rest, $4, 2;
    and.b32 rest, rest, 0x01c001c0;
    lop3.b32 sign, sign, 0x80008000, rest, 0xea;
    mul.bf16x2 $1, sign, $5;
    shl.b32 sign, $4, 4;
    shr.b32 rest, $4, 2;
    and.b32 rest, rest, 0x01c001c0;
    lop3.b32 sign, sign, 0x80008000, rest, 0xea;
    mul.bf16x2 $2, sign, $5;
    shr.b32 rest, $4, 6;
    and.b32 rest, rest, 0x01c001c0;
    lop3.b32 sign, $4, 0x80008000, rest, 0xea;
    mul.bf16x2 $3, sign, $5;
}
"""
# 0x4300 is 128 in bf16, whose last bit stands for 1.
INT4_PTX = """
{
    .reg .b32 code, base;
    mov.b32 base, 0x43004300;
    lop3.b32 code, $4, 0x000f000f, base, 0xea;
    sub.bf16x2 $0, code, $5;
    shr.b32 code, $4, 4;
    lop3.b32 code, code, 0x000f000f, base, 0xea;
    sub.bf16x2 $1, code, $5;
    shr.b32 code, $4, 8;
    lop3.b32 code, code, 0x000f000f, base, 0xea;
    sub.bf16x2 $2, code, $5;
    shr.b32 code, $4, 12;
    lop3.b32 code, code, 0x000f000f, base, 0xea;
    sub.bf16x2 $3, code, $5;
}
"""
_E4M3 = tl.constexpr(E4M3_PTX)
_E2M1 = tl.constexpr(E2M1_PTX)
_INT4 = tl.constexpr(INT4_PTX)


@triton.jit
def e4m3(values, OPERAND):
    """Turn e4m3 values into numbers of the type OPERAND; the code of NaN, which no
    weight has, becomes 480 in bf16."""
    if tl.bfloat16 == OPERAND:
        return tl.inline_asm_elementwise(
            _E4M3,
            "=r,=r,r",
            [values.to(tl.uint8, bitcast=True)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        return values.to(OPERAND)


@triton.jit
def e2m1(quads, scale, OPERAND):
    """Turn quads of fp4 codes into four blocks of their numbers times scale / 2^126, where `scale`
    is a block of the same shape and of the type OPERAND."""
    if tl.bfloat16 == OPERAND:
        numbers: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        return tl.inline_asm_elementwise(
            _E2M1, "=r,=r,=r,=r,r,r", [quads, scale], dtype=numbers, is_pure=True, pack=2
        )
    else:
        wide = quads.to(tl.int32)
        return (
            _one_e2m1(wide) * scale,
            _one_e2m1(wide >> 4) * scale,
            _one_e2m1(wide >> 8) * scale,
            _one_e2m1(wide >> 12) * scale,
        )


@triton.jit
def _one_e2m1(code):
    """The lowest four bits as a number in fp32, times 2^-126."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def int4(quads, zero, OPERAND):
    """Turn quads of codes into four blocks of numbers, codes minus zero points; `zero` is a block
    of the same shape, 128 + the zero points in the type OPERAND."""
    if tl.bfloat16 == OPERAND:
        numbers: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        return tl.inline_asm_elementwise(
            _INT4, "=r,=r,=r,=r,r,r", [quads, zero], dtype=numbers, is_pure=True, pack=2
        )
    else:
        wide = quads.to(tl.int32)
        return (
            (128 + (wide & 15)).to(OPERAND) - zero,
            (128 + ((wide >> 4) & 15)).to(OPERAND) - zero,
            (128 + ((wide >> 8) & 15)).to(OPERAND) - zero,
            (128 + ((wide >> 12) & 15)).to(OPERAND) - zero,
        )
