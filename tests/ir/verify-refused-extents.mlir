// RUN: not tapeout opt %s -p "verify" 2>&1 | filecheck %s
// Two run-time row counts do not meet in one op: one of them would be read beyond its end.

// CHECK: [C103] pass verify: moe.swiglu at loc("-":{{[0-9]+}}:{{[0-9]+}}) takes values of rows and kept rows; expected one extent: bring them to one with nn.take
func.func @mixed(%x: tensor<?x2x128xbf16> {tapeout.extent = "rows"}, %w: tensor<?x2xf32> {tapeout.extent = "kept"}, %o: tensor<?x2xi32> {tapeout.extent = "kept"}) -> tensor<?x2x64xbf16> {
  %0 = moe.swiglu(%x, %w, %o) {limit = 10.0 : f64, operandSegmentSizes = array<i32: 1, 1, 1>} : (tensor<?x2x128xbf16>, tensor<?x2xf32>, tensor<?x2xi32>) -> tensor<?x2x64xbf16>
  return %0 : tensor<?x2x64xbf16>
}
