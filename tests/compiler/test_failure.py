"""Exit codes and endings: missing tools are 3, interrupts 130 with no process left, closed and narrow outputs cost nothing, bugs stay 4."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tapeout.codegen.cpu import linker
from tapeout.compiler import commands, workers
from tapeout.compiler.commands import Terminated, main
from tapeout.compiler.errors import ModuleRefused, ToolchainMissing, WorkerLost, WorkerRefused
from tapeout.compiler.failure import _not_ours, exit_code
from tapeout.compiler.manifest import library
from tapeout.compiler.objects import kernel_objects
from tapeout.compiler.workers import in_processes
from tapeout.dialects.errors import MlirMissing
from tapeout.models import deepseek_v41

TINY = str(Path(deepseek_v41.__file__).parent / "config-tiny.json")
SMALL = ["--max-rows", "16", "--max-sequences", "2", "--max-context", "256", "--block-tokens", "16"]
COMMAND = [sys.executable, "-m", "tapeout.compiler"]


def test_only_typed_errors_are_the_users() -> None:
    assert [exit_code(error) for error in (ModuleRefused("x"), ToolchainMissing("x"), MlirMissing("x"))] == [1, 3, 3]
    assert [exit_code(error) for error in (OSError("x"), ImportError("x"), ValueError("x"), linker.ToolchainError("x"))] == [4] * 4


def test_an_oserror_is_the_users_only_about_a_path_of_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tempfile

    from tapeout.compiler.failure import report

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ours, theirs = (PermissionError(13, "Permission denied", name) for name in ("/somewhere/else", str(tmp_path / "a" / "b")))
    assert report(theirs, ["inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"tapeout: [C105] path {tmp_path}/a/b: found Permission denied, expected ")
    assert report(theirs, ["run", f"--weights={tmp_path}"]) == 1
    assert report(OSError(28, "No space left on device"), []) == 1
    assert "found No space left on device, expected room for it" in capsys.readouterr().err
    assert report(ours, ["inspect", str(tmp_path)]) == 4
    assert main(["inspect", "a" * 5000]) == 1 and "File name too long" in capsys.readouterr().err


# -- missing tools


@pytest.mark.parametrize(("package", "command"), [
    ("numpy", ["run", ".", "--weights", ".", "--prompt", "a"]), ("typer", ["doctor"]), ("pydantic", ["inspect", TINY])])  # fmt: skip
def test_a_missing_package_is_3(package: str, command: list[str]) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; from tapeout.compiler.commands import entry; entry()"
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.split(": pip")[0]) == (
        3, f"tapeout: [C301] found no Python package {package}; the command needs it"
    )  # fmt: skip


def test_a_module_of_ours_that_is_missing_is_our_fault() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        import tapeout.compiler.nothing  # type: ignore[import-not-found]  # noqa: F401
    assert _not_ours(caught.value, []) is None


def test_no_linker_is_3_before_anything_is_compiled(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "TAPEOUT_CACHE_DIR": str(tmp_path / "cache")}
    arguments = ["compile", TINY, "-o", str(tmp_path / "out"), *SMALL]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (
        3,
        "tapeout: [C301] found no C compiler driver `cc` on the path; linking kernels for the CPU needs it: install gcc or clang\n",
    )
    assert not (tmp_path / "cache").exists() and not (tmp_path / "out").exists()
    done = subprocess.run([*COMMAND, *arguments, "--stop-after", "verify"], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_linker_that_fails_is_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tapeout.compiler.cache import Cache

    (tmp_path / "cc").write_text("#!/bin/sh\necho no ld >&2\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ToolchainMissing, match=r"^\[C301\] linking failed: no ld; linking kernels for the CPU needs a working `cc`$"):
        library({}, "x86-64-v3", Cache(tmp_path / "cache"))


def test_another_linker_links_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver and the linker behind it are part of a library's key; what LD_RUN_PATH names is in no library."""
    from tapeout.compiler.cache import Cache

    real, store = shutil.which("cc"), Cache(tmp_path / "cache")
    first = library({}, "x86-64-v3", store)
    monkeypatch.setenv("LD_RUN_PATH", "/somewhere/of/this/host")
    assert library({}, "x86-64-v3", Cache(tmp_path / "other cache")) == first
    names = [linker.linker()]
    for number, (asked, said) in enumerate((("--version", "cc 13.1"), ("--version", "cc 13.2"), ("*-Wl,--version", "another ld"))):
        pattern = f'"{asked}"' if asked == "--version" else asked
        monkeypatch.setenv("PATH", _linker(tmp_path / str(number), f'case "$*" in {pattern}) echo {said};; *) exec {real} "$@";; esac'))
        names.append(linker.linker())
        assert library({}, "x86-64-v3", store) == first and len(list(store.entries())) == 2 + number
    driver, program = names[0].split(", ", 1)
    assert names[1:] == [f"cc 13.1, {program}", f"cc 13.2, {program}", f"{driver}, another ld"]


