"""Products of every operand format at awkward shapes against the interpreter, and the invariances they promise."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tapeout.codegen import tile_builder as t
from tapeout.codegen.cpu.facts import CpuError, cpu
from tapeout.codegen.cpu.native_kernel import native_kernel
from tests.bench.bench_products import linear, linear_e4m3, linear_fp4, panels
from tests.codegen.both import agree, compiled, kernel

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
RNG = np.random.default_rng(17)
DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": BF16, "f16": np.float16}
SHAPES = (
    (1, 16, 32),
    (1, 40, 64),
    (1, 4, 7),
    (7, 33, 16),
    (13, 16, 64),
    (6, 128, 32),
    (96, 20, 40),
    (5, 3, 5),
    (2, 70, 1),
)


def exact(*shape: int) -> np.ndarray:
    """Small multiples of 1/8: every product and sum of this file is exact, so any order gives the same bits."""
    return (RNG.integers(-16, 17, shape) / 8).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", DTYPES)
def test_product_is_exact_for_every_row_count(shape: tuple[int, int, int], kind: str) -> None:
    m, n, k = shape

    def body(x: Any, w: Any, out: Any, counts: Any) -> None:
        rows = t.scalar(counts, 0)
        a, b = t.View(x, [rows, k]).load([0, 0], [m, k]), t.View(w, [k, n]).load([0, 0], [k, n])
        t.View(out, [rows, n]).store([0, 0], t.dot(a, b, t.dot(a, b)), extent=rows)

    module = kernel({"x": kind, "w": kind, "out": "f32", "counts": "i32"}, body)
    for rows in sorted({0 if m > 1 else 1, 1, m // 2 or 1, m}):
        x, w = exact(rows, k).astype(DTYPES[kind]), exact(k, n).astype(DTYPES[kind])
        out = np.full((m, n), 7, np.float32)
        found = agree(module, {"x": x, "w": w, "out": out, "counts": np.array([rows], np.int32)})["out"]
        np.testing.assert_array_equal(found[:rows], 2 * (x.astype(np.float32) @ w.astype(np.float32)))
        assert (found[rows:] == 7).all()


@pytest.mark.parametrize("shape", [(1, 4, 8), (7, 9, 20), (64, 64, 128), (3, 5, 512), (4, 1, 16), (5, 6, 3)])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_product_with_a_transposed_operand(shape: tuple[int, int, int], kind: str) -> None:
    m, n, k = shape

    def body(x: Any, w: Any, out: Any) -> None:
        a, b = t.View(x, [m, k]).load([0, 0], [m, k]), t.View(w, [n, k]).load([0, 0], [n, k])
        t.View(out, [m, n]).store([0, 0], t.dot(a, t.transpose(b), t.full([m, n], 0.5)))

    x, w = exact(m, k).astype(DTYPES[kind]), exact(n, k).astype(DTYPES[kind])
    found = agree(kernel({"x": kind, "w": kind, "out": "f32"}, body), {"x": x, "w": w, "out": np.zeros((m, n), np.float32)})["out"]
    np.testing.assert_array_equal(found, x.astype(np.float32) @ w.astype(np.float32).T + 0.5)


def test_product_of_a_transposed_left_operand() -> None:
    def body(x: Any, w: Any, out: Any) -> None:
        a, b = t.View(x, [24, 10]).load([0, 0], [24, 10]), t.View(w, [24, 32]).load([0, 0], [24, 32])
        t.View(out, [10, 32]).store([0, 0], t.dot(t.transpose(a), b))

    agree(
        kernel(dict.fromkeys(("x", "w", "out"), "f32"), body),
        {"x": exact(24, 10), "w": exact(24, 32), "out": np.zeros((10, 32), np.float32)},
    )


SCALED = (
    (64, 64, 4, 16, 32, 0),
    (48, 128, 7, 48, 64, 16),
    (40, 128, 3, 20, 128, 0),
    (32, 512, 96, 32, 256, 16),
    (16, 96, 2, 16, 96, 16),
)


@pytest.mark.parametrize("case", SCALED)
def test_block_scaled_product_uses_each_scale_where_it_belongs(case: tuple[int, ...]) -> None:
    """Every group of 32 has its own power of two; numbers are 0, 1, 2 so that all sums are exact and a misplaced scale cannot hide."""
    n, k, block_m, block_n, block_k, panel = case
    module = linear_e4m3(n, k, block_m, block_n, block_k, panel)
    for rows in (1, 3, 97):
        x, w = (RNG.integers(0, 3, s).astype(np.float32) for s in ((rows, k), (k, n)))
        xs = (127 + np.arange(rows)[:, None] % 3 + np.arange(k // 32) % 2).astype(np.int8)
        ws = (124 + (np.arange(n)[:, None] * 5 + np.arange(k // 32) * 3) % 6).astype(np.uint8).view(np.int8)
        codes = w.astype(E4M3)
        buffers = {
            "x": x.astype(E4M3),
            "xs": xs,
            "w": panels(codes) if panel else codes,
            "ws": ws,
            "y": np.zeros((rows, n), np.float32),
        }
        found = agree(module, {**buffers, "counts": np.array([rows], np.int32)})["y"]
        left = x * 2.0 ** (xs.view(np.uint8).astype(np.float64) - 127).repeat(32, axis=1)
        right = w * 2.0 ** (ws.view(np.uint8).astype(np.float64) - 127).repeat(32, axis=1).T
        np.testing.assert_array_equal(found, left @ right)


def test_packed_fp4_product() -> None:
    n, k = 48, 256
    codes = RNG.integers(0, 16, (k, n)).astype(np.uint8)
    halves = codes.reshape(k // 128, 2, 64, n)
    packed = (halves[:, 0] | halves[:, 1] << 4).reshape(k // 2, n).view(np.int8)
    exponents = (np.arange(k // 32)[:, None] * 3 + np.arange(n)) % 7 - 3
    scales = (127 + exponents).astype(np.uint8).view(np.int8)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * 2.0 ** exponents.repeat(32, axis=0)
    module = linear_fp4(n, k, 7, 48)
    for rows in (1, 2, 7, 15):
        x = exact(rows, k)
        buffers = {"x": x.astype(BF16), "w": panels(packed), "ws": scales, "y": np.zeros((rows, n), np.float32)}
        found = agree(module, {**buffers, "counts": np.array([rows], np.int32)})["y"]
        np.testing.assert_array_equal(found, x @ values)


@pytest.mark.parametrize("name", ["f32", "bf16", "e4m3", "fp4"])
def test_a_rows_bits_depend_on_nothing_but_the_row(name: str) -> None:
    """Row counts 1 to 14 and other places in the block give the bits of the whole batch, with real roundings."""
    n, k, block_m = 48, 512, 14
    rows = 14
    x, w = RNG.standard_normal((rows, k)).astype(np.float32), RNG.standard_normal((k, n)).astype(np.float32)
    scale = RNG.integers(118, 130, (n, k // 32)).astype(np.int8)
    row_scale = RNG.integers(118, 130, (rows, k // 32)).astype(np.int8)
    if name in DTYPES:
        module, inputs = (
            linear(name, n, k, block_m, n, 256),
            {"x": x.astype(DTYPES[name]), "w": panels(w.astype(DTYPES[name]))},
        )
    elif name == "e4m3":
        module = linear_e4m3(n, k, block_m, n, 256)
        inputs = {"x": x.astype(E4M3), "xs": row_scale, "w": panels(w.astype(E4M3)), "ws": scale}
    else:
        module = linear_fp4(n, k, block_m, n)
        packed = RNG.integers(-128, 128, (k // 2, n)).astype(np.int8)
        inputs = {"x": x.astype(BF16), "w": panels(packed), "ws": np.ascontiguousarray(scale.T)}
    native = native_kernel(module)

    def run(first: int, last: int) -> np.ndarray:
        part = {key: v[first:last].copy() if key in ("x", "xs") else v for key, v in inputs.items()}
        buffers = {**part, "y": np.zeros((last - first, n), np.float32), "counts": np.array([last - first], np.int32)}
        native.run(buffers)
        return buffers["y"]

    whole = run(0, rows)
    for first in range(rows):
        np.testing.assert_array_equal(run(first, rows), whole[first:])
        np.testing.assert_array_equal(run(first, first + 1), whole[first : first + 1])


def test_attention_over_gathered_rows() -> None:
    """Online softmax with a sink over gathered keys that are values too; counts 0, a part, all."""
    heads, width, block, top = 6, 64, 16, 48

    def body(q: Any, kv: Any, ids: Any, counts: Any, sink: Any, out: Any) -> None:
        token = t.program_id(0)
        count = t.scalar(counts, token)
        queries = t.View(q, [None, width]).load([t.mul(token, heads), 0], [heads, width])

        def step(at: Any, peak: Any, mass: Any, total: Any) -> list[Any]:
            keys = t.gather(kv, ids, t.add(t.mul(token, top), at), block, width)
            real = t.less(t.iota(block), t.splat(t.sub(count, at), [block]))
            logits = t.select(t.broadcast(real, 0, heads), t.mul(t.dot(queries, t.transpose(keys)), width**-0.5), -1e30)
            grown = t.maximum(peak, t.reduce(logits, "max", 1))
            share, kept = t.exp(t.sub(logits, t.broadcast(grown, 1, block))), t.exp(t.sub(peak, grown))
            mass = t.add(t.mul(mass, kept), t.reduce(share, "add", 1))
            return [grown, mass, t.dot(t.cast(share, "bf16"), keys, t.mul(total, t.broadcast(kept, 1, width)))]

        start = [t.full([heads], -1e30), t.full([heads], 0.0), t.full([heads, width], 0.0)]
        peak, mass, total = t.loop(0, count, block, start, step)
        mass = t.add(mass, t.exp(t.sub(t.View(sink, [heads]).load([0], [heads]), peak)))
        t.View(out, [None, width]).store([t.mul(token, heads), 0], t.div(total, t.broadcast(mass, 1, width)))

    module = kernel({"q": "bf16", "kv": "bf16", "ids": "i32", "counts": "i32", "sink": "f32", "out": "f32"}, body, lambda *b: [3])
    q, kv = (RNG.standard_normal(s).astype(BF16) for s in ((3 * heads, width), (100, width)))
    ids, counts = RNG.integers(-1, 100, (3, top)).astype(np.int32), np.array([0, 21, top], np.int32)
    sink = RNG.standard_normal(heads).astype(np.float32)
    agree(
        module,
        {"q": q, "kv": kv, "ids": ids, "counts": counts, "sink": sink, "out": np.zeros((3 * heads, width), np.float32)},
        1e-2,
    )


def test_native_target_gives_the_same_bits() -> None:
    """Wider registers change how many sums run side by side, not the order of one."""
    try:
        target = cpu("native")
    except CpuError as error:
        pytest.skip(str(error))
    module = linear("bf16", 48, 512, 14, 48, 256)
    x, w = RNG.standard_normal((14, 512)).astype(BF16), panels(RNG.standard_normal((512, 48)).astype(BF16))
    buffers = {"x": x, "w": w, "y": np.zeros((14, 48), np.float32), "counts": np.array([14], np.int32)}
    expected = compiled(module, buffers)["y"]
    native_kernel(module, target).run(buffers)
    np.testing.assert_array_equal(buffers["y"], expected)
