"""Times on a GPU: graphs of many launches between events, cold ones with every operand in many copies, and ceilings measured the same way.

`cold` launches take turns on copies of what they read and write, together more than the second-level cache holds, so that each finds nothing of
its own there. A plain kernel of a few lines of PTX reads and writes as many bytes and does nothing else, launched in the same way, at the best of
a few shapes.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tapeout.runtime.device import Call
from tapeout.runtime.device.cuda import CudaDevice, GraphTable
from tapeout.runtime.device.early import launch_early
from tapeout.runtime.program import LoadedPrograms
from tests.bench import gpu_library

COPY_BYTES = 2 << 30
TURNED_BYTES = 160 << 20  # of operands that take turns: three times the second-level cache
POOL_BYTES = 24 << 30  # at most, for copies of operands
MOST_TURNS = 256
SHORTEST, LONGEST = 3e-4, 4e-3
"""Seconds that a graph of launches lasts: long enough that its own start is nothing, and no longer than copies ask for."""
IN_A_GRAPH, REPEATS = 8, 5
PLACE = 256  # bytes: where a copy begins


class MeasuredDevice(CudaDevice):
    """The device, memory for copies of operands, and kernels that only move bytes."""

    _early = True
    _pool: tuple[int, int] = (0, 0)
    _plain: Any = None

    def table(self, calls: Sequence[Call], *, copies: bool = True, early: bool = True) -> GraphTable:
        """As the device's; within `one_after_the_other` no launch begins early."""
        return super().table(calls, copies=copies, early=early and self._early)

    @contextmanager
    def one_after_the_other(self, programs: LoadedPrograms) -> Iterator[None]:
        """Steps of these programs whose launches begin when those in front of them have ended."""
        kept, programs._tables, self._early = programs._tables, {}, False
        try:
            yield
        finally:
            programs._tables, self._early = kept, True

    def pool(self, size: int) -> int:
        """The address of `size` bytes, the same memory for every caller."""
        if size > self._pool[1]:
            if self._pool[0]:
                self._driver("cuMemFree", self._pool[0])
                self._undo.remove(("cuMemFree", self._pool[0]))
            size = max(size, min(2 * self._pool[1], POOL_BYTES))
            self._pool = (self._allocated(size, "measurement"), size)
        return self._pool[0]

    def copied(self, to: int, source: int, size: int) -> None:
        """Copies within the GPU."""
        self._driver("cuMemcpyDtoDAsync", to, source, size, self._stream)

    def recorded(self, record: Callable[[], None]) -> GraphTable:
        """A graph of what `record` puts on the stream."""
        driver = self._driver
        driver("cuStreamBeginCapture", self._stream, driver.module.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        record()
        graph = driver("cuStreamEndCapture", self._stream)
        executable = driver("cuGraphInstantiate", graph, 0)
        driver("cuGraphDestroy", graph)
        self._undo.append(("cuGraphExecDestroy", executable))
        return GraphTable(executable, ())

    def plain(self) -> dict[int, Any]:
        """Plain kernels by loads in flight, and the empty one as 0."""
        if self._plain is None:
            waits = self._driver.attribute("COMPUTE_CAPABILITY_MAJOR", self._device) >= FIRST_EARLY
            module = self._driver("cuModuleLoadData", ptx(waits=waits).encode() + b"\0")
            self._undo.append(("cuModuleUnload", module))
            self._plain = {n: self._driver("cuModuleGetFunction", module, f"plain_{n}".encode()) for n in (0, *IN_FLIGHT)}
        return dict(self._plain)

    def start(self, function: Any, blocks: int, threads: int, *values: int, early: bool = False) -> None:
        """One launch of a kernel of 64-bit parameters."""
        arguments = (values, (ctypes.c_void_p,) * len(values))
        if early:
            launch_early(self._driver, function, (blocks, 1, 1), threads, 0, self._stream, arguments)
        else:
            self._driver("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, self._stream, arguments, 0)


def timed(device: CudaDevice, table: Any) -> float:
    """Median seconds of one replay, after a warm one."""
    device.run(table)
    return float(np.median([device.seconds(table, 1) for _ in range(REPEATS)]))


# -- launches whose operands take turns


@dataclass(frozen=True)
class Span:
    """Memory of the programs that may be copied as a whole."""

    start: int
    size: int


def spans_of(programs: LoadedPrograms, arena: int) -> list[Span]:
    """The first `arena` bytes of the arena, weights on the device, states, and values between programs."""
    weights = [Span(programs._weights[operand.name, part.part], part.bytes) for operand in programs.artifact.weights for part in operand.parts
               if operand.kind != "table" or operand.derived is not None]  # fmt: skip
    blocks = [Span(region.address, size) for region, size in
              ((programs._inputs, programs._inputs_bytes), (programs._results, programs._results_bytes))]  # fmt: skip
    values = [Span(start, _value_bytes(programs, key)) for key, start in programs._io.items() if not any(_within(start, b) for b in blocks)]
    sizes = {(state.name, part.part): programs._state_rows(state) * part.row_bytes
             for state in programs.artifact.manifest.states for part in state.parts}  # fmt: skip
    states = [Span(programs._states[key], size) for key, size in sizes.items()]
    return [Span(programs._arena, arena), *weights, *states, *values]


def _value_bytes(programs: LoadedPrograms, key: Any) -> int:
    from tapeout.runtime.device.memory import value_bytes

    value, shape = programs._values[key]
    return value_bytes(value.dtype, shape)


def _within(address: int, span: Span) -> bool:
    return span.start <= address < span.start + span.size


def in_turns(device: MeasuredDevice, calls: Sequence[Call], spans: Sequence[Span], touched: float, most: int) -> list[list[Call]]:
    """The calls on as many copies of their operands, up to `most`, as pass `TURNED_BYTES` where each touches `touched` bytes; the first on their
    own."""
    met = [span for span in spans if any(_within(a, span) for call in calls for a in call.buffers)]
    each = sum(-(-span.size // PLACE) * PLACE for span in met)
    turns = int(max(1, min(most, -(-TURNED_BYTES // max(touched, 1)), 1 + POOL_BYTES // max(each, 1))))
    base, out = device.pool(each * (turns - 1)) if turns > 1 else 0, [list(calls)]
    for turn in range(turns - 1):
        places, at = {}, base + turn * each
        for span in met:
            device.copied(at, span.start, span.size)
            places[span], at = at, at + -(-span.size // PLACE) * PLACE
        out.append([replace(call, buffers=tuple(_moved(a, places) for a in call.buffers)) for call in calls])
    return out


def _moved(address: int, places: dict[Span, int]) -> int:
    return next((to + address - span.start for span, to in places.items() if _within(address, span)), address)


def hot_and_cold(device: MeasuredDevice, calls: Sequence[Call], spans: Sequence[Span], touched: float) -> tuple[float, float]:
    """Seconds of the calls together: on the same operands again and again, and with operands in turns."""
    table = device.table(list(calls) * 2, copies=False)
    device.run(table)
    about = max(device.seconds(table, 1) / 2, 1e-6)
    again = max(2, round(SHORTEST / about))
    hot = timed(device, device.table(list(calls) * again, copies=False)) / again
    turns = in_turns(device, calls, spans, touched, min(MOST_TURNS, max(4, int(LONGEST / about))))
    rounds = max(1, -(-round(SHORTEST / about) // len(turns)))
    table = device.table([call for _ in range(rounds) for turn in turns for call in turn], copies=False)
    return hot, timed(device, table) / len(turns) / rounds


# -- ceilings


def ceilings(device: MeasuredDevice) -> dict[str, float | None]:
    """Bytes a second of a copy (read plus written; the driver's or PyTorch's, whichever is faster) and operations a second of a large bf16
    product (None without PyTorch)."""
    at = device.pool(2 * COPY_BYTES)
    table = device.recorded(lambda: [device.copied(at + COPY_BYTES, at, COPY_BYTES) for _ in range(IN_A_GRAPH)] and None)
    copy, matmul = gpu_library.ceilings(COPY_BYTES)
    gpu_library.memory_back()
    return {"copy": max(copy, 2 * COPY_BYTES * IN_A_GRAPH / timed(device, table)), "matmul": matmul}


# -- plain kernels

FIRST_EARLY = 9  # compute capability from which a launch can begin early
IN_FLIGHT = (1, 2, 4, 8)
UNIT = 16  # bytes of one load
SHAPES = ((1, 512), (2, 256), (2, 512), (4, 256), (4, 512), (8, 256), (8, 512))
"""Loads in flight and threads of a block; as many blocks as the bytes need, as far as they can all be resident."""
RESIDENT = 2048  # threads of a processor
ABOUT_BANDWIDTH = 4e12  # bytes a second: sizes a graph, enters no figure


def plain_us(device: MeasuredDevice, read: float, written: float, early: bool) -> float:
    """Microseconds of the fastest launch that reads and writes so many bytes and does nothing else, from memory that is in no cache; `early`: behind
    others like it, whose end it need not wait for to begin."""
    read, written = (max(UNIT, int(size) // UNIT * UNIT) for size in (read, written))
    turns = max(1, min(MOST_TURNS, -(-max(TURNED_BYTES, read + written) // (read + written))))
    base = device.pool(turns * (read + written))
    nodes = turns * max(1, -(-round(SHORTEST / (1e-6 + (read + written) / ABOUT_BANDWIDTH)) // turns))
    best = float("inf")
    for loads, threads in SHAPES:
        blocks = min(-(-max(read, written) // (UNIT * loads * threads)), RESIDENT // threads * device._processors)
        function = device.plain()[loads]

        def record(function: Any = function, blocks: int = blocks, threads: int = threads) -> None:
            for node in range(nodes):
                at, to = base + node % turns * read, base + turns * read + node % turns * written
                device.start(function, blocks, threads, at, read // UNIT, to, written // UNIT, early=early and node > 0)

        best = min(best, timed(device, device.recorded(record)) / nodes)
    return 1e6 * best


def empty_kernel_us(device: MeasuredDevice) -> float:
    """Microseconds of a node of a graph whose kernel returns at once."""
    function = device.plain()[0]
    return 1e6 * timed(device, device.recorded(lambda: [device.start(function, 1, 32, 0, 0, 0, 0) for _ in range(64)] and None)) / 64


def ptx(*, waits: bool = False) -> str:
    """Plain kernels for any GPU from SM80 on, or, where they wait for the launch in front, from SM90 on."""
    head = [f".version {'7.8' if waits else '7.4'}", f".target sm_{90 if waits else 80}", ".address_size 64"]
    return "\n".join([*head, *(_kernel(loads, waits) for loads in (0, *IN_FLIGHT))])


def _kernel(loads: int, waits: bool) -> str:
    """Thread t of n reads units t, t + n, .. of 16 bytes, `loads` of them at a time while there are as many, joins what it read, and writes that to
    units t, t + n, .. of the result."""
    head = f".visible .entry plain_{loads}(.param .u64 from, .param .u64 units, .param .u64 to, .param .u64 written)\n{{\n"
    if not loads:
        return f"{head}  ret;\n}}"
    group = "".join(
        f"  mad.lo.u64 %rd8, %rd5, {n}, %rd4;\n  shl.b64 %rd8, %rd8, 4;\n  add.u64 %rd8, %rd1, %rd8;\n"
        f"  ld.global.L1::no_allocate.v4.u32 {{%r{8 + 4 * n}, %r{9 + 4 * n}, %r{10 + 4 * n}, %r{11 + 4 * n}}}, [%rd8];\n"
        for n in range(loads)
    )  # fmt: skip
    joined = "".join(f"  xor.b32 %r0, %r0, %r{8 + n};\n" for n in range(4 * loads))
    one = "".join(f"  xor.b32 %r0, %r0, %r{8 + n};\n" for n in range(4))
    wait = "  griddepcontrol.wait;\n  griddepcontrol.launch_dependents;\n" if waits else ""
    return f"""{head}  .reg .b32 %r<{8 + 4 * loads}>;
  .reg .b64 %rd<11>;
  .reg .pred %p<3>;
  ld.param.u64 %rd1, [from];
  ld.param.u64 %rd2, [units];
  ld.param.u64 %rd3, [to];
  ld.param.u64 %rd9, [written];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %nctaid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.u32 %r4, %r1, %r2, %r4;
  cvt.u64.u32 %rd4, %r4;
  mov.u64 %rd10, %rd4;
  mul.wide.u32 %rd5, %r2, %r3;
  mov.u32 %r0, 0;
{wait}more:
  mad.lo.u64 %rd6, %rd5, {loads - 1}, %rd4;
  setp.ge.u64 %p0, %rd6, %rd2;
  @%p0 bra rest;
{group}{joined}  mad.lo.u64 %rd4, %rd5, {loads}, %rd4;
  bra more;
rest:
  setp.ge.u64 %p1, %rd4, %rd2;
  @%p1 bra written_rest;
  shl.b64 %rd8, %rd4, 4;
  add.u64 %rd8, %rd1, %rd8;
  ld.global.L1::no_allocate.v4.u32 {{%r8, %r9, %r10, %r11}}, [%rd8];
{one}  add.u64 %rd4, %rd4, %rd5;
  bra rest;
written_rest:
  setp.ge.u64 %p2, %rd10, %rd9;
  @%p2 ret;
  shl.b64 %rd8, %rd10, 4;
  add.u64 %rd8, %rd3, %rd8;
  st.global.v4.u32 [%rd8], {{%r0, %r0, %r0, %r0}};
  add.u64 %rd10, %rd10, %rd5;
  bra written_rest;
}}"""
