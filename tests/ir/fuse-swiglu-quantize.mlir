// RUN: tapeout opt %s -p "fuse-swiglu-quantize" | filecheck %s

#q8 = #format.scaled<"e8m0", 1 : i64, 32 : i64>

// CHECK-LABEL: func.func @shared
// CHECK-NEXT: %[[F:.*]] = nn.fused(%{{[^,]*}}) ({
// CHECK: %[[S:.*]] = moe.swiglu(
// CHECK-NEXT: %[[Q:.*]] = nn.quantize(%[[S]])
// CHECK-NEXT: nn.yield(%[[Q]])
// CHECK-NEXT: {kind = "swiglu_quantize"
// CHECK-NEXT: return %[[F]]
func.func @shared(%x: tensor<?x128xbf16> {tapeout.extent = "rows"}) -> tensor<?x64xf8E4M3FN, #q8> {
  %0 = moe.swiglu(%x) {limit = 10.0 : f64, operandSegmentSizes = array<i32: 1, 0, 0>} : (tensor<?x128xbf16>) -> tensor<?x64xbf16>
  %1 = nn.quantize(%0) : (tensor<?x64xbf16>) -> tensor<?x64xf8E4M3FN, #q8>
  return %1 : tensor<?x64xf8E4M3FN, #q8>
}

// CHECK-LABEL: func.func @routed
// CHECK-NEXT: nn.fused(%{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}) ({
// CHECK: moe.swiglu(
// CHECK-NEXT: nn.quantize(
// CHECK: {kind = "swiglu_quantize"
func.func @routed(%x: tensor<?x2x128xbf16> {tapeout.extent = "rows"},
                  %w: tensor<?x2xf32> {tapeout.extent = "rows"}, %o: tensor<?x2xi32> {tapeout.extent = "rows"}) -> tensor<?x2x64xf8E4M3FN, #q8> {
  %0 = moe.swiglu(%x, %w, %o) {limit = 10.0 : f64, operandSegmentSizes = array<i32: 1, 1, 1>} : (tensor<?x2x128xbf16>, tensor<?x2xf32>, tensor<?x2xi32>) -> tensor<?x2x64xbf16>
  %1 = nn.quantize(%0) : (tensor<?x2x64xbf16>) -> tensor<?x2x64xf8E4M3FN, #q8>
  return %1 : tensor<?x2x64xf8E4M3FN, #q8>
}
