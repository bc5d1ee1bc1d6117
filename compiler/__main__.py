"""`python -m tapeout.compiler` is the command `tapeout`."""

from tapeout.compiler.commands import entry

entry()
