// RUN: tapeout opt %s -p "fuse-norm-quantize" | filecheck %s
// Chains that are none: two quantizations of one norm, and a quantization of something else.

#q8 = #format.scaled<"e8m0", 1 : i64, 32 : i64>
#q4 = #format.scaled<"e8m0", 1 : i64, 32 : i64>

// CHECK-LABEL: func.func @two
// CHECK-NOT: nn.fused
func.func @two(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}, %w: tensor<64xbf16>) -> (tensor<?x64xf8E4M3FN, #q8>, tensor<?x64xf4E2M1FN, #q4>) {
  %0 = nn.rms_norm(%x, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %1 = nn.quantize(%0) : (tensor<?x64xbf16>) -> tensor<?x64xf8E4M3FN, #q8>
  %2 = nn.quantize(%0) : (tensor<?x64xbf16>) -> tensor<?x64xf4E2M1FN, #q4>
  return %1, %2 : tensor<?x64xf8E4M3FN, #q8>, tensor<?x64xf4E2M1FN, #q4>
}

// CHECK-LABEL: func.func @other
// CHECK-NOT: nn.fused
func.func @other(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}, %w: tensor<64xbf16>) -> (tensor<?x64xbf16>, tensor<?x64xf8E4M3FN, #q8>) {
  %0 = nn.rms_norm(%x, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %1 = nn.quantize(%x) : (tensor<?x64xbf16>) -> tensor<?x64xf8E4M3FN, #q8>
  return %0, %1 : tensor<?x64xbf16>, tensor<?x64xf8E4M3FN, #q8>
}

// Columns that others read too are made once, outside.
// CHECK-LABEL: func.func @shared
// CHECK-NEXT: nn.columns(
// CHECK-NEXT: nn.fused(
// CHECK-NOT: columns_norm_quantize
func.func @shared(%x: tensor<?x96xbf16> {tapeout.extent = "rows"}, %w: tensor<64xbf16>) -> (tensor<?x64xbf16>, tensor<?x64xf8E4M3FN, #q8>) {
  %0 = nn.columns(%x) {first = 32 : i64, count = 64 : i64} : (tensor<?x96xbf16>) -> tensor<?x64xbf16>
  %1 = nn.rms_norm(%0, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %2 = nn.quantize(%1) : (tensor<?x64xbf16>) -> tensor<?x64xf8E4M3FN, #q8>
  return %0, %2 : tensor<?x64xbf16>, tensor<?x64xf8E4M3FN, #q8>
}
