// RUN: not tapeout opt %s -p "bucket-rows{buckets=[128 16]}" 2>&1 | filecheck %s
// RUN: not tapeout opt %s -p "bucket-rows{buckets=[]}" 2>&1 | filecheck %s --check-prefix=EMPTY
// RUN: not tapeout opt %s -p "bucket-rows{buckets=[0 16]}" 2>&1 | filecheck %s --check-prefix=ZERO
// RUN: not tapeout opt %s -p "bucket-rows{buckets=[16 x]}" 2>&1 | filecheck %s --check-prefix=WORD
// RUN: not tapeout opt %s -p "bucket-rows{rows=[16]}" 2>&1 | filecheck %s --check-prefix=OPTION
// RUN: not tapeout opt %s -p "verify,bucket-row" 2>&1 | filecheck %s --check-prefix=NAME

// CHECK: [C103] pass bucket-rows: bucket-rows{buckets}: expected ascending row counts from 1 to 65536, found [128, 16]
// EMPTY: expected ascending row counts from 1 to 65536, found []
// ZERO: expected ascending row counts from 1 to 65536, found [0, 16]
// WORD: [C102] bucket-rows{buckets=[16 x]}: expected numbers, as [16 128]
// OPTION: [C102] bucket-rows{rows=[16]}: expected options buckets
// NAME: [C102] unknown pass bucket-row at column 8: expected one of verify, {{.*}}; nearest: bucket-rows
func.func @f() {
  return
}
