// RUN: tapeout opt %s -p "fuse-norm-quantize,fuse-collapse-norm" | filecheck %s
// The group of norm and quantization is opened and made anew around all three: groups never nest.

#q8 = #format.scaled<"e8m0", 1 : i64, 32 : i64>

// CHECK-LABEL: func.func @sublayer
// CHECK-NEXT: %[[F:.*]] = nn.fused(%{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}) ({
// CHECK-NOT: nn.fused
// CHECK: %[[C:.*]] = mhc.collapse(
// CHECK-NEXT: %[[N:.*]] = nn.rms_norm(%[[C]],
// CHECK-NEXT: %[[Q:.*]] = nn.quantize(%[[N]])
// CHECK-NEXT: nn.yield(%[[Q]])
// CHECK-NEXT: {kind = "collapse_norm_quantize"
// CHECK-NEXT: return %[[F]]
func.func @sublayer(%s: tensor<?x4x64xbf16> {tapeout.extent = "rows"}, %a: tensor<?x4xf32> {tapeout.extent = "rows"}, %w: tensor<64xbf16>) -> tensor<?x64xf8E4M3FN, #q8> {
  %0 = mhc.collapse(%s, %a) : (tensor<?x4x64xbf16>, tensor<?x4xf32>) -> tensor<?x64xbf16>
  %1 = nn.rms_norm(%0, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %2 = nn.quantize(%1) : (tensor<?x64xbf16>) -> tensor<?x64xf8E4M3FN, #q8>
  return %2 : tensor<?x64xf8E4M3FN, #q8>
}

// CHECK-LABEL: func.func @head
// CHECK-NEXT: nn.fused(
// CHECK: mhc.collapse(
// CHECK-NEXT: nn.rms_norm(
// CHECK: {kind = "collapse_norm"
func.func @head(%s: tensor<?x4x64xbf16> {tapeout.extent = "outputs"}, %a: tensor<?x4xf32> {tapeout.extent = "outputs"}, %w: tensor<64xbf16>) -> tensor<?x64xbf16> {
  %0 = mhc.collapse(%s, %a) : (tensor<?x4x64xbf16>, tensor<?x4xf32>) -> tensor<?x64xbf16>
  %1 = nn.rms_norm(%0, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  return %1 : tensor<?x64xbf16>
}
