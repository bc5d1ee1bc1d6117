// RUN: tapeout opt %s -p "fuse-query-path" | filecheck %s

#q8 = #format.scaled<"e8m0", 1 : i64, 32 : i64>

// Window vectors: norm, rotate, quantize.
// CHECK-LABEL: func.func @entries
// CHECK-NEXT: %[[F:.*]] = nn.fused(%{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}) ({
// CHECK: %[[N:.*]] = nn.rms_norm(
// CHECK-NEXT: %[[R:.*]] = nn.rope(%[[N]],
// CHECK-NEXT: %[[Q:.*]] = nn.quantize(%[[R]])
// CHECK-NEXT: nn.yield(%[[Q]])
// CHECK-NEXT: {kind = "norm_rope_quantize"
// CHECK-NEXT: return %[[F]]
func.func @entries(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}, %w: tensor<64xbf16>, %p: tensor<?xi32> {tapeout.extent = "rows"},
                   %t: tensor<9x32xf32>) -> tensor<?x64xf8E4M3FN, #q8> {
  %0 = nn.rms_norm(%x, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %1 = nn.rope(%0, %p, %t) {heads = 1 : i64, width = 64 : i64, offset = 0 : i64, inverse = false} : (tensor<?x64xbf16>, tensor<?xi32>, tensor<9x32xf32>) -> tensor<?x64xbf16>
  %2 = nn.quantize(%1) : (tensor<?x64xbf16>) -> tensor<?x64xf8E4M3FN, #q8>
  return %2 : tensor<?x64xf8E4M3FN, #q8>
}

// Index queries: rotate, quantize.
// CHECK-LABEL: func.func @queries
// CHECK-NEXT: nn.fused(
// CHECK: nn.rope(
// CHECK-NEXT: nn.quantize(
// CHECK: {kind = "rope_quantize"
func.func @queries(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}, %p: tensor<?xi32> {tapeout.extent = "rows"},
                   %t: tensor<9x32xf32>) -> tensor<?x64xf4E2M1FN, #q8> {
  %0 = nn.rope(%x, %p, %t) {heads = 2 : i64, width = 32 : i64, offset = 0 : i64, inverse = false} : (tensor<?x64xbf16>, tensor<?xi32>, tensor<9x32xf32>) -> tensor<?x64xbf16>
  %1 = nn.quantize(%0) : (tensor<?x64xbf16>) -> tensor<?x64xf4E2M1FN, #q8>
  return %1 : tensor<?x64xf4E2M1FN, #q8>
}

// Window vectors that lie beside others: their columns are taken in the group.
// CHECK-LABEL: func.func @beside
// CHECK-NEXT: %[[F:.*]] = nn.fused(%{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}) ({
// CHECK: %[[C:.*]] = nn.columns(
// CHECK-NEXT: %[[N:.*]] = nn.rms_norm(%[[C]],
// CHECK-NEXT: %[[R:.*]] = nn.rope(%[[N]],
// CHECK-NEXT: %[[Q:.*]] = nn.quantize(%[[R]])
// CHECK-NEXT: nn.yield(%[[Q]])
// CHECK-NEXT: {kind = "columns_norm_rope_quantize"
// CHECK-NEXT: return %[[F]]
func.func @beside(%x: tensor<?x96xbf16> {tapeout.extent = "rows"}, %w: tensor<64xbf16>, %p: tensor<?xi32> {tapeout.extent = "rows"},
                  %t: tensor<9x32xf32>) -> tensor<?x64xf8E4M3FN, #q8> {
  %0 = nn.columns(%x) {first = 32 : i64, count = 64 : i64} : (tensor<?x96xbf16>) -> tensor<?x64xbf16>
  %1 = nn.rms_norm(%0, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %2 = nn.rope(%1, %p, %t) {heads = 1 : i64, width = 64 : i64, offset = 0 : i64, inverse = false} : (tensor<?x64xbf16>, tensor<?xi32>, tensor<9x32xf32>) -> tensor<?x64xbf16>
  %3 = nn.quantize(%2) : (tensor<?x64xbf16>) -> tensor<?x64xf8E4M3FN, #q8>
  return %3 : tensor<?x64xf8E4M3FN, #q8>
}
