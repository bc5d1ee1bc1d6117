// RUN: tapeout opt %s -p "bucket-rows{buckets=[3 17 64]}" | filecheck %s
// RUN: tapeout opt %s -p "bucket-rows" | filecheck %s --check-prefix=DEFAULT

// CHECK: func.func @f({{.*}}) attributes {tapeout.buckets = [3, 17, 64]}
// CHECK: func.func @g() attributes {tapeout.buckets = [3, 17, 64]}
// DEFAULT: func.func @f({{.*}}) attributes {tapeout.buckets = [16, 128, 512]}
func.func @f(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}) {
  return
}
func.func @g() {
  return
}
