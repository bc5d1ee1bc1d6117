// RUN: tapeout opt %s -p "fuse-query-path" | filecheck %s
// A latent that two ops read keeps its norm outside: only rotation and quantization join. Without a quantization nothing joins.

#q8 = #format.scaled<"e8m0", 1 : i64, 32 : i64>

// CHECK-LABEL: func.func @shared
// CHECK-NEXT: %[[N:.*]] = nn.rms_norm(
// CHECK-NEXT: nn.fused(%[[N]],
// CHECK: {kind = "rope_quantize"
// CHECK-NOT: norm_rope_quantize
func.func @shared(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}, %w: tensor<64xbf16>, %p: tensor<?xi32> {tapeout.extent = "rows"},
                  %t: tensor<9x32xf32>) -> (tensor<?x64xbf16>, tensor<?x64xf8E4M3FN, #q8>) {
  %0 = nn.rms_norm(%x, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %1 = nn.rope(%0, %p, %t) {heads = 1 : i64, width = 64 : i64, offset = 0 : i64, inverse = false} : (tensor<?x64xbf16>, tensor<?xi32>, tensor<9x32xf32>) -> tensor<?x64xbf16>
  %2 = nn.quantize(%1) : (tensor<?x64xbf16>) -> tensor<?x64xf8E4M3FN, #q8>
  return %0, %2 : tensor<?x64xbf16>, tensor<?x64xf8E4M3FN, #q8>
}

// CHECK-LABEL: func.func @unquantized
// CHECK-NOT: nn.fused
func.func @unquantized(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}, %p: tensor<?xi32> {tapeout.extent = "rows"}, %t: tensor<9x32xf32>) -> tensor<?x64xbf16> {
  %0 = nn.rope(%x, %p, %t) {heads = 1 : i64, width = 64 : i64, offset = 0 : i64, inverse = false} : (tensor<?x64xbf16>, tensor<?xi32>, tensor<9x32xf32>) -> tensor<?x64xbf16>
  return %0 : tensor<?x64xbf16>
}

// So do turned rows that others read: a group hands out codes alone.
// CHECK-LABEL: func.func @turned
// CHECK-NEXT: nn.rms_norm(
// CHECK-NEXT: nn.rope(
// CHECK-NOT: norm_rope_quantize
func.func @turned(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}, %w: tensor<64xbf16>, %p: tensor<?xi32> {tapeout.extent = "rows"},
                  %t: tensor<9x32xf32>) -> (tensor<?x64xbf16>, tensor<?x64xf8E4M3FN, #q8>) {
  %0 = nn.rms_norm(%x, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %1 = nn.rope(%0, %p, %t) {heads = 1 : i64, width = 64 : i64, offset = 0 : i64, inverse = false} : (tensor<?x64xbf16>, tensor<?xi32>, tensor<9x32xf32>) -> tensor<?x64xbf16>
  %2 = nn.quantize(%1) : (tensor<?x64xbf16>) -> tensor<?x64xf8E4M3FN, #q8>
  return %1, %2 : tensor<?x64xbf16>, tensor<?x64xf8E4M3FN, #q8>
}
