"""The runtime starts without compiler and without heavy packages, and quickly."""

import subprocess
import sys
from pathlib import Path

import pytest

import tapeout.runtime

BLOCKED = ("torch_mlir", "torch", "triton", "jinja2", "transformers", "mlir")
OURS = ("dialects", "passes", "codegen", "compiler")
IMPORT_LIMIT_S = 2.0  # numpy and pydantic take most of it; about 0.3 s on a free machine

SCRIPT = """
import importlib, pkgutil, sys, time
class Block:
    def find_spec(self, name, path=None, target=None):
        parts = name.split(".")
        if parts[0] in {blocked!r} or (parts[0] == "tapeout" and len(parts) > 1 and parts[1] in {ours!r}):
            raise ImportError("blocked " + name)
sys.meta_path.insert(0, Block())
start = time.perf_counter()
import tapeout.runtime as runtime
names = [m.name for m in pkgutil.walk_packages(runtime.__path__, "tapeout.runtime.")]
for name in names:
    importlib.import_module(name)
used = time.perf_counter() - start
{extra}
print(len(names), used)
"""


def run(extra: str = "") -> tuple[int, float]:
    script = SCRIPT.format(blocked=BLOCKED, ours=OURS, extra=extra)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, used = done.stdout.split()
    return int(count), float(used)


def test_everything_imports_alone_and_quickly() -> None:
    folder = Path(tapeout.runtime.__path__[0])
    count, used = run()
    assert count == sum(path.name != "__init__.py" for path in folder.rglob("*.py")) + sum(1 for _ in folder.rglob("*/__init__.py"))
    assert used < IMPORT_LIMIT_S


def test_reading_a_checkpoint_needs_no_compiler_either() -> None:
    run("import tapeout.models.deepseek_v41.checkpoint, tapeout.models.deepseek_v41.config, "
        "tapeout.models.deepseek_v41.tokenizer, tapeout.models.deepseek_v41.token_map, tapeout.models.deepseek_v41.prompt")


def test_importing_reads_no_model_code() -> None:
    run("assert not any(name.startswith('tapeout.models') for name in sys.modules)")


def test_every_public_name_resolves() -> None:
    for name in tapeout.runtime.__all__:
        assert getattr(tapeout.runtime, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'LLN'"):
        tapeout.runtime.LLN  # noqa: B018


def test_names_that_are_loaded_on_first_use_are_listed() -> None:
    script = "import sys, tapeout; assert {*tapeout.__all__} <= {*dir(tapeout)} and 'numpy' not in sys.modules; from tapeout import *; print(LLM)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "<class 'tapeout.runtime.llm.LLM'>\n"
