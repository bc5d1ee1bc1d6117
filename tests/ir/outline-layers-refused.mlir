// RUN: not tapeout opt %s -p "outline-layers" 2>&1 | filecheck %s

// CHECK: tapeout: [C103] pass outline-layers: argument 0 of @uncounted has a run-time row count and no tapeout.extent
func.func @uncounted(%x: tensor<?x64xbf16>, %w: tensor<64xbf16>) -> tensor<?x64xbf16> {
  %0 = nn.rms_norm(%x, %w) {epsilon = 1.0e-20 : f64, tapeout.layer = "layers.0"} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  return %0 : tensor<?x64xbf16>
}
