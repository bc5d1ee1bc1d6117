"""assign-formats: from real numbers to the documented ones (docs/model.md 9.6).

Before it every activation is f64 and the graph means the exact model; after it every value has the number the released model gives it, and
`nn.quantize` stands in front of FP8 and FP4 products, state writes and index scoring. It is the one pass that changes values.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tapeout.dialects._mlir import func, ir
from tapeout.dialects.define import attributes_of, builder, declaration_of, operand_groups, views_of
from tapeout.dialects.format import BF16, FP32, INT32, Q4_INDEX, Q4_MAIN, Q8, REAL, Number
from tapeout.dialects.nn import quantize
from tapeout.dialects.types import Blocks, Ring, Tensor, View, from_ir, to_ir
from tapeout.passes.define import Pass, PassError, Promise, functions, operations
from tapeout.passes.extents import argument_attribute

FORMATS = {"q8": Q8, "q4main": Q4_MAIN, "q4index": Q4_INDEX, "f32": FP32, "bf16": BF16}

WIDE: dict[str, tuple[Number | None, ...]] = {
    "mhc.start": (BF16, FP32),
    "mhc.mixer": (FP32, FP32, FP32),
    "moe.gate": (INT32, FP32),
    "dspark.correct": (FP32,),
    "dspark.confidence": (FP32,),
    "sample.draw": (INT32, FP32),
}
"""Results that 9.6 keeps in FP32; any other real result becomes BF16."""

FOLLOWS = {"nn.take", "nn.concat", "nn.columns", "nn.stack"}
"""Ops that move values: their results have their operands' number."""

SCORED = {"mla.select", "mla.select_candidates", "mla.select_within"}


@dataclass(frozen=True)
class AssignFormats(Pass):
    """Gives every real value its number. Removes f64; leaves no op unformatted."""

    name: ClassVar[str] = "assign-formats"
    keeps: ClassVar[Promise] = "formats"

    def run(self, module: ir.Module) -> None:
        for function in functions(module):
            _require_plain(function)
            _rebuild(function)


@dataclass
class _Rewriter:
    """Old values to new ones, and which quantized forms of a new value exist already."""

    values: dict[ir.Value, ir.Value] = field(default_factory=dict)
    quantized: dict[tuple[ir.Value, Number], ir.Value] = field(default_factory=dict)

    def quantize(self, value: ir.Value, number: Number | None, like: ir.Operation) -> ir.Value:
        """`value` in a block-scaled number, made where the value is made; the same request twice gives one op."""
        view = from_ir(value.type)
        if number is None or number.scaling is None or not isinstance(view, Tensor) or view.number.scaling is not None:
            return value
        if (value, number) not in self.quantized:
            producer = value.owner if not isinstance(value.owner, ir.Block) else None
            place = ir.InsertionPoint.after(producer) if producer is not None else ir.InsertionPoint.at_block_begin(value.owner)
            with place:
                made = quantize(value, out=number, loc=value.location)
            _carry(producer or like, made.owner)
            self.quantized[value, number] = made
        return self.quantized[value, number]


def _require_plain(function: func.FuncOp) -> None:
    """Groups and calls hold values whose numbers are settled: this pass comes before those that make them."""
    found = next((op for op in operations(function) if op.name in ("nn.fused", "func.call")), None)
    if found is not None:
        raise PassError(
            f"{found.name} at {found.location} in @{function.name.value}; expected plain ops: run assign-formats in front of fusing and outlining"
        )


def _rebuild(old: func.FuncOp) -> None:
    types = [to_ir(_argument(old, i, from_ir(t))) for i, t in enumerate(old.type.inputs)]
    with ir.InsertionPoint(old), old.location:
        new = func.FuncOp(old.name.value, (types, []))
    locations = [a.location for a in old.arguments]
    block = new.operation.regions[0].blocks.append(*types, arg_locs=locations)
    state = _Rewriter(dict(zip(old.arguments, block.arguments, strict=True)))
    with ir.InsertionPoint(block):
        for op in operations(old):
            if op.name == "func.return":
                results = [state.values[v] for v in op.operands]
                func.ReturnOp(results, loc=op.location)
            else:
                _convert(op, state)
    _finish(old, new, [v.type for v in results])


def _finish(old: func.FuncOp, new: func.FuncOp, results: list[ir.Type]) -> None:
    for name in old.operation.attributes:
        if name != "function_type":
            new.operation.attributes[name] = old.operation.attributes[name]
    inputs = [a.type for a in new.entry_block.arguments]
    new.operation.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, results))
    old.operation.erase()


