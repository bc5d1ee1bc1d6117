// RUN: tapeout opt %s -p "fuse-attention-output" | filecheck %s
// The inverse rotation moves up to the attention; the ring's commit stays behind its read.

#q8 = #format.scaled<"e8m0", 1 : i64, 32 : i64>

// CHECK-LABEL: func.func @output
// CHECK-NEXT: %[[F:.*]] = nn.fused(
// CHECK: %[[A:.*]] = mla.attend(
// CHECK-NEXT: %[[R:.*]] = nn.rope(%[[A]],
// CHECK-SAME: inverse = true
// CHECK-NEXT: nn.yield(%[[R]])
// CHECK-NEXT: {kind = "attend_rotate"
// CHECK-NEXT: cache.commit(
// CHECK-NEXT: return %[[F]]
func.func @output(%q: tensor<?x64xbf16> {tapeout.extent = "rows"}, %ring: !cache.ring<tensor<32xf8E4M3FN, #q8>, 7 : i64>,
                  %ids: tensor<?x4xi32> {tapeout.extent = "rows"}, %n: tensor<?xi32> {tapeout.extent = "rows"}, %sink: tensor<2xf32>,
                  %p: tensor<?xi32> {tapeout.extent = "rows"}, %t: tensor<9x16xf32>) -> tensor<?x64xbf16> {
  %0 = mla.attend(%q, %ring, %ids, %n, %sink) {heads = 2 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 0, 0, 0>, scale = 0.25 : f64} : (tensor<?x64xbf16>, !cache.ring<tensor<32xf8E4M3FN, #q8>, 7 : i64>, tensor<?x4xi32>, tensor<?xi32>, tensor<2xf32>) -> tensor<?x64xbf16>
  cache.commit(%ring, %n) {length = 7 : i64, sequences = 3 : i64} : (!cache.ring<tensor<32xf8E4M3FN, #q8>, 7 : i64>, tensor<?xi32>) -> ()
  %1 = nn.rope(%0, %p, %t) {heads = 2 : i64, width = 32 : i64, offset = 0 : i64, inverse = true} : (tensor<?x64xbf16>, tensor<?xi32>, tensor<9x16xf32>) -> tensor<?x64xbf16>
  return %1 : tensor<?x64xbf16>
}
