// RUN: not tapeout opt %s -p "verify" 2>&1 | filecheck %s
// A ring is written by its commit; a row staged behind it would be lost with the next step.

// CHECK: tapeout: [C103] pass verify: cache.stage at loc("-":{{[0-9]+}}:{{[0-9]+}}) uses a ring that cache.commit at loc("-":{{[0-9]+}}:{{[0-9]+}}) has already written
// CHECK-SAME: expected every read and stage of a step in front of its commit
// CHECK-SAME: move the commit behind it
func.func @late(%ring: !cache.ring<tensor<1xi32>, 7 : i64>, %rows: tensor<?x1xi32> {tapeout.extent = "rows"},
                %ids: tensor<?xi32> {tapeout.extent = "rows"}) {
  cache.commit(%ring, %ids) {length = 7 : i64, sequences = 3 : i64} : (!cache.ring<tensor<1xi32>, 7 : i64>, tensor<?xi32>) -> ()
  cache.stage(%ring, %rows) {length = 7 : i64, sequences = 3 : i64} : (!cache.ring<tensor<1xi32>, 7 : i64>, tensor<?x1xi32>) -> ()
  return
}
