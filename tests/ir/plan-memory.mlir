// RUN: tapeout opt %s -p "bucket-rows{buckets=[1 3]},select-kernels,plan-memory{sequences=2}" | filecheck %s
// 64 BF16 columns are 128 bytes a row. The third value may lie where the first, dead by then, was; codes and scales are two parts.

#q8 = #format.scaled<"e8m0", 1 : i64, 32 : i64>

// CHECK-LABEL: func.func @chain
// CHECK-SAME: tapeout.frame = [256, 768]
// CHECK-NEXT: nn.rms_norm({{.*}} tapeout.offsets = {{\[\[}}0], [0]]
// CHECK-NEXT: nn.rms_norm({{.*}} tapeout.offsets = {{\[\[}}128], [384]]
// CHECK-NEXT: nn.rms_norm({{.*}} tapeout.offsets = {{\[\[}}0], [0]]
// CHECK-NEXT: nn.quantize({{.*}} tapeout.offsets = {{\[\[}}-1, -1], [-1, -1]]
func.func @chain(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}, %w: tensor<64xbf16>) -> tensor<?x64xf8E4M3FN, #q8> {
  %0 = nn.rms_norm(%x, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %1 = nn.rms_norm(%0, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %2 = nn.rms_norm(%1, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %3 = nn.quantize(%2) : (tensor<?x64xbf16>) -> tensor<?x64xf8E4M3FN, #q8>
  return %3 : tensor<?x64xf8E4M3FN, #q8>
}

// A callee's frame lies in its caller's, beside what is alive during the call; two sequences bound the extent of that name.
// CHECK-LABEL: func.func private @callee
// CHECK-SAME: tapeout.frame = [128, 256]
// CHECK-LABEL: func.func @caller
// CHECK-SAME: tapeout.frame = [256, 512]
// CHECK-NEXT: nn.rms_norm({{.*}} tapeout.offsets = {{\[\[}}0], [0]]
// CHECK-NEXT: call @callee({{.*}} {tapeout.offsets = {{\[\[}}-1, 128], [-1, 256]]}
func.func private @callee(%x: tensor<?x64xbf16> {tapeout.extent = "sequences"}, %w: tensor<64xbf16>) -> tensor<?x64xbf16> {
  %0 = nn.rms_norm(%x, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %1 = nn.rms_norm(%0, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  return %1 : tensor<?x64xbf16>
}
func.func @caller(%x: tensor<?x64xbf16> {tapeout.extent = "sequences"}, %w: tensor<64xbf16>) -> tensor<?x64xbf16> {
  %0 = nn.rms_norm(%x, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %1 = call @callee(%0, %w) : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  return %1 : tensor<?x64xbf16>
}
