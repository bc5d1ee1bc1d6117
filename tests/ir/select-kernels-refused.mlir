// RUN: not tapeout opt %s -p "select-kernels" 2>&1 | filecheck %s
// RUN: not tapeout opt %s -p "select-kernels{target=abacus}" 2>&1 | filecheck %s --check-prefix=TARGET
// Real numbers have no kernel: the build fails here and says which families were asked.

// CHECK: [C103] pass select-kernels: nn.rms_norm at loc("-":{{[0-9]+}}:{{[0-9]+}}): no kernel for nn.rms_norm([?, 64] f64, [64] bf16) -> [?, 64] f64 {epsilon=
// CHECK-SAME: rms_norm: x is [?, 64] f64, this kernel norms BF16 or FP32 rows
// TARGET: [C103] pass select-kernels: select-kernels{target}: found abacus, expected one of
func.func @real(%x: tensor<?x64xf64> {tapeout.extent = "rows"}, %w: tensor<64xbf16>) -> tensor<?x64xf64> {
  %0 = nn.rms_norm(%x, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xf64>, tensor<64xbf16>) -> tensor<?x64xf64>
  return %0 : tensor<?x64xf64>
}
