"""A functional simulator of lowered Ascend modules: what the compiler made of a kernel, executed on numpy arrays.

It reads the module right before vector code becomes machine intrinsics: memory is planned, cores are split, flags are placed. One cube core and
two vector cores run as coroutines in a fixed order; every access is checked against the extent of its own buffer. Flags between the pipes of
one core have no effect here (program order is stricter than the hardware), so a missing one is not seen.
"""

from tapeout.codegen.ascend.simulator.launch import Counts, Simulator
from tapeout.codegen.ascend.simulator.memory import SimulationError

__all__ = ["Counts", "SimulationError", "Simulator"]
