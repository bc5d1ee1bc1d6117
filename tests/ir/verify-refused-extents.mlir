// RUN: not tapeout opt %s -p "verify" 2>&1 | filecheck %s
// Two run-time row counts do not meet in one op: one of them would be read beyond its end.

// CHECK: [C103] pass verify: moe.swiglu at loc("-":{{[0-9]+}}:{{[0-9]+}}) takes values of rows and kept rows; expected one extent: bring them to one with nn.take
func.func @mixed(%gate: tensor<?x64xbf16> {tapeout.extent = "rows"}, %up: tensor<?x64xbf16> {tapeout.extent = "kept"}) -> tensor<?x64xbf16> {
  %0 = moe.swiglu(%gate, %up) {limit = 10.0 : f64, operandSegmentSizes = array<i32: 1, 1, 0, 0>} : (tensor<?x64xbf16>, tensor<?x64xbf16>) -> tensor<?x64xbf16>
  return %0 : tensor<?x64xbf16>
}
