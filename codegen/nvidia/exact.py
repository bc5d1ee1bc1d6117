"""Decoding to BF16 in 16-bit arithmetic: what feeds only an exact conversion is computed as BF16 numbers from the start.

A tile kernel decodes codes to f32, scales them by powers of two and says that the result is a BF16 number (`tile.exact`). Codes of e4m3 and
e2m1 have at most four significant bits and powers of two one, so every product on the way is a BF16 number too: two of them share a register
and one instruction. Also here: conversions and reciprocals that a call stands for.
"""

from math import frexp
from typing import Any

from tapeout.codegen.nvidia.hazards import nested
from tapeout.dialects._mlir import ir

DECODER, FP4_DECODER, ROUNDED, RECIPROCAL = "e4m3_to_bf16", "e2m1_to_bf16", "rounded_to_bf16", "reciprocal"
FP4_ENCODER = "pairs_to_e2m1"
_PLACES = (
    "and.b32 $0, x, 0x000F000F;",
    *(f"and.b32 x, x, 0x000F000F;\n        shl.b32 x, x, {place};\n        or.b32 $0, $0, x;" for place in (8, 4, 12)),
)
_TWO_CODES = '''\
        cvt.rn.f16x2.f32 x, {high}, {low};
        mul.rn.f16x2 x, x, down;
        min.xorsign.abs.f16x2 x, x, six;
        shr.u32 y, x, 9;
        and.b32 y, y, 0x00010001;
        add.u32 y, y, 0x00FF00FF;
        add.u32 x, x, y;
        shr.u32 x, x, 9;
        shr.u32 y, x, 3;
        or.b32 x, x, y;
        {put}
'''
_FP4_ENCODER = '''\
@triton.jit
def pairs_to_e2m1(even, odd):
    """Four bytes in a register, two numbers in each step. As FP16 numbers times 2^-14 they have the codes' exponents, those below 1 none at all:
    what is left is to round at the second bit of the fraction, ties to even."""
    return tl.inline_asm_elementwise("""{
        .reg .b32 x, y, down, six;
        mov.b32 down, 0x04000400;
        mov.b32 six, 0x0E000E00;
STEPS
        }""", "=&r,f,f,f,f,f,f,f,f", [even, odd], dtype=tl.int8, is_pure=True, pack=4)
'''


def _fp4_encoder() -> str:
    """Source of the encoder: one step for each two of eight numbers, whose codes go to their places in four bytes."""
    steps = "".join(_TWO_CODES.format(high=f"${even + 2}", low=f"${even}", put=put) for even, put in zip((1, 2, 5, 6), _PLACES, strict=True))
    return _FP4_ENCODER.replace("STEPS\n", steps)


DECODERS = {
    DECODER: '''\
@triton.jit
def e4m3_to_bf16(codes):
    """Two codes in a register: sign, exponent and fraction moved into place are the value times 2^-120, subnormal ones too."""
    return tl.inline_asm_elementwise("""{
        .reg .b32 x, y, up;
        cvt.u32.u16 x, $1;
        prmt.b32 x, x, 0, 0x1404;
        shr.u32 y, x, 4;
        and.b32 y, y, 0x07F007F0;
        and.b32 x, x, 0x80008000;
        or.b32 x, x, y;
        mov.b32 up, 0x7B807B80;
        mul.rn.bf16x2 $0, x, up;
        }""", "=r,h", [codes], dtype=tl.bfloat16, is_pure=True, pack=2)
''',
    FP4_DECODER: '''\
@triton.jit
def e2m1_to_bf16(codes):
    """Two bytes in a register: low codes, high codes. Sign and the other three bits moved into place are the value times 2^-126."""
    return tl.inline_asm_elementwise("""{
        .reg .b32 x, y, z, up;
        cvt.u32.u16 x, $2;
        prmt.b32 x, x, 0, 0x4140;
        mov.b32 up, 0x77807780;
        shl.b32 y, x, 6;
        shl.b32 z, x, 12;
        and.b32 y, y, 0x01C001C0;
        and.b32 z, z, 0x80008000;
        or.b32 y, y, z;
        mul.rn.bf16x2 $0, y, up;
        shl.b32 y, x, 2;
        shl.b32 z, x, 8;
        and.b32 y, y, 0x01C001C0;
        and.b32 z, z, 0x80008000;
        or.b32 y, y, z;
        mul.rn.bf16x2 $1, y, up;
        }""", "=r,=r,h", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
''',
    FP4_ENCODER: _fp4_encoder(),
    ROUNDED: '''\
@triton.jit
def rounded_to_bf16(x):
    """Two numbers in one conversion, which takes a fourth of the time of two."""
    return tl.inline_asm_elementwise("""{
        .reg .b32 pair;
        cvt.rn.bf16x2.f32 pair, $3, $2;
        shl.b32 $0, pair, 16;
        and.b32 $1, pair, 0xFFFF0000;
        }""", "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2)
''',
    RECIPROCAL: '''\
@triton.jit
def reciprocal(x):
    """Of normal numbers from 2^-126 on and infinity, within one unit in the last place: no other needs a scale on the way."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
''',
}
"""Functions that a source brings along where it calls them: name to text."""
SHAPES = ("tensor.expand_shape", "tensor.collapse_shape", "linalg.broadcast")
MADE_UP = (*SHAPES, "math.absf", "tensor.empty", "linalg.fill", "tile.iota")


