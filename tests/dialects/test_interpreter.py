"""The interpreter: calls and groups are entered, observers see every op, states change in place and are guarded."""

import numpy as np
import pytest

from tapeout.dialects import nn
from tapeout.dialects._mlir import ir
from tapeout.dialects.format import FP32, Q8, Scaled, quantize
from tapeout.dialects.interpreter import Interpreter
from tapeout.dialects.state import State, block_rows, empty, ring_rows
from tapeout.dialects.text import parse
from tapeout.dialects.types import Blocks, Ring, Tensor
from tapeout.passes.define import functions

SOURCE = """
func.func private @inner(%x: tensor<?x64xf32>, %w: tensor<64xf32>) -> tensor<?x64xf32> {
  %0 = nn.rms_norm(%x, %w) {epsilon = 0.25 : f64} : (tensor<?x64xf32>, tensor<64xf32>) -> tensor<?x64xf32>
  return %0 : tensor<?x64xf32>
}
func.func @outer(%x: tensor<?x64xf32>, %w: tensor<64xf32>, %ids: tensor<?xi32>) -> (tensor<?x64xf32>, tensor<?x64xf32>, tensor<?x64xf32>) {
  %0 = call @inner(%x, %w) : (tensor<?x64xf32>, tensor<64xf32>) -> tensor<?x64xf32>
  %1 = call @inner(%0, %w) : (tensor<?x64xf32>, tensor<64xf32>) -> tensor<?x64xf32>
  %2 = nn.take(%1, %ids) : (tensor<?x64xf32>, tensor<?xi32>) -> tensor<?x64xf32>
  return %2, %0, %x : tensor<?x64xf32>, tensor<?x64xf32>, tensor<?x64xf32>
}
"""


def norm(x: object, w: object) -> object:
    v = np.asarray(x, np.float64)
    return (v / np.sqrt((v * v).mean(-1, keepdims=True) + 0.25) * w).astype(np.float32)  # type: ignore[operator]


def test_calls_are_entered_and_a_function_runs_again() -> None:
    x, w = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32), np.linspace(1, 2, 64, dtype=np.float32)
    seen: list[str] = []
    with ir.Context():
        module = parse(SOURCE)
        interpreter = Interpreter(
            functions(module)[1], lambda op, inputs, made: seen.append(f"{op.operation.name} {len(inputs)} {len(made)}")
        )
        for ids in (np.array([4, 0], np.int32), np.zeros(0, np.int32)):
            taken, first, given = interpreter.run(x, w, ids)
            np.testing.assert_array_equal(first, norm(x, w))
            np.testing.assert_array_equal(taken, norm(first, w)[ids])  # type: ignore[index]
            assert given is x
    assert seen == ["nn.rms_norm 2 1", "nn.rms_norm 2 1", "nn.take 2 1"] * 2


def test_wrong_arguments_and_unknown_ops() -> None:
    with ir.Context():
        module = parse(SOURCE)
        with pytest.raises(TypeError, match="the function takes 3 arguments, found 1"):
            Interpreter(functions(module)[1]).run(1)
        foreign = parse(
            "func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> {\n%0 = arith.addf %x, %x : tensor<4xf32>\nreturn %0 : tensor<4xf32>\n}"
        )
        with pytest.raises(KeyError, match=r"arith\.addf at .* has no declared meaning"):
            Interpreter(functions(foreign)[0])
    assert nn.rms_norm.__name__ == "rms_norm"


def test_plain_states() -> None:
    state = empty(Tensor((2,), FP32), 4)
    np.testing.assert_array_equal(state.value, np.zeros((4, 2), np.float32))
    state.write(np.array([3, -1, 1, 3], np.int32), np.arange(8, dtype=np.float32).reshape(4, 2))
    np.testing.assert_array_equal(state.value, [[0, 0], [4, 5], [0, 0], [6, 7]])  # the negative id is dropped, the last of equal ids wins
    np.testing.assert_array_equal(state.read(np.array([[3], [1]], np.int32)), [[[6, 7]], [[4, 5]]])
    assert state.read(np.zeros(0, np.int32)).shape == (0, 2)
    with pytest.raises(IndexError, match="state row -1 read; ops mask negative ids before reading"):
        state.read(np.array([0, -1], np.int32))
    with pytest.raises(IndexError):
        state.read(np.array([4], np.int32))


def test_scaled_states() -> None:
    state = empty(Tensor((64,), Q8), 3)
    rows = quantize(np.linspace(-3, 900, 128).reshape(2, 64), Q8)
    state.write(np.array([2, -1], np.int32), rows)
    found = state.read(np.array([2, 0], np.int32))
    assert isinstance(found, Scaled) and found.scales.shape == (2, 2)
    np.testing.assert_array_equal(found.codes[0].view(np.uint8), rows.codes[0].view(np.uint8))
    np.testing.assert_array_equal(found.scales, [rows.scales[0], [0, 0]])
    with pytest.raises(TypeError, match="a state of Scaled was given rows of ndarray"):
        state.write(np.array([0], np.int32), np.zeros((1, 64), np.float32))
    with pytest.raises(TypeError, match="a state of ndarray was given rows of Scaled"):
        State(np.zeros((3, 64), np.float32)).write(np.array([0, 1], np.int32), rows)


def test_sizes_of_states() -> None:
    assert ring_rows(Ring(Tensor((2,), FP32), 7), sequences=3, staging=5) == 26
    assert block_rows(Blocks(Tensor((2,), FP32), 2), count=3, block_tokens=16) == 24
