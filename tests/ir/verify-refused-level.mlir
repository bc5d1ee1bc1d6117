// RUN: not tapeout opt %s -p "verify" 2>&1 | filecheck %s
// A foreign op has no meaning, no cost and no kernel.

// CHECK: [C103] pass verify: arith.addf at loc("-":{{[0-9]+}}:{{[0-9]+}}) in @foreign is no op of the graph level; expected one of our dialects
func.func @foreign(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = arith.addf %x, %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}
