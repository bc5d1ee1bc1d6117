// RUN: tapeout opt %s -p "fuse-attention-output" | filecheck %s
// The positions are made behind the attention, which reads a state: the group could stand at neither place.

#q8 = #format.scaled<"e8m0", 1 : i64, 32 : i64>

// CHECK-LABEL: func.func @too_late
// CHECK-NOT: nn.fused
// CHECK: mla.attend(
// CHECK: nn.take(
// CHECK: nn.rope(
func.func @too_late(%q: tensor<?x64xbf16> {tapeout.extent = "rows"}, %ring: !cache.ring<tensor<32xf8E4M3FN, #q8>, 7 : i64>,
                    %ids: tensor<?x4xi32> {tapeout.extent = "rows"}, %n: tensor<?xi32> {tapeout.extent = "rows"}, %sink: tensor<2xf32>,
                    %p: tensor<?xi32> {tapeout.extent = "rows"}, %t: tensor<9x16xf32>) -> tensor<?x64xbf16> {
  %0 = mla.attend(%q, %ring, %ids, %n, %sink) {heads = 2 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 0, 0, 0>, scale = 0.25 : f64} : (tensor<?x64xbf16>, !cache.ring<tensor<32xf8E4M3FN, #q8>, 7 : i64>, tensor<?x4xi32>, tensor<?xi32>, tensor<2xf32>) -> tensor<?x64xbf16>
  %1 = nn.take(%p, %n) : (tensor<?xi32>, tensor<?xi32>) -> tensor<?xi32>
  %2 = nn.rope(%0, %1, %t) {heads = 2 : i64, width = 32 : i64, offset = 0 : i64, inverse = true} : (tensor<?x64xbf16>, tensor<?xi32>, tensor<9x16xf32>) -> tensor<?x64xbf16>
  return %2 : tensor<?x64xbf16>
}

// Attended rows that another op reads too stay in memory: the group would hand out two results.
// CHECK-LABEL: func.func @shared
// CHECK-NOT: nn.fused
// CHECK: return
func.func @shared(%q: tensor<?x64xbf16> {tapeout.extent = "rows"}, %ring: !cache.ring<tensor<32xf8E4M3FN, #q8>, 7 : i64>,
                  %ids: tensor<?x4xi32> {tapeout.extent = "rows"}, %n: tensor<?xi32> {tapeout.extent = "rows"}, %sink: tensor<2xf32>,
                  %p: tensor<?xi32> {tapeout.extent = "rows"}, %t: tensor<9x16xf32>) -> (tensor<?x64xbf16>, tensor<?x64xbf16>) {
  %0 = mla.attend(%q, %ring, %ids, %n, %sink) {heads = 2 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 0, 0, 0>, scale = 0.25 : f64} : (tensor<?x64xbf16>, !cache.ring<tensor<32xf8E4M3FN, #q8>, 7 : i64>, tensor<?x4xi32>, tensor<?xi32>, tensor<2xf32>) -> tensor<?x64xbf16>
  %1 = nn.rope(%0, %p, %t) {heads = 2 : i64, width = 32 : i64, offset = 0 : i64, inverse = true} : (tensor<?x64xbf16>, tensor<?xi32>, tensor<9x16xf32>) -> tensor<?x64xbf16>
  return %0, %1 : tensor<?x64xbf16>, tensor<?x64xbf16>
}
