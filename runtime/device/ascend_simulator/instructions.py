"""Meanings of hivm.hir ops: copies between memories, products of the cube, the fixed pipe, signals between cores, library calls."""

from typing import Any

import numpy as np

from tapeout.runtime.device.ascend_simulator.memory import ALIGNMENT, Core, SimulationError, View, row_major
from tapeout.runtime.device.ascend_simulator.program import CORE_SLOT, Env, Op, Run, meaning
from tapeout.runtime.device.ascend_simulator.text import DYNAMIC

SCALE_GROUP = 32


@meaning("hivm.hir.get_block_idx")
def _block_number(op: Op) -> Run:
    (out,) = op.results

    def run(env: Env) -> None:
        env[out] = env[CORE_SLOT].block

    return run


@meaning("hivm.hir.get_sub_block_idx")
def _core_number(op: Op) -> Run:
    (out,) = op.results

    def run(env: Env) -> None:
        env[out] = env[CORE_SLOT].number

    return run


@meaning("hivm.hir.pointer_cast")
def _pointer(op: Op) -> Run:
    address, *rest = op.operands
    (out,), kind = op.results, op.node.result_kinds[0]
    extents, dtype, space = list(kind.shape), op.result_dtype, kind.space
    dynamic = rest[len(rest) - extents.count(DYNAMIC) :] if DYNAMIC in extents else []

    known: list[Any] = [None, None, None]  # of a fixed shape: core and address of the last time, and the buffer there

    def run(env: Env) -> None:
        if not dynamic and known[0] is env[CORE_SLOT] and known[1] == env[address]:
            env[out] = known[2]
            return
        sizes = iter(dynamic)
        shape = [env[next(sizes)] if n == DYNAMIC else n for n in extents]
        env[out] = _placed(env[CORE_SLOT], space, env[address], dtype, shape)
        known[:] = env[CORE_SLOT], env[address], env[out]

    return run


def _placed(core: Core, space: str, address: int, dtype: Any, shape: list[int]) -> View:
    count = int(np.prod(shape))
    if dtype.kind == "b":  # predicates are packed bits on the device: here a byte an element, beside the memory
        held = core.predicates.get((space, address))
        if held is None or held.nbytes < count:
            held = core.predicates[space, address] = np.zeros(count, np.uint8)
        return View(held, dtype, 0, tuple(shape), row_major(shape), space, 0, count, 0)
    if address % dtype.itemsize:
        raise SimulationError(f"address {address} in {space} is not a multiple of {dtype.itemsize}")
    memory, first = core.memory(space), address // dtype.itemsize
    if address + count * dtype.itemsize > memory.nbytes:
        raise SimulationError(f"a buffer of {count} {dtype} at {address} ends behind the {memory.nbytes} bytes of {space}")
    twins = core.shared.unified if space == "ub" and core.kind == "cube" else ()
    return View(memory, dtype, first, tuple(shape), row_major(shape), space, first, first + count, first, twins)


# ---- copies ------------------------------------------------------------------------------------------------------------


@meaning("hivm.hir.load")
def _load(op: Op) -> Run:
    groups = op.segments()
    (source,), (target,) = groups[:2]
    padding = groups[2][0] if len(groups) > 2 and groups[2] else None
    left = groups[3][0] if len(groups) > 3 and groups[3] else None

    def run(env: Env) -> None:
        _require_alignment(env[target], env[source])
        found, there = env[source].array(), env[target].array()
        if padding is not None:
            there[...] = env[padding]
        if left is not None and env[left]:
            raise SimulationError(f"a load starts {env[left]} elements behind an aligned address of {env[target].space}: what lies in front "
                                  "of it would be overwritten")
        _require_same(found, there)
        there[...] = found
        env[CORE_SLOT].count(f"{env[source].space} to {env[target].space}", found)

    return run