def _linker(folder: Path, script: str) -> str:
    """A PATH on which `cc` is a script."""
    folder.mkdir()
    (folder / "cc").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "cc").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize(("script", "sentence"), [
    ("#!/nowhere\n", "found a C compiler driver that does not run ("),
    ("#!/bin/sh\necho no ld here >&2; exit 1\n", "linking failed: no ld here; linking kernels for the CPU needs a working `cc`\n")])  # fmt: skip
def test_a_linker_that_is_of_no_use_is_3_before_anything_is_compiled(tmp_path: Path, script: str, sentence: str) -> None:
    (tmp_path / "cc").write_text(script)
    (tmp_path / "cc").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TAPEOUT_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([*COMMAND, "compile", TINY, "-o", str(tmp_path / "out"), *SMALL], capture_output=True, text=True, env=environment,
                          check=False)  # fmt: skip
    assert done.returncode == 3 and done.stderr.startswith(f"tapeout: [C301] {sentence}")
    assert not (tmp_path / "cache").exists() and not (tmp_path / "out").exists()


def test_bindings_that_do_not_load_are_3(tmp_path: Path) -> None:
    (tmp_path / "torch_mlir").mkdir()
    (tmp_path / "torch_mlir" / "__init__.py").write_text("raise ImportError('libstdc++ is too old')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*COMMAND, "plan", TINY], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert "the MLIR bindings (torch_mlir) cannot be imported; found torch-mlir 20261001 (libstdc++ is too old), needed" in done.stderr


# -- the output place


def test_the_output_place_is_checked_before_anything_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPEOUT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for place in ("foreign", "file", "file/below"):
        assert main(["compile", TINY, "-o", str(tmp_path / place), *SMALL]) == 1
    assert not (tmp_path / "cache").exists()
    assert (tmp_path / "foreign" / "thesis.txt").read_text() == (tmp_path / "file").read_text() == "mine"


# -- worker processes


def double(number: int) -> tuple[int, int]:
    print("what a task prints does not reach the answers")
    return number * 2, os.getpid()


def refuse(text: str) -> None:
    raise ModuleRefused(text)


def divide(number: int) -> float:
    return 1 / number


def die(code: int) -> None:
    os._exit(code)


def sleep(folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(60)


def test_tasks_run_in_other_processes() -> None:
    found: dict[str, tuple[int, int]] = {}
    in_processes(double, {str(n): (n,) for n in range(7)}, 2, found.__setitem__)
    assert {name: answer[0] for name, answer in found.items()} == {str(n): 2 * n for n in range(7)}
    processes = {answer[1] for answer in found.values()}
    assert 1 <= len(processes) <= 2 and os.getpid() not in processes
    in_processes(double, {}, 2, found.__setitem__)


def test_what_a_task_raises_is_raised_here() -> None:
    with pytest.raises(ModuleRefused) as refused:
        in_processes(refuse, {"a": ("kernel 3",)}, 1, lambda name, result: None)
    assert str(refused.value) == "[C103] kernel 3"
    with pytest.raises(ZeroDivisionError) as caught:
        in_processes(divide, {"a": (0,)}, 1, lambda name, result: None)
    assert "return 1 / number" in caught.value.__notes__[0]
    with pytest.raises(WorkerLost, match=r"^\[C107\] compiling a: found a worker process that ended with exit code 7, "):
        in_processes(die, {"a": (7,)}, 1, lambda name, result: None)


@pytest.mark.parametrize("limit", [0, 1])
def test_fewer_workers_than_asked_for_do_it_too(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on processes: what there is does all tasks; of none at all it is one sentence."""
    start, started = workers._process, []

    def limited() -> "subprocess.Popen[bytes]":
        if len(started) == limit:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(start())
        return started[-1]

    monkeypatch.setattr(workers, "_process", limited)
    found: dict[str, tuple[int, int]] = {}
    if limit:
        in_processes(double, {str(n): (n,) for n in range(4)}, 3, found.__setitem__)
        assert {name: answer[0] for name, answer in found.items()} == {str(n): 2 * n for n in range(4)}
        assert {answer[1] for answer in found.values()} == {process.pid for process in started}
        return
    with pytest.raises(WorkerRefused, match=r"^\[C110\] compiling: found no worker process that starts \(Resource temporarily unavailable\), exp"):
        in_processes(double, {"a": (1,)}, 3, found.__setitem__)


def test_an_interrupt_ends_the_workers_at_once(tmp_path: Path) -> None:
    """Two tasks of a minute each; the interrupt comes when both run."""
    program = (
        "import sys\nfrom tapeout.compiler import workers\nfrom tests.compiler.test_failure import sleep\n"
        f"workers.in_processes(sleep, {{'a': ({str(tmp_path)!r},), 'b': ({str(tmp_path)!r},)}}, 2, lambda name, result: None)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, preexec_fn=_take_interrupts)
    _wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=20)[1]
    _wait_for(lambda: not any(Path(f"/proc/{path.name}").exists() for path in tmp_path.iterdir()))


def _take_interrupts() -> None:
    """A shell may have started the tests with interrupts ignored, which children inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _wait_for(is_there: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not is_there():
        assert time.monotonic() < until, "it did not happen within 30 s"
        time.sleep(0.05)


def test_ctrl_c_in_a_compile_is_130_and_one_line(tmp_path: Path) -> None:
    """The interrupt goes to the whole process group, as from a terminal, once kernels are being compiled."""
    environment = {**os.environ, "TAPEOUT_CACHE_DIR": str(tmp_path / "cache")}
    command = [*COMMAND, "compile", TINY, "-o", str(tmp_path / "out"), *SMALL]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, process_group=0, preexec_fn=_take_interrupts)
    _wait_for(lambda: (tmp_path / "cache").exists())
    os.killpg(process.pid, signal.SIGINT)
    error = process.communicate(timeout=20)[1]
    assert process.returncode == 130 and error.splitlines()[-1] == "tapeout: interrupted" and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_a_plain_script_without_a_main_guard_compiles_once(tmp_path: Path) -> None:
    """Workers must not run the script again; kernels compiled are counted, so that `compiled by one` can be asserted of two."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "with open(Path(__file__).with_name('runs'), 'a') as file:\n    file.write('run\\n')\n"
        "from tests.compiler.test_failure import two_kernels\n"
        "print(two_kernels(Path(__file__).with_name('cache')))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    running = [subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    counts = [int(process.communicate(timeout=120)[0]) for process in running]
    assert sum(counts) == 2 and (tmp_path / "runs").read_text() == "run\n" * 2
    assert two_kernels(tmp_path / "cache") == 0


def two_kernels(root: Path) -> int:
    """Compiles two kernels through a cache; how many were compiled here."""
    from types import SimpleNamespace

    from tapeout.codegen import tile_builder as t
    from tapeout.compiler.cache import Cache

    def body(x: Any, y: Any) -> None:
        t.View(y, [8]).store([0], t.View(x, [8]).load([0], [8]))

    modules = {name: t.kernel(name, {"x": "f32", "y": "f32"}, body, lambda *buffers: [1]) for name in ("copy_0", "copy_1")}
    kernels: Any = [SimpleNamespace(symbol=name, text=str(module)) for name, module in modules.items()]
    found, compiled = kernel_objects(kernels, "x86-64-v3", Cache(root), 2, lambda symbol: None)
    assert list(found) == ["copy_0", "copy_1"] and all(content[:4] == b"\x7fELF" for content in found.values())
    return compiled


def test_workers_end_when_nobody_asks() -> None:
    done = subprocess.run([sys.executable, "-c", workers._START, "[]"], input=b"", capture_output=True, check=False)
    assert done.returncode != 0  # an empty path finds no tapeout
    import json

    done = subprocess.run([sys.executable, "-c", workers._START, json.dumps(sys.path)], input=b"", capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# -- outputs


def test_a_reader_that_leaves_costs_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "inspect", TINY, "--json"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "2>&-"])
def test_closed_streams(closed: str) -> None:
    command = f"{sys.executable} -m tapeout.compiler inspect {TINY} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, "inspect", TINY, "--json"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "tapeout: [C105] writing to standard output: found No space left on device, expected room for it; free some, or write elsewhere\n"
    )


def test_an_output_that_lacks_characters(tmp_path: Path) -> None:
    module = tmp_path / "module.mlir"
    module.write_text('module { func.func @f() attributes {note = "ü→"} { return } }', encoding="utf-8")
    program = "import sys; from tapeout.compiler import report; from tapeout.compiler import commands, doctor\n"
    program += "doctor.findings = lambda: [doctor.Finding('ü→', '1', '1', True, '')]\nsys.exit(commands.main(['doctor']))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok      \\xfc\\u2192: found 1\n", "")


@pytest.mark.parametrize(("end", "code", "said"), [(KeyboardInterrupt(), 130, "interrupted"), (Terminated(15), 143, "interrupted by SIGTERM")])
def test_an_interrupt_inside_another_error_is_one(
    end: KeyboardInterrupt, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python 3.11 says RuntimeError of an interrupt that comes while it makes a class; whatever a clean-up raises stands before one too."""

    def while_a_class_is_made(given: object) -> int:
        raise RuntimeError("Error calling __set_name__ on 'Field' instance") from end

    def while_it_is_handled(given: object) -> int:
        try:
            raise end
        finally:
            raise ValueError("a clean-up that fails")

    for ending in (while_a_class_is_made, while_it_is_handled):
        monkeypatch.setattr(commands, "_run", ending)
        assert main(["doctor"]) == code and capsys.readouterr().err == f"tapeout: {said}\n"


# -- interrupts while Python starts

STARTING = """
import os, signal, sys
left = int(sys.argv.pop(1))
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGINT)
from tapeout.compiler.commands import entry
for name in [name for name in sys.modules if name in ("signal", "enum")]:
    del sys.modules[name]
sys.meta_path.insert(0, Interrupting())
"""


@pytest.mark.parametrize("place", [1, 2, 3, 5, 11, 29, 67, 131])
def test_an_interrupt_at_any_import_ends_the_command_in_one_sentence(place: int) -> None:
    """From the first line of the console script on: the first two imports are those of `signal` itself."""
    command = [sys.executable, "-c", STARTING + "entry()", str(place), "inspect", TINY]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=_take_interrupts)
    assert (done.returncode, done.stderr) == (130, "tapeout: interrupted\n")


def test_an_interrupt_that_python_only_reports_comes_once_more() -> None:
    program = STARTING + (
        "import threading, weakref\n"
        "class Thing: pass\n"
        "def run(given):\n"
        "    thing = Thing()\n"
        "    watch = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))\n"
        "    del thing\n"
        "    threading.Event().wait(30)  # an interrupt wakes the main thread\n"
        "from tapeout.compiler import commands\n"
        "commands._run = run\n"
        "entry()"
    )
    done = subprocess.run([sys.executable, "-c", program, "0"], capture_output=True, text=True, check=False, preexec_fn=_take_interrupts)
    assert (done.returncode, done.stderr) == (130, "tapeout: interrupted\n")


def test_the_console_script_imports_nothing_before_it_waits_for_interrupts() -> None:
    program = "import sys; before = {*sys.modules}; import tapeout.compiler.commands; print(sorted({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "['tapeout', 'tapeout.compiler', 'tapeout.compiler.commands']\n"


def test_a_signal_behind_the_last_line_ends_the_process_without_a_traceback() -> None:
    program = "import atexit, os, signal\natexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\nfrom tapeout.compiler.commands import entry\n"
    done = subprocess.run([sys.executable, "-c", program + "entry()", "inspect", TINY], capture_output=True, text=True, check=False,
                          preexec_fn=_take_interrupts)  # fmt: skip
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "") and done.stdout.startswith("weights")