def _argument(function: func.FuncOp, index: int, view: View) -> View:
    """The argument's view with its `tapeout.format` in place of real numbers."""
    name = argument_attribute(function, index, "tapeout.format") or "bf16"
    if name not in FORMATS:
        raise PassError(f"argument {index} of @{function.name.value} has tapeout.format {name}; expected one of {', '.join(FORMATS)}")
    asked = FORMATS[name]
    match view:
        case Ring(entry, length) if entry.number == REAL:
            return Ring(Tensor(entry.shape, asked), length)
        case Blocks(entry, ratio) if entry.number == REAL:
            return Blocks(Tensor(entry.shape, asked), ratio)
        case Tensor(shape, number) if number == REAL:
            return Tensor(shape, asked)
    return view


def _convert(op: ir.Operation, state: _Rewriter) -> None:
    declaration = declaration_of(op)
    attributes = vars(attributes_of(op))
    if op.name in SCORED:
        attributes["score"] = "bf16"
    groups = [_map(g, state) for g in operand_groups(op)]
    wanted = QUANTIZED.get(op.name, _as_given)(attributes, [_view(g) for g in groups])
    groups = [state.quantize(g, n, op) if isinstance(g, ir.Value) else g for g, n in zip(groups, wanted, strict=True)]
    made = builder(declaration.cls)(*groups, out=_numbers(op, attributes, groups), loc=op.location, **attributes)
    new = op if not op.results else (made[0] if isinstance(made, tuple) else made).owner
    if op.results:
        _carry(op, new)
        state.values.update(zip(op.results, new.results, strict=True))
    else:
        _carry(op, made.operation)


def _map(group: Any, state: _Rewriter) -> Any:
    if isinstance(group, list):
        return [state.values[v] for v in group]
    return None if group is None else state.values[group]


def _view(group: Any) -> View | None:
    return from_ir(group.type) if isinstance(group, ir.Value) else None


def _numbers(op: ir.Operation, attributes: dict[str, Any], groups: list[Any]) -> tuple[Number | None, ...]:
    _, results = views_of(op)
    if op.name in FOLLOWS:
        first = groups[0][0] if isinstance(groups[0], list) else groups[0]
        view = from_ir(first.type)
        return (view.number,) if isinstance(view, Tensor) else (None,)
    if op.name in WIDE:
        return WIDE[op.name]
    narrow = FP32 if attributes.get("wide") else BF16
    return tuple(narrow if isinstance(r, Tensor) and r.number == REAL else r.number if isinstance(r, Tensor) else None for r in results)


def _as_given(attributes: dict[str, Any], views: list[View | None]) -> list[Number | None]:
    return [None] * len(views)


def _product(attributes: dict[str, Any], views: list[View | None]) -> list[Number | None]:
    """Activations are FP8 in front of FP8 and FP4 weights; the grouped output projection takes BF16 (9.7, first row)."""
    weight = views[1]
    if not isinstance(weight, Tensor):
        raise PassError(f"a linear's weight is a tensor, found {weight}")
    narrow = weight.number.scaling is not None and attributes.get("groups", 1) == 1
    return [Q8 if narrow else None, *[None] * (len(views) - 1)]


def _scored(attributes: dict[str, Any], views: list[View | None]) -> list[Number | None]:
    return [Q4_INDEX, *[None] * (len(views) - 1)]


def _stored(attributes: dict[str, Any], views: list[View | None]) -> list[Number | None]:
    """A state is written in its entry's number."""
    state = views[0]
    if not isinstance(state, Ring | Blocks):
        raise PassError(f"a state is written through a handle, found {state}")
    return [None, state.entry.number, *[None] * (len(views) - 2)]


QUANTIZED: dict[str, Callable[[dict[str, Any], list[View | None]], list[Number | None]]] = {
    "nn.linear": _product,
    "moe.expert_linear": _product,
    **dict.fromkeys(SCORED, _scored),
    "cache.stage": _stored,
    "cache.append": _stored,
}


def _carry(old: ir.Operation, new: Any) -> None:
    """Copies the discardable attributes (`tapeout.layer`) that passes behind this one rely on."""
    for name in old.attributes:
        if name.startswith("tapeout."):
            new.attributes[name] = old.attributes[name]
