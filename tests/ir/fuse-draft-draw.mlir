// RUN: tapeout opt %s -p "fuse-draft-draw" | filecheck %s

// CHECK-LABEL: func.func @token
// CHECK-NEXT: %[[F:.*]] = nn.fused(%{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}) ({
// CHECK: %[[L:.*]] = dspark.correct(
// CHECK-NEXT: %[[T:.*]]:2 = sample.draw(%[[L]],
// CHECK-NEXT: nn.yield(%[[T]]#0)
// CHECK-NEXT: {kind = "correct_draw"
// CHECK-NEXT: return %[[F]]
func.func @token(%b: tensor<?x64xf32> {tapeout.extent = "drafts"}, %m: tensor<?x64xf32> {tapeout.extent = "sequences"}, %t: tensor<?xf32> {tapeout.extent = "sequences"},
                 %k: tensor<?xi32> {tapeout.extent = "sequences"}, %p: tensor<?xf32> {tapeout.extent = "sequences"}, %s: tensor<?xi64> {tapeout.extent = "sequences"},
                 %a: tensor<?xi32> {tapeout.extent = "sequences"}) -> tensor<?xi32> {
  %0 = dspark.correct(%b, %m) {size = 5 : i64, step = 2 : i64} : (tensor<?x64xf32>, tensor<?x64xf32>) -> tensor<?x64xf32>
  %1, %2 = sample.draw(%0, %t, %k, %p, %s, %a) {stream = 3 : i64} : (tensor<?x64xf32>, tensor<?xf32>, tensor<?xi32>, tensor<?xf32>, tensor<?xi64>, tensor<?xi32>) -> (tensor<?xi32>, tensor<?xf32>)
  return %1 : tensor<?xi32>
}
