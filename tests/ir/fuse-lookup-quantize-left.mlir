// RUN: tapeout opt %s -p "fuse-lookup-quantize" | filecheck %s
// Decoded rows that somebody reads stay as they are.

#q8 = #format.scaled<"e8m0", 1 : i64, 32 : i64>

// CHECK-LABEL: func.func @read
// CHECK-NOT: nn.fused
func.func @read(%ids: tensor<?x3xi32> {tapeout.extent = "rows"},
                %table: tensor<7x64xf8E4M3FN, #q8>) -> (tensor<?x192xbf16>, tensor<?x192xf8E4M3FN, #q8>) {
  %0 = engram.lookup(%ids, %table) : (tensor<?x3xi32>, tensor<7x64xf8E4M3FN, #q8>) -> tensor<?x192xbf16>
  %1 = nn.quantize(%0) : (tensor<?x192xbf16>) -> tensor<?x192xf8E4M3FN, #q8>
  return %0, %1 : tensor<?x192xbf16>, tensor<?x192xf8E4M3FN, #q8>
}
