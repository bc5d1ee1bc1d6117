"""Modules that pass tests work on: the tiny model's graph after the passes that come before one, and the toy-data check around it."""

from collections.abc import Iterator
from contextlib import contextmanager

from tapeout.compiler.check_passes import Checker
from tapeout.compiler.pipeline import graph_pipeline, run
from tapeout.compiler.settings import Settings
from tapeout.dialects._mlir import func, ir
from tapeout.models.deepseek_v41.config import ModelConfig, shipped_config
from tapeout.models.deepseek_v41.graph import GraphOptions, build_graph
from tapeout.passes.define import Pass, functions, operations
from tapeout.passes.extents import callee

TINY: ModelConfig = shipped_config("tiny")
REAL: ModelConfig = shipped_config("v4.1-flash")
SETTINGS = Settings(max_rows=33, max_sequences=3, max_context=160, block_tokens=16, buckets=(1, 7, 33))
OPTIONS = GraphOptions(SETTINGS.max_sequences, SETTINGS.max_context, SETTINGS.block_tokens)
PASSES: list[Pass] = graph_pipeline(SETTINGS, TINY.text.dspark_block_size)
DRAFTS = TINY.text.dspark_block_size


@contextmanager
def graph(before: str | None = None, config: ModelConfig = TINY) -> Iterator[ir.Module]:
    """The graph as the pass called `before` meets it; as it is built without one."""
    with ir.Context(), ir.Location.unknown():
        module = build_graph(config, OPTIONS)
        names = [p.name for p in PASSES]
        run(module, PASSES[: names.index(before)] if before else [])
        yield module


def keeps_meaning(one: Pass, config: ModelConfig = TINY) -> None:
    """Runs a pass where it stands in the pipeline, on toy data before and after; raises `PromiseBroken` where values changed."""
    with graph(one.name, config) as module:
        checker = Checker(module, config, OPTIONS)
        run(module, [one], checker.before, checker.after)


def every_op(module: ir.Module) -> list[ir.Operation]:
    """All ops of all functions in order, those inside groups behind their group."""
    found = []
    for function in functions(module):
        for op in operations(function):
            found.append(op)
            found += [inner.operation for region in op.regions for inner in region.blocks[0].operations]
    return found


def kinds(module: ir.Module) -> list[str]:
    """The kind of every group in order."""
    return [ir.StringAttr(op.attributes["kind"]).value for op in every_op(module) if op.name == "nn.fused"]


def executed(function: func.FuncOp, names: dict[ir.Value, str]) -> Iterator[tuple[ir.Operation, list[str]]]:
    """Ops in the order in which they run, calls and groups entered, with the states that each one takes, by name."""
    for op in operations(function)[:-1]:
        inner = callee(function, op).entry_block if op.name == "func.call" else op.regions[0].blocks[0] if op.name == "nn.fused" else None
        if inner is None:
            yield op, [names[v] for v in op.operands if v in names]
            continue
        passed = {a: names[v] for a, v in zip(inner.arguments, op.operands, strict=True) if v in names}
        if op.name == "func.call":
            yield from executed(callee(function, op), passed)
            continue
        yield from ((o.operation, [passed[v] for v in o.operation.operands if v in passed]) for o in list(inner.operations)[:-1])


def state_histories(module: ir.Module) -> dict[str, list[str]]:
    """For every function and state: the ops that touch it, in the order in which they run."""
    from tapeout.compiler.programs import is_entry_point
    from tapeout.passes.extents import argument_attribute

    found: dict[str, list[str]] = {}
    for function in filter(is_entry_point, functions(module)):
        names = {
            a: str(argument_attribute(function, i, "tapeout.name"))
            for i, a in enumerate(function.entry_block.arguments)
            if argument_attribute(function, i, "tapeout.kind") == "state"
        }
        for op, touched in executed(function, names):
            for state in touched:
                found.setdefault(f"{function.name.value}: {state}", []).append(op.name)
    return found
