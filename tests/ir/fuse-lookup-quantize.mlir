// RUN: tapeout opt %s -p "fuse-lookup-quantize" | filecheck %s

#q8 = #format.scaled<"e8m0", 1 : i64, 32 : i64>

// CHECK-LABEL: func.func @rows
// CHECK-NEXT: %[[F:.*]] = nn.fused(%{{[^,]*}}, %{{[^,]*}}) ({
// CHECK: %[[L:.*]] = engram.lookup(
// CHECK-NEXT: %[[Q:.*]] = nn.quantize(%[[L]])
// CHECK-NEXT: nn.yield(%[[Q]])
// CHECK-NEXT: {kind = "lookup_quantize"
// CHECK-NEXT: return %[[F]]
func.func @rows(%ids: tensor<?x3xi32> {tapeout.extent = "rows"}, %table: tensor<7x64xf8E4M3FN, #q8>) -> tensor<?x192xf8E4M3FN, #q8> {
  %0 = engram.lookup(%ids, %table) : (tensor<?x3xi32>, tensor<7x64xf8E4M3FN, #q8>) -> tensor<?x192xbf16>
  %1 = nn.quantize(%0) : (tensor<?x192xbf16>) -> tensor<?x192xf8E4M3FN, #q8>
  return %1 : tensor<?x192xf8E4M3FN, #q8>
}
