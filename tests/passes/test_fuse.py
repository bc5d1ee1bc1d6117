"""What all fuse passes share: groups never nest, nothing is lost or computed twice, states are touched in the order they were."""

from collections import Counter

import pytest

from tapeout.dialects._mlir import ir
from tapeout.dialects.text import parse
from tapeout.passes.define import functions, operations
from tapeout.passes.fuse import Chain, fuse_chains
from tests.passes.modules import REAL, TINY, every_op, graph, state_histories

CONFIGS = pytest.mark.parametrize("config", [TINY, REAL], ids=["tiny", "real"])


@CONFIGS
def test_groups_never_nest_and_hold_several_ops(config: object) -> None:
    with graph("outline-layers", config) as module:  # type: ignore[arg-type]
        groups = [op for op in every_op(module) if op.name == "nn.fused"]
        assert len(groups) > 60
        for group in groups:
            inner = [op.operation.name for op in group.regions[0].blocks[0].operations]
            assert "nn.fused" not in inner and len(inner) >= 3 and inner[-1] == "nn.yield"


@CONFIGS
def test_columns_are_read_where_they_lie(config: object) -> None:
    """Every range of columns is taken inside the group of the norm that reads it: none is a launch of its own."""
    with graph("outline-layers", config) as module:  # type: ignore[arg-type]
        taken = [op for op in every_op(module) if op.name == "nn.columns"]
        assert taken and all(op.parent.name == "nn.fused" for op in taken)


@CONFIGS
def test_no_op_is_lost_or_doubled(config: object) -> None:
    added = ("nn.fused", "nn.yield")
    with graph("fuse-query-path", config) as module:  # type: ignore[arg-type]
        before = Counter((op.name, str(op.location)) for op in every_op(module))
    with graph("outline-layers", config) as module:  # type: ignore[arg-type]
        after = Counter((op.name, str(op.location)) for op in every_op(module) if op.name not in added)
    assert after == before


@CONFIGS
def test_states_are_touched_in_the_same_order(config: object) -> None:
    """Attention before its commit, stage before attention, append before selection: as the graph is built, so it is planned."""
    with graph(None, config) as module:  # type: ignore[arg-type]
        built = state_histories(module)
    with graph("bucket-rows", config) as module:  # type: ignore[arg-type]
        assert state_histories(module) == built
    assert built["encoder: layers.0.attn.window"] == ["cache.stage", "mla.attend", "cache.commit"]
    assert all("cache.commit" not in touched[:-1] for touched in built.values())


@CONFIGS
def test_a_group_belongs_to_its_layer(config: object) -> None:
    with graph("outline-layers", config) as module:  # type: ignore[arg-type]
        for op in every_op(module):
            if op.name == "nn.fused":
                layers = {
                    ir.StringAttr(o.attributes["tapeout.layer"]).value
                    for o in op.regions[0].blocks[0].operations
                    if "tapeout.layer" in o.attributes
                }
                assert len(layers) <= 1
                assert ("tapeout.layer" in op.attributes) == bool(layers)


def test_an_op_belongs_to_one_group_only() -> None:
    """Of three in a row the first two are a pair; the last one is none with the second."""
    take = "nn.take(%{}, %p) : (tensor<?xi32>, tensor<?xi32>) -> tensor<?xi32>"
    steps = [f"%{i + 1} = {take.format(i if i else 'p')}" for i in range(3)]
    source = "\n".join(['func.func @f(%p: tensor<?xi32> {tapeout.extent = "rows"}) -> tensor<?xi32> {', *steps, "return %3 : tensor<?xi32>", "}"])
    with ir.Context(), ir.Location.unknown():
        module = parse(source)
        fuse_chains(module, [Chain("pair", ("nn.take", "nn.take"))])
        module.operation.verify()
        assert [op.name for op in operations(functions(module)[0])] == ["nn.fused", "nn.take", "func.return"]
