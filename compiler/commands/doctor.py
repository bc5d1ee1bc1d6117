"""Report what this machine can compile for and run on."""

from typing import Annotated

import typer


def command(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Report what this machine can compile for and run on: processor, tools, packages; what is missing; exit 1 if nothing can run."""
    from tapeout.compiler import report
    from tapeout.compiler.doctor import findings

    found = findings()
    data = [{"what": f.what, "found": f.found, "needed": f.needed, "ok": f.is_ok, "do": f.remedy} for f in found]
    report.emit(
        data,
        as_json,
        lambda: print(
            "\n".join(
                f"{'ok     ' if f.is_ok else 'missing'} {f.what}: found {f.found}" + ("" if f.is_ok else f", needed {f.needed}: {f.remedy}")
                for f in found
            )
        ),
    )
    if any(f.stops_running for f in found):
        raise typer.Exit(1)
