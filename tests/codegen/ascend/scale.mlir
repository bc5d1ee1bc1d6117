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
      %15 = "arith.remui"(%arg11, %8) : (index, index) -> index
      %16 = "arith.constant"() <{value = 0 : index}> : () -> index
      %17 = "memref.reinterpret_cast"(%arg4, %16) <{operandSegmentSizes = array<i32: 1, 1, 0, 0>, static_offsets = array<i64: -9223372036854775808>, static_sizes = array<i64: 1>, static_strides = array<i64: 1>}> : (memref<?xi32>, index) -> memref<1xi32, strided<[1], offset: ?>>
      %18 = "arith.constant"() <{value = 0 : index}> : () -> index
      %19 = "memref.load"(%17, %18) : (memref<1xi32, strided<[1], offset: ?>>, index) -> i32
      %20 = "arith.index_cast"(%19) : (i32) -> index
      %21 = "arith.constant"() <{value = 4 : index}> : () -> index
      %22 = "arith.muli"(%15, %21) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %23 = "arith.constant"() <{value = 0 : index}> : () -> index
      %24 = "memref.alloc"() <{operandSegmentSizes = array<i32: 0, 0>}> : () -> memref<4x32xf32>
      %25 = "arith.subi"(%20, %22) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %26 = "arith.constant"() <{value = 0 : index}> : () -> index
      %27 = "arith.maxsi"(%25, %26) : (index, index) -> index
      %28 = "arith.constant"() <{value = 4 : index}> : () -> index
      %29 = "arith.minsi"(%27, %28) : (index, index) -> index
      %30 = "arith.constant"() <{value = 0 : index}> : () -> index
      %31 = "arith.constant"() <{value = 32 : index}> : () -> index
      %32 = "arith.muli"(%22, %31) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %33 = "arith.addi"(%30, %32) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %34 = "arith.constant"() <{value = 1 : index}> : () -> index
      %35 = "arith.muli"(%23, %34) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %36 = "arith.addi"(%33, %35) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %37 = "memref.reinterpret_cast"(%arg2, %36) <{operandSegmentSizes = array<i32: 1, 1, 0, 0>, static_offsets = array<i64: -9223372036854775808>, static_sizes = array<i64: 4, 32>, static_strides = array<i64: 32, 1>}> : (memref<?xf32>, index) -> memref<4x32xf32, strided<[32, 1], offset: ?>>
      %38 = "memref.subview"(%37, %29) <{operandSegmentSizes = array<i32: 1, 0, 1, 0>, static_offsets = array<i64: 0, 0>, static_sizes = array<i64: -9223372036854775808, 32>, static_strides = array<i64: 1, 1>}> : (memref<4x32xf32, strided<[32, 1], offset: ?>>, index) -> memref<?x32xf32, strided<[32, 1], offset: ?>>
      %39 = "memref.subview"(%24, %29) <{operandSegmentSizes = array<i32: 1, 0, 1, 0>, static_offsets = array<i64: 0, 0>, static_sizes = array<i64: -9223372036854775808, 32>, static_strides = array<i64: 1, 1>}> : (memref<4x32xf32>, index) -> memref<?x32xf32, strided<[32, 1]>>
      "memref.copy"(%38, %39) : (memref<?x32xf32, strided<[32, 1], offset: ?>>, memref<?x32xf32, strided<[32, 1]>>) -> ()
      %40 = "bufferization.to_tensor"(%24) <{restrict, writable}> : (memref<4x32xf32>) -> tensor<4x32xf32>
      %41 = "arith.constant"() <{value = dense<2.000000e+00> : tensor<4x32xf32>}> : () -> tensor<4x32xf32>
      %42 = "arith.mulf"(%40, %41) <{fastmath = #arith.fastmath<none>}> : (tensor<4x32xf32>, tensor<4x32xf32>) -> tensor<4x32xf32>
      %43 = "arith.constant"() <{value = 0 : index}> : () -> index
      %44 = "arith.subi"(%20, %22) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %45 = "arith.constant"() <{value = 0 : index}> : () -> index
      %46 = "arith.maxsi"(%44, %45) : (index, index) -> index
      %47 = "arith.constant"() <{value = 4 : index}> : () -> index
      %48 = "arith.minsi"(%46, %47) : (index, index) -> index
      %49 = "arith.constant"() <{value = 0 : index}> : () -> index
      %50 = "arith.constant"() <{value = 32 : index}> : () -> index
      %51 = "arith.muli"(%22, %50) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %52 = "arith.addi"(%49, %51) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %53 = "arith.constant"() <{value = 1 : index}> : () -> index
      %54 = "arith.muli"(%43, %53) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %55 = "arith.addi"(%52, %54) <{overflowFlags = #arith.overflow<none>}> : (index, index) -> index
      %56 = "memref.reinterpret_cast"(%arg3, %55) <{operandSegmentSizes = array<i32: 1, 1, 0, 0>, static_offsets = array<i64: -9223372036854775808>, static_sizes = array<i64: 4, 32>, static_strides = array<i64: 32, 1>}> : (memref<?xf32>, index) -> memref<4x32xf32, strided<[32, 1], offset: ?>>
      %57 = "tensor.extract_slice"(%42, %48) <{operandSegmentSizes = array<i32: 1, 0, 1, 0>, static_offsets = array<i64: 0, 0>, static_sizes = array<i64: -9223372036854775808, 32>, static_strides = array<i64: 1, 1>}> : (tensor<4x32xf32>, index) -> tensor<?x32xf32>
      %58 = "memref.subview"(%56, %48) <{operandSegmentSizes = array<i32: 1, 0, 1, 0>, static_offsets = array<i64: 0, 0>, static_sizes = array<i64: -9223372036854775808, 32>, static_strides = array<i64: 1, 1>}> : (memref<4x32xf32, strided<[32, 1], offset: ?>>, index) -> memref<?x32xf32, strided<[32, 1], offset: ?>>
      "bufferization.materialize_in_destination"(%57, %58) <{writable}> : (tensor<?x32xf32>, memref<?x32xf32, strided<[32, 1], offset: ?>>) -> ()
      "scf.yield"() : () -> ()
    }) : (index, index, index) -> ()
    "func.return"() : () -> ()
  }) {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", mix_mode = "aiv", parallel_mode = "simd"} : () -> ()
}) : () -> ()
