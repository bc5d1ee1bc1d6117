"""How an op is declared once: fields, one `infer` rule, `meaning`, `cost`. Builder, verifier, registry and documentation follow from it.

An op is an `ext` class with static functions and the `declare` decorator:

* `infer(a, *operands, out)` takes attributes, operand views and the result numbers asked for, raises `Mismatch` with a sentence where they do not
  fit, and returns the result views. The builder uses it to make types, the verifier to compare them: there is no second statement of a shape rule.
* `meaning(a, results, *inputs)` computes arrays from arrays: real arithmetic in float64, rounded once to each result's number.
* `cost(a, operands, results, sizes)` counts bytes and operations; without it an op reads its operands and writes its results once.
* `reads_host = True` where rows come from a table that a chip may leave in host memory: then it is the bus between the two that the op waits for,
  and launches of other ops can run meanwhile.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tapeout.dialects._mlir import ext, ir
from tapeout.dialects.format import Number
from tapeout.dialects.types import Blocks, Ring, Tensor, View, from_ir, to_ir

Group = View | list[View] | None


class Mismatch(Exception):
    """Operands or attributes that do not fit together; the text is the sentence that the verifier prints."""


def require(fact: bool, sentence: str) -> None:
    """Raises `Mismatch(sentence)` unless `fact` holds."""
    if not fact:
        raise Mismatch(sentence)


class Effect:
    """A trait that attaches one memory effect; state handles are read or written through ops that carry it."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds

    def attach(self, name: str) -> None:
        kinds = self.kinds

        class Effects(ir.MemoryEffectsOpInterface):  # type: ignore[misc]
            @staticmethod
            def get_effects(op: Any, effects: Any) -> None:
                for kind in kinds:
                    effects.append(getattr(ir.MemoryEffect, kind))

        Effects.attach(name)


READS = Effect("Read")
WRITES = Effect("Write")
UPDATES = Effect("Read", "Write")


@dataclass(frozen=True)
class Sizes:
    """Run-time extents a cost is asked for: rows of the step, entries visible to each row on average, sequences, experts hit."""

    rows: int
    entries: int = 0
    sequences: int = 1
    experts: int = 0


@dataclass(frozen=True)
class Cost:
    """Bytes moved and operations done by one execution. `operations` are keyed by kind: bf16, fp8, fp4, f32, integer."""

    read: int = 0
    written: int = 0
    operations: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: "Cost") -> "Cost":
        kinds = {**self.operations}
        for kind, count in other.operations.items():
            kinds[kind] = kinds.get(kind, 0) + count
        return Cost(self.read + other.read, self.written + other.written, kinds)


@dataclass(frozen=True)
class Declaration:
    """One op: its class and the functions that say what it is."""

    name: str
    cls: Any
    infer: Callable[..., Any]
    meaning: Callable[..., Any]
    cost: Callable[..., Cost]
    groups: tuple[str, ...]
    results: tuple[str, ...]
    attributes: tuple[str, ...]
    reads_host: bool

    @property
    def sentence(self) -> str:
        return (self.cls.__doc__ or "").strip().splitlines()[0]


REGISTRY: dict[str, Declaration] = {}
DIALECTS: list[Any] = []


OpClass = Any
"""An `ext` op class: its fields, names and hooks are made at run time, out of sight of type checkers."""


def declare(cls: OpClass) -> OpClass:
    """Registers an op class: checks that its declaration is whole and derives its verifier."""
    missing = [part for part in ("infer", "meaning") if part not in cls.__dict__]
    if missing or not cls.__doc__:
        raise TypeError(f"{cls.__name__} needs {', '.join([*missing, *([] if cls.__doc__ else ['a docstring'])])}")
    kinds = {kind: tuple(f.name for f in cls._fields if type(f).__name__ == kind) for kind in ("OperandDef", "ResultDef", "AttributeDef")}
    declaration = Declaration(
        cls.OPERATION_NAME,
        cls,
        cls.infer,
        cls.meaning,
        getattr(cls, "cost", moved_once),
        kinds["OperandDef"],
        kinds["ResultDef"],
        kinds["AttributeDef"],
        getattr(cls, "reads_host", False),
    )
    cls.verify_invariants = _verify
    REGISTRY[declaration.name] = declaration
    dialect = cls._dialect_obj
    if dialect not in DIALECTS:
        DIALECTS.append(dialect)
    return cls


