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
    from tapeout.compiler import report
    from tapeout.compiler.files import read_text
    from tapeout.compiler.opt import run_passes

    results = run_passes(read_text(path, "module"), passes)
    data = {"passes": passes, "modules": results}
    report.emit(data, as_json, lambda: print("// -----\n".join(results), end=""))
