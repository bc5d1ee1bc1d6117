"""The artifact's rows about compiled kernels: what each target's binaries need of a machine, where they lie, how they are launched.

Part of the schema of `artifact.py`, which owns the rest; nothing here reads a file.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue


class Strict(BaseModel):
    """Fields as declared and no others; nothing is converted."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Element = Literal[
    "f64", "f32", "f16", "bf16", "f8E4M3FN", "f8E8M0FNU", "f4E2M1FN", "i64", "i32", "i16", "i8", "ui8", "i1"
]  # fmt: skip


class CpuLevel(Strict):
    """The processor the library is for; `features` are flag names of /proc/cpuinfo."""

    level: Name
    features: tuple[Name, ...]


class GpuLevel(Strict):
    """The chip that binaries are for: exactly this compute capability, and a driver of at least this CUDA version (major, minor)."""

    chip: Name
    capability: tuple[Count, Count]
    cuda: tuple[Count, Count]


EARLY = (9, 0)
"""The compute capability from which a launch can begin before those in front of it have ended (device/early.py)."""


class Binary(Strict):
    """A compiled GPU kernel: its file, entry, warps, and what the assembler reports.

    Shared memory is of a block, registers, spilled and local bytes of a thread, scratch of an instance; `occupancy` is the share of a
    processor's threads that can be resident. One that `waits` for the launch in front by itself may begin before that has ended.
    """

    file: Name
    function: Name
    warps: Positive
    shared_bytes: Count
    registers: Count
    spills: Count
    local_bytes: Count
    occupancy: Annotated[float, Field(ge=0, le=1)]
    scratch: Count
    waits: bool = False


class NpuLevel(Strict):
    """The Ascend chip that modules are lowered for. Kernels do not depend on its core counts, which only bound the blocks of a launch."""

    chip: Name
    cube_cores: Positive
    vector_cores: Positive


LaunchArgument = Literal["ffts", "lock", "workspace", "buffers", "grid_x", "grid_y", "grid_z"]
"""What a device function takes, in words: `buffers` stands for all of a launch's buffers in order, grid extents are i32."""


class Lowered(Strict):
    """An Ascend kernel as the open compiler leaves it, and how to make an object of it: `finish` is the command, its words MODULE and OBJECT
    stand for `file` and the object's path; `${ASCENDNPUIR}` in the module stands for the folder of that package where the command runs.

    `simulated` is the module that the simulator runs, `source` the tile contract, `object` the object file once `tapeout finish` has run.
    `functions` are those of the module: the kernel's own name, or `_mix_aic` and `_mix_aiv` for the cube and the vector cores of a block.
    `memory` is bytes by space (ub and cbuf of a core, cc its accumulators); `pipes` static instructions by pipe; the rest are counts.
    `instance` is what one instance of a full tile executes, `step` what each pass of a loop adds whose length only the run knows: vector
    operations of one vector core, multiply-adds by element, bytes read and written.
    """

    file: Name
    simulated: Name
    source: Name
    object: Name | None = None
    mode: Literal["aiv", "aic", "mix"]
    functions: Annotated[tuple[Name, ...], Field(min_length=1)]
    arguments: tuple[LaunchArgument, ...]
    flags: tuple[str, ...]
    finish: Annotated[tuple[str, ...], Field(min_length=1)]
    memory: dict[str, Count]
    pipes: dict[str, Count]
    pipe_flags: Count
    core_flags: Count
    barriers: Count
    vector_functions: Count
    instance: dict[str, Count]
    step: dict[str, Count]


Abi = Literal["buffers-worker-workers", "buffers-scratch-profile", "lock-workspace-buffers-grid"]


class Kernel(Strict):
    """One native function. `reduction_order` says in which order it sums; all buckets of an op share one. On a GPU it has a `binary`, on an
    NPU it is `lowered`.

    `parameters` are the elements of its buffers in order, the count cell last; a launch is held against them.
    """

    id: Name
    target: Name
    symbol: Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
    op: Name
    family: Name
    variant: str
    source_sha256: Sha256
    abi: Abi
    schedule: dict[str, JsonValue]
    origin: Literal["default", "tuned", "override"]
    reduction_order: str
    parameters: tuple[Element, ...] = ()
    binary: Binary | None = None
    lowered: Lowered | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """The artifact's files that running this kernel reads, besides a library that holds many."""
        npu = self.lowered
        return ((self.binary.file,) if self.binary else ()) + ((npu.file, npu.simulated, *filter(None, [npu.object])) if npu else ())