def load_dialects(context: ir.Context, *more: Any) -> None:
    """Registers every dialect that has declared ops (and `more`) in a context; a second call changes nothing."""
    from tapeout.dialects.format import Format
    from tapeout.dialects.types import Cache

    with context:
        for dialect in [Format, Cache, *DIALECTS, *more]:
            try:
                dialect.load()
            except ext.DialectAlreadyLoadedError:
                continue


def builder(cls: OpClass) -> Callable[..., Any]:
    """The function callers use: `op(*operands, out=numbers, **attributes)` infers result types and returns the value, tuple or op.

    `out` is a number (or one per result) where the result's format is a choice; None takes the op's default. A list operand is a
    variadic group, None an absent optional one.
    """
    declaration = REGISTRY[cls.OPERATION_NAME]

    def build(*operands: Any, out: Number | Sequence[Number | None] | None = None, loc: Any = None, **attributes: Any) -> Any:
        a = SimpleNamespace(**attributes)
        views = [_group_view(o) for o in operands]
        numbers = _numbers(out, len(declaration.results))
        try:
            results = as_tuple(declaration.infer(a, *views, out=numbers))
        except Mismatch as error:
            raise Mismatch(f"{declaration.name}: {error}") from None
        attrs = [to_attribute(attributes[name]) for name in declaration.attributes]
        made = iter([*map(to_ir, results)])
        values = iter(operands)
        arguments = {f.name: _argument(f, made, values, attrs, declaration) for f in cls._fields}
        op = cls(**arguments, loc=loc)
        found = list(op.operation.results)
        return op if not found else found[0] if len(found) == 1 else tuple(found)

    build.__name__, build.__doc__ = declaration.name.split(".")[1], cls.__doc__
    return build


def _argument(f: Any, made: Any, values: Any, attrs: list[ir.Attribute], declaration: Declaration) -> Any:
    match type(f).__name__:
        case "ResultDef":
            return next(made)
        case "OperandDef":
            return next(values)
    return attrs[declaration.attributes.index(f.name)]


def _numbers(out: Any, count: int) -> tuple[Number | None, ...]:
    if out is None or isinstance(out, Number):
        return (out,) * max(count, 1)
    return tuple(out)


def as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else () if x is None else (x,)


def _group_view(operand: Any) -> Group:
    if operand is None:
        return None
    if isinstance(operand, list | tuple):
        return [from_ir(v.type) for v in operand]
    return from_ir(operand.type)


def declaration_of(op: Any) -> Declaration:
    """The declaration behind an op of ours; raises KeyError for a foreign op."""
    return REGISTRY[op.name if isinstance(op, ir.Operation) else op.OPERATION_NAME]


def attributes_of(op: Any) -> SimpleNamespace:
    """An op's declared attributes as Python values."""
    declaration = declaration_of(op)
    view = op.operation.attributes
    return SimpleNamespace(**{name: from_attribute(view[name]) for name in declaration.attributes})


def operand_groups(op: Any) -> list[Any]:
    """An op's operand values by declared field: a value, None where an optional one is absent, a list where variadic."""
    view = op.operation.opview if isinstance(op, ir.Operation) else op
    out: list[Any] = []
    for name in declaration_of(op).groups:
        group = getattr(view, name)
        out.append(group if group is None or isinstance(group, ir.Value) else list(group))
    return out


def views_of(op: Any) -> tuple[list[Group], list[View]]:
    """Views of an op's operand groups and of its results."""
    return [_group_view(g) for g in operand_groups(op)], [from_ir(r.type) for r in op.operation.results]


def cost_of(op: Any, sizes: Sizes) -> Cost:
    operands, results = views_of(op)
    return declaration_of(op).cost(attributes_of(op), operands, results, sizes)


def _verify(self: Any) -> bool:
    declaration = REGISTRY[self.OPERATION_NAME]
    try:
        _require_attributes(self)
        _require_segments(self, declaration)
        operands, results = views_of(self)
        numbers = tuple(r.number if isinstance(r, Tensor) else None for r in results)
        expected = as_tuple(declaration.infer(attributes_of(self), *operands, out=numbers))
        problem = next(
            (
                f"result {name} is {found}, expected {want}"
                for name, found, want in zip(declaration.results, results, expected, strict=True)
                if found != want
            ),
            None,
        )
    except (Mismatch, TypeError, ValueError) as error:
        problem = str(error)
    if problem is None:
        return True
    self.location.emit_error(f"'{self.OPERATION_NAME}' {problem}")
    return False


