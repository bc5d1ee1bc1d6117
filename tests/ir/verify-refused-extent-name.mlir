// RUN: not tapeout opt %s -p "verify" 2>&1 | filecheck %s
// An extent is one of five that the runtime counts; another one would be planned, and sized, as rows.

// CHECK: [C103] pass verify: argument 0 of @misspelt has tapeout.extent "output"; expected one of rows, kept, outputs, sequences, drafts
func.func @misspelt(%x: tensor<?x64xbf16> {tapeout.extent = "output"}, %w: tensor<64xbf16>) -> tensor<?x64xbf16> {
  %0 = nn.rms_norm(%x, %w) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  return %0 : tensor<?x64xbf16>
}
