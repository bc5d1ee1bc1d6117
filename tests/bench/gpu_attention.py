"""Sparse attention alone, with full lists: `python -m tests.bench.gpu attend ARTIFACT` on a GPU host.

Steps of a slice see few entries, so that their attention says little. Here every row has all the keys that its lists hold, rows of the caches
are random and read far apart, and inputs take turns. Prints time, operations a second and, for a few rows, the distance from the formula.
It needs the runtime and numpy.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tapeout.runtime.artifact import Artifact
from tapeout.runtime.device import Call

HEADS, COLUMNS, TURNED = 64, 512, 64
PHYSICAL = 200_000  # rows of each cache: more bytes than the second-level cache holds
SETS, IN_A_GRAPH = 4, 8
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
LISTS = re.compile(r"\[\?, (\d+)\] i32")


@dataclass(frozen=True)
class Attention:
    """One kernel of an artifact: its number and symbol, keys of the window and of the entries (0: none), rows of its table of angles, instances
    that take rows in turns (0: each row has its own) and that share a row."""

    number: int
    symbol: str
    window: int
    selected: int
    angles: int
    turns: int = 0
    parts: int = 1

    def grid(self, rows: int) -> tuple[int, int, int]:
        """Instances by axis."""
        return (min(rows, self.turns or rows), self.parts, 1)

    def operations(self, rows: int) -> int:
        """Two products of every head with every key."""
        return 4 * rows * HEADS * COLUMNS * (self.window + self.selected)


def kernels_of(artifact: Artifact) -> list[Attention]:
    """The artifact's attention kernels of the real shape."""
    found = []
    for number, kernel in enumerate(artifact.manifest.kernels):
        if kernel.op != "nn.fused:attend_rotate" or f"[?, {HEADS * COLUMNS}] bf16" not in kernel.variant:
            continue
        widths = [int(w) for w in LISTS.findall(kernel.variant)]
        table = re.search(rf"\[(\d+), {TURNED}\] f32", kernel.variant)
        assert table is not None, kernel.variant
        turns, heads = (int(str(kernel.schedule.get(name, usual))) for name, usual in (("instances", 0), ("block_heads", HEADS)))
        found.append(Attention(number, kernel.symbol, widths[0], widths[1] if len(widths) > 1 else 0, int(table[1]), turns, HEADS // heads))
    return found


def launched(artifact: Artifact, rows: int) -> set[int]:
    """Numbers of the kernels in programs of the smallest bucket that holds so many rows."""
    found: set[int] = set()
    for programs in artifact.programs.values():
        bucket = min((b for b in programs if b >= rows), default=max(programs))
        found |= {launch.kernel for launch in programs[bucket].launches}
    return found


@dataclass(frozen=True)
class Caches:
    """Random rows: codes and scales of FP8 and FP4 keys, in memory of the host and of the device."""

    host: dict[str, Any]
    device: dict[str, int]


def caches(device: Any) -> Caches:
    """All codes but NaN; scales whose keys are about 1."""
    rng = np.random.default_rng(1)
    fp8 = rng.integers(0, 256, (PHYSICAL, COLUMNS), np.uint8)
    fp8[(fp8 & 0x7F) == 0x7F] = 0x35
    host = {"ring_codes": fp8, "ring_scales": rng.integers(118, 122, (PHYSICAL, COLUMNS // 32), np.uint8),
            "entry_codes": rng.integers(0, 256, (PHYSICAL, COLUMNS // 2), np.uint8),
            "entry_scales": rng.integers(0x20, 0x38, (PHYSICAL, COLUMNS // 16), np.uint8)}  # fmt: skip
    return Caches(host, {name: _sent(device, value) for name, value in host.items()})


def _sent(device: Any, value: Any) -> int:
    region = device.memory(value.nbytes, "measurement")
    device._copy_up(region.address, np.ascontiguousarray(value).view(np.uint8).reshape(-1), value.nbytes)
    return int(region.address)


@dataclass(frozen=True)
class Inputs:
    """One set of operands, on both sides, and the call on them."""

    host: dict[str, Any]
    call: Call
    out: int


def inputs(device: Any, attention: Attention, held: Caches, rows: int, seed: int) -> Inputs:
    """Full lists of rows far apart."""
    rng = np.random.default_rng(seed)
    angle = rng.random((attention.angles, TURNED // 2)) * 6
    host = {
        "q": (rng.standard_normal((rows, HEADS * COLUMNS)) * 0.1).astype(ml_dtypes.bfloat16),
        "window_ids": rng.integers(0, PHYSICAL, (rows, attention.window), np.int32),
        "window_counts": np.full(rows, attention.window, np.int32),
        "sink": rng.standard_normal(HEADS).astype(np.float32),
        "ids": rng.integers(0, PHYSICAL, (rows, max(attention.selected, 1)), np.int32),
        "counts": np.full(rows, attention.selected, np.int32),
        "positions": rng.integers(0, attention.angles, rows, np.int32),
        "table": np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32),
        "count": np.array([rows, 0, 0, 0], np.int32),
    }
    at = {**held.device, **{name: _sent(device, value) for name, value in host.items()}}
    out = int(device.memory(rows * HEADS * COLUMNS * 2, "measurement").address)
    entries = ["entry_codes", "entry_scales", "ids", "counts"] if attention.selected else []
    order = ["q", "ring_codes", "ring_scales", "window_ids", "window_counts", "sink", *entries, "positions", "table"]
    return Inputs(host, Call(attention.number, (*(at[name] for name in order), out, at["count"]), attention.grid(rows)), out)


def expected(attention: Attention, held: Caches, given: Inputs, row: int) -> Any:
    """[heads, columns] in float64, the turned columns after the rounding that stands before them (model spec 4.7, 4.9)."""
    ids = given.host["window_ids"][row]
    codes = held.host["ring_codes"][ids].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    keys = codes * np.repeat(2.0 ** (held.host["ring_scales"][ids].astype(np.float64) - 127), 32, 1)
    if attention.selected:
        ids = given.host["ids"][row]
        packed = held.host["entry_codes"][ids]
        codes = FP4_VALUES[np.stack((packed & 15, packed >> 4), -1).reshape(len(ids), COLUMNS)]
        scales = held.host["entry_scales"][ids].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        keys = np.concatenate([keys, codes * np.repeat(scales, 16, 1)])
    q = given.host["q"][row].astype(np.float64).reshape(HEADS, COLUMNS)
    logits, sink = q @ keys.T * COLUMNS**-0.5, given.host["sink"][:, None].astype(np.float64)
    peak = np.maximum(logits.max(1, keepdims=True), sink)
    weights = np.exp(logits - peak)
    out = weights @ keys / (weights.sum(1, keepdims=True) + np.exp(sink - peak))
    turned = out[:, -TURNED:].astype(ml_dtypes.bfloat16).astype(np.float64)
    cos, sin = np.split(given.host["table"][given.host["positions"][row]].astype(np.float64), 2)
    even, odd = turned[:, ::2], turned[:, 1::2]
    out[:, -TURNED:] = np.stack((even * cos + odd * sin, odd * cos - even * sin), -1).reshape(HEADS, TURNED)
    return out


def distance(device: Any, attention: Attention, held: Caches, given: Inputs, rows: Sequence[int]) -> float:
    """The largest distance from the formula, in units of the largest result."""
    worst = 0.0
    for row in rows:
        raw = np.empty(HEADS * COLUMNS * 2, np.uint8)
        device._driver("cuMemcpyDtoH", raw.ctypes.data, given.out + row * raw.nbytes, raw.nbytes)
        found = raw.view(ml_dtypes.bfloat16).astype(np.float64).reshape(HEADS, COLUMNS)
        wanted = expected(attention, held, given, row)
        worst = max(worst, float(np.abs(found - wanted).max() / np.abs(wanted).max()))
    return worst


def attention(artifact: Artifact, device: Any, timed: Any, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Every attention kernel of the artifact at those of these row counts whose bucket has it."""
    held, table = caches(device), []
    for one in kernels_of(artifact):
        for count in (n for n in rows if one.number in launched(artifact, n)):
            sets = [inputs(device, one, held, count, seed) for seed in range(SETS if count <= 512 else 1)]
            calls = [sets[i % len(sets)].call for i in range(IN_A_GRAPH)]
            seconds = timed(device, device.table(calls, copies=False)) / IN_A_GRAPH
            apart = distance(device, one, held, sets[0], sorted({0, count // 2, count - 1}))
            table.append({"kernel": one.symbol, "rows": count, "window": one.window, "selected": one.selected, "us": 1e6 * seconds,
                          "tflops": one.operations(count) / seconds / 1e12, "distance": apart})  # fmt: skip
    return table


def show_attention(found: Sequence[dict[str, Any]]) -> None:
    """The figures as a table."""
    for r in found:
        print(f"{r['kernel']:24} {r['window']:4} + {r['selected']:4} keys, {r['rows']:5} rows: {r['us']:9.2f} us, {r['tflops']:6.1f} TFLOP/s, "
              f"{r['distance']:.1e} from the formula")  # fmt: skip
