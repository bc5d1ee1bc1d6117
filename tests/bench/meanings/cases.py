"""What each kernel of an artifact means, as a file: `python -m tests.bench.meanings.cases CONFIG --target sm90 -o FILE` on the compile host.

A case names its kernel's buffers, the views of operands and results, and the ops of its body with their attributes and where each operand
comes from. `gpu_meaning.py` reads the file where there is no compiler. Give the settings of the compile: they decide symbols.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tapeout.dialects.format import Number, Scaling
from tapeout.dialects.types import Blocks, Ring, Tensor, View

Ref = Any
"""("in", number), ("op", number of the op, number of the result), a list of these where an operand is variadic, None where it is absent."""


@dataclass(frozen=True)
class Op:
    """One op of a kernel's body."""

    name: str
    attributes: dict[str, Any]
    operands: tuple[Ref, ...]
    results: tuple[View, ...]


@dataclass(frozen=True)
class Case:
    """One kernel. `buffers` are (name, element) in launch order; `outputs` says which values of the body are the results.

    A `part` is a launch in front of the kernel that finishes the op: it has no meaning of its own.
    """

    symbol: str
    family: str
    op: str
    operands: tuple[View | None, ...]
    results: tuple[View, ...]
    buffers: tuple[tuple[str, str], ...]
    body: tuple[Op, ...]
    outputs: tuple[Ref, ...]
    part: bool = False


# -- views as data


def view_data(view: View | None) -> Any:
    """A view as JSON data."""
    match view:
        case None:
            return None
        case Ring(entry, length):
            return {"ring": view_data(entry), "length": length}
        case Blocks(entry, ratio):
            return {"blocks": view_data(entry), "ratio": ratio}
        case Tensor(shape, Number(element, scaling)):
            scaled = None if scaling is None else [scaling.scale, scaling.rows, scaling.columns]
            return {"shape": list(shape), "element": element, "scaling": scaled}
    raise TypeError(f"no data form for {view!r}")


def view_from(data: Any) -> Any:
    """The view behind JSON data."""
    if data is None:
        return None
    if "ring" in data:
        return Ring(view_from(data["ring"]), data["length"])
    if "blocks" in data:
        return Blocks(view_from(data["blocks"]), data["ratio"])
    return Tensor(tuple(data["shape"]), Number(data["element"], None if data["scaling"] is None else Scaling(*data["scaling"])))


def case_data(case: Case) -> dict[str, Any]:
    """A case as JSON data."""
    body = [{"name": o.name, "attributes": o.attributes, "operands": o.operands, "results": [view_data(v) for v in o.results]} for o in case.body]
    views = {name: [view_data(v) for v in getattr(case, name)] for name in ("operands", "results")}
    return {"symbol": case.symbol, "family": case.family, "op": case.op, **views, "buffers": case.buffers, "body": body, "outputs": case.outputs,
            "part": case.part}  # fmt: skip


def case_from(data: dict[str, Any]) -> Case:
    """The case behind JSON data."""
    body = tuple(Op(o["name"], o["attributes"], tuple(o["operands"]), tuple(view_from(v) for v in o["results"])) for o in data["body"])
    operands, results = (tuple(view_from(v) for v in data[name]) for name in ("operands", "results"))
    buffers = tuple((name, element) for name, element in data["buffers"])
    return Case(data["symbol"], data["family"], data["op"], operands, results, buffers, body, tuple(data["outputs"]), data["part"])


def load_cases(path: Path) -> dict[str, Case]:
    """Cases by symbol."""
    return {data["symbol"]: case_from(data) for data in json.loads(path.read_text())}


# -- making them (needs the compiler)


def cases_of(config: Any, settings: Any) -> list[Case]:
    """A case for every distinct kernel of a configuration, by the passes of a compile for `settings.target`."""
    from tapeout.codegen.lower_to_tile import symbol_of
    from tapeout.codegen.select_kernels import PART, SelectKernels, choices_of, in_launches, launches
    from tapeout.compiler.pipeline import graph_pipeline, run
    from tapeout.dialects._mlir import ir
    from tapeout.models.deepseek_v41.graph import GraphOptions, build_graph

    passes = graph_pipeline(settings, config.text.dspark_block_size)
    passes = [replace(p, target=settings.target) if isinstance(p, SelectKernels) else p for p in passes]
    with ir.Context(), ir.Location.unknown():
        module = build_graph(config, GraphOptions(settings.max_sequences, settings.max_context, settings.block_tokens))
        run(module, passes)
        found = {symbol_of(one): (op, one) for op in launches(module) for choice in choices_of(op) for one in in_launches(choice)}
        return [_case(symbol, op, choice, PART in dict(choice.schedule)) for symbol, (op, choice) in found.items()]


def _case(symbol: str, op: Any, choice: Any, part: bool) -> Case:
    request = choice.request
    if op.name == "nn.fused":
        block = op.regions[0].blocks[0]
        *inner, ending = [o.operation for o in block.operations]
        known = {value: ("in", i) for i, value in enumerate(block.arguments)}
        made = list(ending.operands)
    else:
        inner, made = [op], list(op.results)
        flat = [v for group in _groups(op) for v in (group if isinstance(group, list) else [group])]
        known = {value: ("in", i) for i, value in reversed(list(enumerate(flat))) if value is not None}
    body = []
    for number, one in enumerate(inner):
        body.append(_op(one, known))
        known |= {value: ("op", number, i) for i, value in enumerate(one.results)}
    buffers = tuple((b.name, b.element) for b in request.buffers())
    return Case(symbol, choice.family, request.op, request.operands, request.results, buffers, tuple(body),
                tuple(known[v] for v in made), part)  # fmt: skip


def _groups(op: Any) -> list[Any]:
    from tapeout.dialects.define import operand_groups

    return operand_groups(op)


def _op(op: Any, known: dict[Any, Ref]) -> Op:
    from tapeout.dialects.define import attributes_of
    from tapeout.dialects.types import from_ir

    refs = tuple(None if g is None else [known[v] for v in g] if isinstance(g, list) else known[g] for g in _groups(op))
    return Op(op.name, vars(attributes_of(op)), refs, tuple(from_ir(r.type) for r in op.results))


def main(arguments: Sequence[str] | None = None) -> int:
    """0 written."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.meanings.cases", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--target", default="sm90")
    parser.add_argument("--max-rows", type=int, default=512)
    parser.add_argument("--max-sequences", type=int, default=8)
    parser.add_argument("--max-context", type=int, default=4096)
    parser.add_argument("--output", "-o", type=Path, required=True)
    given = parser.parse_args(arguments)
    from tapeout.compiler.settings import Settings
    from tapeout.models.deepseek_v41.config import load_config

    settings = Settings(target=given.target, max_rows=given.max_rows, max_sequences=given.max_sequences, max_context=given.max_context)
    cases = cases_of(load_config(given.config), settings)
    given.output.write_text(json.dumps([case_data(case) for case in cases]) + "\n")
    print(f"{given.output}: {len(cases)} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
