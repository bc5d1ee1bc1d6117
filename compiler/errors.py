"""What the compiler refuses, one class each; the command line turns them into exit codes.

1 wrong input, 2 usage, 3 toolchain missing, 4 internal error. A message reads: what - where - found / expected - do this.
"""

from collections.abc import Sequence
from typing import ClassVar


class CompilerError(Exception):
    """A refused input of the compiler."""

    code: ClassVar[str] = "C000"
    exit_code: ClassVar[int] = 1

    def __init__(self, text: str) -> None:
        super().__init__(f"[{self.code}] {text}")


class SettingsError(CompilerError):
    """One or more settings that do not fit; all of them are listed."""

    code = "C101"

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("settings do not fit: " + "; ".join(problems))


class PipelineError(CompilerError):
    """A pass text or pass name that the pipeline does not know."""

    code = "C102"


class ModuleRefused(CompilerError):
    """IR that does not parse, verify or pass a pass."""

    code = "C103"


class PromiseBroken(CompilerError):
    """A pass changed a value that it promised to keep (`--check-passes`)."""

    code = "C104"


class OutputOccupied(CompilerError):
    """The output path holds something that tapeout did not write."""

    code = "C105"


class CacheDamaged(CompilerError):
    """A cache entry does not hash to what its name says."""

    code = "C106"


class ToolchainMissing(CompilerError):
    """A tool of a target is absent: what was found, what is needed."""

    code = "C301"
    exit_code = 3
