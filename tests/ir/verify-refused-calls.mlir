// RUN: not tapeout opt %s -p "verify" 2>&1 | filecheck %s
// What a call commits counts in its caller.

// CHECK: [C103] pass verify: cache.stage at loc("-":{{[0-9]+}}:{{[0-9]+}}) uses a ring that func.call at loc("-":{{[0-9]+}}:{{[0-9]+}}) has already written
func.func private @write(%ring: !cache.ring<tensor<1xi32>, 7 : i64>, %ids: tensor<?xi32> {tapeout.extent = "rows"}) {
  cache.commit(%ring, %ids) {length = 7 : i64, sequences = 3 : i64} : (!cache.ring<tensor<1xi32>, 7 : i64>, tensor<?xi32>) -> ()
  return
}
func.func @late(%ring: !cache.ring<tensor<1xi32>, 7 : i64>, %rows: tensor<?x1xi32> {tapeout.extent = "rows"},
                %ids: tensor<?xi32> {tapeout.extent = "rows"}) {
  call @write(%ring, %ids) : (!cache.ring<tensor<1xi32>, 7 : i64>, tensor<?xi32>) -> ()
  cache.stage(%ring, %rows) {length = 7 : i64, sequences = 3 : i64} : (!cache.ring<tensor<1xi32>, 7 : i64>, tensor<?x1xi32>) -> ()
  return
}