def _require_alignment(*views: View) -> None:
    """Local ends of a copy start at an aligned address, and so do their rows where they leave gaps (packed rows are a mode of the copy)."""
    for view in views:
        if view.space == "gm" or 0 in view.shape:
            continue
        size = view.dtype.itemsize
        starts = [view.offset, *(view.strides[axis] for axis in range(len(view.shape)) if view.shape[axis] > 1 and not _runs_on(view, axis))]
        if any(n * size % ALIGNMENT for n in starts):
            raise SimulationError(f"a copy of {view.shape} {view.dtype} touches {view.space} at element {view.offset} with strides {view.strides}; "
                                  f"rows there start at multiples of {ALIGNMENT} bytes")


def _runs_on(view: View, axis: int) -> bool:
    """Whether an axis follows its inner ones without a gap."""
    return view.strides[axis:] == row_major(view.shape[axis:])


@meaning("hivm.hir.store")
def _store(op: Op) -> Run:
    source, target = op.operands[:2]
    atomic = op.word("atomic_kind")

    def run(env: Env) -> None:
        _require_alignment(env[source], env[target])
        found, there = env[source].array(), env[target].array()
        _require_same(found, there)
        combine = {"add": np.add, "max": np.maximum, "min": np.minimum}.get(atomic)
        there[...] = found if combine is None else combine(there, found).astype(there.dtype)
        env[CORE_SLOT].count(f"{env[source].space} to {env[target].space}", found)

    return run


@meaning("hivm.hir.copy", "memref.copy")
def _copy(op: Op) -> Run:
    source, target = op.operands[:2]

    def run(env: Env) -> None:
        found, there = env[source].array(), env[target].array()
        _require_same(found, there)
        there[...] = found
        env[CORE_SLOT].count(f"{env[source].space} to {env[target].space}", found)

    return run


def _require_same(found: Any, there: Any) -> None:
    if found.shape != there.shape:
        raise SimulationError(f"a copy takes {found.shape} to {there.shape}")


