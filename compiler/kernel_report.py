"""One kernel as who tunes it wants to see it: what was asked for, how the work is cut, what came out, where it is launched, what bounds it.

The same facts for kernels that are planned and for those of an artifact; an artifact knows more of them (docs/tuning.md).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any

from tapeout.codegen.lower_to_tile import TileKernel
from tapeout.codegen.tuned_rows import PART
from tapeout.compiler.errors import SettingsError
from tapeout.compiler.gpu_bounds import Bound
from tapeout.runtime.artifact import Artifact, Program
from tapeout.runtime.artifact_kernels import Kernel

StepPrograms = Mapping[str, Mapping[Any, Program]]
"""By entry point and bucket."""


def planned_kernel(kernel: TileKernel) -> dict[str, Any]:
    """Facts of a kernel before it is compiled."""
    choice = kernel.choice
    return {"symbol": kernel.symbol, "op": choice.request.op, "family": choice.family, "request": str(choice.request),
            "schedule": dict(choice.schedule), "order": kernel.kernel.order}  # fmt: skip


def compiled_kernel(kernel: Kernel, artifact: Artifact) -> dict[str, Any]:
    """Facts of an artifact's kernel; `files` are its sources and binary there."""
    facts = {"symbol": kernel.symbol, "op": kernel.op, "family": kernel.family, "request": kernel.variant, "origin": kernel.origin,
             "schedule": dict(kernel.schedule), "order": kernel.reduction_order}  # fmt: skip
    if kernel.binary is not None:
        facts["binary"] = kernel.binary.model_dump(mode="json")
    files = sorted(path for path in artifact.manifest.files if path.rpartition("/")[2].split(".")[0] == kernel.symbol)
    return facts | {"files": files}


def details(
    asked: str, kernels: Sequence[Mapping[str, Any]], programs: StepPrograms, bounds: Callable[[StepPrograms], Sequence[Bound]]
) -> list[dict[str, Any]]:
    """The kernels whose symbols begin with `asked`, each with its launches by entry point and bucket, and what bounds it in every bucket.

    `kernels` are in the order by which launches number them. Raises `SettingsError` where none is called so.
    """
    symbols = [str(kernel["symbol"]) for kernel in kernels]
    numbers = [i for i, symbol in enumerate(symbols) if symbol.startswith(asked)]
    if not numbers:
        near = ", ".join(get_close_matches(asked, symbols, 3, 0.3))
        raise SettingsError([f"--kernel: found {asked}, expected a kernel's symbol or how it begins" + (f", as {near}" if near else "")])
    buckets = list(dict.fromkeys(bucket for of in programs.values() for bucket in of))
    alone = ({entry: {bucket: of[bucket]} for entry, of in programs.items() if bucket in of} for bucket in buckets)
    known = [bound for one in alone for bound in bounds(one)]
    return [
        {**kernels[i], "launches": _launches(i, programs), "bounds": [asdict(bound) for bound in known if bound.kernel == symbols[i]]}
        for i in numbers
    ]


def _launches(kernel: int, programs: StepPrograms) -> dict[str, dict[str, int]]:
    """How often a kernel is launched, by entry point and bucket."""
    counts = {
        entry: {str(bucket): sum(launch.kernel == kernel for launch in program.launches) for bucket, program in buckets.items()}
        for entry, buckets in programs.items()
    }
    return {entry: {bucket: count for bucket, count in of.items() if count} for entry, of in counts.items() if any(of.values())}


def show_details(found: Iterable[Mapping[str, Any]]) -> None:
    """Prints `details` for people."""
    for kernel in found:
        print(f"{kernel['symbol']}" + (f" ({kernel['origin']})" if "origin" in kernel else ""))
        for name, value in _lines(kernel):
            print(f"  {name:9} {value}")


def _lines(kernel: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    yield "request", kernel["request"]
    yield "schedule", " ".join(f"{name}={value}" for name, value in kernel["schedule"].items()) or "-"
    yield "order", kernel["order"]
    if binary := kernel.get("binary"):
        yield "binary", (f"{binary['registers']} registers, {binary['spills']} bytes of spills, {binary['shared_bytes']:,} of shared memory, "
                         f"{binary['warps']} warps, {100 * binary['occupancy']:.0f} % of a processor's threads")  # fmt: skip
    for path in kernel.get("files", ()):
        yield "file", path
    for entry, counts in kernel["launches"].items():
        yield "launches", f"{entry}: " + ", ".join(f"{count} of bucket {bucket}" for bucket, count in counts.items())
    if PART in kernel["schedule"]:
        yield "bound", "none of its own: an op's cost stands on the last of its launches, and this one is in front of that"
        return
    for bound in kernel["bounds"]:
        yield "bound", (f"{bound['entry']} {bound['bucket']}: {bound['bound_us']:.3f} us by {bound['limit']} "
                        f"({bound['bytes_us']:.3f} by bytes, {bound['work_us']:.3f} by work)")  # fmt: skip
