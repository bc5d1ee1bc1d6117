"builtin.module"() ({
  "func.func"() <{function_type = (memref<?xi8>, memref<?xi8>, memref<?xf32>, memref<?xf32>, memref<?xi32>, i32, i32, i32, i32, i32, i32) -> (), sym_name = "scale"}> ({
  ^bb0(%arg0: memref<?xi8>, %arg1: memref<?xi8>, %arg2: memref<?xf32>, %arg3: memref<?xf32>, %arg4: memref<?xi32>, %arg5: i32, %arg6: i32, %arg7: i32, %arg8: i32, %arg9: i32, %arg10: i32):
    %0 = "arith.constant"() <{value = 0 : index}> : () -> index
    %1 = "memref.reinterpret_cast"(%arg4, %0) <{operandSegmentSizes = array<i32: 1, 1, 0, 0>, static_offsets = array<i64: -9223372036854775808>, static_sizes = array<i64: 1>, static_strides = array<i64: 1>}> : (memref<?xi32>, index) -> memref<1xi32, strided<[1], offset: ?>>
    %2 = "arith.constant"() <{value = 0 : index}> : () -> index
    %3 = "memref.load"(%1, %2) : (memref<1xi32, strided<[1], offset: ?>>, index) -> i32
    %4 = "arith.index_cast"(%3) : (i32) -> index
    %5 = "arith.constant"() <{value = 3 : index}> : () -> index
    %6 = "arith.addi"(%4, %5) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
    %7 = "arith.constant"() <{value = 4 : index}> : () -> index
    %8 = "arith.divui"(%6, %7) : (index, index) -> index
    %9 = "arith.constant"() <{value = 1 : index}> : () -> index
    %10 = "arith.constant"() <{value = 1 : index}> : () -> index
    %11 = "arith.muli"(%8, %9) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
    %12 = "arith.muli"(%11, %10) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
    %13 = "arith.index_cast"(%arg8) : (i32) -> index
    %14 = "arith.index_cast"(%arg5) : (i32) -> index
    "scf.for"(%13, %12, %14) ({
    ^bb0(%arg11: index):
      %15 = "arith.muli"(%8, %9) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %16 = "arith.remui"(%arg11, %8) : (index, index) -> index
      %17 = "arith.divui"(%arg11, %8) : (index, index) -> index
      %18 = "arith.remui"(%17, %9) : (index, index) -> index
      %19 = "arith.divui"(%arg11, %15) : (index, index) -> index
      %20 = "arith.constant"() <{value = 0 : index}> : () -> index
      %21 = "memref.reinterpret_cast"(%arg4, %20) <{operandSegmentSizes = array<i32: 1, 1, 0, 0>, static_offsets = array<i64: -9223372036854775808>, static_sizes = array<i64: 1>, static_strides = array<i64: 1>}> : (memref<?xi32>, index) -> memref<1xi32, strided<[1], offset: ?>>
      %22 = "arith.constant"() <{value = 0 : index}> : () -> index
      %23 = "memref.load"(%21, %22) : (memref<1xi32, strided<[1], offset: ?>>, index) -> i32
      %24 = "arith.index_cast"(%23) : (i32) -> index
      %25 = "arith.constant"() <{value = 4 : index}> : () -> index
      %26 = "arith.muli"(%16, %25) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %27 = "arith.constant"() <{value = 0 : index}> : () -> index
      %28 = "memref.alloc"() <{operandSegmentSizes = array<i32: 0, 0>}> : () -> memref<4x32xf32>
      %29 = "arith.subi"(%24, %26) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %30 = "arith.constant"() <{value = 0 : index}> : () -> index
      %31 = "arith.maxsi"(%29, %30) : (index, index) -> index
      %32 = "arith.constant"() <{value = 4 : index}> : () -> index
      %33 = "arith.minsi"(%31, %32) : (index, index) -> index
      %34 = "arith.constant"() <{value = 0 : index}> : () -> index
      %35 = "arith.constant"() <{value = 32 : index}> : () -> index
      %36 = "arith.muli"(%26, %35) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %37 = "arith.addi"(%34, %36) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %38 = "arith.constant"() <{value = 1 : index}> : () -> index
      %39 = "arith.muli"(%27, %38) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %40 = "arith.addi"(%37, %39) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %41 = "memref.reinterpret_cast"(%arg2, %40) <{operandSegmentSizes = array<i32: 1, 1, 0, 0>, static_offsets = array<i64: -9223372036854775808>, static_sizes = array<i64: 4, 32>, static_strides = array<i64: 32, 1>}> : (memref<?xf32>, index) -> memref<4x32xf32, strided<[32, 1], offset: ?>>
      %42 = "memref.subview"(%41, %33) <{operandSegmentSizes = array<i32: 1, 0, 1, 0>, static_offsets = array<i64: 0, 0>, static_sizes = array<i64: -9223372036854775808, 32>, static_strides = array<i64: 1, 1>}> : (memref<4x32xf32, strided<[32, 1], offset: ?>>, index) -> memref<?x32xf32, strided<[32, 1], offset: ?>>
      %43 = "memref.subview"(%28, %33) <{operandSegmentSizes = array<i32: 1, 0, 1, 0>, static_offsets = array<i64: 0, 0>, static_sizes = array<i64: -9223372036854775808, 32>, static_strides = array<i64: 1, 1>}> : (memref<4x32xf32>, index) -> memref<?x32xf32, strided<[32, 1]>>
      "memref.copy"(%42, %43) : (memref<?x32xf32, strided<[32, 1], offset: ?>>, memref<?x32xf32, strided<[32, 1]>>) -> ()
      %44 = "bufferization.to_tensor"(%28) <{restrict, writable}> : (memref<4x32xf32>) -> tensor<4x32xf32>
      %45 = "arith.constant"() <{value = dense<2.000000e+00> : tensor<4x32xf32>}> : () -> tensor<4x32xf32>
      %46 = "arith.mulf"(%44, %45) <{fastmath = #arith.fastmath<none>}> : (tensor<4x32xf32>, tensor<4x32xf32>) -> tensor<4x32xf32>
      %47 = "arith.constant"() <{value = 0 : index}> : () -> index
      %48 = "arith.subi"(%24, %26) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %49 = "arith.constant"() <{value = 0 : index}> : () -> index
      %50 = "arith.maxsi"(%48, %49) : (index, index) -> index
      %51 = "arith.constant"() <{value = 4 : index}> : () -> index
      %52 = "arith.minsi"(%50, %51) : (index, index) -> index
      %53 = "arith.constant"() <{value = 0 : index}> : () -> index
      %54 = "arith.constant"() <{value = 32 : index}> : () -> index
      %55 = "arith.muli"(%26, %54) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %56 = "arith.addi"(%53, %55) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %57 = "arith.constant"() <{value = 1 : index}> : () -> index
      %58 = "arith.muli"(%47, %57) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %59 = "arith.addi"(%56, %58) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %60 = "memref.reinterpret_cast"(%arg3, %59) <{operandSegmentSizes = array<i32: 1, 1, 0, 0>, static_offsets = array<i64: -9223372036854775808>, static_sizes = array<i64: 4, 32>, static_strides = array<i64: 32, 1>}> : (memref<?xf32>, index) -> memref<4x32xf32, strided<[32, 1], offset: ?>>
      %61 = "tensor.extract_slice"(%46, %52) <{operandSegmentSizes = array<i32: 1, 0, 1, 0>, static_offsets = array<i64: 0, 0>, static_sizes = array<i64: -9223372036854775808, 32>, static_strides = array<i64: 1, 1>}> : (tensor<4x32xf32>, index) -> tensor<?x32xf32>
      %62 = "memref.subview"(%60, %52) <{operandSegmentSizes = array<i32: 1, 0, 1, 0>, static_offsets = array<i64: 0, 0>, static_sizes = array<i64: -9223372036854775808, 32>, static_strides = array<i64: 1, 1>}> : (memref<4x32xf32, strided<[32, 1], offset: ?>>, index) -> memref<?x32xf32, strided<[32, 1], offset: ?>>
      "bufferization.materialize_in_destination"(%61, %62) <{writable}> : (tensor<?x32xf32>, memref<?x32xf32, strided<[32, 1], offset: ?>>) -> ()
      "scf.yield"() : () -> ()
    }) : (index, index, index) -> ()
    "func.return"() : () -> ()
  }) {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", mix_mode = "aiv", parallel_mode = "simd"} : () -> ()
}) : () -> ()
