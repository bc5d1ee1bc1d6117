// RUN: tapeout opt %s -p "select-kernels" | filecheck %s
// Every op, and every group, carries its family and schedule row; equal requests get equal rows.

#q8 = #format.scaled<"e8m0", 1 : i64, 32 : i64>

// CHECK-LABEL: func.func @f
// CHECK-NEXT: nn.rms_norm({{.*}} tapeout.kernel = "rms_norm", tapeout.schedule = {block_columns = [[C:[0-9]+]] : i64, block_rows = [[R:[0-9]+]] : i64}}
// CHECK-NEXT: nn.rms_norm({{.*}} tapeout.kernel = "rms_norm", tapeout.schedule = {block_columns = [[C]] : i64, block_rows = [[R]] : i64}}
// CHECK-NEXT: nn.fused(
// CHECK: nn.rms_norm({{.*}} {epsilon = 9.9999999999999995E-21 : f64} :
// CHECK-NEXT: nn.quantize(%{{[^,]*}}) :
// CHECK-NEXT: nn.yield(
// CHECK-NEXT: kind = "norm_quantize", {{.*}} tapeout.kernel = "rms_norm", tapeout.schedule = {block_columns =
func.func @f(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}, %w: tensor<64xbf16>) -> tensor<?x64xf8E4M3FN, #q8> {
  %0 = nn.rms_norm(%x, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %1 = nn.rms_norm(%0, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %2 = "nn.fused"(%1, %w) ({
  ^bb0(%y: tensor<?x64xbf16>, %v: tensor<64xbf16>):
    %3 = nn.rms_norm(%y, %v) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
    %4 = nn.quantize(%3) : (tensor<?x64xbf16>) -> tensor<?x64xf8E4M3FN, #q8>
    nn.yield(%4) {operandSegmentSizes = array<i32: 1, 0, 0, 0>} : (tensor<?x64xf8E4M3FN, #q8>) -> ()
  }) {kind = "norm_quantize", operandSegmentSizes = array<i32: 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0>, resultSegmentSizes = array<i32: 1, 0, 0, 0>} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xf8E4M3FN, #q8>
  return %2 : tensor<?x64xf8E4M3FN, #q8>
}
