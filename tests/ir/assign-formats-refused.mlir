// RUN: not tapeout opt %s -p "assign-formats" 2>&1 | filecheck %s

// CHECK: tapeout: [C103] pass assign-formats: argument 0 of @unknown has tapeout.format q5; expected one of q8, q4main, q4index, f32, bf16
func.func @unknown(%x: tensor<?x64xf64> {tapeout.extent = "rows", tapeout.format = "q5"}) {
  return
}