def _require_attributes(op: Any) -> None:
    """Every declared attribute is there and of its declared kind; a boolean is an integer of one bit."""
    present = op.operation.attributes
    for f in (f for f in op._fields if type(f).__name__ == "AttributeDef"):
        require(f.name in present, f"has no attribute {f.name}")
        found = present[f.name].maybe_downcast()
        if not (isinstance(found, f.constraint) or (f.constraint is ir.IntegerAttr and isinstance(found, ir.BoolAttr))):
            raise Mismatch(f"attribute {f.name} is {found}, expected {_KINDS.get(f.constraint.__name__, f.constraint.__name__)}")


def _require_segments(op: Any, declaration: Declaration) -> None:
    """Optional operands are told apart by an attribute, which MLIR itself looks at only after this verifier."""
    try:
        operand_groups(op)
        told_apart = SEGMENTS not in op.operation.attributes or sum(op.operation.attributes[SEGMENTS]) == len(op.operation.operands)
    except (KeyError, IndexError):
        told_apart = False
    if not told_apart:
        present, count = op.operation.attributes, len(op.operation.operands)
        found = present.get(SEGMENTS, "absent")
        raise Mismatch(f"attribute {SEGMENTS} is {found}, expected array<i32: ...> with 1 for each of {', '.join(declaration.groups)} that is there "
                       f"and 0 for one that is not: {count} in all")


SEGMENTS = "operandSegmentSizes"
_KINDS = {"IntegerAttr": "a whole number or boolean", "FloatAttr": "a number with a point", "StringAttr": "a string", "ArrayAttr": "a list"}


def moved_once(a: Any, operands: Iterable[Group], results: Iterable[View], sizes: Sizes) -> Cost:
    """The default cost: every tensor operand is read once, every tensor result written once."""
    flat = [v for g in operands for v in (g if isinstance(g, list) else [g])]
    return Cost(
        sum(v.bytes(sizes.rows) for v in flat if isinstance(v, Tensor)), sum(v.bytes(sizes.rows) for v in results if isinstance(v, Tensor))
    )


def to_attribute(value: Any) -> ir.Attribute:
    """bool, int, float, str and lists of them as attributes."""
    match value:
        case bool():
            return ir.IntegerAttr.get(ir.IntegerType.get_signless(1), value)  # a BoolAttr of false counts as absent in ext
        case int():
            return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
        case float():
            return ir.FloatAttr.get(ir.F64Type.get(), value)
        case str():
            return ir.StringAttr.get(value)
        case list() | tuple():
            return ir.ArrayAttr.get([to_attribute(v) for v in value])
    raise TypeError(f"no attribute form for {value!r}")


def from_attribute(attribute: ir.Attribute) -> Any:
    match attribute.maybe_downcast():
        case ir.BoolAttr() as a:
            return bool(a.value)
        case ir.IntegerAttr() | ir.FloatAttr() | ir.StringAttr() as a:
            return a.value
        case ir.ArrayAttr() as a:
            return [from_attribute(v) for v in a]
        case other:
            raise TypeError(f"attribute {other} has no Python form")


def signature(declaration: Declaration) -> str:
    """One line for documentation: `nn.linear(x, weight) {groups} -> out`."""
    attributes = f" {{{', '.join(declaration.attributes)}}}" if declaration.attributes else ""
    arrow = f" -> {', '.join(declaration.results)}" if declaration.results else ""
    return f"{declaration.name}({', '.join(declaration.groups)}){attributes}{arrow}"


__all__ = [
    "READS",
    "REGISTRY",
    "UPDATES",
    "WRITES",
    "Blocks",
    "Cost",
    "Declaration",
    "Mismatch",
    "Number",
    "Ring",
    "Sizes",
    "Tensor",
    "attributes_of",
    "builder",
    "cost_of",
    "declaration_of",
    "declare",
    "load_dialects",
    "operand_groups",
    "require",
    "signature",
]
