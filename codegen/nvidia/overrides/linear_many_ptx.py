"""PTX of the linear layer for many rows on SM90: what Gluon has no words for, as text with numbered operands.

A word of four e4m3 codes b0..b3 becomes two registers of BF16 numbers, (b0, b2) and (b1, b3), so of 16 columns the even ones come first, then
the odd ones; the right factor lies in that order too, and the tensor cores' sum over 16 products has no order. Bits moved into place are a
code's value times 2^-120. The left factor's own scale restores it but for 2^-32, which the right factor carries as 2^32: one multiplication a
pair, exact within the preconditions of linear_many_sm90.py.
"""

from collections.abc import Iterator

TENSOR = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
STEP, HALF, LEFT = 128, 64, 128
CODE_BYTES, MAP_BYTES = LEFT * STEP, 128
LEFT_REGISTERS, HALF_WORDS = 16, 8
"""Of a thread, for 16 rows of a warp times half a step: the left factor, and its codes."""
READ_OPERANDS, READ_HALF_OPERANDS = (",".join(["=&r"] * words + ["r"] * 2) for words in (LEFT_REGISTERS, HALF_WORDS))
LEFT_OPERANDS, LEFT_HALF_OPERANDS = (",".join(["=&r"] * LEFT_REGISTERS + ["r"] * (words + 2)) for words in (LEFT_REGISTERS, HALF_WORDS))
WAIT = """{ .reg .pred p, enough;
            setp.ne.s32 enough, $2, 0; @enough bra.uni over;
            again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra.uni again; over: }"""
"""Where it is enough the barrier is not asked at all: a question about a phase that does not end is answered after microseconds."""
SCALE_BIAS = 88 << 7
"""An e8m0 byte s plus 88 is the exponent field of 2^(s - 127 + 120 - 32)."""


def decoded_pair() -> str:
    """$0: two BF16 numbers of a word $1 shifted left by $2 (8: even codes, 0: odd ones) times $3, times 2^120."""
    return """{ .reg .b32 a, b, up;
        mov.b32 up, 0x7b807b80; shl.b32 a, $1, $2; shr.u32 b, a, 4;
        and.b32 a, a, 0x80008000; and.b32 b, b, 0x07f007f0; or.b32 a, a, b;
        mul.rn.bf16x2 a, a, up; mul.rn.bf16x2 $0, a, $3; }"""


def read(half: int | None = None) -> str:
    """$0..: words of a step's codes, or of half a step, of 16 rows of a warp; behind them a thread's place and a buffer."""
    parts = range(4) if half is None else (2 * half, 2 * half + 1)
    lines = [f"{{ .reg .b32 a<4>; add.u32 a0, ${4 * len(parts) + 1}, ${4 * len(parts)};", *(f"xor.b32 a{i}, a0, {32 * i};" for i in parts if i)]
    return _block([*lines, *(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{_range(4 * n, 4)}}}, [a{i}];" for n, i in enumerate(parts)), "}"])


def _range(first: int, count: int) -> str:
    return ", ".join(f"${first + i}" for i in range(count))


