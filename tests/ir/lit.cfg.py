"""The RUN lines of this folder for `lit -v tests/ir`; pytest runs the same lines in its own process (test_filecheck.py)."""

import os
import sys
from pathlib import Path
from typing import Any

import lit.formats

config: Any = globals()["config"]
here = Path(__file__).parent
config.name = "tapeout"
config.suffixes = [".mlir"]
config.test_format = lit.formats.ShTest(execute_external=False)
config.test_source_root = str(here)
config.test_exec_root = str(here / ".lit-out")
config.environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
