"""A functional simulator of lowered Ascend modules: what the compiler made of a kernel, executed on numpy arrays.

It reads the module right before vector code becomes machine intrinsics: memory is planned, cores are split, flags are placed. One cube core and
two vector cores run as coroutines in a fixed order; every access is checked against the extent of its own buffer. Loops whose iterations are
independent run at once. Flags between the pipes of one core have no effect here (program order is stricter than the hardware), so a missing one
is not seen. Nothing of a compiler is needed or imported.
"""

from tapeout.runtime.device.ascend_simulator.launch import Counts, Simulator
from tapeout.runtime.device.ascend_simulator.memory import SimulationError

__all__ = ["Counts", "SimulationError", "Simulator"]
