"""weights.json: how each operand of the kernels is made from checkpoint tensors.

The layouts are the kernels' own statements (`Kernel.layouts`); shapes after the transforms follow from the runtime's index maps, so the two
halves cannot disagree. One operand has one layout: two kernels that read it differently are refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import cast

from tapeout.codegen.kernel import EVERY_SCALE, Layout, parts
from tapeout.codegen.select_kernels import Choice, choices_of, kernel_of
from tapeout.compiler.programs import NAMES, is_entry_point
from tapeout.dialects._mlir import func, ir
from tapeout.dialects.format import BITS
from tapeout.dialects.types import Tensor, from_ir
from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.models.deepseek_v41.weights import Rotary, WeightSource
from tapeout.passes.define import PassError, functions, operations
from tapeout.passes.extents import argument_attribute, callee
from tapeout.runtime.artifact import Derived, TokenMap, WeightOperand, WeightPart, Weights
from tapeout.runtime.artifact import Rotary as RotaryTable
from tapeout.runtime.artifact_kernels import Element
from tapeout.runtime.transforms import transformed_shape

WIDTH = {**BITS, "i8": 8, "f4E2M1FN": 8}


Limits = tuple[int, int]


@dataclass
class Wants:
    """What kernels want of weight operands: how each lies, and the smallest and largest byte of its scales that all of them multiply by exactly."""

    layouts: dict[str, Layout] = field(default_factory=dict)
    limits: dict[str, Limits] = field(default_factory=dict)


def weights_of(
    module: ir.Module, config: ModelConfig, sources: Mapping[str, WeightSource], limits: Callable[[Choice], Limits]
) -> Weights:
    """The operands that the module's kernels read, in the order of `sources`; `limits` are the target's for scales."""
    wants = operand_wants(module, limits)
    numbers = _argument_views(module)
    return Weights(
        operands=tuple(
            _operand(name, source, numbers[name], wants.layouts.get(name, Layout()), wants.limits.get(name, EVERY_SCALE), config)
            for name, source in sources.items()
            if name in numbers
        )
    )


def operand_wants(module: ir.Module, limits: Callable[[Choice], Limits]) -> Wants:
    """What the kernels want of each weight operand. Raises `PassError` where two want one operand differently."""
    found = Wants()
    for function in functions(module):
        if is_entry_point(function):
            names = {
                a: str(argument_attribute(function, i, "tapeout.name"))
                for i, a in enumerate(function.entry_block.arguments)
                if argument_attribute(function, i, "tapeout.kind") in ("weight", "table")
            }
            _collect(function, names, limits, found)
    return found


def _collect(function: func.FuncOp, names: dict[ir.Value, str], limits: Callable[[Choice], Limits], found: Wants) -> None:
    for op in operations(function)[:-1]:
        if op.name == "func.call":
            target = callee(function, op)
            inner = {a: names[v] for a, v in zip(target.entry_block.arguments, op.operands, strict=True) if v in names}
            _collect(target, inner, limits, found)
            continue
        layouts, bounds = kernel_of(op).layouts, [limits(choice) for choice in choices_of(op)]
        for i, value in enumerate(_operands(op)):
            if value in names:
                name, layout = names[value], layouts.get(i, Layout())
                least, most = zip(*bounds, found.limits.get(name, EVERY_SCALE), strict=True)
                found.limits[name] = (max(least), min(most))
                if found.layouts.setdefault(name, layout) != layout:
                    raise PassError(
                        f"{op.name} at {op.location} wants {name} as {layout}, another kernel as {found.layouts[name]}; "
                        "expected one layout an operand: align the schedule rows"
                    )


def _operands(op: ir.Operation) -> list[ir.Value | None]:
    """Operands by their number in the request (absent ones are None)."""
    if op.name == "nn.fused":
        return list(op.operands)
    from tapeout.dialects.define import operand_groups

    return [v for g in operand_groups(op) for v in (g if isinstance(g, list) else [g])]


def _argument_views(module: ir.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for function in functions(module):
        for i, kind in enumerate(function.type.inputs):
            view = from_ir(kind)
            if (
                is_entry_point(function)
                and argument_attribute(function, i, "tapeout.kind") in ("weight", "table")
                and isinstance(view, Tensor)
            ):
                found[str(argument_attribute(function, i, "tapeout.name"))] = view
    return found


def _operand(name: str, source: WeightSource, view: Tensor, layout: Layout, limits: Limits, config: ModelConfig) -> WeightOperand:
    if source.derived is not None:
        shape = view.sized(0)
        part = WeightPart(
            part="values",
            dtype=cast(Element, view.number.element),
            shape=shape,
            bytes=view.number.bytes(shape),
            layout="packed",
            tensors=(),
        )
        return WeightOperand(name=name, kind=source.kind, parts=(part,), derived=_derived(source, config))
    made = []
    for suffix, element in parts(view):
        is_scale = suffix == "_scales"
        part = _part(NAMES[suffix], element, view, source, (*_joined(source), *(layout.scales if is_scale else layout.values)), is_scale)
        made.append(part.model_copy(update=_named(limits)) if is_scale else part)
    return WeightOperand(name=name, kind=source.kind, parts=tuple(made))


def _joined(source: WeightSource) -> tuple[str, ...]:
    """The transforms that make one array of an operand's tensors."""
    if len(source.view.shape) < 3:
        return ("concat",) if source.rows else ()
    return ("stack", f"rows_together:{len(source.rows)}") if source.rows else ("stack",)


def _named(limits: Limits) -> dict[str, int]:
    """The limits of a part's scales that not every number keeps."""
    named = zip(("least_scale", "most_scale"), limits, EVERY_SCALE, strict=True)
    return {name: found for name, found, every in named if found != every}


def _part(
    name: str, element: str, view: Tensor, source: WeightSource, transforms: tuple[str, ...], is_scale: bool
) -> WeightPart:  # fmt: skip
    tensors = source.scales if is_scale else source.tensors
    shapes = [_stored_shape(view, rows, is_scale) for rows in source.rows or (None,)]
    final = transformed_shape([shapes[i % len(shapes)] for i in range(len(tensors))], transforms, name)
    return WeightPart(
        part=name,
        dtype=cast(Element, element),
        shape=final,
        bytes=prod(final) * WIDTH[element] // 8,
        layout="packed" if transforms else "as_stored",
        tensors=tensors,
        transforms=transforms,
        stored=tuple(shapes) if source.rows else (),
    )


def _stored_shape(view: Tensor, rows: int | None, is_scale: bool) -> tuple[int, ...]:
    """The shape of one of an operand's stored tensors, of `rows` rows where it is not a whole matrix: packed FP4 has half the columns, scales one
    cell a block."""
    shape = view.sized(0)[1:] if len(view.shape) == 3 else view.sized(0)
    shape = shape if rows is None else (rows, *shape[1:])
    if is_scale and view.number.scaling is not None:
        return tuple(n or 0 for n in view.number.scaling.blocks(shape))
    return (*shape[:-1], shape[-1] // 2) if view.number.element == "f4E2M1FN" else shape


def _derived(source: WeightSource, config: ModelConfig) -> Derived:
    if isinstance(source.derived, Rotary):
        frequencies = tuple(float(f) for f in config.rope_frequencies(source.derived.ratio))
        return Derived(rotary=RotaryTable(frequencies=frequencies, positions=source.derived.rows))
    return Derived(token_map=TokenMap())
