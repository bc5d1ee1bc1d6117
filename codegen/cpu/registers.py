"""Arithmetic on registers: one scalar or one vector of any number of lanes, and the number formats that x86 has no instruction for.

How a tile element is held: f32, f64, i8, i16, i32, i64 and i1 as themselves, e4m3 as its byte, bf16 and f16 as their 16 bits.
"""

from collections.abc import Sequence
from typing import Any

from tapeout.codegen.cpu.emitter import Emitter
from tapeout.dialects._mlir import arith, ir, math, vector

REPS = {"bf16": "i16", "f16": "i16", "f8E4M3FN": "i8"}


def rep_of(elem: Any) -> str:
    """The register type that holds an MLIR element type."""
    return REPS.get(str(elem), str(elem))


def create(name: str, result: Any, *operands: Any, **attributes: Any) -> Any:
    """One op by name: the generated builders cost three times as much."""
    return ir.Operation.create(name, results=[result], operands=list(operands), attributes=attributes).result


def lanes_of(value: Any) -> int:
    """Lanes of a register; 1 for a scalar."""
    return int(ir.VectorType(value.type).shape[0]) if isinstance(value.type, ir.VectorType) else 1


class Registers:
    """Builders for registers of one lane count, at the current insertion point."""

    def __init__(self, emitter: Emitter, lanes: int) -> None:
        self.emitter = emitter
        self.lanes = lanes

    def type(self, rep: str) -> Any:
        """The register type."""
        return self.emitter.type(rep, self.lanes)

    def constant(self, rep: str, value: Any) -> Any:
        """The same number in all lanes, or a list of them."""
        return self.emitter.constant(rep, value, self.lanes)

    def binary(self, name: str, a: Any, b: Any) -> Any:
        """arith.NAME of two registers of one type."""
        return create(f"arith.{name}", a.type, a, b)

    def convert(self, name: str, value: Any, rep: str) -> Any:
        """arith.NAME from one register type to another."""
        return create(f"arith.{name}", self.type(rep), value)

    def compare(self, predicate: Any, a: Any, b: Any) -> Any:
        """A mask."""
        floats = isinstance(predicate, arith.CmpFPredicate)
        return (arith.cmpf if floats else arith.cmpi)(predicate, a, b)

    def select(self, mask: Any, a: Any, b: Any) -> Any:
        """a where the mask holds, else b."""
        return create("arith.select", a.type, mask, a, b)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a b + c, rounded once."""
        return create("math.fma", a.type, a, b, c)

    def splat(self, scalar: Any) -> Any:
        """A scalar in all lanes."""
        if self.lanes == 1:
            return scalar
        return create("vector.broadcast", ir.VectorType.get([self.lanes], scalar.type), scalar)

    def shift(self, name: str, value: Any, rep: str, count: int) -> Any:
        """shli, shrsi or shrui by a constant."""
        return self.binary(name, value, self.constant(rep, count))

    # ---- formats

    def bf16_to_f32(self, bits: Any) -> Any:
        """Exact."""
        return self.convert("bitcast", self.shift("shli", self.convert("extui", bits, "i32"), "i32", 16), "f32")

    def f32_to_bf16(self, value: Any) -> Any:
        """Nearest, ties to even; NaN stays NaN."""
        bits = self.convert("bitcast", value, "i32")
        odd = self.binary("andi", self.shift("shrui", bits, "i32", 16), self.constant("i32", 1))
        rounded = self.binary("addi", self.binary("addi", bits, self.constant("i32", 0x7FFF)), odd)
        quiet = self.binary("ori", bits, self.constant("i32", 0x400000))
        nan = self.compare(arith.CmpFPredicate.UNO, value, value)
        return self.upper_half(self.select(nan, quiet, rounded))

    def upper_half(self, bits: Any) -> Any:
        """The upper 16 of 32 bits: f32 to bf16 where nothing is lost."""
        return self.convert("trunci", self.shift("shrui", bits, "i32", 16), "i16")

    def f16_to_f32(self, bits: Any) -> Any:
        """Exact."""
        return self.convert("extf", self.convert("bitcast", bits, "f16"), "f32")

    def f32_to_f16(self, value: Any) -> Any:
        """Nearest, ties to even."""
        return self.convert("bitcast", self.convert("truncf", value, "f16"), "i16")

    def e4m3_to_f32_over_256(self, code: Any) -> Any:
        """The number of an e4m3 code times 2^-8, exact: its bits placed in an f16, subnormals included. NaN codes give +-1.875."""
        wide = self.shift("shli", self.convert("extsi", code, "i16"), "i16", 7)
        return self.f16_to_f32(self.binary("andi", wide, self.constant("i16", 0xBFFF)))

    def e4m3_to_f32(self, code: Any) -> Any:
        """Exact; the two NaN codes, which no encoder of ours makes from a number, give +-480."""
        return self.binary("mulf", self.e4m3_to_f32_over_256(code), self.constant("f32", 256.0))

    def f32_to_e4m3(self, value: Any) -> Any:
        """Nearest, ties to even, for |value| below 464; NaN becomes the NaN code.

        From 2^-6 on: half an ulp less one plus the kept bit is added, and 127 rebiased to 7. Below: adding 2^14 rounds to multiples of
        2^-9.
        """
        bits = self.convert("bitcast", value, "i32")
        sign = self.binary("andi", self.shift("shrui", bits, "i32", 24), self.constant("i32", 0x80))
        size = self.binary("andi", bits, self.constant("i32", 0x7FFFFFFF))
        odd = self.binary("andi", self.shift("shrui", size, "i32", 20), self.constant("i32", 1))
        bumped = self.binary("addi", self.binary("addi", size, self.constant("i32", 0x7FFFF)), odd)
        normal = self.binary("subi", self.shift("shrui", bumped, "i32", 20), self.constant("i32", 120 << 3))
        magic = self.binary("addf", self.convert("bitcast", size, "f32"), self.constant("f32", 16384.0))
        small = self.binary("subi", self.convert("bitcast", magic, "i32"), self.constant("i32", 0x46800000))
        is_small = self.compare(arith.CmpIPredicate.slt, size, self.constant("i32", 121 << 23))
        code = self.select(is_small, small, self.binary("minsi", normal, self.constant("i32", 0x7F)))
        return self.convert("trunci", self.binary("ori", code, sign), "i8")

    def e8m0_to_f32(self, byte: Any, bias: int = 0) -> Any:
        """2^(byte - 127 + bias): a byte shifted into the exponent."""
        wide = self.convert("extui", byte, "i32")
        wide = self.binary("addi", wide, self.constant("i32", bias)) if bias else wide
        return self.convert("bitcast", self.shift("shli", wide, "i32", 23), "f32")

    # ---- lanes

    def shuffle(self, a: Any, b: Any, order: Sequence[int]) -> Any:
        """The listed lanes of the concatenation of two vectors (a scalar for one lane)."""
        if len(order) == 1:
            return self.extract(a if order[0] < lanes_of(a) else b, order[0] % lanes_of(a))
        return vector.shuffle(a, b, list(order))

    def extract(self, value: Any, lane: int) -> Any:
        """One lane as a scalar."""
        if not isinstance(value.type, ir.VectorType):
            return value
        return vector.extract(value, [], [lane])

    def from_elements(self, scalars: Sequence[Any]) -> Any:
        """A vector of scalars."""
        if len(scalars) == 1:
            return scalars[0]
        return create_variadic("vector.from_elements", ir.VectorType.get([len(scalars)], scalars[0].type), scalars)

    def part(self, value: Any, first: int, count: int) -> Any:
        """`count` lanes from lane `first`."""
        if count == lanes_of(value):
            return value
        return self.shuffle(value, value, range(first, first + count))

    def absolute(self, value: Any) -> Any:
        """|value| of floats."""
        return math.absf(value)


def create_variadic(name: str, result: Any, operands: Sequence[Any]) -> Any:
    """One op with a list of operands."""
    return ir.Operation.create(name, results=[result], operands=list(operands)).result


def combine(emitter: Emitter, kind: str, a: Any, b: Any, rep: str) -> Any:
    """One step of a reduction: add, max or min of two registers. In max and min a NaN in `b` loses."""
    if rep[0] == "f":
        if kind == "add":
            return create("arith.addf", a.type, a, b)
        predicate = arith.CmpFPredicate.OGT if kind == "max" else arith.CmpFPredicate.OLT
        return create("arith.select", a.type, arith.cmpf(predicate, b, a), b, a)
    return create({"add": "arith.addi", "max": "arith.maxsi", "min": "arith.minsi"}[kind], a.type, a, b)


def across(emitter: Emitter, kind: str, value: Any, rep: str) -> Any:
    """Reduces the lanes of a register in a fixed order, halves first: lane i with lane i + n/2."""
    count = lanes_of(value)
    while count > 1:
        count //= 2
        registers = Registers(emitter, count)
        low, high = registers.part(value, 0, count), registers.part(value, count, count)
        value = combine(emitter, kind, low, high, rep)
    return value