def left_factor(half: int, words: int = LEFT_REGISTERS) -> str:
    """$0..$15: half a step of the left factor, from the step's words $16.., or its own 8; behind them the scales of a thread's two rows."""
    lines = [f"{{ .reg .b32 f<4>, e, o, s, t, bias; mov.b32 bias, {SCALE_BIAS * 0x00010001};"]
    for group in (0, 1):
        for row in (0, 1):
            byte, factor = 2 * half + group, f"f{2 * group + row}"
            lines.append(f"prmt.b32 {factor}, ${LEFT_REGISTERS + words + row}, 0, 0x4{byte}4{byte}; mad.lo.u32 {factor}, {factor}, 128, bias;")
        for word in range(4):  # row 0, row 1 of columns 0..15, then of columns 16..31
            skipped = HALF_WORDS * half if words > HALF_WORDS else 0
            source, first = LEFT_REGISTERS + skipped + 4 * group + word, 8 * group + 4 * (word // 2) + word % 2
            lines.append(_two_pairs(f"${source}", f"f{2 * group + word % 2}", first, first + 2))
    return _block([*lines, "}"])


def _two_pairs(word: str, factor: str, even: int, odd: int) -> str:
    return (
        f"shl.b32 e, {word}, 8; shl.b32 s, {word}, 4; shr.u32 t, {word}, 4; and.b32 e, e, 0x80008000; and.b32 o, {word}, 0x80008000; "
        f"and.b32 s, s, 0x07f007f0; and.b32 t, t, 0x07f007f0; or.b32 e, e, s; or.b32 o, o, t; "
        f"mul.rn.bf16x2 ${even}, e, {factor}; mul.rn.bf16x2 ${odd}, o, {factor};"
    )


def products(tile: int, half: int) -> str:
    """Four products of half a step onto the sums $0.., when those of the half before are done; in the first half the buffer of the step
    before is given back. Operands: sums, the left factor, the one of the half before, the right factor's buffer, the barrier of the buffer
    that is given back, the number of the step in its segment, the thread's lane."""
    buffer, free, step, lane = (f"${tile + 2 * LEFT_REGISTERS + i}" for i in range(4))
    release = f"setp.eq.u32 p, {lane}, 0; setp.ne.and.s32 p, {step}, 0, p; @p mbarrier.arrive.shared::cta.b64 _, [{free}];"
    wait = f"wgmma.wait_group.sync.aligned 0; {'' if half else release} wgmma.fence.sync.aligned;"
    return _block(["{ .reg .b32 q; .reg .b64 d, e; .reg .pred p;", _described(buffer), wait, *_half(tile, half)])


def _described(buffer: str) -> str:
    """d: the right factor there, rows of 128 bytes, swizzled, 1024 bytes from eight rows to the next eight."""
    return f"shr.u32 q, {buffer}, 4; and.b32 q, q, 0x3fff; cvt.u64.u32 d, q; or.b64 d, d, 0x4000004000010000;"


def _half(tile: int, half: int) -> Iterator[str]:
    """The four products of half a step and what closes their group."""
    for part in range(4):
        yield f"add.s64 e, d, {2 * part + half * tile * HALF * 2 // 16};"
        product = f"wgmma.mma_async.sync.aligned.m64n{tile}k16.f32.bf16.bf16"
        yield f"{product} {{{_range(0, tile // 2)}}}, {{{_range(tile + 4 * part, 4)}}}, e, 1, 1, 1, 0;"
    yield "wgmma.commit_group.sync.aligned; }"


def started(tile: int, half: int) -> str:
    """As `products`, where nothing is under way. Operands: sums, the left factor, the right factor's buffer."""
    buffer = f"${tile + LEFT_REGISTERS}"
    return _block(["{ .reg .b32 q; .reg .b64 d, e;", _described(buffer), "wgmma.fence.sync.aligned;", *_half(tile, half)])


def product_operands(tile: int) -> str:
    """Constraints of `products`."""
    return _sums(tile, 2 * LEFT_REGISTERS + 4)


def started_operands(tile: int) -> str:
    """Constraints of `started`."""
    return _sums(tile, LEFT_REGISTERS + 1)


def drain(tile: int) -> str:
    """Waits for the products of a segment and gives the last buffer back. Operands: sums, the left factor, the barrier, the lane."""
    free, lane = (f"${tile + LEFT_REGISTERS + i}" for i in range(2))
    return _block(["{ .reg .pred p; wgmma.wait_group.sync.aligned 0;",
                   f"setp.eq.u32 p, {lane}, 0; @p mbarrier.arrive.shared::cta.b64 _, [{free}]; }}"])  # fmt: skip


def drain_operands(tile: int) -> str:
    """Constraints of `drain`."""
    return _sums(tile, LEFT_REGISTERS + 2)


def _sums(tile: int, more: int) -> str:
    return ",".join(["=f"] * (tile // 2) + [str(i) for i in range(tile // 2)] + ["r"] * more)


WARP = "{ .reg .b32 w; shr.u32 w, $1, 5; shfl.sync.idx.b32 $0, w, 0, 31, 0xffffffff; }"
"""$0: the warp of thread $1, the same number in all its lanes as far as the assembler can see."""


def acquire() -> str:
    """The warps $0 that start copies see the tensor maps $1 as the launch in front left them."""
    return _block([
        "{ .reg .b32 w; .reg .b64 map; .reg .pred one; and.b32 w, $0, 3; setp.eq.u32 one, w, 0;",
        f"add.s64 map, $1, {MAP_BYTES}; @one fence.proxy.tensormap::generic.acquire.gpu [$1], {MAP_BYTES};",
        f"@one fence.proxy.tensormap::generic.acquire.gpu [map], {MAP_BYTES}; }}",
    ])  # fmt: skip


def copies(tile: int) -> str:
    """One warp starts a step's copies, each by one of its lanes. Operands: warp, the one whose turn it is, barrier of the free buffer, its
    phase, barrier of the full one, buffers of the left and the right factor, column and row of the left one, rows of the right one's two
    halves, tensor maps (the right one's lies behind the left one's)."""
    return _block([
        "{ .reg .b32 n; .reg .b64 map; .reg .pred p, other, one; setp.ne.u32 other, $0, $1; @other bra.uni done;",
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [$2], $3; @!p bra.uni again;",
        f"add.s64 map, $11, {MAP_BYTES}; add.u32 n, $6, {2 * tile * HALF}; elect.sync _|one, 0xffffffff;",
        f"@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$4], {CODE_BYTES + 2 * tile * STEP};",
        f"@one {TENSOR} [$6], [map, {{0, $9}}], [$4];",
        f"@one {TENSOR} [n], [map, {{0, $10}}], [$4];",
        f"@one {TENSOR} [$5], [$11, {{$7, $8}}], [$4]; done: }}",
    ])  # fmt: skip


def tensor_maps(k: int, tile: int) -> str:
    """The first thread writes how both factors are copied, in swizzled boxes with zeros behind the rows: codes in boxes of 128 rows times 128
    bytes, the right factor in boxes of `tile` rows times 64 numbers. Operands: where, the codes, their rows, the right factor, its rows times
    K / 64, thread."""
    return _block([
        "{ .reg .pred other; .reg .b64 zero, pitch; setp.ne.u32 other, $5, 0; @other bra done; mov.b64 zero, 0;",
        *(f"st.global.b64 [$0+{8 * i}], zero;" for i in range(2 * MAP_BYTES // 8)),
        *_tensor_map("$0", "$1", (k, "$2"), k, (STEP, LEFT), 0),
        f"add.s64 zero, $0, {MAP_BYTES};",
        *_tensor_map("zero", "$3", (HALF, "$4"), 2 * HALF, (HALF, tile), 1),
        "fence.proxy.tensormap::generic.release.gpu; done: }",
    ])  # fmt: skip


def _tensor_map(where: str, base: str, shape: tuple[int, str], pitch: int, box: tuple[int, int], element: int) -> list[str]:
    """Two axes, the inner one first; `element`: 0 bytes, 1 of 16 bits; `pitch` in bytes."""
    fields = [("global_address", "b64", base), ("rank", "b32", "1"), ("box_dim", "b32", f"0, {box[0]}"), ("box_dim", "b32", f"1, {box[1]}"),
              ("global_dim", "b32", f"0, {shape[0]}"), ("global_dim", "b32", f"1, {shape[1]}"), ("global_stride", "b64", "0, pitch"),
              ("element_stride", "b32", "0, 1"), ("element_stride", "b32", "1, 1"), ("elemtype", "b32", f"{element}"),
              ("interleave_layout", "b32", "0"), ("swizzle_mode", "b32", "3"), ("fill_mode", "b32", "0")]  # fmt: skip
    replaced = (f"tensormap.replace.tile.{name}.global.b1024.{kind} [{where}], {value};" for name, kind, value in fields)
    return [f"mov.b64 pitch, {pitch};", *replaced]


def _block(lines: list[str]) -> str:
    return "\n            ".join(lines)
