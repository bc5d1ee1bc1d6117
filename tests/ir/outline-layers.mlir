// RUN: tapeout opt %s -p "outline-layers" | filecheck %s
// RUN: tapeout opt %s -p "outline-layers,outline-layers" | filecheck %s
// Layers 0 and 1 are built alike and become one function with their weights as arguments; layer 2 has another epsilon. A second run changes nothing.

// CHECK-LABEL: func.func private @f_part0
// CHECK-SAME: (%[[X:[^:]*]]: tensor<?x64xbf16> {tapeout.extent = "rows"}, %[[W:[^:]*]]: tensor<64xbf16>) -> tensor<?x64xbf16>
// CHECK-NEXT: %[[N:.*]] = nn.rms_norm(%[[X]], %[[W]]) {epsilon = 9.9999999999999995E-21 : f64} :
// CHECK-NEXT: return %[[N]]
// CHECK-NOT: @f_part1
// CHECK-LABEL: func.func private @f_part2
// CHECK-NEXT: nn.rms_norm({{.*}} {epsilon = 1.000000e-03 : f64} :
// CHECK-LABEL: func.func @f(
// CHECK-NEXT: %[[A:.*]] = call @f_part0(%[[X0:.*]], %[[W0:.*]]) {tapeout.layer = "layers.0"}
// CHECK-NEXT: %[[B:.*]] = call @f_part0(%[[A]], %{{.*}}) {tapeout.layer = "layers.1"}
// CHECK-NEXT: %[[C:.*]] = call @f_part2(%[[B]], %[[W0]]) {tapeout.layer = "layers.2"}
// CHECK-NEXT: nn.rms_norm(%[[C]],
// CHECK-NEXT: return
func.func @f(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}, %w0: tensor<64xbf16>, %w1: tensor<64xbf16>) -> tensor<?x64xbf16> {
  %0 = nn.rms_norm(%x, %w0) {epsilon = 1.0e-20 : f64, tapeout.layer = "layers.0"} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %1 = nn.rms_norm(%0, %w1) {epsilon = 1.0e-20 : f64, tapeout.layer = "layers.1"} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %2 = nn.rms_norm(%1, %w0) {epsilon = 1.0e-3 : f64, tapeout.layer = "layers.2"} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %3 = nn.rms_norm(%2, %w1) {epsilon = 1.0e-20 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  return %3 : tensor<?x64xbf16>
}

// The same ops on kept rows are planned for other counts: a function of their own, whose name is free.
// CHECK-LABEL: func.func private @g_part1
// CHECK-SAME: {tapeout.extent = "kept"}
// CHECK-LABEL: func.func @g(
// CHECK-NEXT: call @g_part1(
// CHECK-LABEL: func.func @g_part0
func.func @g(%x: tensor<?x64xbf16> {tapeout.extent = "kept"}, %w: tensor<64xbf16>) -> tensor<?x64xbf16> {
  %0 = nn.rms_norm(%x, %w) {epsilon = 1.0e-20 : f64, tapeout.layer = "layers.0"} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  return %0 : tensor<?x64xbf16>
}
func.func @g_part0(%x: tensor<64xbf16>) -> tensor<64xbf16> {
  return %x : tensor<64xbf16>
}
