"""What a lowered kernel uses: memory high-water per space, instructions per pipe, flags, library calls. Read from the module's text."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod

from tapeout.codegen.ascend.facts import CORE
from tapeout.codegen.ascend.toolchain import CompileError

SPACES = {"ub": CORE.unified_bytes, "cbuf": CORE.l1_bytes, "cc": CORE.l0c_bytes}
BITS = {"bf16": 16, "f16": 16, "f32": 32, "f64": 64, "i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f8E4M3FN": 8, "f8E5M2": 8, "index": 64}
PIPES = {
    "hivm.hir.load": "MTE2", "hivm.hir.nd2nz": "MTE2", "hivm.hir.load_scale": "MTE2", "hivm.hir.store": "MTE3", "hivm.hir.copy": "MTE3",
    "hivm.hir.mmadL1": "M", "hivm.hir.mmadmxL1": "M", "hivm.hir.fixpipe": "FIX", "hivm.hir.indirect_load": "MTE2",
    "hivm.hir.indirect_store": "MTE3", "memref.load": "S", "memref.store": "S",
}  # fmt: skip
"""Ops by the pipe that runs them; vector functions are counted apart."""


@dataclass(frozen=True)
class Resources:
    """Of one kernel, for the manifest and for `plan`. `memory` is bytes by space, `pipes` static instructions by pipe."""

    mode: str
    memory: Mapping[str, int]
    pipes: Mapping[str, int]
    flags: int
    cross_core_flags: int
    barriers: int
    vector_functions: int

    def as_json(self) -> str:
        """One line, keys sorted."""
        return json.dumps(asdict(self), sort_keys=True)


def resources(dump: str, mode: str) -> Resources:
    """Counts of the dump before intrinsics."""
    ops = Counter(re.findall(r'"((?:hivm\.hir|memref|vector|func)\.\w+)"\(', dump))
    pipes: Counter[str] = Counter()
    for op, count in ops.items():
        if op in PIPES:
            pipes[PIPES[op]] += count
    pipes["V"] = len(re.findall(r'"(?:arith|math|vector)\.\w+"\([^\n]*-> vector<', dump))
    return Resources(mode, memory(dump), dict(sorted(pipes.items())), ops["hivm.hir.set_flag"], ops["hivm.hir.sync_block_set"],
                     ops["hivm.hir.pipe_barrier"], len(re.findall(r"\{[^\n]*hivm\.vector_function[^\n]*\} : \(\) -> \(\)", dump)))


def memory(dump: str) -> dict[str, int]:
    """High-water mark of each local memory: the end of its last buffer."""
    constants = {m[1]: int(m[2]) for m in re.finditer(r'(%\w+) = "arith\.constant"\(\) <\{value = (-?\d+) : i64\}>', dump)}
    found = dict.fromkeys(SPACES, 0)
    pattern = r'"hivm\.hir\.pointer_cast"\((%\w+)[^\n]*-> memref<((?:\d+x)*)([A-Za-z]\w*)(?:, [^\n]*)?, #hivm\.address_space<(\w+)>>'
    for address, extents, element, space in re.findall(pattern, dump):
        if space in found and address in constants and element in BITS:
            size = prod(int(n) for n in extents.split("x") if n) * BITS[element] // 8
            found[space] = max(found[space], constants[address] + size)
    return found


def require_fits(name: str, used: Resources) -> None:
    """Raises `CompileError` for a kernel whose plan is larger than a memory; the compiler's own check comes first."""
    over = [f"{count} of {SPACES[space]} bytes of {space}" for space, count in used.memory.items() if count > SPACES[space]]
    if over:
        raise CompileError(f"kernel {name} needs {', '.join(over)}: take smaller blocks in the schedule row")
