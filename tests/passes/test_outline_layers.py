"""outline-layers: layers of one kind are one function; calls name their layer and hand over the extents that the function states."""

import pytest

from tapeout.dialects._mlir import ir
from tapeout.passes.define import functions, operations, text
from tapeout.passes.extents import argument_attribute, callee, extents
from tapeout.passes.outline_layers import OutlineLayers
from tests.passes.modules import REAL, TINY, graph, keeps_meaning

REAL_CALLS = {
    "encoder_part0": [0],  # window only
    "encoder_part1": [1],  # window only, Engram
    "encoder_part2": [2, 8],  # entries of ratio 2 and a selection
    "encoder_part3": [3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 15, 16, 17, 18, 19],  # a selection made above
    "encoder_part14": [14],  # entries, selection, Engram
    "encoder_part20": [20],  # the boundary layer's entries
    "decoder_part0": [20],  # the boundary layer's candidates
    "decoder_part1": [21, 22, 23, 25, 26, 27, 29, 30, 31, 33, 34, 35],
    "decoder_part4": [24, 28, 32, 36],  # selections inside candidates
    "decoder_part17": [37, 38, 39],  # what the draft sees
}
DRAFTS = ["draft.0", "draft.1", "draft.2"]


def test_keeps_meaning() -> None:
    keeps_meaning(OutlineLayers())


def test_forty_layers_are_ten_functions() -> None:
    with graph("outline-layers", REAL) as module:
        OutlineLayers().run(module)
        found: dict[str, list[str]] = {}
        for function in functions(module):
            for op in operations(function):
                if op.name == "func.call":
                    found.setdefault(callee(function, op).name.value, []).append(ir.StringAttr(op.attributes["tapeout.layer"]).value)
    wanted = {name: [f"layers.{n}" for n in numbers] for name, numbers in REAL_CALLS.items()}
    assert found == wanted | {"decoder_part20": DRAFTS, "draft_part0": DRAFTS}


@pytest.mark.parametrize("config", [TINY, REAL], ids=["tiny", "real"])
def test_calls_hand_over_the_stated_extents(config: object) -> None:
    with graph("outline-layers", config) as module:  # type: ignore[arg-type]
        before = {f.name.value: [extents(f).get(v) for v in operations(f)[-1].operands] for f in functions(module)}
        OutlineLayers().run(module)
        for function in functions(module):
            ragged = extents(function)
            for op in operations(function):
                if op.name == "func.call":
                    target = callee(function, op)
                    stated = [argument_attribute(target, i, "tapeout.extent") for i in range(len(op.operands))]
                    assert stated == [ragged.get(v) for v in op.operands]
            if function.name.value in before:
                assert [ragged.get(v) for v in operations(function)[-1].operands] == before[function.name.value]


def test_no_layer_is_left_outside_and_a_second_run_changes_nothing() -> None:
    with graph("outline-layers") as module:
        OutlineLayers().run(module)
        for function in functions(module):
            assert all(op.name == "func.call" for op in operations(function) if "tapeout.layer" in op.attributes)
        once = text(module)
        OutlineLayers().run(module)
        assert text(module) == once
