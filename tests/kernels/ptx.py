"""The few PTX instructions that turn codes into numbers, in Python, so that a machine without a GPU
can check them."""

import re

import torch


def _bf16(word: int) -> torch.Tensor:
    """The two halves of a word as bf16 numbers, the lower one first."""
    halves = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32)
    return halves.to(torch.uint16).view(torch.bfloat16)


def _word(numbers: torch.Tensor) -> int:
    low, high = numbers.view(torch.uint16).tolist()
    return low | high << 16


def _prmt(a: int, b: int, selector: int) -> int:
    source = (b << 32 | a).to_bytes(8, "little")
    picked = [source[selector >> 4 * place & 7] for place in range(4)]
    return int.from_bytes(bytes(picked), "little")


def _lop3(a: int, b: int, c: int, table: int) -> int:
    result = 0
    for bit in range(32):
        index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1
        result |= (table >> index & 1) << bit
    return result


OPERATIONS = {
    "mov.b32": lambda a: a,
    "prmt.b32": _prmt,
    "shl.b32": lambda a, count: a << count & 0xFFFFFFFF,
    "shr.b32": lambda a, count: a >> count,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": _lop3,
    "mul.bf16x2": lambda a, b: _word(_bf16(a) * _bf16(b)),
    "sub.bf16x2": lambda a, b: _word(_bf16(a) - _bf16(b)),
}


def run(text: str, outputs: int, *inputs: int) -> list[int]:
    """Run inline assembly whose first operands are its outputs, and return those."""
    registers = {f"${outputs + place}": word for place, word in enumerate(inputs)}
    for line in re.sub(r"[{}]", "", text).split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, rest = line.strip().split(maxsplit=1)
        target, *operands = [operand.strip() for operand in rest.split(",")]
        words = [
            registers[operand] if operand in registers else int(operand, 0) for operand in operands
        ]
        registers[target] = OPERATIONS[name](*words)
    return [registers[f"${place}"] for place in range(outputs)]


def halves(words: list[int]) -> list[float]:
    """The bf16 numbers in words, as floats."""
    return [number for word in words for number in _bf16(word).float().tolist()]
