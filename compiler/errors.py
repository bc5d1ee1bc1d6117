"""What the compiler refuses, one class each; the command line turns them into exit codes.

1 wrong input, 2 usage, 3 toolchain missing, 4 internal error. A message reads: what - where - found / expected - do this.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar


class CompilerError(Exception):
    """A refused input of the compiler. It crosses the border of a worker process as it is."""

    code: ClassVar[str] = "C000"
    exit_code: ClassVar[int] = 1

    def __init__(self, text: str) -> None:
        super().__init__(f"[{self.code}] {text}")
        self.given: tuple[Any, ...] = (text,)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.given, {"__notes__": getattr(self, "__notes__", [])}


class SettingsError(CompilerError):
    """One or more settings that do not fit; all of them are listed."""

    code = "C101"

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("settings do not fit: " + "; ".join(problems))
        self.given = (self.problems,)

    def renamed(self, names: Mapping[str, str]) -> "SettingsError":
        """The same problems, with each `--option` that is a key of `names` called by that name: what the caller knows it as."""
        return SettingsError([re.sub(r"--[a-z][a-z-]*", lambda found: names.get(found[0], found[0]), text) for text in self.problems])


class PipelineError(CompilerError):
    """A pass text or pass name that the pipeline does not know."""

    code = "C102"


class ModuleRefused(CompilerError):
    """IR that does not parse, verify or pass a pass."""

    code = "C103"


class PromiseBroken(CompilerError):
    """A pass changed a value that it promised to keep (`--check-passes`)."""

    code = "C104"


class FileRefused(CompilerError):
    """A file or folder that the user named cannot be read or written."""

    code = "C105"

    def __init__(self, where: str, path: Path | str, found: str, expected: str, remedy: str) -> None:
        super().__init__(f"{where} {path}: found {found}, expected {expected}; {remedy}")
        self.given = (where, path, found, expected, remedy)


class CacheRefused(CompilerError):
    """The folder of the compile cache cannot be used."""

    code = "C106"

    def __init__(self, root: Path | str, found: str) -> None:
        super().__init__(
            f"compile cache {root}: found {found}, expected a folder that can be written; set TAPEOUT_CACHE_DIR to another one"
        )
        self.given = (root, found)


class WorkerLost(CompilerError):
    """A worker process ended in the middle of its task: killed from outside, most often for want of memory."""

    code = "C107"

    def __init__(self, task: str, status: int) -> None:
        end = f"signal {-status}" if status < 0 else f"exit code {status}"
        super().__init__(
            f"compiling {task}: found a worker process that ended with {end}, expected its answer; give fewer --jobs if memory is short"
        )
        self.given = (task, status)


class FinishRefused(CompilerError):
    """An artifact that cannot be finished: none for Ascend, or a kernel that the back end refuses."""

    code = "C108"


class MemoryLacking(CompilerError):
    """The system gives this process no more memory."""

    code = "C109"

    def __init__(self, found: str) -> None:
        super().__init__(f"memory: found none left{f' ({found})' if found else ''}, expected what the command needs; "
                         "free some, ask for less at a time, or take a larger machine")  # fmt: skip
        self.given = (found,)


class WorkerRefused(CompilerError):
    """The system starts no worker process."""

    code = "C110"

    def __init__(self, found: str) -> None:
        super().__init__(f"compiling: found no worker process that starts ({found}), expected one at least; allow more processes, threads or memory")
        self.given = (found,)


class ToolchainMissing(CompilerError):
    """A tool of a target is absent: what was found, what is needed."""

    code = "C301"
    exit_code = 3
