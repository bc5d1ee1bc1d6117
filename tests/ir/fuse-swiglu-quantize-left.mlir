// RUN: tapeout opt %s -p "fuse-swiglu-quantize" | filecheck %s
// An inner value that nothing quantizes stays as it is.

// CHECK-LABEL: func.func @plain
// CHECK-NOT: nn.fused
func.func @plain(%x: tensor<?x128xbf16> {tapeout.extent = "rows"}) -> tensor<?x64xbf16> {
  %0 = moe.swiglu(%x) {limit = 10.0 : f64, operandSegmentSizes = array<i32: 1, 0, 0>} : (tensor<?x128xbf16>) -> tensor<?x64xbf16>
  return %0 : tensor<?x64xbf16>
}
