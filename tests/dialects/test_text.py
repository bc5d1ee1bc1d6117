"""Readable text: sugar and unsugar are inverse on whole models, and leave strings, comments and foreign ops alone."""

import pytest
from tests.passes.modules import PASSES, REAL, TINY, graph

from tapeout.dialects._mlir import ir
from tapeout.dialects.text import parse, sugar, unsugar
from tapeout.passes.define import text


@pytest.mark.parametrize("before", [None, "fuse-query-path", "bucket-rows", "planned"])
@pytest.mark.parametrize("config", [TINY, REAL], ids=["tiny", "real"])
def test_whole_models_return(before: str | None, config: object) -> None:
    """Printed, read back and printed: the same module, whichever passes have run."""
    from tapeout.compiler.pipeline import run

    with graph(None if before == "planned" else before, config) as module:  # type: ignore[arg-type]
        if before == "planned":
            run(module, PASSES)
        generic, readable = module.operation.get_asm(assume_verified=True), text(module)
    assert '"nn.' not in readable.replace('"nn.fused:', "") and unsugar(sugar(generic)) == generic
    with ir.Context():
        assert parse(readable).operation.get_asm() == generic


@pytest.mark.parametrize(
    "kept",
    [
        'note = "nn.linear(x)"',
        "// nn.linear(x)",
        "%nn.linear(",
        "@nn.linear(",
        '"arith.addf"(',
        "other.linear(",
        "nn.Linear(",
        "nn.linear {",
        r'note = "a \" nn.linear("',
    ],
)
def test_unsugar_leaves_the_rest_alone(kept: str) -> None:
    assert unsugar(kept) == kept


def test_both_ways() -> None:
    assert sugar('%0 = "nn.linear"(%a) : x') == "%0 = nn.linear(%a) : x"
    assert unsugar("%0 = nn.linear(%a) : x") == '%0 = "nn.linear"(%a) : x' == unsugar('%0 = "nn.linear"(%a) : x')
    assert sugar('"foreign.op"()') == '"foreign.op"()'
    assert unsugar("(nn.linear(cache.stage(") == '("nn.linear"("cache.stage"('


def test_errors_have_line_and_column() -> None:
    with ir.Context(), pytest.raises(ir.MLIRError) as caught:
        parse("module {\n  hello\n}")
    assert [str(d.location) for d in caught.value.error_diagnostics] == ['loc("-":2:3)']
