// RUN: tapeout opt %s -p "verify" | filecheck %s
// verify changes nothing: a ring is staged, read and committed in this order, once in a function and once through calls.

#q8 = #format.scaled<"e8m0", 1 : i64, 32 : i64>

// CHECK-LABEL: func.func @whole
// CHECK: cache.stage(
// CHECK-NEXT: mla.attend(
// CHECK-NEXT: cache.commit(
// CHECK-NEXT: return
func.func @whole(%q: tensor<?x64xbf16> {tapeout.extent = "rows"}, %new: tensor<?x32xf8E4M3FN, #q8> {tapeout.extent = "rows"},
                 %ring: !cache.ring<tensor<32xf8E4M3FN, #q8>, 7 : i64>, %ids: tensor<?x4xi32> {tapeout.extent = "rows"},
                 %counts: tensor<?xi32> {tapeout.extent = "rows"}, %commits: tensor<?xi32> {tapeout.extent = "rows"},
                 %sink: tensor<2xf32>) -> tensor<?x64xbf16> {
  cache.stage(%ring, %new) {length = 7 : i64, sequences = 3 : i64} : (!cache.ring<tensor<32xf8E4M3FN, #q8>, 7 : i64>, tensor<?x32xf8E4M3FN, #q8>) -> ()
  %0 = mla.attend(%q, %ring, %ids, %counts, %sink) {heads = 2 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 0, 0, 0>, scale = 0.25 : f64} : (tensor<?x64xbf16>, !cache.ring<tensor<32xf8E4M3FN, #q8>, 7 : i64>, tensor<?x4xi32>, tensor<?xi32>, tensor<2xf32>) -> tensor<?x64xbf16>
  cache.commit(%ring, %commits) {length = 7 : i64, sequences = 3 : i64} : (!cache.ring<tensor<32xf8E4M3FN, #q8>, 7 : i64>, tensor<?xi32>) -> ()
  return %0 : tensor<?x64xbf16>
}

// CHECK-LABEL: func.func private @write
// CHECK: cache.commit(
func.func private @write(%ring: !cache.ring<tensor<1xi32>, 7 : i64>, %ids: tensor<?xi32> {tapeout.extent = "kept"}) {
  cache.commit(%ring, %ids) {length = 7 : i64, sequences = 3 : i64} : (!cache.ring<tensor<1xi32>, 7 : i64>, tensor<?xi32>) -> ()
  return
}

// CHECK-LABEL: func.func @calls
// CHECK: cache.stage(
// CHECK-NEXT: call @write(
func.func @calls(%ring: !cache.ring<tensor<1xi32>, 7 : i64>, %rows: tensor<?x1xi32> {tapeout.extent = "kept"},
                 %ids: tensor<?xi32> {tapeout.extent = "kept"}) {
  cache.stage(%ring, %rows) {length = 7 : i64, sequences = 3 : i64} : (!cache.ring<tensor<1xi32>, 7 : i64>, tensor<?x1xi32>) -> ()
  call @write(%ring, %ids) : (!cache.ring<tensor<1xi32>, 7 : i64>, tensor<?xi32>) -> ()
  return
}
