"""Prints GFLOP/s of our products and numpy's float32 product, on one thread of this machine, in the same run.

    env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE OPENBLAS_NUM_THREADS=1 python tests/bench/bench_products.py [--cpu native] [--repeat 15]

Medians of interleaved repetitions; ratio = ours / numpy. Matrix-vector is effective GFLOP/s of a 4096 x 4096 weight.
OpenBLAS takes the widest registers it finds: compare `--cpu native` with it as it is, and the AVX2 baseline with OPENBLAS_CORETYPE=Haswell.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tapeout.codegen import tile_builder as t
from tapeout.codegen.cpu.facts import BASELINE, Cpu, cpu
from tapeout.codegen.cpu.native_kernel import native_kernel

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
PANEL = 16
SHAPES = ((512, 512, 512), (37, 512, 512), (512, 2048, 2048), (1, 4096, 4096))
DTYPES: dict[str, Any] = {"bf16": BF16, "f32": np.float32}


def linear(kind: str, n: int, k: int, block_m: int, block_n: int, block_k: int) -> Any:
    """y = x w of one element type, f32 sums, weights in panels."""

    def body(x: Any, w: Any, y: Any, counts: Any) -> None:
        rows = t.scalar(counts, 0)
        m0, n0 = t.mul(t.program_id(0), block_m), t.mul(t.program_id(1), block_n)

        def step(k0: Any, acc: Any) -> list[Any]:
            a = t.View(x, [rows, k]).load([m0, k0], [block_m, block_k])
            return [t.dot(a, t.View(w, [k, n], PANEL).load([k0, n0], [block_k, block_n]), acc)]

        (acc,) = t.loop(0, k, block_k, [t.full([block_m, block_n], 0.0)], step)
        t.View(y, [rows, n]).store([m0, n0], acc)

    buffers = {"x": kind, "w": kind, "y": "f32", "counts": "i32"}
    return t.kernel(f"linear_{kind}", buffers, body, lambda *b: [t.ceil_div(t.scalar(b[3], 0), block_m), n // block_n])


def linear_e4m3(n: int, k: int, block_m: int, block_n: int, block_k: int, panel: int = PANEL) -> Any:
    """y = x w on e4m3 codes with e8m0 bytes per 32 of k."""

    def body(x: Any, xs: Any, w: Any, ws: Any, y: Any, counts: Any) -> None:
        rows = t.scalar(counts, 0)
        m0, n0 = t.mul(t.program_id(0), block_m), t.mul(t.program_id(1), block_n)

        def step(k0: Any, acc: Any) -> list[Any]:
            g0 = t.quotient(k0, 32)
            a = t.View(x, [rows, k]).load([m0, k0], [block_m, block_k])
            sa = t.View(xs, [rows, k // 32]).load([m0, g0], [block_m, block_k // 32])
            b = t.View(w, [k, n], panel).load([k0, n0], [block_k, block_n])
            sb = t.View(ws, [n, k // 32]).load([n0, g0], [block_n, block_k // 32])
            return [t.dot_scaled(a, sa, b, sb, acc)]

        (acc,) = t.loop(0, k, block_k, [t.full([block_m, block_n], 0.0)], step)
        t.View(y, [rows, n]).store([m0, n0], acc)

    buffers = {"x": "e4m3", "xs": "i8", "w": "e4m3", "ws": "i8", "y": "f32", "counts": "i32"}
    return t.kernel("linear_e4m3", buffers, body, lambda *b: [t.ceil_div(t.scalar(b[5], 0), block_m), n // block_n])


def linear_fp4(n: int, k: int, block_m: int, block_n: int) -> Any:
    """y = x w on bf16 rows and packed e2m1 weights with e8m0 bytes per 32 of k."""

    def body(x: Any, w: Any, ws: Any, y: Any, counts: Any) -> None:
        rows = t.scalar(counts, 0)
        m0, n0 = t.mul(t.program_id(0), block_m), t.mul(t.program_id(1), block_n)

        def step(i: Any, acc: Any) -> list[Any]:
            codes = t.View(w, [k // 2, n], PANEL).load([t.mul(i, 64), n0], [64, block_n])
            scales = [t.View(ws, [k // 32, n]).load([t.add(t.mul(i, 4), d), n0], [2, block_n]) for d in (0, 2)]
            for half, b in enumerate(t.decode_fp4_weight(codes, *scales)):
                a = t.View(x, [rows, k]).load([m0, t.add(t.mul(i, 128), 64 * half)], [block_m, 64])
                acc = t.dot(a, b, acc)
            return [acc]

        (acc,) = t.loop(0, k // 128, 1, [t.full([block_m, block_n], 0.0)], step)
        t.View(y, [rows, n]).store([m0, n0], acc)

    buffers = {"x": "bf16", "w": "i8", "ws": "i8", "y": "f32", "counts": "i32"}
    return t.kernel("linear_fp4", buffers, body, lambda *b: [t.ceil_div(t.scalar(b[4], 0), block_m), n // block_n])


def panels(w: np.ndarray) -> np.ndarray:
    """[K, N] as [N/16][K][16]."""
    k, n = w.shape
    return np.ascontiguousarray(w.reshape(k, n // PANEL, PANEL).transpose(1, 0, 2))


def cases(m: int, n: int, k: int, rng: np.random.Generator) -> dict[str, tuple[Any, dict[str, np.ndarray]]]:
    """name -> (kernel module, buffers)."""
    x, w = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    y, counts = np.zeros((m, n), np.float32), np.array([m], np.int32)
    xs, ws = (rng.integers(118, 130, s).astype(np.int8) for s in ((m, k // 32), (n, k // 32)))
    packed = rng.integers(-128, 128, (k // 2, n)).astype(np.int8)
    block_m, block_n = min(m, 192), min(n, 256)
    out = {
        kind: (
            linear(kind, n, k, block_m, block_n, 256),
            {"x": x.astype(d), "w": panels(w.astype(d)), "y": y, "counts": counts},
        )
        for kind, d in DTYPES.items()
    }
    scaled = {"x": x.astype(E4M3), "xs": xs, "w": panels(w.astype(E4M3)), "ws": ws, "y": y, "counts": counts}
    out["e4m3"] = linear_e4m3(n, k, block_m, block_n, 256), scaled
    fp4 = {"x": x.astype(BF16), "w": panels(packed), "ws": np.ascontiguousarray(ws.T), "y": y, "counts": counts}
    out["fp4"] = linear_fp4(n, k, block_m, block_n), fp4
    return out


def seconds(calls: dict[str, Callable[[], Any]], repeat: int) -> dict[str, float]:
    """Median seconds of each call, taken in turns so that other load meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeat + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found[2:]) for name, found in times.items()}


def measure(m: int, n: int, k: int, target: Cpu, repeat: int) -> None:
    """Prints one line."""
    rng = np.random.default_rng(m + n)
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    out = np.empty((m, n), np.float32)
    calls: dict[str, Callable[[], Any]] = {"numpy": lambda: np.matmul(a, b, out=out)}
    for name, (module, buffers) in cases(m, n, k, rng).items():
        kernel = native_kernel(module, target)
        table = kernel.table(buffers)
        calls[name] = lambda kernel=kernel, table=table, keep=buffers: kernel.function(table, 0, 1)  # type: ignore[misc]
    found = seconds(calls, repeat)
    speed = {name: 2e-9 * m * n * k / s for name, s in found.items()}
    print(
        f"{m:4} x {k} x {n}: numpy {speed['numpy']:6.1f}   "
        + "   ".join(f"{name} {value:6.1f} ({value / speed['numpy']:.2f}x)" for name, value in speed.items() if name != "numpy")
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cpu", default=BASELINE)
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()
    print(f"GFLOP/s, one thread, {options.cpu}; in brackets: times numpy float32")
    for m, n, k in SHAPES:
        measure(m, n, k, cpu(options.cpu), options.repeat)


if __name__ == "__main__":
    main()
