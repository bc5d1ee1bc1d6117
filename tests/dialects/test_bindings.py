"""The MLIR bindings are brought in whole: no signal ends the process, or raises, while they start."""

import os
import signal
import threading
from types import ModuleType

import pytest

from tapeout.dialects import _mlir


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_heard_when_they_have_started(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    before = signal.signal(number, lambda *_: heard.append("handler"))

    def starting(name: str) -> ModuleType:
        os.kill(os.getpid(), number)
        heard.extend(str(n) for n in range(3))  # Python looks for signals between these
        return ModuleType(name)

    try:
        handler = signal.getsignal(number)
        monkeypatch.setattr(_mlir.importlib, "import_module", starting)
        assert _mlir.load("ir").__name__ == "torch_mlir.ir"
        assert heard == ["0", "1", "2", "handler"] and signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_an_interrupt_that_came_is_raised_and_one_that_was_ignored_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mlir.importlib, "import_module", lambda name: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it from the start
    try:
        with pytest.raises(KeyboardInterrupt):
            _mlir.load("ir")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _mlir.load("ir")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_load_them_too() -> None:
    found: list[ModuleType] = []
    thread = threading.Thread(target=lambda: found.append(_mlir.load("ir")))
    thread.start()
    thread.join()
    assert found == [_mlir.ir]
