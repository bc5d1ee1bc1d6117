// RUN: tapeout opt %s -p "fuse-draft-draw" | filecheck %s
// Logits that something else reads too stay in memory, and so do those that are rounded before they are drawn from.

// CHECK-LABEL: func.func @read
// CHECK-NOT: nn.fused
func.func @read(%b: tensor<?x64xf32> {tapeout.extent = "drafts"}, %m: tensor<?x64xf32> {tapeout.extent = "sequences"}, %t: tensor<?xf32> {tapeout.extent = "sequences"},
                 %k: tensor<?xi32> {tapeout.extent = "sequences"}, %p: tensor<?xf32> {tapeout.extent = "sequences"}, %s: tensor<?xi64> {tapeout.extent = "sequences"},
                 %a: tensor<?xi32> {tapeout.extent = "sequences"}) -> (tensor<?xi32>, tensor<?x64xf32>) {
  %0 = dspark.correct(%b, %m) {size = 5 : i64, step = 2 : i64} : (tensor<?x64xf32>, tensor<?x64xf32>) -> tensor<?x64xf32>
  %1, %2 = sample.draw(%0, %t, %k, %p, %s, %a) {stream = 3 : i64} : (tensor<?x64xf32>, tensor<?xf32>, tensor<?xi32>, tensor<?xf32>, tensor<?xi64>, tensor<?xi32>) -> (tensor<?xi32>, tensor<?xf32>)
  return %1, %0 : tensor<?xi32>, tensor<?x64xf32>
}

// CHECK-LABEL: func.func @rounded
// CHECK-NOT: nn.fused
func.func @rounded(%b: tensor<?x64xbf16> {tapeout.extent = "drafts"}, %m: tensor<?x64xf32> {tapeout.extent = "sequences"}, %t: tensor<?xf32> {tapeout.extent = "sequences"},
                 %k: tensor<?xi32> {tapeout.extent = "sequences"}, %p: tensor<?xf32> {tapeout.extent = "sequences"}, %s: tensor<?xi64> {tapeout.extent = "sequences"},
                 %a: tensor<?xi32> {tapeout.extent = "sequences"}) -> tensor<?xi32> {
  %0 = dspark.correct(%b, %m) {size = 5 : i64, step = 2 : i64} : (tensor<?x64xbf16>, tensor<?x64xf32>) -> tensor<?x64xbf16>
  %1, %2 = sample.draw(%0, %t, %k, %p, %s, %a) {stream = 3 : i64} : (tensor<?x64xbf16>, tensor<?xf32>, tensor<?xi32>, tensor<?xf32>, tensor<?xi64>, tensor<?xi32>) -> (tensor<?xi32>, tensor<?xf32>)
  return %1 : tensor<?xi32>
}
