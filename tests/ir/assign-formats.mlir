// RUN: tapeout opt %s -p "assign-formats" | filecheck %s
// f64 goes: rows become BF16, wide results FP32, and nn.quantize stands in front of FP8 products and state writes, once for each value.

#q8 = #format.scaled<"e8m0", 1 : i64, 32 : i64>
#w8 = #format.scaled<"e8m0", 32 : i64, 32 : i64>

// CHECK-LABEL: func.func @products
// CHECK-SAME: %[[X:[^:]*]]: tensor<?x64xbf16> {tapeout.extent = "rows"}
// CHECK-SAME: %[[W:[^:]*]]: tensor<32x64xf8E4M3FN
// CHECK-NEXT: %[[Q:.*]] = nn.quantize(%[[X]]) {tapeout.layer = "layers.3"} : (tensor<?x64xbf16>) -> tensor<?x64xf8E4M3FN, #format.scaled<"e8m0", 1 : i64, 32 : i64>>
// CHECK-NEXT: %[[A:.*]] = nn.linear(%[[Q]], %[[W]]) {groups = 1 : i64, tapeout.layer = "layers.3", wide = false}
// CHECK-SAME: -> tensor<?x32xbf16>
// CHECK-NEXT: nn.linear(%[[Q]], %[[W]]) {groups = 1 : i64, wide = true}
// CHECK-SAME: -> tensor<?x32xf32>
// CHECK-NEXT: return %[[A]]
// CHECK-NOT: f64
func.func @products(%x: tensor<?x64xf64> {tapeout.extent = "rows"}, %w: tensor<32x64xf8E4M3FN, #w8>) -> (tensor<?x32xf64>, tensor<?x32xf64>) {
  %0 = nn.linear(%x, %w) {groups = 1 : i64, wide = false, tapeout.layer = "layers.3"} : (tensor<?x64xf64>, tensor<32x64xf8E4M3FN, #w8>) -> tensor<?x32xf64>
  %1 = nn.linear(%x, %w) {groups = 1 : i64, wide = true} : (tensor<?x64xf64>, tensor<32x64xf8E4M3FN, #w8>) -> tensor<?x32xf64>
  return %0, %1 : tensor<?x32xf64>, tensor<?x32xf64>
}

// A grouped product and one with a BF16 weight take their rows as they are.
// CHECK-LABEL: func.func @as_given
// CHECK-NOT: nn.quantize
// CHECK: nn.linear
// CHECK: nn.linear
// CHECK: return
func.func @as_given(%x: tensor<?x64xf64> {tapeout.extent = "rows"}, %w: tensor<32x32xf8E4M3FN, #w8>, %b: tensor<8x64xbf16>) -> (tensor<?x32xf64>, tensor<?x8xf64>) {
  %0 = nn.linear(%x, %w) {groups = 2 : i64, wide = false} : (tensor<?x64xf64>, tensor<32x32xf8E4M3FN, #w8>) -> tensor<?x32xf64>
  %1 = nn.linear(%x, %b) {groups = 1 : i64, wide = false} : (tensor<?x64xf64>, tensor<8x64xbf16>) -> tensor<?x8xf64>
  return %0, %1 : tensor<?x32xf64>, tensor<?x8xf64>
}

// A state is kept in the number its argument asks for, and written in it.
// CHECK-LABEL: func.func @states
// CHECK-SAME: !cache.ring<tensor<32xf8E4M3FN, #format.scaled<"e8m0", 1 : i64, 32 : i64>>, 7 : i64> {tapeout.format = "q8"}
// CHECK-SAME: !cache.blocks<tensor<32xf4E2M1FN, #format.scaled<"e4m3", 1 : i64, 16 : i64>>, 2 : i64> {tapeout.format = "q4main"}
// CHECK: %[[E:.*]] = nn.quantize({{.*}} -> tensor<?x32xf4E2M1FN, #format.scaled<"e4m3", 1 : i64, 16 : i64>>
// CHECK: %[[K:.*]] = nn.quantize({{.*}} -> tensor<?x32xf8E4M3FN, #format.scaled<"e8m0", 1 : i64, 32 : i64>>
// CHECK: cache.stage(%{{.*}}, %[[K]])
// CHECK: cache.append(%{{.*}}, %[[E]],
func.func @states(%x: tensor<?x32xf64> {tapeout.extent = "rows"}, %ring: !cache.ring<tensor<32xf64>, 7 : i64> {tapeout.format = "q8"},
                  %entries: !cache.blocks<tensor<32xf64>, 2 : i64> {tapeout.format = "q4main"}, %ids: tensor<?xi32> {tapeout.extent = "rows"}) {
  cache.stage(%ring, %x) {length = 7 : i64, sequences = 3 : i64} : (!cache.ring<tensor<32xf64>, 7 : i64>, tensor<?x32xf64>) -> ()
  cache.append(%entries, %x, %ids) : (!cache.blocks<tensor<32xf64>, 2 : i64>, tensor<?x32xf64>, tensor<?xi32>) -> ()
  return
}
