"""PTX of the linear layer for many rows on SM90: what Gluon has no words for, as text with numbered operands.

A word of four e4m3 codes b0..b3 becomes two registers of BF16 numbers, (b0, b2) and (b1, b3), so of 16 columns the even ones come first, then
the odd ones; a right factor that a launch in front decoded lies in that order too, and the tensor cores' sum over 16 products has no order. Beside
one that stays as it lies, codes are read two by two, so that 16 columns are in order. Bits moved into place are a code's value times 2^-120. The
left factor's own scale restores it but for 2^-32, which the right factor carries as 2^32, or the total: one multiplication a pair, exact within
the preconditions of linear_many_sm90.py.
"""

from collections.abc import Sequence

TENSOR = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
HALF, LEFT, MAP_BYTES = 64, 128, 128
QUARTER_REGISTERS = 8
"""Of a thread, for 16 rows of a warp times a quarter of a step: the left factor; half a step has as many words of codes, a quarter as many pairs."""
READ_HALF_OPERANDS, QUARTER_OPERANDS = (",".join(["=&r"] * QUARTER_REGISTERS + ["r"] * more) for more in (2, QUARTER_REGISTERS + 2))
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


def read(half: int) -> str:
    """$0..$7: words of codes of half a step, of 16 rows of a warp; behind them a thread's place and a buffer."""
    lines = ["{ .reg .b32 a<2>, at; add.u32 at, $9, $8;", *(f"xor.b32 a{i}, at, {64 * half + 32 * i};" for i in (0, 1))]
    return _block([*lines, *(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{_range(4 * i, 4)}}}, [a{i}];" for i in (0, 1)), "}"])


def read_pairs(quarter: int, columns: int) -> str:
    """$0..$7: codes of a quarter of a step two by two, 2j and 2j + 1, then 2j + 8 and 2j + 9 of 16, from rows of so many columns; behind them a
    thread's place and a buffer."""
    lines = ["{ .reg .b32 a<2>, at; .reg .b16 h; add.u32 at, $9, $8;", *(f"xor.b32 a{i}, at, {32 * quarter + 16 * i};" for i in (0, 1))]
    for number in range(QUARTER_REGISTERS):  # of row 0 and row 1, of columns 0..15, then of columns 16..31
        lines.append(f"ld.shared.u16 h, [a{number // 4}+{8 * columns * (number // 2 % 2) + 8 * (number % 2)}]; cvt.u32.u16 ${number}, h;")
    return _block([*lines, "}"])


def _range(first: int, count: int) -> str:
    return ", ".join(f"${first + i}" for i in range(count))


