// RUN: not tapeout opt %s -p "verify" 2>&1 | filecheck %s
// A group reads its inputs and nothing else: a region that reaches outside is refused before any pass sees it.

// CHECK: tapeout: [C103] module 0: loc("-":{{[0-9]+}}:{{[0-9]+}}): 'nn.fused' holds nn.rms_norm that reads a value from outside, expected it as an input of the group
func.func @outside(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}, %w: tensor<64xbf16>) -> tensor<?x64xbf16> {
  %0 = "nn.fused"(%x) ({
  ^bb0(%y: tensor<?x64xbf16>):
    %1 = nn.rms_norm(%y, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
    nn.yield(%1) {operandSegmentSizes = array<i32: 1, 0, 0, 0>} : (tensor<?x64xbf16>) -> ()
  }) {kind = "norm", operandSegmentSizes = array<i32: 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0>, resultSegmentSizes = array<i32: 1, 0, 0, 0>} : (tensor<?x64xbf16>) -> tensor<?x64xbf16>
  return %0 : tensor<?x64xbf16>
}