def narrow_values(function: Any) -> set[Any]:
    """The f32 values of a kernel that are held as BF16: those that exact conversions are made of, and that nothing else looks at."""
    ends = [op for op in nested(function.operation) if op.name == "arith.truncf" and "tile.exact" in op.operation.attributes]
    chains = [(op, chain) for op in ends if (chain := _chain(op.operands[0]))]
    while True:
        held = set().union(*(chain for _, chain in chains))
        readers = held | {op.results[0] for op, _ in chains}
        seen = {v for v in held if any(not len(use.owner.results) or not set(use.owner.results) <= readers for use in v.uses)}
        if not seen:
            return held
        chains = [(op, chain) for op, chain in chains if not chain & seen]


def squared(value: Any) -> Any:
    """The tile of BF16 numbers that an f32 tile is the square of, where one op reads it; None for another tile."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "arith.mulf" or owner.operands[0] != owner.operands[1] or len(list(value.uses)) != 1:
        return None
    x = owner.operands[0]
    widened = isinstance(x.type, ir.RankedTensorType) and not isinstance(x.owner, ir.Block) and x.owner.name == "arith.extf"
    return x if widened and str(x.owner.operands[0].type.element_type) == "bf16" else None


def unread_values(function: Any, narrow: set[Any]) -> set[Any]:
    """Values that are not computed: halves of packed bytes are decoded by one call, from the bytes on, and encoded by one, from the numbers on."""
    found: set[Any] = set()
    halves = {v for v in narrow if v.owner.name == "arith.extf" and nibble(v) is not None}
    packs = {op.results[0]: x for op in nested(function.operation) if (x := packed_numbers(op)) is not None}
    for op in reversed(list(nested(function.operation))):
        readers = [use.owner.results for result in op.results for use in result.uses]
        left_out = op.name.startswith("arith.") or (packs and op.name in MADE_UP)
        if left_out and readers and all(set(results) <= found | halves | set(packs) and len(results) for results in readers):
            found |= set(op.results) - set(packs.values())
    return found - halves


def packed_numbers(op: Any) -> Any:
    """The f32 tile [..., n] whose codes an op packs to bytes [..., n / 2], those of `tile_formats.encode_fp4_row`; None for another op."""
    if op.name != "linalg.reduce" or "tile.pack" not in op.operation.attributes:
        return None
    codes = _through(op.operands[0], "arith.muli", "tensor.expand_shape", "arith.ori")
    sign = codes.owner.operands[1] if codes is not None else None
    bits = _through(sign, "arith.andi", "arith.shrui", "arith.bitcast") if sign is not None else None
    return None if bits is None else bits.owner.operands[0]


def _chain(value: Any) -> set[Any] | None:
    """A value and everything it is made of down to codes and powers of two; None where something else is among them."""
    if not isinstance(value.type, ir.RankedTensorType) or isinstance(value.owner, ir.Block):
        return None
    op = value.owner
    if op.name == "arith.extf":
        return {value} if "f8E4M3FN" in str(op.operands[0].type) or nibble(value) else None
    if op.name == "arith.constant":
        return {value} if _is_power_of_two(op) else None
    if op.name == "arith.bitcast":
        return {value} if _is_power(op.operands[0]) else None
    made_of = list(op.operands) if op.name == "arith.mulf" else [op.operands[0]] if op.name in SHAPES else None
    parts = [_chain(v) for v in made_of] if made_of else [None]
    return None if None in parts else {value}.union(*(part for part in parts if part))


def nibble(value: Any) -> tuple[Any, int] | None:
    """The packed bytes and the half of each that `tile_formats.fp4_values` made an f32 tile of; None for another tile."""
    source = _through(value, "arith.extf", "arith.bitcast", "arith.ori")
    found = {_nibbles(part) for part in source.owner.operands} if source is not None and source.owner.name == "arith.ori" else {None}
    return found.pop() if len(found) == 1 else None


def _through(value: Any, *names: str) -> Any:
    """Follows first operands through ops of these names but the last, which is returned; None where another stands there."""
    for name in names[:-1]:
        if isinstance(value.owner, ir.Block) or value.owner.name != name:
            return None
        value = value.owner.operands[0]
    return None if isinstance(value.owner, ir.Block) or value.owner.name != names[-1] else value


def _nibbles(part: Any) -> tuple[Any, int] | None:
    """(bytes, 0 or 1) behind the bits of one half."""
    source = _through(part, "arith.shli", "arith.andi")
    masked = source.owner.operands[0] if source is not None else None
    if masked is None or isinstance(masked.owner, ir.Block):
        return None
    high = masked.owner.name == "arith.shrsi"
    wide = masked.owner.operands[0] if high else masked
    if isinstance(wide.owner, ir.Block) or wide.owner.name != "arith.extui" or not str(wide.owner.operands[0].type).endswith("xi8>"):
        return None
    return wide.owner.operands[0], int(high)


def _is_power_of_two(op: Any) -> bool:
    value = ir.DenseElementsAttr(op.operation.attributes["value"])
    return value.is_splat and frexp(value.get_splat_value().value)[0] == 0.5


def _is_power(bits: Any) -> bool:
    """Whether bits are those of `tile_formats.e8m0`: an exponent field and nothing else, or the subnormal 2^-127."""
    return not isinstance(bits.owner, ir.Block) and bits.owner.name == "arith.maxsi" and any(
        not isinstance(v.owner, ir.Block) and v.owner.name == "arith.shli" for v in bits.owner.operands)
