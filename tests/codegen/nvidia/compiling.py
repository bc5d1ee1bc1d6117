"""Compiles kernels in processes of their own: Triton in the test process interprets."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from tapeout.codegen.lower_to_tile import TileKernel
from tapeout.codegen.nvidia import facts
from tapeout.codegen.nvidia.overrides import source_for

Job = tuple[str, str, dict[str, int], str, Any]
"""(family, tile text, schedule row, chip, the source of an override or None)."""


def jobs(kernels: Iterable[TileKernel], chip: str) -> list[Job]:
    """One job a kernel."""
    return [(k.choice.family, k.text, dict(k.choice.schedule), chip, source_for(k, facts.chip(chip))) for k in kernels]


def compiled(work: Iterable[Job], workers: int = 2) -> Iterator[tuple[Job, Any, list[str]]]:
    """(job, compiled kernel or the sentence that refused it, what the checks say)."""
    work = list(work)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from ((job, *found) for job, found in zip(work, pool.map(_compile, work), strict=True))


def _compile(job: Job) -> tuple[Any, list[str]]:
    from tapeout.codegen.nvidia.emit import emit
    from tapeout.codegen.nvidia.facts import chip
    from tapeout.codegen.nvidia.report import after, before
    from tapeout.codegen.nvidia.toolchain import ToolchainError, compile_cubin

    family, text, schedule, name, override = job
    source = override or emit(text)
    problems = before(family, schedule, source, chip(name))
    try:
        made = compile_cubin(source, chip(name), schedule)
    except ToolchainError as error:
        return str(error), problems
    return made, problems + after(family, made.report, chip(name))
