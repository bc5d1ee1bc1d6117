"""Launch costs: coefficients say what the ops say, work of a decode step is two operations per active parameter, groups move no inner value."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from tapeout.codegen.costs import LONG, launch_cost, op_cost
from tapeout.codegen.kernel import request_of
from tapeout.compiler.opt import run_passes
from tapeout.compiler.programs import is_entry_point
from tapeout.dialects._mlir import ir
from tapeout.dialects.define import Sizes
from tapeout.dialects.text import parse
from tapeout.dialects.types import Tensor, from_ir
from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.models.deepseek_v41.ledger import active_ledger
from tapeout.passes.define import functions, operations
from tapeout.runtime.cost import evaluated
from tests.passes.modules import REAL, TINY, executed, graph

CONFIGS = pytest.mark.parametrize("config", [TINY, REAL], ids=["tiny", "real"])
PRODUCTS = ("nn.linear", "moe.expert_linear", "moe.gate", "mhc.mixer")


def ops_of(module: ir.Module, *names: str) -> Iterator[ir.Operation]:
    """Every executed op of the entry points called `names`, as often as it runs."""
    for function in functions(module):
        if is_entry_point(function) and function.name.value in names:
            yield from (op for op, _ in executed(function, {}))


def product_operations(op: ir.Operation, top_k: int) -> int:
    """Operations of an op's weight product for one row, counted from the weight's shape alone."""
    weight = from_ir(op.operands[1].type)
    assert isinstance(weight, Tensor)
    experts = top_k if op.name == "moe.expert_linear" else 1
    return 2 * experts * int(np.prod([n for n in weight.shape[-2:] if n is not None], dtype=np.int64))


@CONFIGS
def test_decode_does_two_operations_per_active_parameter(config: ModelConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """Weight products of one decoded token are exactly the ledger's; window attention, norms and routing add a few percent (model spec 12.2)."""
    active = active_ledger(config)
    one = Sizes(1, entries=0, experts=config.text.num_experts_per_tok)
    products = total = 0
    with graph("outline-layers", config) as module:
        for op in ops_of(module, "encoder", "decoder"):
            products += product_operations(op, config.text.num_experts_per_tok) if op.name in PRODUCTS else 0
            total += sum(n for kind, n in op_cost(op, one).operations.items() if kind != "integer")
    wanted = 2 * (active.decode + active.head + active.draft_feature)
    with capsys.disabled():
        print(f"\ndecode at 1 row: {total / 1e9:.3f} GFLOP, {total / wanted:.4f} of two per active parameter")
    assert products == wanted
    assert 1.0 < total / wanted < (1.05 if config is REAL else 1.5)


def test_active_parameters_of_the_real_model() -> None:
    """The hand numbers of model spec 12.2."""
    active = active_ledger(REAL)
    assert (active.prefill, active.decode, active.head) == (7_895_220_224, 15_468_068_864, 661_913_600)


@CONFIGS
def test_product_costs_are_counted_by_kind(config: ModelConfig) -> None:
    """Cost of each product op at one row is its weight's product; the gate and the mixer do a little more in FP32."""
    one = Sizes(1, experts=config.text.num_experts_per_tok)
    with graph("outline-layers", config) as module:
        for op in ops_of(module, "encoder", "decoder", "draft"):
            if op.name in ("nn.linear", "moe.expert_linear"):
                top_k = from_ir(op.operands[2].type).shape[1] if op.name == "moe.expert_linear" else 1  # type: ignore[union-attr]
                assert sum(op_cost(op, one).operations.values()) == product_operations(op, top_k or 0)


@CONFIGS
def test_coefficients_say_what_the_ops_say(config: ModelConfig) -> None:
    """In the long-context regime, at sizes the coefficients were not taken from; experts are fewer than pairs, as they are in a step.

    Rows are even: one row in two completes an entry of ratio 2.
    """
    compared = 0
    with graph("outline-layers", config) as module:
        unique = {request_of(op): op for f in functions(module) for op in operations(f)[:-1]}
        for op, (rows, entries, experts) in itertools.product(unique.values(), [(2, LONG, 2), (8, LONG + 4096, 3), (130, 3 * LONG, 4)]):
            cost = op_cost(op, Sizes(rows, entries, experts=experts))
            found = evaluated(launch_cost(op, "kept"), {"kept": rows, "entries": entries, "experts": experts})
            exact = {"read": cost.read, "written": cost.written, **cost.operations}
            assert {q: round(v) for q, v in found.items() if round(v)} == {q: n for q, n in exact.items() if n}, op
            compared += 1
    assert compared > 100