def quarter(number: int, pairs: bool = False) -> str:
    """$0..$7: a quarter of a step of the left factor, from the words $8.. of its half, or from its own pairs; behind them the scales of a thread's
    two rows."""
    lines = [f"{{ .reg .b32 f<2>, w, e, o, n, t, bias; mov.b32 bias, {SCALE_BIAS * 0x00010001};"]
    for row in (0, 1):
        lines.append(f"prmt.b32 f{row}, ${2 * QUARTER_REGISTERS + row}, 0, 0x4{number}4{number}; mad.lo.u32 f{row}, f{row}, 128, bias;")
    for word in range(4):  # row 0, row 1 of columns 0..15, then of columns 16..31
        first, to = QUARTER_REGISTERS + (2 * word if pairs else 4 * (number % 2) + word), 4 * (word // 2) + word % 2
        lines.append(f"prmt.b32 w, ${first}, ${first + 1}, 0x5140;" if pairs else "")
        lines.append(two_pairs("w" if pairs else f"${first}", f"f{word % 2}", f"${to}", f"${to + 2}"))
    return _block([*lines, "}"])


def two_pairs(word: str, factor: str, even: str, odd: str) -> str:
    """Both pairs of a word times a factor, by way of registers n, e, o and t. Signs of four codes are taken at once; those that are not meant
    lie where magnitudes are selected."""
    return (
        f"and.b32 n, {word}, 0x80808080; shl.b32 e, {word}, 4; shr.u32 o, {word}, 4; shl.b32 t, n, 8; "
        f"lop3.b32 e, e, t, 0x07f007f0, 0xe4; lop3.b32 o, o, n, 0x07f007f0, 0xe4; "
        f"mul.rn.bf16x2 {even}, e, {factor}; mul.rn.bf16x2 {odd}, o, {factor};"
    )


def quarter_products(tile: int, number: int, halves: int = 2, stays: bool = False) -> str:
    """The two products of a quarter of a step onto the sums $0..; then those of the quarter before are done, and in a buffer's first quarter the
    buffer before is given back unless it stays; a buffer holds both halves of a step, or one. Operands: sums, the left factor, the one of the
    quarter before (which stays until its products are done), the right factor's buffer, the barrier of the buffer before, the number of the step
    in its segment, the thread's lane."""
    buffer, free, step, lane = (f"${tile + 2 * QUARTER_REGISTERS + i}" for i in range(4))
    lines = [f"{{ .reg .b32 q, a; .reg .b64 d; .reg .pred p; shr.u32 q, {buffer}, 4; or.b32 q, q, 0x10000; wgmma.fence.sync.aligned;"]
    for part in (0, 1):  # rows of 128 bytes, swizzled, 1024 bytes from eight rows to the next eight
        at = 4 * (number % 2) + 2 * part + (number // 2 * tile * HALF * 2 // 16 if halves > 1 else 0)
        lines.append(f"add.u32 a, q, {at}; mov.b64 d, {{a, 0x40000040}}; wgmma.mma_async.sync.aligned.m64n{tile}k16.f32.bf16.bf16")
        lines.append(f"{{{_range(0, tile // 2)}}}, {{{_range(tile + 4 * part, 4)}}}, d, 1, 1, 1, 0;")
    first = "" if number else f"setp.ne.and.s32 p, {step}, 0, p; "
    release = "" if stays or number % (2 * halves) else f"setp.eq.u32 p, {lane}, 0; {first}@p mbarrier.arrive.shared::cta.b64 _, [{free}];"
    return _block([*lines, f"wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1; {release} }}"])


def stored_products(parts: Sequence[int]) -> str:
    """The products of a buffer of 64 columns of both factors as stored onto the sums $0.., each of so many rows of the right one; then those of the
    buffer before are done, and unless the step is a segment's first it is given back. Operands: sums, both factors, the barrier of the buffer
    before, the number of the step, the thread's lane and warp."""
    left, right, free, step, lane, warp = (f"${sum(parts) + i}" for i in range(6))
    lines = [f"{{ .reg .b32 l, r, a; .reg .b64 d, e; .reg .pred p; shr.u32 a, {warp}, 2; mad.lo.u32 l, a, {2 * HALF * HALF}, {left}; "
             f"shr.u32 l, l, 4; shr.u32 r, {right}, 4; wgmma.fence.sync.aligned;"]  # fmt: skip
    for k, (part, width) in ((k, found) for k in range(4) for found in enumerate(parts)):
        first, at = sum(parts[:part]), 0x10000 + 2 * k
        lines.append(f"add.u32 a, l, {at}; mov.b64 d, {{a, 0x40000040}}; add.u32 a, r, {at + 8 * first}; mov.b64 e, {{a, 0x40000040}};")
        lines.append(f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 {{{_range(first // 2, width // 2)}}}, d, e, 1, 1, 1, 0, 0;")
    release = f"setp.eq.u32 p, {lane}, 0; setp.ne.and.s32 p, {step}, 0, p; @p mbarrier.arrive.shared::cta.b64 _, [{free}];"
    return _block([*lines, f"wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1; {release} }}"])


def product_operands(tile: int, left: int = QUARTER_REGISTERS) -> str:
    """Constraints of `quarter_products`."""
    return _sums(tile, 2 * left + 4)


def drain(tile: int, left: int = QUARTER_REGISTERS) -> str:
    """Waits for the products of a segment and gives the last buffer back. Operands: sums, the left factor, the barrier, the lane."""
    free, lane = (f"${tile + left + i}" for i in range(2))
    return _block(["{ .reg .pred p; wgmma.wait_group.sync.aligned 0;",
                   f"setp.eq.u32 p, {lane}, 0; @p mbarrier.arrive.shared::cta.b64 _, [{free}]; }}"])  # fmt: skip


def drain_operands(tile: int, left: int = QUARTER_REGISTERS) -> str:
    """Constraints of `drain`."""
    return _sums(tile, left + 2)


def _sums(tile: int, more: int) -> str:
    return ",".join(["=&f"] * (tile // 2) + [str(i) for i in range(tile // 2)] + ["r"] * more)


WARP = "{ .reg .b32 w; shr.u32 w, $1, 5; shfl.sync.idx.b32 $0, w, 0, 31, 0xffffffff; }"
"""$0: the warp of thread $1, the same number in all its lanes as far as the assembler can see."""


def acquire() -> str:
    """The warps $0 that start copies see the tensor maps $1 as the launch in front left them."""
    return _block([
        "{ .reg .b32 w; .reg .b64 map; .reg .pred one; and.b32 w, $0, 3; setp.eq.u32 one, w, 0;",
        f"add.s64 map, $1, {MAP_BYTES}; @one fence.proxy.tensormap::generic.acquire.gpu [$1], {MAP_BYTES};",
        f"@one fence.proxy.tensormap::generic.acquire.gpu [map], {MAP_BYTES}; }}",
    ])  # fmt: skip


def copies(tile: int | None, columns: int, in_order: bool) -> str:
    """One warp starts the copies into a buffer, each by one of its lanes. Operands: warp, the one whose turn it is, barrier of the free buffer, its
    phase, barrier of the full one, buffers of the left and the right factor, column and row of the left one and of the right one, tensor maps
    (the right one's lies behind the left one's), how far the right one's second half lies behind its first: columns where it lies in order, or
    rows. Without a `tile` these are also the rows of each half, and columns are 64."""
    size, middle = (columns * (LEFT + 2 * tile), f"add.u32 m, $6, {2 * tile * HALF};") if tile else (
        "b", f"mad.lo.u32 m, $12, {2 * HALF}, $6; mad.lo.u32 b, $12, {4 * HALF}, {2 * HALF * LEFT};")  # fmt: skip
    moved, second = ("$9", "{n, $10}") if in_order else ("$10", "{$9, n}")
    return _block([
        "{ .reg .b32 n, m, b; .reg .b64 map; .reg .pred p, other, one; setp.ne.u32 other, $0, $1; @other bra.uni done;",
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [$2], $3; @!p bra.uni again;",
        f"add.s64 map, $11, {MAP_BYTES}; {middle} add.u32 n, {moved}, $12; elect.sync _|one, 0xffffffff;",
        f"@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$4], {size};",
        f"@one {TENSOR} [$6], [map, {{$9, $10}}], [$4];",
        f"@one {TENSOR} [m], [map, {second}], [$4];" if columns > HALF else "",
        f"@one {TENSOR} [$5], [$11, {{$7, $8}}], [$4]; done: }}",
    ])  # fmt: skip


def tensor_maps(k: int, tile: int, columns: int, pitch: int = HALF, stored: bool = False) -> str:
    """The first thread writes how both factors are copied, in swizzled boxes with zeros behind the rows: codes in boxes of 128 rows times so many
    bytes, the right factor in boxes of `tile` rows times 64 of a row's `pitch` numbers. A left factor `stored` in BF16 comes in 64
    columns, and beside it half of the right one's rows, of at most `tile`, in eights. Operands: where, the left factor, its rows, the right one, its
    rows, thread."""
    box = f"min.s32 rows, $4, {tile}; add.s32 rows, rows, 15; shr.s32 rows, rows, 4; shl.b32 rows, rows, 3;"
    return _block([
        "{ .reg .pred other; .reg .b32 rows; .reg .b64 zero, pitch; setp.ne.u32 other, $5, 0; @other bra done; mov.b64 zero, 0;",
        *(f"st.global.b64 [$0+{8 * i}], zero;" for i in range(2 * MAP_BYTES // 8)),
        *_tensor_map("$0", "$1", (k, "$2"), (columns, LEFT), int(stored)),
        f"add.s64 zero, $0, {MAP_BYTES}; {box if stored else ''}",
        *_tensor_map("zero", "$3", (pitch, "$4"), (HALF, "rows" if stored else tile), 1),
        "fence.proxy.tensormap::generic.release.gpu; done: }",
    ])  # fmt: skip


def _tensor_map(where: str, base: str, shape: tuple[int, str], box: tuple[int, int | str], element: int) -> list[str]:
    """Two axes, the inner one first; `element`: 0 bytes, 1 of 16 bits. Rows of a box, of 64 or 128 bytes, are swizzled."""
    fields = [("global_address", "b64", base), ("rank", "b32", "1"), ("box_dim", "b32", f"0, {box[0]}"), ("box_dim", "b32", f"1, {box[1]}"),
              ("global_dim", "b32", f"0, {shape[0]}"), ("global_dim", "b32", f"1, {shape[1]}"), ("global_stride", "b64", "0, pitch"),
              ("element_stride", "b32", "0, 1"), ("element_stride", "b32", "1, 1"), ("elemtype", "b32", f"{element}"),
              ("interleave_layout", "b32", "0"), ("fill_mode", "b32", "0"), ("swizzle_mode", "b32", f"{2 + (box[0] << element > 64)}")]  # fmt: skip
    replaced = (f"tensormap.replace.tile.{name}.global.b1024.{kind} [{where}], {value};" for name, kind, value in fields)
    return [f"mov.b64 pitch, {shape[0] << element};", *replaced]


def _block(lines: list[str]) -> str:
    return "\n            ".join(line for line in lines if line)
