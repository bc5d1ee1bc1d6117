"""Small tile kernels that the tests of this folder share."""

from typing import Any

from tapeout.codegen import tile_builder as t


def scale(name: str = "scale", rows: int = 4, columns: int = 32) -> Any:
    """y = 2 x of f32 rows, in blocks of rows: a vector kernel with a ragged edge."""

    def body(x: Any, y: Any, count: Any) -> None:
        valid, row = t.scalar(count, 0), t.mul(t.program_id(0), rows)
        box = t.View(x, [valid, columns]).load([row, 0], [rows, columns])
        t.View(y, [valid, columns]).store([row, 0], t.mul(box, 2.0))

    return t.kernel(name, {"x": "f32", "y": "f32", "count": "i32"}, body, lambda *b: [t.ceil_div(t.scalar(b[2], 0), rows)])


def product(m: int = 16, n: int = 32, k: int = 64) -> Any:
    """y = a b in bf16, one block: a cube kernel."""

    def body(a: Any, b: Any, y: Any) -> None:
        left, right = t.View(a, [m, k]).load([0, 0], [m, k]), t.View(b, [k, n]).load([0, 0], [k, n])
        t.View(y, [m, n]).store([0, 0], t.cast(t.dot(left, right), "bf16"))

    return t.kernel("product", {"a": "bf16", "b": "bf16", "y": "bf16"}, body, lambda *b: [1])


def rounded(n: int = 64) -> Any:
    """y = x through e4m3 and back: what the compiler would drop."""

    def body(x: Any, y: Any) -> None:
        box = t.View(x, [n]).load([0], [n])
        t.View(y, [n]).store([0], t.cast(t.cast(box, "e4m3"), "f32"))

    return t.kernel("rounded", {"x": "f32", "y": "f32"}, body, lambda *b: [1])


def largest_log() -> Any:
    """y = log of the largest of all x [count, 64]: a loop that carries one number."""

    def body(x: Any, y: Any, count: Any) -> None:
        def step(row: Any, best: Any) -> list[Any]:
            return [t.maximum(best, t.reduce(t.View(x, [None, 64]).load([row, 0], [64]), "max", 0))]

        (best,) = t.loop(0, t.scalar(count, 0), 1, [t.full([], 0.0)], step)
        t.View(y, [None]).store([0], t.log(best))

    return t.kernel("largest_log", {"x": "f32", "y": "f32", "count": "i32"}, body, lambda *b: [1])


def sums_of_blocks(scale: float | None = None) -> Any:
    """y[b] = sum of block b of x [3, 64], the next block loaded while one is added up, and times `scale` if there is one."""

    def body(x: Any, y: Any) -> None:
        def block(number: Any) -> Any:
            box = t.View(x, [3, 64]).load([number, 0], [1, 64])
            return box if scale is None else t.mul(box, scale)

        def step(number: Any, held: Any) -> list[Any]:
            ahead = block(t.minimum(t.add(number, 1), 2))
            t.View(y, [None]).store([number], t.reduce(held, "add", 1))
            return [ahead]

        t.loop(0, 3, 1, [block(0)], step)

    return t.kernel("sums_of_blocks", {"x": "f32", "y": "f32"}, body, lambda *b: [1])


def numbered(rows: int = 16, n: int = 128) -> Any:
    """y[r] = sum over the columns below count of column + x[r]: lane numbers in a loop that reduces."""

    def body(x: Any, y: Any, count: Any) -> None:
        inside = t.broadcast(t.less(t.iota(n), t.splat(t.scalar(count, 0), [n])), 0, rows)
        columns = t.add(t.broadcast(t.iota(n), 0, rows), t.broadcast(t.View(x, [rows]).load([0], [rows]), 1, n))
        t.View(y, [rows]).store([0], t.reduce(t.select(inside, columns, 0), "add", 1))

    return t.kernel("numbered", {"x": "i32", "y": "i32", "count": "i32"}, body, lambda *b: [1])


