"""The tile dialect: how a kernel reaches global memory, and the two products and stores that standard MLIR has no word for.

A kernel body is one program instance on static tiles (tensors). Ten ops here: program_id, iota, scalar, load, store, gather, scatter,
compress_store, dot_scaled; everything else is `arith`, `math`, `linalg`, `tensor`, `scf`. Buffers are flat `memref<?xT>`.
Contract: tile elements outside a ragged extent are unspecified; they must not reach a valid element of a store.
Each op carries `meaning`, a numpy function on plain arrays; which ops a kernel may hold at all is checked by `codegen.verify_tile`.
"""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tapeout.dialects._mlir import ext, ir
from tapeout.dialects.define import READS, WRITES

UNKNOWN = -1  # shape[0] of an array whose number of rows is known at run time only
SCALE_GROUP = 32  # elements of k that share one e8m0 byte in dot_scaled


class Tile(ext.Dialect, name="tile"):
    """Global memory and block-scaled products of a kernel body."""


def load_into(context: ir.Context) -> None:
    """Registers the dialect in a context; a second call changes nothing."""
    with context:
        try:
            Tile.load()
        except ext.DialectAlreadyLoadedError:
            return


def unspecified(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An array of the values that show misuse: NaN, or the lowest integer."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return np.ones(shape, dtype)
    lowest = np.iinfo(dtype).min if np.issubdtype(dtype, np.integer) else np.nan
    return np.full(shape, lowest, np.float32 if np.isnan(float(lowest)) else dtype).astype(dtype)


def positions(at: Sequence[int], box: Sequence[int], shape: Sequence[int], panel: int = 0) -> np.ndarray:
    """Flat positions of a box of a row-major array. With `panel` p the last two axes [K, N] lie as [N/p][K][p]."""
    lead = len(shape) - len(box)
    steps = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    counts = [1] * lead + list(box)
    coordinates: list[Any] = list(
        np.meshgrid(*(first + np.arange(n) for first, n in zip(at, counts, strict=True)), indexing="ij", sparse=True)
    )
    if panel:
        k, n = coordinates[-2:]
        steps = [*steps[:-2], 1, 1]
        coordinates = [*coordinates[:-2], (n // panel * shape[-2] + k) * panel, n % panel]
    flat = sum((c * s for c, s in zip(coordinates, steps, strict=True)), np.zeros(counts, np.int64))
    return np.asarray(flat, np.int64).reshape(box)


def valid_rows(at: Sequence[int], box: Sequence[int], shape: Sequence[int], extent: int | None) -> int:
    """Rows of a box that exist: all of them, or those below `extent` on the box's leading axis."""
    if extent is None or not box:
        return box[0] if box else 1
    return int(np.clip(extent - at[len(shape) - len(box)], 0, box[0]))


def _require(op: Any, fact: bool, sentence: str) -> bool:
    if not fact:
        op.location.emit_error(f"'{op.OPERATION_NAME}' {sentence}")
    return bool(fact)


def _shape(value: Any) -> list[int]:
    return list(ir.RankedTensorType(value.type).shape)


def _element(value: Any) -> Any:
    kind = ir.RankedTensorType if isinstance(value.type, ir.RankedTensorType) else ir.MemRefType
    return kind(value.type).element_type


def integers(attribute: Any) -> list[int]:
    """The numbers of an array attribute."""
    return [int(entry.value) for entry in attribute]


def _box_is_sound(op: Any, tile: Any, panel: int) -> bool:
    box, shape = _shape(tile), integers(op.shape)
    axis = len(shape) - len(box)
    ragged = len(list(op.extent))
    same = _element(op.base) == _element(tile)
    return (
        _require(op, same, f"moves {_element(tile)} but the buffer holds {_element(op.base)}; give them one element type")
        and _require(
            op,
            len(list(op.at)) == len(shape),
            f"needs one coordinate per axis: {len(shape)} axes, {len(list(op.at))} coordinates",
        )
        and _require(
            op,
            axis >= 0,
            f"takes a box of rank {len(box)} from an array of rank {len(shape)}; the array needs at least as many axes",
        )
        and _require(
            op,
            ragged <= 1,
            f"takes at most one run-time extent, found {ragged}; only the leading axis of the box is ragged",
        )
        and _require(
            op,
            all(n > 0 for n in shape[1:]) and shape[0] >= UNKNOWN,
            f"needs known extents behind the first axis, found {shape}",
        )
        and _require(
            op,
            all(b <= n or n == UNKNOWN for b, n in zip(box[ragged:], shape[axis + ragged :], strict=True)),
            f"box {box} is wider than the array {shape}; only a ragged leading axis may reach beyond it",
        )
        and _panel_is_sound(op, box, shape, panel)
    )


def _panel_is_sound(op: Any, box: list[int], shape: list[int], panel: int) -> bool:
    if panel == 0:
        return True
    return _require(
        op,
        panel > 0 and len(box) >= 2 and shape[-2] != UNKNOWN,
        f"panel {panel} needs the last two axes of a box, both known",
    ) and _require(
        op,
        shape[-1] % panel == 0 and box[-1] % panel == 0,
        f"panel {panel} divides neither or only one of the array's {shape[-1]} and the box's {box[-1]} columns; it must divide both",
    )


class ProgramIdOp(Tile.Operation, name="program_id", traits=[ext.Pure]):
    """This instance's coordinate on one grid axis; axis 3 is the number of the launched block that runs it, where blocks run many instances."""

    out: ext.Result[ir.IndexType]
    axis: ir.IntegerAttr

    def verify_invariants(self) -> bool:
        return _require(self, 0 <= self.axis.value <= 3, f"axis is {self.axis.value}; a grid has axes 0, 1 and 2, and 3 is the launched block")

    @staticmethod
    def meaning(instance: Sequence[int], axis: int) -> int:
        """The instance's coordinate. One after the other, all instances are run by block 0."""
        return instance[axis] if axis < 3 else 0


class IotaOp(Tile.Operation, name="iota", traits=[ext.Pure]):
    """[0, 1, ..., n-1] as i32."""

    out: ext.Result[ir.RankedTensorType]

    def verify_invariants(self) -> bool:
        right = len(_shape(self.out)) == 1 and str(_element(self.out)) == "i32"
        return _require(self, right, f"makes a tensor<nxi32>, not {self.out.type}")

    @staticmethod
    def meaning(n: int) -> np.ndarray:
        """[0, n) as int32."""
        return np.arange(n, dtype=np.int32)


class ScalarOp(Tile.Operation, name="scalar", traits=[READS]):
    """One i32 of a buffer as an index: counts, table entries."""

    out: ext.Result[ir.IndexType]
    base: ext.Operand[ir.MemRefType]
    at: ext.Operand[ir.IndexType]

    def verify_invariants(self) -> bool:
        return _require(self, str(_element(self.base)) == "i32", f"reads i32 buffers, not {self.base.type}")

    @staticmethod
    def meaning(base: np.ndarray, at: int) -> int:
        """base[at]."""
        return int(base[at])


class LoadOp(Tile.Operation, name="load", traits=[READS]):
    """The box of `out`'s shape at coordinates `at` of the row-major array `shape`; missing leading axes are boxes of one row.

    Rows of the box's leading axis at or beyond `extent` are not read and unspecified. shape[0] = -1 is a run-time number of rows.
    `panel` p > 0: the array's last two axes [K, N] are stored as [N/p][K][p].
    """

    out: ext.Result[ir.RankedTensorType]
    base: ext.Operand[ir.MemRefType]
    at: Sequence[ext.Operand[ir.IndexType]]
    extent: Sequence[ext.Operand[ir.IndexType]]
    shape: ir.ArrayAttr
    panel: ir.IntegerAttr

    def verify_invariants(self) -> bool:
        return _box_is_sound(self, self.out, self.panel.value)

    @staticmethod
    def meaning(
        base: np.ndarray, at: Sequence[int], extent: int | None, box: Sequence[int], shape: Sequence[int], panel: int
    ) -> np.ndarray:
        """base at the box's positions, unspecified rows marked."""
        rows = valid_rows(at, box, shape, extent)
        out = unspecified(box, base.dtype)
        where = positions(at, box, shape, panel)
        if box:
            out[:rows] = base[where[:rows]]
            return out
        return base[where]


class StoreOp(Tile.Operation, name="store", traits=[WRITES]):
    """Writes a tile to a box; rows of its leading axis at or beyond `extent` are dropped."""

    value: ext.Operand[ir.RankedTensorType]
    base: ext.Operand[ir.MemRefType]
    at: Sequence[ext.Operand[ir.IndexType]]
    extent: Sequence[ext.Operand[ir.IndexType]]
    shape: ir.ArrayAttr

    def verify_invariants(self) -> bool:
        return _box_is_sound(self, self.value, 0)

    @staticmethod
    def meaning(value: np.ndarray, base: np.ndarray, at: Sequence[int], extent: int | None, shape: Sequence[int]) -> None:
        """Writes the valid rows into base."""
        rows = valid_rows(at, value.shape, shape, extent)
        where = positions(at, value.shape, shape)
        base[where[:rows] if value.shape else where] = value[:rows] if value.shape else value


def _rows_are_sound(op: Any, tile: Any, stride: int) -> bool:
    shape = _shape(tile)
    return (
        _require(op, len(shape) == 2, f"moves rows of a rank 2 tile, not {tile.type}")
        and _require(op, _element(op.base) == _element(tile), f"moves {_element(tile)} but the buffer holds {_element(op.base)}")
        and _require(op, str(_element(op.ids)) == "i32", f"takes ids from an i32 buffer, not {op.ids.type}")
        and _require(op, stride >= shape[1], f"row_stride {stride} is less than the {shape[1]} columns of the tile")
    )


class GatherOp(Tile.Operation, name="gather", traits=[READS]):
    """Row r is columns [column, column + width) of row max(ids[first + r], 0) of `base`, whose rows are `row_stride` apart.

    The ids come from memory, not from a tile, and a negative id reads row 0: every element is a readable number, and the kernel masks
    what a padding id brought in. Rows at or beyond `valid` (none or one operand) are unspecified and their ids are not read.
    """

    out: ext.Result[ir.RankedTensorType]
    base: ext.Operand[ir.MemRefType]
    ids: ext.Operand[ir.MemRefType]
    first: ext.Operand[ir.IndexType]
    column: ext.Operand[ir.IndexType]
    valid: Sequence[ext.Operand[ir.IndexType]]
    row_stride: ir.IntegerAttr

    def verify_invariants(self) -> bool:
        single = len(list(self.valid)) <= 1
        return _require(self, single, "takes at most one number of valid rows") and _rows_are_sound(self, self.out, self.row_stride.value)

    @staticmethod
    def meaning(
        base: np.ndarray,
        ids: np.ndarray,
        first: int,
        column: int,
        valid: int | None,
        box: Sequence[int],
        row_stride: int,
    ) -> np.ndarray:
        """Rows of base by id."""
        rows = box[0] if valid is None else int(np.clip(valid, 0, box[0]))
        out = unspecified(box, base.dtype)
        chosen = np.maximum(ids[first + np.arange(rows)].astype(np.int64), 0)
        out[:rows] = base[chosen[:, None] * row_stride + column + np.arange(box[1])]
        return out


class ScatterOp(Tile.Operation, name="scatter", traits=[WRITES]):
    """Row r < valid of the tile goes to columns [column, ...) of row ids[first + r] of `base`; rows with a negative id are dropped."""

    value: ext.Operand[ir.RankedTensorType]
    base: ext.Operand[ir.MemRefType]
    ids: ext.Operand[ir.MemRefType]
    first: ext.Operand[ir.IndexType]
    column: ext.Operand[ir.IndexType]
    valid: ext.Operand[ir.IndexType]
    row_stride: ir.IntegerAttr

    def verify_invariants(self) -> bool:
        return _rows_are_sound(self, self.value, self.row_stride.value)

    @staticmethod
    def meaning(value: np.ndarray, base: np.ndarray, ids: np.ndarray, first: int, column: int, valid: int, row_stride: int) -> None:
        """Writes rows of base by id, in order."""
        for row in range(int(np.clip(valid, 0, len(value)))):
            to = int(ids[first + row])
            if to >= 0:
                base[to * row_stride + column + np.arange(value.shape[1])] = value[row]


class CompressStoreOp(Tile.Operation, name="compress_store", traits=[WRITES]):
    """Writes values[i] where mask[i] holds to base[at], base[at + 1], ... in order of i, dropping positions at or beyond `limit`.

    The result is how many were written. `limit` is a position of `base`, not a count.
    """

    count: ext.Result[ir.IndexType]
    values: ext.Operand[ir.RankedTensorType]
    mask: ext.Operand[ir.RankedTensorType]
    base: ext.Operand[ir.MemRefType]
    at: ext.Operand[ir.IndexType]
    limit: ext.Operand[ir.IndexType]

    def verify_invariants(self) -> bool:
        shapes = [_shape(self.values), _shape(self.mask)]
        return (
            _require(
                self,
                len(shapes[0]) == 1 and shapes[0] == shapes[1],
                f"takes values and mask of one rank 1 shape, found {shapes}",
            )
            and _require(self, str(_element(self.mask)) == "i1", f"takes an i1 mask, not {self.mask.type}")
            and _require(
                self,
                _element(self.base) == _element(self.values),
                f"writes {_element(self.values)} but the buffer holds {_element(self.base)}",
            )
        )

    @staticmethod
    def meaning(values: np.ndarray, mask: np.ndarray, base: np.ndarray, at: int, limit: int) -> int:
        """Writes the chosen values, returns their number."""
        chosen = values[mask][: max(limit - at, 0)]
        base[at : at + len(chosen)] = chosen
        return len(chosen)


class DotScaledOp(Tile.Operation, name="dot_scaled", traits=[ext.Pure]):
    """acc + (a 2^(sa-127)) (b 2^(sb-127)): a [M, K] and b [K, N] e4m3, sa [M, K/32] and sb [N, K/32] e8m0 bytes, acc [M, N] f32.

    `a` may be e2m1 codes instead, two to a byte: i8 [M, K/2], element 2k in the low half. Only targets that ask for it get such a product.
    Every operand but acc comes straight from a load or gather, transposed at most: no target has a fast block-scaled product of computed
    operands.
    """

    out: ext.Result[ir.RankedTensorType]
    a: ext.Operand[ir.RankedTensorType]
    sa: ext.Operand[ir.RankedTensorType]
    b: ext.Operand[ir.RankedTensorType]
    sb: ext.Operand[ir.RankedTensorType]
    acc: ext.Operand[ir.RankedTensorType]

    def verify_invariants(self) -> bool:
        (m, columns), (k2, n) = _shape(self.a), _shape(self.b)
        packed = str(_element(self.a)) == "i8"
        k = columns * 2 if packed else columns
        found = [_shape(v) for v in (self.sa, self.sb, self.acc, self.out)]
        needed = [[m, k // SCALE_GROUP], [n, k // SCALE_GROUP], [m, n], [m, n]]
        kinds = [str(_element(v)) for v in (self.a, self.sa, self.b, self.sb, self.acc, self.out)]
        wanted = ["i8" if packed else "f8E4M3FN", "i8", "f8E4M3FN", "i8", "f32", "f32"]
        return (
            _require(
                self,
                k == k2 and k % SCALE_GROUP == 0 and found == needed,
                f"shapes disagree: {m}x{k} times {k2}x{n} needs scales and sums {needed}, found {found}",
            )
            and _require(self, kinds == wanted, f"takes elements {wanted}, found {kinds}")
            and _require(
                self,
                all(_is_loaded(v) for v in list(self.operands)[:4]),
                "takes a, sa, b and sb straight from tile.load or tile.gather",
            )
        )

    @staticmethod
    def meaning(a: np.ndarray, sa: np.ndarray, b: np.ndarray, sb: np.ndarray, acc: np.ndarray) -> np.ndarray:
        """The product of the decoded operands in float32."""
        left = (_e2m1(a) if a.dtype == np.int8 else a.astype(np.float32)) * np.repeat(_e8m0(sa), SCALE_GROUP, axis=1)
        right = b.astype(np.float32) * np.repeat(_e8m0(sb), SCALE_GROUP, axis=1).T
        return np.asarray(acc + left @ right, np.float32)


def _e2m1(packed: np.ndarray) -> np.ndarray:
    codes = packed.view(np.uint8)
    halves = np.stack((codes & 15, codes >> 4), -1).reshape(len(codes), -1)
    return halves.view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def _e8m0(codes: np.ndarray) -> np.ndarray:
    return codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def _is_loaded(value: Any) -> bool:
    owner = value.owner
    if isinstance(owner, ir.Block):
        return False
    return _is_loaded(owner.operands[0]) if owner.name == "linalg.transpose" else owner.name in ("tile.load", "tile.gather")
