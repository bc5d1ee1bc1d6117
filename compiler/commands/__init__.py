"""The command line: one file a command, found by its name; this file builds the table and turns errors into exit codes.

0 done, 1 wrong input, 2 usage, 3 toolchain missing, 4 internal error with a folder that reproduces it, 128 + n ended by signal n. Heavy imports
live inside the commands, so `tapeout --help` starts no compiler. This file itself imports only what Python has imported when it starts, so that an
interrupt has hardly a moment to come in which nobody waits for it.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


class Terminated(KeyboardInterrupt):
    """The system or a scheduler ends the process: the same way out as Ctrl-C, so that what is done is kept. `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def main(arguments: "Sequence[str] | None" = None) -> int:
    """Runs one command and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a character must not cost the result
    try:
        code = _run(given)
        sys.stdout.flush()
    except KeyboardInterrupt as end:
        return _interrupted(end)
    except BrokenPipeError:
        _drop_output()
        return 0
    except Exception as error:
        if (behind := _behind(error)) is not None:
            return _interrupted(behind)
        from tapeout.compiler.failure import report

        code = report(error, given)
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
    return code


def _interrupted(end: KeyboardInterrupt) -> int:
    """Says how the process ends, and the exit code."""
    import signal

    number, by = signal.SIGINT, ""
    if isinstance(end, Terminated):
        number = signal.Signals(end.number)
        by = f" by {number.name}"
    print(f"tapeout: interrupted{by}", file=sys.stderr)
    return 128 + number


def _behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """The interrupt that an error came of: Python makes another error of one that it meets while a class is being made."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def entry() -> None:
    """The console script. From its first line on an interrupt ends it in one sentence, behind its last one without any."""
    try:
        _open_missing_streams()
        _take_signals()
        code = main()
        _leave_signals()
    except BaseException as error:
        if (behind := _behind(error)) is None:
            raise
        _leave_signals()
        code = _interrupted(behind)
    sys.exit(code)


def _take_signals() -> None:
    """What ends a process from outside ends it as Ctrl-C does; nohup ignores hang-ups, and so do we then."""
    import signal

    sys.unraisablehook = _again
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _terminate)


def _leave_signals() -> None:
    """All is written, or given up: another signal ends the process at once, so that no traceback comes of Python's own end."""
    import signal

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.default_int_handler, _terminate):
            signal.signal(number, signal.SIG_DFL)


def _terminate(number: int, _: object) -> None:
    raise Terminated(number)


def _again(lost: "sys.UnraisableHookArgs") -> None:
    """An interrupt that comes in a call-back (imports have some), which Python reports and forgets, comes once more when that is through."""
    import signal
    import threading

    if isinstance(lost.exc_value, KeyboardInterrupt):
        number = lost.exc_value.number if isinstance(lost.exc_value, Terminated) else signal.SIGINT
        threading.Timer(0.01, signal.pthread_kill, [threading.main_thread().ident, number]).start()
    else:
        sys.__unraisablehook__(lost)


def _run(given: list[str]) -> int:
    """The exit code of a command that ended by itself or was called wrongly; everything else is raised as it is.

    Called below typer's own entry, which would turn an interrupt into its own message and code.
    """
    import typer

    wrong_usage: Any = typer.BadParameter.__mro__[2]  # ClickException, which typer itself does not name
    command = typer.main.get_command(_application())
    try:
        with command.make_context("tapeout", list(given)) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except wrong_usage as error:
        error.show()
        return int(error.exit_code)
    return 0


def _drop_output() -> None:
    """Nobody reads any more: what is still buffered goes nowhere, so that the interpreter's own flush does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


def _open_missing_streams() -> None:
    """Streams that the caller closed lead nowhere; their numbers must not go to the next file that is opened."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, PTH123 (open as long as the process)


def _application() -> "Any":
    import importlib
    import pkgutil

    import typer

    app = typer.Typer(
        name="tapeout",
        help="Compile DeepSeek-V4.1-Flash to hardware binaries ahead of time and run them offline.",
        rich_markup_mode=None,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    for name in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        module = importlib.import_module(f"{__name__}.{name}")
        command = module.command
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name.removesuffix("_"), help=(module.__doc__ or name).splitlines()[0])
        else:
            app.command(name.removesuffix("_"))(command)
    return app