def handed_over(rows: int = 16, n: int = 32) -> Any:
    """y = a a^T through a workspace, row by row: a mixed kernel whose vector cores must meet."""

    def body(a: Any, y: Any, work: Any) -> None:
        box = t.View(a, [rows, n]).load([0, 0], [rows, n])
        t.View(work, [rows, rows]).store([0, 0], t.dot(box, t.transpose(box)))

        def step(r: Any) -> None:
            line = t.View(work, [rows, rows]).load([r, 0], [1, rows])
            t.View(y, [rows, rows]).store([t.sub(rows - 1, r), 0], t.add(line, 1.0))

        t.loop(0, rows, 1, [], step)

    return t.kernel("handed_over", {"a": "bf16", "y": "f32", "work": "f32"}, body, lambda *b: [1])


MX = """
func.func @mx(%lock: memref<?xi8>, %work: memref<?xi8>, %a: memref<?xf8E4M3FN>, %b: memref<?xf8E4M3FN>, %sa: memref<?xi8>, %sb: memref<?xi8>,
    %c: memref<?xf32>, %gx: i32, %gy: i32, %gz: i32, %px: i32, %py: i32, %pz: i32)
    attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", mix_mode = "MODE", parallel_mode = "simd"} {
  %ga = memref.reinterpret_cast %a to offset: [0], sizes: [16, 64], strides: [64, 1] : memref<?xf8E4M3FN> to memref<16x64xf8E4M3FN, strided<[64, 1]>>
  %la = memref.alloc() : memref<16x64xf8E4M3FN>
  memref.copy %ga, %la : memref<16x64xf8E4M3FN, strided<[64, 1]>> to memref<16x64xf8E4M3FN>
  %ta = bufferization.to_tensor %la restrict writable : memref<16x64xf8E4M3FN>
  %gb = memref.reinterpret_cast %b to offset: [0], sizes: [BROWS], strides: [BSTEP, 1] : memref<?xf8E4M3FN> to memref<BSHAPExf8E4M3FN, strided<[BSTEP, 1]>>
  %lb = memref.alloc() : memref<BSHAPExf8E4M3FN>
  memref.copy %gb, %lb : memref<BSHAPExf8E4M3FN, strided<[BSTEP, 1]>> to memref<BSHAPExf8E4M3FN>
  %tb = bufferization.to_tensor %lb restrict writable : memref<BSHAPExf8E4M3FN>
  TURN
  %gsa = memref.reinterpret_cast %sa to offset: [0], sizes: [16, 2], strides: [2, 1] : memref<?xi8> to memref<16x2xi8, strided<[2, 1]>>
  %lsa = memref.alloc() : memref<16x2xi8>
  memref.copy %gsa, %lsa : memref<16x2xi8, strided<[2, 1]>> to memref<16x2xi8>
  %tsa = bufferization.to_tensor %lsa restrict writable : memref<16x2xi8>
  %gsb = memref.reinterpret_cast %sb to offset: [0], sizes: [64, 2], strides: [2, 1] : memref<?xi8> to memref<64x2xi8, strided<[2, 1]>>
  %lsb = memref.alloc() : memref<64x2xi8>
  memref.copy %gsb, %lsb : memref<64x2xi8, strided<[2, 1]>> to memref<64x2xi8>
  %tsb = bufferization.to_tensor %lsb restrict writable : memref<64x2xi8>
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<16x64xf32>
  %init = linalg.fill ins(%zero : f32) outs(%e : tensor<16x64xf32>) -> tensor<16x64xf32>
  %sum = hfusion.matmul_mx ins(%ta, OPERAND, %tsa, %tsb : tensor<16x64xf8E4M3FN>, tensor<64x64xf8E4M3FN>, tensor<16x2xi8>, tensor<64x2xi8>) outs(%init : tensor<16x64xf32>) -> tensor<16x64xf32>
  %gc = memref.reinterpret_cast %c to offset: [0], sizes: [16, 64], strides: [64, 1] : memref<?xf32> to memref<16x64xf32, strided<[64, 1]>>
  bufferization.materialize_in_destination %sum in writable %gc : (tensor<16x64xf32>, memref<16x64xf32, strided<[64, 1]>>) -> ()
  return
}
"""  # noqa: E501
"""A block-scaled product on the tile contract, with words to be replaced."""
