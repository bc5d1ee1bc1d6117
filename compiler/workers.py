"""Worker processes: functions of ours run beside this process, in fresh Pythons that never see the caller's main module.

So a compile works from a plain script without a main guard, and in an interactive session. An interrupt of the caller ends the workers at
once; they take no interrupts of their own. What a worker raises is raised here. Questions and answers are pickles over pipes.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from tapeout.compiler.errors import WorkerLost, WorkerRefused
from tapeout.compiler.files import reason

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tapeout.compiler.workers import serve; serve()"

Answer = tuple[Any, Exception | None]


def in_processes(function: Callable[..., Any], tasks: Mapping[str, tuple[Any, ...]], jobs: int, done: Callable[[str, Any], None]) -> None:
    """Calls `function(*task)` for every task in at most `jobs` processes, and `done(name, result)` here as each is ready, in any order.

    `function` is a module's own, by name. Raises what a task raises, with the worker's traceback as a note, WorkerLost, and WorkerRefused where the
    system starts none; the other tasks are then given up. No process is left behind, however this ends.
    """
    waiting: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
    answers: SimpleQueue[tuple[str, Answer]] = SimpleQueue()
    for item in tasks.items():
        waiting.put(item)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(min(jobs, len(tasks))):
            try:
                processes.append(_process())
                threading.Thread(target=_feed, args=(processes[-1], function, waiting, answers), daemon=True).start()
            except (OSError, RuntimeError) as limit:  # of processes, threads or memory
                if not number:
                    raise WorkerRefused(reason(limit)) from None
                break  # fewer do it too
        for _ in tasks:
            name, (result, error) = answers.get()
            if error is not None:
                raise error
            done(name, result)
    finally:
        _end(processes)


def _process() -> "subprocess.Popen[bytes]":
    """A worker in a process group of its own: what a terminal sends on Ctrl-C does not reach it, not even while it starts."""
    command = [sys.executable, "-c", _START, json.dumps(sys.path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)


def _end(processes: "list[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                pipe.close()


def _feed(process: "subprocess.Popen[bytes]", function: Callable[..., Any], waiting: Any, answers: Any) -> None:
    """Hands one task after the other to one worker, until none is left or the worker is gone."""
    while True:
        try:
            name, task = waiting.get_nowait()
        except Empty:
            return
        answers.put((name, _asked(process, function, name, task)))


def _asked(process: "subprocess.Popen[bytes]", function: Callable[..., Any], name: str, task: tuple[Any, ...]) -> Answer:
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    try:
        process.stdin.write(pickle.dumps((function, task)))
        process.stdin.flush()
        found: Answer = pickle.load(process.stdout)
    except (EOFError, OSError, ValueError, pickle.UnpicklingError):
        return None, WorkerLost(name, _status(process))
    except Exception as error:
        return None, error
    return found


def _status(process: "subprocess.Popen[bytes]") -> int:
    """How a worker ended whose answer did not come."""
    try:
        return process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def serve() -> None:
    """What a worker does: answers questions from standard input until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a task prints must not mix with the answers
    with suppress(BrokenPipeError):
        while True:
            try:
                function, task = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            answers.write(pickle.dumps(_answer(function, task)))
            answers.flush()


def _answer(function: Callable[..., Any], task: tuple[Any, ...]) -> Answer:
    try:
        return function(*task), None
    except Exception as error:
        error.add_note(f"in a worker process:\n{traceback.format_exc()}")
        return None, _portable(error)


def _portable(error: Exception) -> Exception:
    """The error, if it comes out of a pickle as it went in; else one with its words."""
    with suppress(Exception):
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    return RuntimeError("\n".join([f"{type(error).__name__}: {error}", *error.__notes__]))