def test_weights_of_experts_are_read_per_expert_hit() -> None:
    with graph("outline-layers", REAL) as module:
        op = next(o for o in ops_of(module, "encoder") if o.name == "moe.expert_linear")
        weight = from_ir(op.operands[1].type)
        assert isinstance(weight, Tensor)
        _, n, k = weight.sized(0)
        cost = launch_cost(op, "rows")
        assert cost["read"]["experts"] == n * k // 2 + n * k // 32
        assert cost["fp4"] == {"rows": 2.0 * n * k * REAL.text.num_experts_per_tok}
        assert cost["read"]["rows"] < n * k // 32  # no weight among what each row reads


def test_ops_of_sequences_cost_what_each_sequence_does() -> None:
    """A draft's token: two rows of logits are added up and drawn from, in one launch, for every sequence; confidences read a hidden row each."""
    vocabulary, hidden = REAL.text.vocab_size, REAL.text.hidden_size
    with graph("outline-layers", REAL) as module:
        ops = [op for f in functions(module) if f.name.value == "draft" for op in operations(f)]
        group = next(op for op in ops if op.name == "nn.fused" and ir.StringAttr(op.attributes["kind"]).value == "correct_draw")
        costs = [launch_cost(op, "sequences") for op in (group, next(op for op in ops if op.name == "dspark.confidence"))]
    assert costs[0]["read"] == {"sequences": 8.0 * vocabulary + 24} and costs[0]["written"] == {"sequences": 4.0}
    assert costs[0]["f32"] == {"sequences": 9.0 * vocabulary}
    assert costs[1]["read"]["sequences"] >= 2.0 * hidden


NORM = """#q8 = #format.scaled<"e8m0", 1 : i64, 32 : i64>
func.func @f(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}, %w: tensor<64xbf16>, %p: tensor<?xi32> {tapeout.extent = "rows"},
             %t: tensor<1000x32xf32>) -> tensor<?x64xf8E4M3FN, #q8> {
  %0 = nn.rms_norm(%x, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %1 = nn.rope(%0, %p, %t) {heads = 1 : i64, width = 64 : i64, offset = 0 : i64, inverse = false}
    : (tensor<?x64xbf16>, tensor<?xi32>, tensor<1000x32xf32>) -> tensor<?x64xbf16>
  %2 = nn.quantize(%1) : (tensor<?x64xbf16>) -> tensor<?x64xf8E4M3FN, #q8>
  return %2 : tensor<?x64xf8E4M3FN, #q8>
}
"""


TAKEN = "  %x = nn.columns(%wide) {first = 192 : i64, count = 64 : i64} : (tensor<?x256xbf16>) -> tensor<?x64xbf16>\n  %0 ="
BESIDE = NORM.replace("%x: tensor<?x64xbf16>", "%wide: tensor<?x256xbf16>").replace("  %0 =", TAKEN)


@pytest.mark.parametrize("graph", [NORM, BESIDE], ids=["alone", "columns of wider rows"])
def test_a_group_moves_what_it_takes_and_hands_out(graph: str) -> None:
    """Per row: 128 bytes of x, a position, one angle row of 128 bytes; out come 64 codes and 2 scales. The weight is read once. Of columns that
    the group does not take nothing is read."""
    (text,) = run_passes(graph, "fuse-query-path")
    with ir.Context(), ir.Location.unknown():
        module = parse(text)
        group = operations(functions(module)[0])[0]
        assert group.name == "nn.fused"
        cost = launch_cost(group, "rows")
    assert cost["read"] == {"fixed": 128.0, "rows": 128.0 + 4 + 128}
    assert cost["written"] == {"rows": 64.0 + 2}
    assert cost["f32"] == {"rows": 4.0 * 64 + 3 * 32 + 3 * 64}
