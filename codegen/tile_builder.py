"""What a kernel definition imports, as `t`: memory and control flow, arithmetic, number formats, in one namespace.

    from tapeout.codegen import tile_builder as t

The functions live where their idea does (`tile_memory`, `tile_arithmetic`, `tile_formats`); this file only gathers the names.
"""

from tapeout.codegen.tile_arithmetic import (
    KernelError, Number, Value, absolute, add, bit_and, bit_or, bit_xor, bitcast, broadcast, cast, ceil_div, clamp, constant, div, dot,
    dot_scaled, element_of, equal, even_odd, exact_bf16, exp, full, greater, greater_equal, index, interleave, is_tile, kind_of, less,
    less_equal, less_unsigned, like, log, log1p, logical_not, maximum, merge_first, merge_last, minimum, mul, negate, not_equal, quotient,
    quotient_unsigned, reduce, remainder, remainder_unsigned, rsqrt, select, shape_of, shl, shr, shr_unsigned, sigmoid, silu, softplus,
    splat, split_first, split_last, sqrt, sub, transpose, widen_unsigned,
)  # fmt: skip
from tapeout.codegen.tile_formats import (
    E4M3_MAX, FP4_BIAS, FP4_MAX, decode_e4m3, decode_fp4_row, decode_fp4_weight, dequantize_q8, e8m0, encode_e4m3, encode_fp4_row,
    fp4_codes, fp4_values, inverse_power, power_exponent, quantize_fp4_index, quantize_fp4_main, quantize_q8, round_bf16,
)  # fmt: skip
from tapeout.codegen.tile_memory import (
    View, argument_names, compress_store, gather, iota, kernel, kernel_name, loop, program_id, scalar, scatter, when,
)  # fmt: skip

__all__ = [
    "E4M3_MAX", "FP4_BIAS", "FP4_MAX", "KernelError", "Number", "Value", "View", "absolute", "add", "argument_names", "bit_and", "bit_or",
    "bit_xor", "bitcast", "broadcast", "cast", "ceil_div", "clamp", "compress_store", "constant", "decode_e4m3", "decode_fp4_row",
    "decode_fp4_weight", "dequantize_q8", "div", "dot", "dot_scaled", "e8m0", "element_of", "encode_e4m3", "encode_fp4_row", "equal",
    "even_odd", "exact_bf16", "exp", "fp4_codes", "fp4_values", "full", "gather", "greater", "greater_equal", "index", "interleave",
    "inverse_power", "iota", "is_tile", "kernel", "kernel_name", "kind_of", "less", "less_equal", "less_unsigned", "like", "log", "log1p",
    "logical_not", "loop", "maximum", "merge_first", "merge_last", "minimum", "mul", "negate", "not_equal", "power_exponent", "program_id",
    "quantize_fp4_index", "quantize_fp4_main", "quantize_q8", "quotient", "quotient_unsigned", "reduce", "remainder", "remainder_unsigned",
    "round_bf16", "rsqrt", "scalar", "scatter", "select", "shape_of", "shl", "shr", "shr_unsigned", "sigmoid", "silu", "softplus", "splat",
    "split_first", "split_last", "sqrt", "sub", "transpose", "when", "widen_unsigned",
]  # fmt: skip
