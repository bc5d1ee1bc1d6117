"""Packed FP4 weights on x86: the 16-bit arithmetic of `decode_fp4_weight` recognised and replaced by a byte shuffle.

A nibble selects one of sixteen bytes, twice its value as an integer; that becomes an f32 and is multiplied by half the scale. Same numbers, half
the instructions. Where the pattern or the vector width is another, the plain arithmetic stands.
"""

from typing import Any

from tapeout.codegen.cpu.registers import Registers
from tapeout.codegen.cpu.tiles import WIDEST
from tapeout.dialects._mlir import arith, ir

TWICE = (0, 1, 2, 3, 4, 6, 8, 12)
TABLE = (*TWICE, *(-v for v in TWICE))


def operands(op: Any) -> tuple[Any, Any] | None:
    """(nibbles i16, bf16 bits of half the scale) of a bitcast that `decode_fp4_weight` built for products alone, else None.

    In a product the sign of a zero, which an integer does not have, makes no difference.
    """
    if op.name != "arith.bitcast" or any(use.owner.operation.name != "linalg.matmul" for use in op.results[0].uses):
        return None
    joined = _defined(op.operands[0], "arith.ori")
    if joined is None:
        return None
    size, sign = _defined(joined.operands[0], "arith.select"), _defined(joined.operands[1], "arith.shli")
    if size is None or sign is None or not _is_splat(sign.operands[1], 12):
        return None
    masked, large = _defined(sign.operands[0], "arith.andi"), _defined(size.operands[2], "arith.addi")
    if masked is None or large is None or not _is_splat(masked.operands[1], 8):
        return None
    nibbles, half = masked.operands[0], large.operands[1]
    return (nibbles, half) if _is_size(size, large, nibbles, half) else None


def _is_size(size: Any, large: Any, nibbles: Any, half: Any) -> bool:
    """select(low < 2, select(low < 1, 0, half), low * 64 + half), low = nibbles & 7."""
    shifted = _defined(large.operands[0], "arith.shli")
    low = _defined(shifted.operands[0], "arith.andi") if shifted is not None else None
    inner = _defined(size.operands[1], "arith.select")
    if shifted is None or low is None or inner is None:
        return False
    tests = (_is_below(size.operands[0], low.result, 2), _is_below(inner.operands[0], low.result, 1))
    values = inner.operands[2] == half and _is_splat(inner.operands[1], 0)
    masks = low.operands[0] == nibbles and _is_splat(low.operands[1], 7) and _is_splat(shifted.operands[1], 6)
    return all(tests) and values and masks


def _is_below(mask: Any, value: Any, bound: int) -> bool:
    test = _defined(mask, "arith.cmpi")
    return test is not None and test.operands[0] == value and _is_splat(test.operands[1], bound) and test.attributes["predicate"].value == 2


def _defined(value: Any, name: str) -> Any:
    owner = value.owner
    return None if isinstance(owner, ir.Block) or owner.name != name else owner


def _is_splat(value: Any, number: int) -> bool:
    constant = _defined(value, "arith.constant")
    if constant is None:
        return False
    attribute = ir.DenseElementsAttr(constant.attributes["value"])
    return bool(attribute.is_splat and attribute.get_splat_value().value == number)


def decode(r: Registers, nibbles: Any, half: Any) -> Any:
    """f32 numbers of nibbles (i16, higher bits ignored) under half scales (bf16 bits)."""
    byte = r.binary("andi", r.convert("trunci", nibbles, "i8"), r.constant("i8", 15))
    return r.binary("mulf", r.convert("sitofp", _looked_up(r, byte), "f32"), r.bf16_to_f32(half))


def _looked_up(r: Registers, byte: Any) -> Any:
    if r.lanes != WIDEST:
        return _computed(r, byte)
    kind = r.type("i8")
    attributes = {
        "intrin": ir.StringAttr.get("llvm.x86.ssse3.pshuf.b.128"),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([2, 0]),
        "op_bundle_sizes": ir.DenseI32ArrayAttr.get([]),
    }
    table = r.constant("i8", list(TABLE))
    return ir.Operation.create("llvm.call_intrinsic", results=[kind], operands=[table, byte], attributes=attributes).result


def _computed(r: Registers, byte: Any) -> Any:
    """Twice the value by selects, for the few columns at a tile's end."""
    value = r.constant("i8", 0)
    for code, number in enumerate(TABLE):
        value = r.select(r.compare(arith.CmpIPredicate.eq, byte, r.constant("i8", code)), r.constant("i8", number), value)
    return value
