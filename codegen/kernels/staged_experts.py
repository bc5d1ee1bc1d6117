"""Expert products for a cube that multiplies FP8 with FP8 and takes operands from memory alone: what has to be changed is staged there first.

A launch in front copies the row of every sorted pair to its place. Then each instance, one expert and a block of its columns, unpacks the FP4
weights to e4m3 codes, which is exact and leaves their scales as they are, into scratch of the block that runs it, and multiplies from there.
"""

from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, Layout, Part, Request, Schedule, Workspace
from tapeout.codegen.row_values import bind, block, by, columns_of, row_count
from tapeout.dialects.types import Tensor

Value = Any
HALF, SCALE_GROUP = 64, 32
"""Rows of K in one nibble plane; elements of a scale."""


def staged_product(request: Request, schedule: Schedule) -> Kernel:
    """`moe.expert_linear` by staging. `workers` in the schedule is how many blocks run at once, each with scratch for one weight tile."""
    view, gathered = request.operands[1], bool(request["gathered"])
    assert isinstance(view, Tensor)
    (experts, n, k), choices = view.sized(0), columns_of(request.operands[2])
    block_m, block_n, block_k = schedule["block_m"], block(schedule, "block_n", n, 1), block(schedule, "block_k", k, 2 * SCALE_GROUP)
    workspaces = [Workspace("f8E4M3FN", lambda rows: schedule["workers"] * k * block_n)]
    if gathered:
        workspaces += [Workspace("f8E4M3FN", lambda rows: rows * choices * k), Workspace("i8", lambda rows: rows * choices * k // SCALE_GROUP)]

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        expert, n0 = t.program_id(0), t.mul(t.program_id(1), block_n)
        first, end = t.scalar(b.operands[3].values, expert), t.scalar(b.operands[3].values, t.add(expert, 1))
        weight, own = b.operands[1], t.mul(t.program_id(WORKER), k)
        unpacked = t.View(b.workspaces[0], [schedule["workers"] * k, block_n])

        def unpack(k0: Value) -> None:
            pair = t.quotient(k0, 2 * HALF)
            codes = t.View(weight.values, [experts, k // 2, n]).load([expert, t.mul(pair, HALF), n0], [HALF, block_n])
            unpacked.store([t.add(own, k0), 0], e4m3_of_fp4(codes, t.quotient(t.remainder(k0, 2 * HALF), HALF)))

        t.loop(0, t.minimum(t.mul(t.sub(end, first), k), k), HALF, [], unpack)
        x = b.operands[0].folded(k)
        codes, scales = ((t.View(buffer, [end, width]) for buffer, width in zip(b.workspaces[1:], (k, k // SCALE_GROUP), strict=True))
                         if gathered else (t.View(buffer, [end, width]) for buffer, width in x.buffers()))
        factors = t.View(weight.scales, [experts, n, k // SCALE_GROUP])

        def rows(m0: Value) -> None:
            def step(k0: Value, acc: Value) -> list[Value]:
                group = by(k0, SCALE_GROUP)
                a, sa = codes.load([m0, k0], [block_m, block_k]), scales.load([m0, group], [block_m, block_k // SCALE_GROUP])
                w = unpacked.load([t.add(own, k0), 0], [block_k, block_n])
                return [t.dot_scaled(a, sa, w, factors.load([expert, n0, group], [block_n, block_k // SCALE_GROUP]), acc)]

            (acc,) = t.loop(0, k, block_k, [t.full([block_m, block_n], 0.0)], step)
            b.results[0].folded(n).store(end, [m0, n0], acc)

        t.loop(first, end, block_m, [], rows)

    order = f"column: sum over k in blocks of {block_k}, ascending"
    before = (_copied_pairs(request, k),) if gathered else ()
    return Kernel(body, lambda *b: [experts, n // block_n], order, {1: Layout(("fp4_split",))}, tuple(workspaces), before)


WORKER = 3
"""The grid axis behind the three: which of the blocks that run at once runs an instance."""


def _copied_pairs(request: Request, k: int) -> Part:
    """The launch that copies the row of every sorted pair. Grid: pairs."""
    choices = columns_of(request.operands[2])

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        pair, x = t.program_id(0), b.operands[0].folded(k)
        row = t.quotient(t.scalar(b.operands[2].values, pair), choices)
        for (source, width), target in zip(x.buffers(), b.workspaces[1:], strict=True):
            t.View(target, [None, width]).store([pair, 0], t.View(source, [None, width]).load([row, 0], [1, width]))

    return Part(body, lambda *b: [t.mul(row_count(b), choices)])


def e4m3_of_fp4(codes: Value, plane: Value) -> Value:
    """Bytes (i8) of two FP4 codes to the e4m3 codes of the numbers in their low (plane 0) or high (1) nibbles: exact.

    Codes 0 and 1 are 0 and 0.5 (byte 0x30); from 1 (byte 0x38) on the exponents differ by 6 and the mantissa bit moves up by two.
    """
    wide = t.widen_unsigned(codes, "i16")
    nibbles = t.shr(wide, t.splat(t.mul(plane, 4), t.shape_of(wide), "i16"))
    size, sign = t.bit_and(nibbles, 7), t.shl(t.bit_and(nibbles, 8), 4)
    bits = t.select(t.less(size, 2), t.mul(size, 0x30), t.add(t.shl(size, 2), 0x30))
    return t.bitcast(t.cast(t.bit_or(bits, sign), "i8"), "e4m3")
