"""The few PTX instructions that emitted kernels hold as inline text, run on numpy: what decodes on the GPU is what the interpreter runs.

Elements are packed into registers as the compiler packs them: `pack` of them, the first one lowest.
"""

import re
from collections.abc import Sequence

import ml_dtypes
import numpy as np

Register = np.ndarray
"""uint32, one a group of packed elements."""


def run(text: str, inputs: Sequence[np.ndarray], outputs: Sequence[int], pack: int) -> list[np.ndarray]:
    """Raw output elements (unsigned, flat) of bytes sizes `outputs`, of raw input elements; a group of each makes one register."""
    count = inputs[0].size
    registers: dict[str, Register] = {f"${len(outputs) + i}": _packed(x, pack) for i, x in enumerate(inputs)}
    for line in re.findall(r"[^{};]+;", text):
        _step(line.strip(" ;\n"), registers)
    return [_unpacked(registers[f"${i}"], size, pack)[:count] for i, size in enumerate(outputs)]


def _packed(x: np.ndarray, pack: int) -> Register:
    raw = x.reshape(-1).view(f"u{x.itemsize}").astype(np.uint64)
    groups = np.pad(raw, (0, -raw.size % pack)).reshape(-1, pack)
    assert pack * x.itemsize <= 4, "an input fills at most one register"
    return (groups << (8 * x.itemsize * np.arange(pack, dtype=np.uint64))).sum(1).astype(np.uint32)


def _unpacked(register: Register, size: int, pack: int) -> np.ndarray:
    assert pack * size == 4, "an output fills one register"
    return (register[:, None] >> (8 * size * np.arange(pack, dtype=np.uint32))).astype(f"u{size}").reshape(-1)


def _step(line: str, registers: dict[str, Register]) -> None:
    name, _, rest = line.partition(" ")
    if name == ".reg":
        return
    target, *sources = (word.strip() for word in rest.split(","))
    values = [registers[s] if s in registers else np.uint32(int(s, 0)) for s in sources]
    shape = next(iter(registers.values())).shape
    registers[target] = np.broadcast_to(OPERATIONS[name](*values), shape).astype(np.uint32)


def _permuted(a: Register, b: Register, selector: np.uint32) -> Register:
    """Byte i of the result is byte `selector >> 4i` of b:a."""
    both = a.astype(np.uint64) | (np.asarray(b).astype(np.uint64) << np.uint64(32))
    picks = [(both >> np.uint64(8 * ((int(selector) >> 4 * i) & 7))) & np.uint64(255) for i in range(4)]
    return sum(pick << np.uint64(8 * i) for i, pick in enumerate(picks)).astype(np.uint32)


def _product(a: Register, b: Register) -> Register:
    """Halves as BF16, each product rounded to nearest."""
    x, y = (np.broadcast_to(v, np.broadcast(a, b).shape).astype(np.uint32).view(ml_dtypes.bfloat16).astype(np.float64) for v in (a, b))
    return (x * y).astype(ml_dtypes.bfloat16).view(np.uint32)


OPERATIONS = {
    "mov.b32": lambda a: a,
    "cvt.u32.u16": lambda a: a & np.uint32(0xFFFF),
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": _permuted,
    "mul.rn.bf16x2": _product,
}
