"""The few PTX instructions that emitted kernels hold as inline text, run on numpy: what decodes on the GPU is what the interpreter runs.

Elements are packed into registers as the compiler packs them: `pack` of them, the first one lowest. Groups of them are lanes, 32 a warp.
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
    results = [_registers_of(size, pack) for size in outputs]
    given = [register for x in inputs for register in _packed(x, pack)]
    registers: dict[str, Register] = {f"${sum(results) + i}": register for i, register in enumerate(given)}
    registers["%laneid"] = np.arange(given[0].size, dtype=np.uint32) % 32
    for line in re.findall(r"[^{};]+;", text):
        _step(line.strip(" ;\n"), registers)
    firsts = [sum(results[:i]) for i in range(len(outputs))]
    return [_unpacked([registers[f"${first + i}"] for i in range(n)], size, pack)[:count]
            for first, n, size in zip(firsts, results, outputs, strict=True)]


def _registers_of(size: int, pack: int) -> int:
    """How many registers a group of elements takes."""
    return max(1, pack * size // 4)


def _packed(x: np.ndarray, pack: int) -> list[Register]:
    raw = x.reshape(-1).view(f"u{x.itemsize}").astype(np.uint64)
    groups = np.pad(raw, (0, -raw.size % pack)).reshape(-1, pack)
    each = min(pack, 4 // x.itemsize)
    words = groups.reshape(len(groups), -1, each) << (8 * x.itemsize * np.arange(each, dtype=np.uint64))
    return list(words.sum(2).astype(np.uint32).T)


def _unpacked(registers: Sequence[Register], size: int, pack: int) -> np.ndarray:
    assert len(registers) * 4 == pack * size, "an output fills its registers"
    words = np.stack(registers, 1)[:, :, None] >> (8 * size * np.arange(4 // size, dtype=np.uint32))
    return words.astype(f"u{size}").reshape(-1)


def _step(line: str, registers: dict[str, Register]) -> None:
    name, _, rest = line.partition(" ")
    if name == ".reg":
        return
    target, *sources = (word.strip() for word in rest.split(","))
    values = [registers[s] if s in registers else np.uint32(int(s, 0) % 2**32) for s in sources]
    shape = next(iter(registers.values())).shape
    registers[target] = np.broadcast_to(OPERATIONS[name](*values), shape).astype(np.uint32)


def _permuted(a: Register, b: Register, selector: np.uint32) -> Register:
    """Byte i of the result is byte `selector >> 4i` of b:a."""
    both = a.astype(np.uint64) | (np.asarray(b).astype(np.uint64) << np.uint64(32))
    picks = [(both >> np.uint64(8 * ((int(selector) >> 4 * i) & 7))) & np.uint64(255) for i in range(4)]
    return sum(pick << np.uint64(8 * i) for i, pick in enumerate(picks)).astype(np.uint32)


def _any_of_three(a: Register, b: Register, c: Register, table: np.uint32) -> Register:
    """Bit by bit what `table` says of the three bits."""
    rows = [(a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if int(table) >> i & 1]
    return np.bitwise_or.reduce(np.broadcast_arrays(*rows))


def _product(a: Register, b: Register) -> Register:
    """Halves as BF16, each product rounded to nearest."""
    x, y = (np.broadcast_to(v, np.broadcast(a, b).shape).astype(np.uint32).view(ml_dtypes.bfloat16).astype(np.float64) for v in (a, b))
    return (x * y).astype(ml_dtypes.bfloat16).view(np.uint32)


def _rounded_pair(high: Register, low: Register) -> Register:
    """Two f32 numbers rounded to BF16, the second one in the low half."""
    halves = [x.astype(np.uint32).view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32) for x in (high, low)]
    return (halves[0] << np.uint32(16)) | halves[1]


def _halves(x: Register) -> np.ndarray:
    """Two FP16 numbers each, the low one first."""
    return np.ascontiguousarray(np.asarray(x, np.uint32).reshape(-1, 1)).view(np.float16)


def _f16_pair(high: Register, low: Register) -> Register:
    """Two f32 numbers rounded to FP16, the second one in the low half."""
    with np.errstate(over="ignore"):
        halves = [x.astype(np.uint32).view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32) for x in (high, low)]
    return (halves[0] << np.uint32(16)) | halves[1]


def _f16_product(a: Register, b: Register) -> Register:
    """Halves as FP16, each product rounded to nearest."""
    return (_halves(a).astype(np.float64) * _halves(b).astype(np.float64)).astype(np.float16).view(np.uint32).reshape(-1)


def _f16_least_size(a: Register, b: Register) -> Register:
    """Halves as FP16: the smaller magnitude with the product of the signs."""
    x, y = np.broadcast_arrays(_halves(a), _halves(b))
    least = np.minimum(abs(x), abs(y))
    return np.where(np.signbit(x) ^ np.signbit(y), -least, least).astype(np.float16).view(np.uint32).reshape(-1)


def _from_partner(x: Register, mask: np.uint32, bound: np.uint32, lanes: np.uint32) -> Register:
    """The register of the lane whose number differs in the bits of `mask`; all lanes of a warp take part."""
    assert (bound, lanes) == (31, 2**32 - 1) and x.size % 32 == 0, "whole warps"
    return x[np.arange(x.size) ^ int(mask)]


def _inverse(x: Register) -> Register:
    with np.errstate(divide="ignore"):
        return (np.float32(1) / x.astype(np.uint32).view(np.float32)).astype(np.float32).view(np.uint32)


OPERATIONS = {
    "cvt.rn.bf16x2.f32": _rounded_pair,
    "cvt.rn.f16x2.f32": _f16_pair,
    "mul.rn.f16x2": _f16_product,
    "min.xorsign.abs.f16x2": _f16_least_size,
    "rcp.approx.ftz.f32": _inverse,
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "setp.ne.u32": lambda a, b: a != b,
    "selp.b32": lambda a, b, p: np.where(p, a, b),
    "shfl.sync.bfly.b32": _from_partner,
    "cvt.u32.u16": lambda a: a & np.uint32(0xFFFF),
    "add.u32": lambda a, b: a + b,
    "sub.rn.f32": lambda a, b: (a.view(np.float32) - b.view(np.float32)).view(np.uint32),
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "lop3.b32": _any_of_three,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "prmt.b32": _permuted,
    "mul.rn.bf16x2": _product,
}
