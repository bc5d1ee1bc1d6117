"""Launches that begin before those in front of them have ended, on GPUs of compute capability 9.0 and later (programmatic dependent launch).

A kernel whose manifest row says `waits` runs `griddepcontrol.wait` before it touches anything that another launch writes, or writes itself;
what it does before (addresses, copies of weights) overlaps with the end of the launches in front. Why nothing is read too early:

* The wait returns when the launches in front, which are its predecessors in the graph, have ended and what they wrote is visible. Every block
  of theirs waited in the same way before it ended, or they began behind all in front of them. So, launch after launch, whatever lies in front
  has ended when a wait returns: results may be read, and memory that an earlier launch reads may be written.
* `griddepcontrol.launch_dependents` stands behind the wait. A launch begins when every block of its predecessors has run it or has ended, so of
  what it waits for its predecessors alone may still run beside it; all that is further in front has ended before it begins. First of all the
  host's copy of inputs: the count of rows, which no kernel writes, may be read before the wait. So may what a kernel's own first launch waited
  for, by the launch behind that one.
* Forks and joins are nothing else: several launches begin early behind one and wait for the same one; a launch behind several begins when all
  let it, and waits for all.
* A launch behind a copy, or the first of a graph, begins when that has ended; so does one whose kernel does not wait. Copies behind a launch
  begin when it has ended, and a graph ends with its last node: what the host reads back is there.

Only launches that fit on the chip at once begin early: blocks of larger ones are dealt out to whatever room the launch in front leaves, which is
uneven, and that costs more than an early start gives (measured: nothing to gain from 256 rows on). Warps alone are counted: where registers and
shared memory had to fit too, steps of 1 to 256 rows took up to 1 % longer on an H200, as launches somewhat larger copy weights early as well.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

RESIDENT = 64
"""Warps that a multiprocessor holds."""


def fits(grid: tuple[int, int, int], warps: int, processors: int) -> bool:
    """Whether all blocks of a launch, of so many warps each, can be on the chip at once as far as warps go."""
    return prod(grid) * warps <= RESIDENT * processors


def launch_early(
    driver: Any, function: Any, grid: tuple[int, int, int], threads: int, shared: int, stream: Any, arguments: tuple[Sequence[int], Sequence[Any]]
) -> None:
    """A launch on a stream that need not wait until the kernels in front of it have ended. Raises DeviceFailed."""
    module = driver.module
    value = module.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute = module.CUlaunchAttribute()
    attribute.id, attribute.value = module.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value
    config = module.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared, stream
    config.attrs, config.numAttrs = [attribute], 1
    driver("cuLaunchKernelEx", config, function, arguments, 0)
