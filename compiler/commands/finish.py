"""Make the object files of an Ascend artifact, where the back end of CANN is installed."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    artifact: Annotated[Path, typer.Argument(help="an artifact of --target ascend950, or a set that holds one")],
    jobs: Annotated[int, typer.Option(min=1, max=256, help="processes")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Make the object files of an Ascend artifact with hivmc-a5 (CANN 9.2) and store them in it; exit 3 where that is missing."""
    import os

    from tapeout.compiler import report
    from tapeout.compiler.finish import finish

    with report.progress("kernels") as update:
        made = finish(artifact, os.environ.get("PATH", ""), os.environ.get("BISHENG_INSTALL_PATH"), jobs, update)
    facts = [{"artifact": str(m.directory), "identity": m.identity, "kernels": m.kernels, "object_bytes": m.object_bytes} for m in made]
    report.emit(
        facts,
        as_json,
        lambda: print("\n".join(f"{m.directory}: {m.kernels} objects, {m.object_bytes:,} bytes, identity {m.identity[:16]}" for m in made)),
    )
