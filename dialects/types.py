"""Typed views of IR types: plain dataclasses that op rules compute with, and their translation to and from MLIR.

`Tensor` is a ranked tensor (None: the run-time row axis) with its number format; `Ring` and `Blocks` are the state handles of a
sequence (docs/model.md 11): what one entry is, and how entries are found.
"""

from dataclasses import dataclass
from functools import lru_cache

from tapeout.dialects._mlir import ext, ir
from tapeout.dialects.format import Number, ScaledAttr, Scaling

DYNAMIC = ir.ShapedType.get_dynamic_size()


class Cache(ext.Dialect, name="cache"):
    """State handles and the ops that write them (see cache.py)."""


class RingType(Cache.Type, name="ring"):
    """`!cache.ring<entry, length>`: the last `length` positions of every sequence, then this step's new rows (staging)."""

    entry: ir.TypeAttr
    length: ir.IntegerAttr


class BlocksType(Cache.Type, name="blocks"):
    """`!cache.blocks<entry, ratio>`: paged entries, one for every `ratio` tokens, reached through the block table."""

    entry: ir.TypeAttr
    ratio: ir.IntegerAttr


@dataclass(frozen=True)
class Tensor:
    """Shape and number format. A leading None is the ragged row axis; other axes are static."""

    shape: tuple[int | None, ...]
    number: Number

    def __str__(self) -> str:
        return f"[{', '.join('?' if n is None else str(n) for n in self.shape)}] {self.number}"

    def sized(self, rows: int) -> tuple[int, ...]:
        """The shape with run-time extents replaced by `rows`."""
        return tuple(rows if n is None else n for n in self.shape)

    def bytes(self, rows: int = 0) -> int:
        return self.number.bytes(self.sized(rows))


@dataclass(frozen=True)
class Ring:
    entry: Tensor
    length: int

    def __str__(self) -> str:
        return f"ring of {self.length} x {self.entry}"


@dataclass(frozen=True)
class Blocks:
    entry: Tensor
    ratio: int

    def __str__(self) -> str:
        return f"blocks of {self.entry}, one for {self.ratio} tokens"


View = Tensor | Ring | Blocks


def element_type(name: str) -> ir.Type:
    return ir.Type.parse(name)


def to_ir(view: View) -> ir.Type:
    """The MLIR type of a view; needs a current context and location."""
    match view:
        case Ring(entry, length):
            return RingType.get(ir.TypeAttr.get(to_ir(entry)), _i64(length))
        case Blocks(entry, ratio):
            return BlocksType.get(ir.TypeAttr.get(to_ir(entry)), _i64(ratio))
        case Tensor(shape, Number(element, scaling)):
            encoding = (
                None if scaling is None else ScaledAttr.get(ir.StringAttr.get(scaling.scale), _i64(scaling.rows), _i64(scaling.columns))
            )
            return ir.RankedTensorType.get([DYNAMIC if n is None else n for n in shape], element_type(element), encoding)


@lru_cache(maxsize=4096)
def from_ir(type_: ir.Type) -> View:
    """The view of an MLIR type; raises TypeError where the type is none of ours. Types are unique in a context, so views are kept."""
    type_ = type_.maybe_downcast()
    if isinstance(type_, RingType):
        return Ring(_entry(type_.entry), _int(type_.length))
    if isinstance(type_, BlocksType):
        return Blocks(_entry(type_.entry), _int(type_.ratio))
    if isinstance(type_, ir.RankedTensorType):
        shape = tuple(None if type_.is_dynamic_dim(i) else type_.get_dim_size(i) for i in range(type_.rank))
        return Tensor(shape, Number(str(type_.element_type), _scaling(type_.encoding)))
    raise TypeError(f"{type_} is neither a ranked tensor nor a state handle")


def _scaling(encoding: ir.Attribute | None) -> Scaling | None:
    if encoding is None:
        return None
    attribute = encoding.maybe_downcast()
    if not isinstance(attribute, ScaledAttr):
        raise TypeError(f"tensor encoding {attribute} is not #format.scaled")
    return Scaling(ir.StringAttr(attribute.scale).value, _int(attribute.rows), _int(attribute.columns))


def _entry(attribute: ir.Attribute) -> Tensor:
    view = from_ir(ir.TypeAttr(attribute).value)
    if not isinstance(view, Tensor):
        raise TypeError(f"a state entry is a tensor, found {view}")
    return view


def _int(attribute: ir.Attribute) -> int:
    return int(ir.IntegerAttr(attribute).value)


def _i64(value: int) -> ir.IntegerAttr:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
