// RUN: tapeout opt %s -p "fuse-norm-quantize" | filecheck %s

#q8 = #format.scaled<"e8m0", 1 : i64, 32 : i64>

// CHECK-LABEL: func.func @alone
// CHECK-NEXT: %[[F:.*]] = nn.fused(%{{.*}}, %{{.*}}) ({
// CHECK-NEXT: ^bb0(%[[X:.*]]: tensor<?x64xbf16>, %[[W:.*]]: tensor<64xbf16>):
// CHECK-NEXT: %[[N:.*]] = nn.rms_norm(%[[X]], %[[W]])
// CHECK-NEXT: %[[Q:.*]] = nn.quantize(%[[N]])
// CHECK-NEXT: nn.yield(%[[Q]])
// CHECK-NEXT: }) {kind = "norm_quantize", operandSegmentSizes = array<i32: 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0>, resultSegmentSizes = array<i32: 1, 0, 0, 0>, tapeout.layer = "layers.7"}
// CHECK-NEXT: return %[[F]]
func.func @alone(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}, %w: tensor<64xbf16>) -> tensor<?x64xf8E4M3FN, #q8> {
  %0 = nn.rms_norm(%x, %w) {epsilon = 1.0e-20 : f64, tapeout.layer = "layers.7"} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %1 = nn.quantize(%0) {tapeout.layer = "layers.7"} : (tensor<?x64xbf16>) -> tensor<?x64xf8E4M3FN, #q8>
  return %1 : tensor<?x64xf8E4M3FN, #q8>
}

// The normed rows are used elsewhere too: they stay a result of the group, and nothing is computed twice.
// CHECK-LABEL: func.func @both
// CHECK-NEXT: %[[F:.*]]:2 = nn.fused(
// CHECK: %[[N:.*]] = nn.rms_norm(
// CHECK-NEXT: %[[Q:.*]] = nn.quantize(%[[N]])
// CHECK-NEXT: nn.yield(%[[N]], %[[Q]])
// CHECK: nn.rope(%[[F]]#0,
// CHECK-NOT: nn.rms_norm
func.func @both(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}, %w: tensor<64xbf16>, %p: tensor<?xi32> {tapeout.extent = "rows"},
                %t: tensor<9x32xf32>) -> (tensor<?x64xbf16>, tensor<?x64xf8E4M3FN, #q8>) {
  %0 = nn.rms_norm(%x, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %1 = nn.rope(%0, %p, %t) {heads = 1 : i64, width = 64 : i64, offset = 0 : i64, inverse = false} : (tensor<?x64xbf16>, tensor<?xi32>, tensor<9x32xf32>) -> tensor<?x64xbf16>
  %2 = nn.quantize(%0) : (tensor<?x64xbf16>) -> tensor<?x64xf8E4M3FN, #q8>
  return %1, %2 : tensor<?x64xbf16>, tensor<?x64xf8E4M3FN, #q8>
}

// Of rows that lie beside others the columns are taken in the group.
// CHECK-LABEL: func.func @beside
// CHECK-NEXT: %[[F:.*]]:2 = nn.fused(
// CHECK: %[[C:.*]] = nn.columns(
// CHECK-NEXT: %[[N:.*]] = nn.rms_norm(%[[C]],
// CHECK-NEXT: %[[Q:.*]] = nn.quantize(%[[N]])
// CHECK-NEXT: nn.yield(%[[N]], %[[Q]])
// CHECK-NEXT: {kind = "columns_norm_quantize"
func.func @beside(%x: tensor<?x96xbf16> {tapeout.extent = "rows"}, %w: tensor<64xbf16>) -> (tensor<?x64xbf16>, tensor<?x64xf8E4M3FN, #q8>) {
  %0 = nn.columns(%x) {first = 32 : i64, count = 64 : i64} : (tensor<?x96xbf16>) -> tensor<?x64xbf16>
  %1 = nn.rms_norm(%0, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %2 = nn.quantize(%1) : (tensor<?x64xbf16>) -> tensor<?x64xf8E4M3FN, #q8>
  return %1, %2 : tensor<?x64xbf16>, tensor<?x64xf8E4M3FN, #q8>
}