@meaning("hivm.hir.nd2nz")
def _to_blocks(op: Op) -> Run:
    source, target = op.operands[:2]

    def run(env: Env) -> None:
        found, there = env[source].array(), env[target].array()
        blocks = there[0] if there.ndim == 5 and there.shape[0] == 1 else there
        _, _, height, columns = blocks.shape
        r, c = np.arange(found.shape[0])[:, None], np.arange(found.shape[1])[None, :]
        blocks[c // columns, r // height, r % height, c % columns] = found
        env[CORE_SLOT].count(f"{env[source].space} to {env[target].space}", found)

    return run


@meaning("hivm.hir.load_scale")
def _load_scales(op: Op) -> Run:
    source, target = op.operands[:2]

    def run(env: Env) -> None:
        found, there = env[source].array(), env[target].array()
        r, s = np.arange(found.shape[0])[:, None], np.arange(found.shape[1])[None, :]
        there[r // there.shape[2], s // there.shape[3], r % there.shape[2], s % there.shape[3]] = found
        env[CORE_SLOT].count(f"{env[source].space} to {env[target].space}", found)

    return run


# ---- products ----------------------------------------------------------------------------------------------------------


def plain(blocks: Any) -> Any:
    """A matrix from the cube's block order [C/c, R/r, r, c]."""
    blocks = blocks[0] if blocks.ndim == 5 else blocks
    across, down, height, columns = blocks.shape
    return blocks.transpose(1, 2, 0, 3).reshape(down * height, across * columns)


def _scales(blocks: Any) -> Any:
    down, across, height, columns = blocks.shape
    return np.exp2(blocks.transpose(0, 2, 1, 3).reshape(down * height, across * columns).view(np.uint8).astype(np.float32) - 127)


def multiplied(a: Any, b: Any) -> Any:
    """a b, each sum in one order wherever its row stands, as the cube's is (a BLAS rounds rows of a tile differently)."""
    return np.einsum("mk,kn->mn", a, b)


def _accumulate(target: Any, product: Any, starts: bool) -> None:
    """Into L0C's block order."""
    m, n = product.shape
    i, j = np.arange(m)[:, None], np.arange(n)[None, :]
    where = (j // 16, i // 16, i % 16, j % 16)
    target[where] = (product if starts else target[where] + product).astype(target.dtype)


@meaning("hivm.hir.mmadL1")
def _multiply(op: Op) -> Run:
    groups = op.segments()
    (a,), (b,), (starts,), (m,), (k,), (n,), (c,) = groups[:7]
    if any(groups[8:]):  # group 7 is seven numbers of flags
        raise SimulationError(f"a product with a bias or a unit flag: {op.node.attributes}")
    turned_a, turned_b = op.attribute("a_transpose") is not None, op.attribute("b_transpose") is not None

    def run(env: Env) -> None:
        left, right, sums = plain(env[a].array()), plain(env[b].array()), env[c].array()
        left, right = left.T if turned_a else left, right.T if turned_b else right
        rows, inner, columns = env[m], env[k], env[n]
        kind = np.int64 if sums.dtype.kind == "i" else np.float32
        _require_extents(left.shape, right.shape, (rows, inner, columns))
        product = multiplied(left[:rows, :inner].astype(kind), right[:inner, :columns].astype(kind))
        _accumulate(sums, product, env[starts])
        env[CORE_SLOT].products += rows * inner * columns

    return run


def _require_extents(left: Any, right: Any, extents: tuple[int, int, int]) -> None:
    m, k, n = extents
    if m > left[0] or k > left[1] or k > right[0] or n > right[1]:
        raise SimulationError(f"a product of {m} x {k} by {k} x {n} is larger than its operands {left} and {right}")


@meaning("hivm.hir.mmadmxL1")
def _multiply_scaled(op: Op) -> Run:
    a, b, sa, sb, starts, m, k, n, c = op.operands[:9]
    if op.integer("lhsFormat") == 3:
        raise SimulationError("block-scaled FP4 products are not simulated")
    turned = op.attribute("b_transpose") is not None

    def run(env: Env) -> None:
        if not env[starts]:
            raise SimulationError("a block-scaled product adds to earlier sums; the function of the device library always starts afresh")
        left, right = plain(env[a].array()), plain(env[b].array())
        right = right.T if turned else right
        rows, inner, columns = env[m], env[k], env[n]
        _require_extents(left.shape, right.shape, (rows, inner, columns))
        groups = -(-inner // SCALE_GROUP)
        counts = ((sa, rows), (sb, columns))
        by_row, by_column = (_scales(env[s].array())[:count, :groups].repeat(SCALE_GROUP, 1)[:, :inner] for s, count in counts)
        product = multiplied(left[:rows, :inner].astype(np.float32) * by_row, right[:inner, :columns].astype(np.float32) * by_column.T)
        _accumulate(env[c].array(), product, env[starts])
        env[CORE_SLOT].products += rows * inner * columns

    return run


@meaning("hivm.hir.fixpipe")
def _fixed_pipe(op: Op) -> Run:
    source, target = op.operands[:2]
    dual, positive = op.word("dual_dst_mode"), "RELU" in op.word("pre_relu")
    if op.word("dma_mode") != "nz2nd":
        raise SimulationError(f"the fixed pipe stores by {op.word('dma_mode') or 'no mode'}: {op.node.attributes}")

    def run(env: Env) -> None:
        view: View = env[target]
        sums = plain(env[source].array())
        sums = np.maximum(sums, 0) if positive else sums
        height, columns = view.shape[-2:]
        env[CORE_SLOT].count(f"cc to {view.space}", sums[:height, :columns])
        _stored(view, sums, height, columns, dual)

    return run


def _stored(view: View, sums: Any, height: int, columns: int, dual: str) -> None:
    if not view.twins:
        view.array()[...] = sums[:height, :columns].astype(view.dtype)
        return
    split = "ROW_SPLIT" in dual
    if dual and not split and "NO_DUAL" not in dual:
        raise SimulationError(f"the fixed pipe splits a tile by {dual}")
    for number, memory in enumerate(view.twins):
        first = number * height if split else 0
        view.of(memory).array()[...] = sums[first : first + height, :columns].astype(view.dtype)


# ---- signals -----------------------------------------------------------------------------------------------------------


@meaning("hivm.hir.sync_block_set")
def _signal(op: Op) -> Run:
    flag, operands = op.integer("static_flag_id"), op.operands
    if op.attribute("tsync_instr_mode") is not None and "SUBBLOCK" in op.word("tsync_instr_mode"):
        return lambda env: env[CORE_SLOT].arrive(flag)

    def run(env: Env) -> None:
        env[CORE_SLOT].set(env[operands[0]] if flag is None else flag)

    return run


@meaning("hivm.hir.sync_block_wait")
def _await(op: Op) -> Run:
    flag, operands = op.integer("static_flag_id"), op.operands
    if op.attribute("tsync_instr_mode") is not None and "SUBBLOCK" in op.word("tsync_instr_mode"):
        return lambda env: env[CORE_SLOT].meet(flag)

    def run(env: Env) -> None:
        env[CORE_SLOT].wait(env[operands[0]] if flag is None else flag)

    return run


# ---- library -----------------------------------------------------------------------------------------------------------


@meaning("hivm.hir.vcumsum")
def _running_sum(op: Op) -> Run:
    (source, target, *_), axis = op.operands, op.integers("cum_dims")[0]

    def run(env: Env) -> None:
        found = env[source].array()
        env[target].array()[...] = np.cumsum(found, axis=axis, dtype=found.dtype)

    return run


@meaning("hivm.hir.vsort")
def _sort(op: Op) -> Run:
    (source, target, *_), falling = op.operands, op.word("descending") == "true"

    def run(env: Env) -> None:
        rising = np.sort(env[source].array(), axis=-1)
        env[target].array()[...] = rising[..., ::-1] if falling else rising

    return run


@meaning("hivm.hir.vreduce")
def _reduce(op: Op) -> Run:
    groups, kind, axis = op.segments(), op.word("arith"), op.integers("reduce_dims")[0]
    (source,), targets = groups[0], groups[1]

    def run(env: Env) -> None:
        found = env[source].array()
        if "with_index" in kind:
            best = (np.argmax if "max" in kind else np.argmin)(found, axis=axis)
            values, places = (env[s].array() for s in targets)
            values[...] = np.take_along_axis(found, np.expand_dims(best, axis), axis).reshape(values.shape)
            places[...] = best.reshape(places.shape)
            return
        function: Any = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}[kind]
        there = env[targets[0]].array()
        there[...] = function.reduce(found, axis=axis, dtype=found.dtype).reshape(there.shape)

    return run


def _require_inside(what: str, places: Any, flat: Any) -> None:
    if places.size and not (places.min() >= 0 and places.max() < flat.size):
        raise SimulationError(f"an indirect {what} reaches {places.min()} to {places.max()} of a buffer of {flat.size}")


@meaning("hivm.hir.indirect_load")
def _indirect_load(op: Op) -> Run:
    base, places, target, *rest = op.operands

    def run(env: Env) -> None:
        view, where, there = env[base], env[places].array(), env[target].array()
        kept = env[rest[0]].array().astype(bool) if rest else np.ones(where.shape, bool)
        if len(rest) > 1:
            there[...] = env[rest[1]].array()
        flat, chosen = view.flat(), where[kept] + view.offset - view.base
        _require_inside("load", chosen, flat)
        there[kept] = flat[chosen]
        env[CORE_SLOT].count(f"{view.space} to ub", flat[chosen])

    return run


@meaning("hivm.hir.indirect_store")
def _indirect_store(op: Op) -> Run:
    base, places, source, *mask = op.operands

    def run(env: Env) -> None:
        view, where, values = env[base], env[places].array(), env[source].array()
        kept = env[mask[0]].array().astype(bool) if mask else np.ones(where.shape, bool)
        flat, chosen = view.flat(), where[kept] + view.offset - view.base
        _require_inside("store", chosen, flat)
        flat[chosen] = values[kept]
        env[CORE_SLOT].count(f"ub to {view.space}", values[kept])

    return run
