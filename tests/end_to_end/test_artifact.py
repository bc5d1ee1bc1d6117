"""Artifacts as files: same input, same bytes; two compiles at once do the work once; running needs no compiler."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tapeout.compiler.cache import Cache
from tests.end_to_end.conftest import Model

BLOCKED = ("torch_mlir", "torch", "triton", "jinja2")
SMALL = ["--max-rows", "32", "--max-sequences", "2", "--max-context", "256", "--block-tokens", "16"]


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _tapeout(*arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tapeout.compiler", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent", **environment},
    )


@pytest.mark.full
def test_two_compiles_at_once_are_byte_equal_and_one(model: Model, tmp_path: Path) -> None:
    """Two processes, two folders, one cache: equal artifacts, and every kernel was made once."""
    outputs = [tmp_path / "a" / "one", tmp_path / "b" / "another-name"]
    cache = tmp_path / "cache"
    running = [_tapeout("compile", str(model.weights), "-o", str(o), *SMALL, "--json", TAPEOUT_CACHE_DIR=str(cache)) for o in outputs]
    compiled = []
    for process in running:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out + err
        compiled.append(json.loads(out)["kernels_compiled"])
    assert _files(outputs[0]) == _files(outputs[1])
    entries = list(Cache(cache / "v1").entries())
    made = json.loads((outputs[0] / "manifest.json").read_text())["kernels"]
    assert len(entries) == 2 * len(made) + 1  # texts, objects, the library
    assert sum(compiled) == len(made), compiled


def test_compiling_again_gives_the_same_bytes(model: Model, tmp_path: Path) -> None:
    """A second process with a warm cache; the cache folder of the session's artifact."""
    cache = model.artifact.parent / "cache"
    first = json.loads((model.artifact / "manifest.json").read_text())
    options = first["options"]
    asked = [
        "--max-rows",
        options["max_rows"],
        "--max-sequences",
        options["max_sequences"],
        "--max-context",
        options["max_context"],
        "--max-outputs",
        options["max_outputs"],
        "--block-tokens",
        options["block_tokens"],
    ]
    before = {e.key for e in Cache(cache).entries()}
    process = _tapeout(
        "compile", str(model.weights), "-o", str(tmp_path / "again"), *map(str, asked), TAPEOUT_CACHE_DIR=str(cache.parent / "link")
    )
    link = cache.parent / "link" / "v1"
    link.parent.mkdir(exist_ok=True)
    if not link.exists():
        link.symlink_to(cache)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert _files(tmp_path / "again") == _files(model.artifact)
    assert {e.key for e in Cache(cache).entries()} == before


def test_running_needs_no_compiler(model: Model, tmp_path: Path) -> None:
    """`tapeout run` in a process where the compiler's packages cannot be imported; loading stays within its budget."""
    code = (
        "import sys\n"
        f"for name in {BLOCKED!r}: sys.modules[name] = None\n"
        "from tapeout.compiler.commands import main\n"
        f"sys.exit(main(['run', {str(model.artifact)!r}, '--weights', {str(model.weights)!r}, '--prompt', 'Once', '--prompt', 'A', '--json',"
        " '--max-tokens', '5']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    *lines, totals = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(line["token_ids"]) for line in lines] == [5, 5]
    assert totals["totals"]["requests"] == 2


def test_loading_is_quick(model: Model) -> None:
    """Half a second after imports, a second in all, at best of five on a shared machine."""
    code = (
        "import time; a = time.perf_counter()\n"
        "from tapeout.runtime.llm import LLM; import tapeout.models.deepseek_v41.tokenizer, tapeout.models.deepseek_v41.checkpoint\n"
        f"b = time.perf_counter(); llm = LLM({str(model.artifact)!r}, {str(model.weights)!r}); print(time.perf_counter() - b)\n"
    )
    best = [(9.0, 9.0)] * 2
    for _ in range(5):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        best.append((float(done.stdout), time.perf_counter() - started))
    print(f"load {min(b[0] for b in best):.3f} s after imports, {min(b[1] for b in best):.3f} s in all")
    assert min(b[0] for b in best) <= 0.5
    assert min(b[1] for b in best) <= 1.0
