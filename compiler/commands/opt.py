"""Run passes on a module in text form and print it."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    path: Annotated[Path, typer.Argument(help="module text; - reads standard input")],
    passes: Annotated[str, typer.Option("-p", "--passes", help='as "verify,bucket-rows{buckets=[16 128]}"')] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print {module, passes} as JSON")] = False,
) -> None:
    """Run passes on a module in text form and print it. Modules are separated by lines of `// -----`."""
    import sys

    from tapeout.compiler import report
    from tapeout.compiler.errors import ModuleRefused
    from tapeout.compiler.opt import run_passes

    try:
        source = sys.stdin.read() if str(path) == "-" else path.read_text()
    except UnicodeDecodeError as error:
        raise ModuleRefused(f"{path}: not text ({error}); expected module text in UTF-8") from None
    results = run_passes(source, passes)
    data = {"passes": passes, "modules": results}
    report.emit(data, as_json, lambda: print("// -----\n".join(results), end=""))
