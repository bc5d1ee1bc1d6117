"""Extents: named by arguments, handed on by ops, one an op; every ragged value of the model has one."""

import pytest

from tapeout.dialects.types import Tensor, from_ir
from tapeout.passes.define import PassError, functions, operations
from tapeout.passes.extents import EXTENTS, argument_attribute, extent_of, extents
from tapeout.runtime import artifact
from tests.passes.modules import REAL, TINY, graph

ENDS = {
    "step": {"rows"},
    "encoder": {"rows"},
    "decoder": {"outputs"},
    "sample": {"outputs"},
    "draft": {"sequences"},
}


@pytest.mark.parametrize("before", [None, "outline-layers", "bucket-rows"])
@pytest.mark.parametrize("config", [TINY, REAL], ids=["tiny", "real"])
def test_every_ragged_value_has_an_extent(before: str | None, config: object) -> None:
    with graph(before, config) as module:  # type: ignore[arg-type]
        for function in functions(module):
            found = extents(function)
            for op in operations(function)[:-1]:
                for result in op.results:
                    view = from_ir(result.type)
                    assert isinstance(view, Tensor) and (result in found) == (None in view.shape)
            assert set(found.values()) <= set(EXTENTS)
            if function.name.value in ENDS:
                assert {found[v] for v in operations(function)[-1].operands} == ENDS[function.name.value]


def test_the_runtime_counts_the_same_extents() -> None:
    assert EXTENTS == artifact.EXTENTS


def test_kept_rows_are_counted_apart() -> None:
    """What @decoder takes has the encoder's rows; behind nn.take every op counts kept rows."""
    with graph() as module:
        decoder = next(f for f in functions(module) if f.name.value == "decoder")
        found = extents(decoder)
        assert argument_attribute(decoder, 0, "tapeout.extent") == "rows"
        attends = [op for op in operations(decoder) if op.name == "mla.attend"]
        assert [extent_of(op, found) for op in attends] == ["kept"] * 3


def test_arguments_may_be_named_by_the_caller() -> None:
    with graph("bucket-rows") as module:
        part = next(f for f in functions(module) if f.name.value == "decoder_part0")
        names = [argument_attribute(part, i, "tapeout.extent") for i in range(len(part.type.inputs))]
        assert extents(part, names) == extents(part)
        with pytest.raises(PassError, match=r"argument 0 of @decoder_part0 has a run-time row count and no tapeout\.extent"):
            extents(part, [None] * len(names))
