"""The command line: one file a command, found by its name; this file builds the table and turns errors into exit codes.

0 done, 1 wrong input, 2 usage, 3 toolchain missing, 4 internal error with a folder that reproduces it. Heavy imports live inside the commands,
so `tapeout --help` starts no compiler.
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _application()(args=given, prog_name="tapeout")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except KeyboardInterrupt:
        print("tapeout: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    except Exception as error:
        from tapeout.compiler.failure import report

        return report(error, given)
    return 0


def entry() -> None:
    """The console script."""
    sys.exit(main())


def _application() -> Callable[..., object]:
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
