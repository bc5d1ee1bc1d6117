// RUN: tapeout opt %s -p "fuse-norm-quantize,fuse-collapse-norm" | filecheck %s
// Collapsed rows without a norm, and rows that two norms read, stay on their own.

// CHECK-LABEL: func.func @bare
// CHECK-NOT: nn.fused
func.func @bare(%s: tensor<?x4x64xbf16> {tapeout.extent = "rows"}, %a: tensor<?x4xf32> {tapeout.extent = "rows"}) -> tensor<?x64xbf16> {
  %0 = mhc.collapse(%s, %a) : (tensor<?x4x64xbf16>, tensor<?x4xf32>) -> tensor<?x64xbf16>
  return %0 : tensor<?x64xbf16>
}

// CHECK-LABEL: func.func @two
// CHECK-NOT: nn.fused
func.func @two(%s: tensor<?x4x64xbf16> {tapeout.extent = "rows"}, %a: tensor<?x4xf32> {tapeout.extent = "rows"}, %w: tensor<64xbf16>, %v: tensor<64xbf16>) -> (tensor<?x64xbf16>, tensor<?x64xbf16>) {
  %0 = mhc.collapse(%s, %a) : (tensor<?x4x64xbf16>, tensor<?x4xf32>) -> tensor<?x64xbf16>
  %1 = nn.rms_norm(%0, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %2 = nn.rms_norm(%0, %v) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  return %1, %2 : tensor<?x64xbf16>, tensor<?x64xbf16>
}
