// RUN: not tapeout opt %s -p "bucket-rows,plan-memory" 2>&1 | filecheck %s
// RUN: not tapeout opt %s -p "select-kernels,plan-memory" 2>&1 | filecheck %s --check-prefix=BUCKETS
// RUN: not tapeout opt %s -p "bucket-rows,select-kernels,plan-memory{sequences=0}" 2>&1 | filecheck %s --check-prefix=ZERO

// CHECK: [C103] pass plan-memory: nn.rms_norm at loc("-":{{[0-9]+}}:{{[0-9]+}}) has no kernel; expected pass select-kernels in front of this one
// BUCKETS: [C103] pass plan-memory: the module has no row buckets; expected pass bucket-rows in front of this one
// ZERO: [C103] pass plan-memory: plan-memory{sequences, drafts_each}: found 0, 5, expected at least 1 each
func.func @f(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}, %w: tensor<64xbf16>) -> tensor<?x64xbf16> {
  %0 = nn.rms_norm(%x, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  return %0 : tensor<?x64xbf16>
}
