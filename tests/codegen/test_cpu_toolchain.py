"""Objects, libraries and the executor: same bytes twice, the target's instructions only, launches in order under any number of workers."""

import ctypes
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapeout.codegen import tile_builder as t
from tapeout.codegen.cpu import facts, linker, toolchain
from tapeout.codegen.cpu.executor import NAME
from tapeout.codegen.tile_memory import kernel_name
from tests.bench.bench_products import linear_fp4

N = 1000


def step(name: str, change: Callable[[Any, Any], Any]) -> Any:
    """x[i] = change(x[i], x[neighbour block]): instance after instance of 10 cells."""

    def body(x: Any, y: Any) -> None:
        i = t.program_id(0)
        view, other = t.View(x, [N]), t.mul(t.remainder(t.add(i, 37), N // 10), 10)
        t.View(y, [N]).store([t.mul(i, 10)], change(view.load([t.mul(i, 10)], [10]), view.load([other], [10])))

    return t.kernel(name, {"x": "i64", "y": "i64"}, body, lambda *b: [N // 10])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("library") / "kernels.so"
    modules = [
        step("mix", lambda a, b: t.bit_xor(t.mul(a, 5), b)),
        step("shift", lambda a, b: t.add(a, t.shr_unsigned(b, 3))),
    ]
    objects = {kernel_name(m): toolchain.compile_object(m) for m in modules}
    linker.link({**objects, NAME: toolchain.executor_object()}, path)
    return path


def expected(x: np.ndarray, turns: int) -> np.ndarray:
    for turn in range(turns):
        other = np.roll(x.reshape(-1, 10), -37, axis=0).reshape(-1)
        x = x * 5 ^ other if turn % 2 == 0 else x + (other.view(np.uint64) >> np.uint64(3)).view(np.int64)
    return x


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_launches_run_in_order_with_a_barrier_between_them(library: Path, workers: int) -> None:
    loaded = ctypes.CDLL(str(library))
    turns = 40
    cells = [np.random.default_rng(2).integers(-(2**60), 2**60, N), np.zeros(N, np.int64)]
    start = cells[0].copy()
    tables = [(ctypes.c_void_p * 2)(cells[turn % 2].ctypes.data, cells[1 - turn % 2].ctypes.data) for turn in range(2)]
    functions = [ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value for name in ("mix", "shift")]
    launches = (ctypes.c_void_p * (2 * turns))()
    for turn in range(turns):
        launches[2 * turn], launches[2 * turn + 1] = functions[turn % 2], ctypes.addressof(tables[turn % 2])
    barrier = (ctypes.c_int64 * 8)()
    arguments = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    loaded.tapeout_execute.argtypes, loaded.tapeout_execute.restype = arguments, None
    for _ in range(2):  # the barrier is used again without being zeroed
        cells[0][:] = start
        threads = [threading.Thread(target=loaded.tapeout_execute, args=(launches, turns, w, workers, barrier)) for w in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        np.testing.assert_array_equal(cells[turns % 2], expected(start, turns))


def test_an_empty_list_of_launches_returns(library: Path) -> None:
    loaded = ctypes.CDLL(str(library))
    loaded.tapeout_execute(None, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_int64(2), None)


def test_a_grid_of_nothing_runs_nothing() -> None:
    from tapeout.codegen.cpu.native_kernel import native_kernel

    def body(n: Any, y: Any) -> None:
        t.View(y, [1]).store([0], t.full([1], 1, "i32"))

    kernel = native_kernel(t.kernel("k", {"n": "i32", "y": "i32"}, body, lambda *b: [3, t.scalar(b[0], 0), 2]))
    y = np.zeros(1, np.int32)
    kernel.run({"n": np.zeros(1, np.int32), "y": y})
    assert y[0] == 0
    kernel.run({"n": np.ones(1, np.int32), "y": y})
    assert y[0] == 1


def test_workers_share_the_grid_without_gaps_or_overlap() -> None:
    from tapeout.codegen.cpu.native_kernel import native_kernel

    def body(y: Any) -> None:
        i, j, k = (t.program_id(axis) for axis in range(3))
        at = t.add(t.mul(t.add(t.mul(i, 3), j), 5), k)
        view = t.View(y, [None])
        view.store(
            [at],
            t.add(
                view.load([at], [1]),
                t.add(t.mul(t.splat(i, [1]), 100), t.add(t.mul(t.splat(j, [1]), 10), t.splat(k, [1]))),
            ),
        )

    kernel = native_kernel(t.kernel("k", {"y": "i32"}, body, lambda *b: [2, 3, 5]))
    numbers = [100 * i + 10 * j + k for i in range(2) for j in range(3) for k in range(5)]
    for workers in (1, 2, 4, 7, 30, 31):
        y = np.full(30, 1000, np.int32)
        for worker in range(workers):
            kernel.run({"y": y}, worker, workers)
        assert y.tolist() == [1000 + n for n in numbers]


def test_same_module_same_bytes(tmp_path: Path) -> None:
    change = lambda a, b: t.add(a, b)  # noqa: E731
    first, second = (toolchain.compile_object(step("mix", change)) for _ in range(2))
    assert first == second
    paths = [tmp_path / "a.so", tmp_path / "folder" / "b.so"]
    paths[1].parent.mkdir()
    executor = toolchain.executor_object()
    linker.link({"mix": first, NAME: executor}, paths[0])
    linker.link({NAME: executor, "mix": second}, paths[1])
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_module_is_not_changed_by_compiling() -> None:
    module = step("mix", lambda a, b: t.add(a, b))
    before = str(module)
    toolchain.compile_object(module)
    assert str(module) == before


def test_library_exports_kernels_alone_and_needs_no_other(library: Path) -> None:
    listed = subprocess.run(["readelf", "-W", "--dyn-syms", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    names = set(re.findall(r"GLOBAL DEFAULT +\d+ (\w+)", listed))
    assert names == {"mix", "shift", NAME}
    assert "NEEDED" not in listed


def test_baseline_holds_no_wider_instructions(library: Path) -> None:
    code = subprocess.run(["objdump", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert "%ymm" in code
    assert "%zmm" not in code and "%k1" not in code


def test_tiles_that_do_not_fit_on_the_stack_are_refused() -> None:
    def body(x: Any, y: Any) -> None:
        rows = t.View(x, [600, 500]).load([0, 0], [600, 500])
        t.View(y, [600]).store([0], t.reduce(t.mul(t.exp(rows), t.broadcast(t.reduce(t.exp(rows), "max", 1), 1, 500)), "add", 1))

    with pytest.raises(linker.ToolchainError) as caught:
        toolchain.compile_object(t.kernel("wide", {"x": "f32", "y": "f32"}, body, lambda *b: [1]))
    assert str(caught.value) == (
        "kernel wide keeps 1214800 bytes of tiles on the stack, x86-64-v3 allows 1048576 (the largest are 1210000, 2400, 2400); "
        "make its blocks smaller"
    )


def test_packed_fp4_weights_are_decoded_by_byte_shuffles(tmp_path: Path) -> None:
    (tmp_path / "k.o").write_bytes(toolchain.compile_object(linear_fp4(64, 128, 8, 64)))
    code = subprocess.run(["objdump", "-d", str(tmp_path / "k.o")], capture_output=True, text=True, check=True).stdout
    assert code.count("vpshufb") >= 8


def test_linker_failure_says_its_words(tmp_path: Path) -> None:
    with pytest.raises(linker.ToolchainError, match="linking failed: "):
        linker.link({"mix": b"not an object"}, tmp_path / "a.so")


def test_unknown_cpu_is_refused() -> None:
    with pytest.raises(facts.CpuError, match="no CPU target is called 'avx'; there are x86-64-v3 and native"):
        facts.cpu("avx")


def test_native_reads_flags_of_every_core(tmp_path: Path) -> None:
    base = " ".join(sorted(facts._LINUX_NAMES_OF_BASELINE))
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor: 0\nflags\t\t: {base} avx512f avx_vnni\n\nprocessor: 1\nflags\t\t: {base} avx_vnni\n")
    assert facts.host_features(path) == ("avxvnni",)
    path.write_text(f"flags : {base.replace('fma ', '')}\n")
    with pytest.raises(facts.CpuError, match="this host lacks fma, which x86-64-v3 needs; build and run on a newer CPU"):
        facts.host_features(path)
    path.write_text("Features : neon\n")
    with pytest.raises(facts.CpuError, match="lists no flags"):
        facts.host_features(path)
    with pytest.raises(facts.CpuError, match="cannot be read"):
        facts.host_features(tmp_path / "nothing")
