"""List, verify or prune the compile cache."""

from pathlib import Path
from typing import Annotated

import typer

command = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
Folder = Annotated[Path | None, typer.Option("--cache", help="cache folder, as TAPEOUT_CACHE_DIR names it or `ls` prints it; default: the user's")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@command.command()
def ls(cache: Folder = None, as_json: Json = False) -> None:
    """List entries with their sizes."""
    from tapeout.compiler import report
    from tapeout.compiler.cache import Cache, named_root

    store = Cache(named_root(cache))
    entries = list(store.entries())
    data = {"root": str(store.root), "bytes": sum(e.size for e in entries), "entries": [{"key": e.key, "bytes": e.size} for e in entries]}
    report.emit(
        data, as_json, lambda: report.table(f"{store.root}: {data['bytes']:,} bytes", ["key", "bytes"], [(e.key, e.size) for e in entries])
    )


@command.command()
def verify(cache: Folder = None, as_json: Json = False) -> None:
    """Check that every entry still hashes to its name; exit 1 if one does not."""
    from tapeout.compiler import report
    from tapeout.compiler.cache import Cache, named_root

    store = Cache(named_root(cache))
    entries, damaged = list(store.entries()), [entry.key for entry in store.damaged()]
    data = {"root": str(store.root), "entries": len(entries), "damaged": damaged}
    report.emit(
        data, as_json, lambda: print(f"{store.root}: {len(entries)} entries, {len(damaged)} damaged" + "".join(f"\n  {k}" for k in damaged))
    )
    if damaged:
        raise typer.Exit(1)


@command.command()
def prune(
    keep: Annotated[int, typer.Option(min=0, help="MiB to keep, the most recently used")] = 0, cache: Folder = None, as_json: Json = False
) -> None:
    """Remove damaged entries, then the least recently used ones beyond --keep."""
    from tapeout.compiler import report
    from tapeout.compiler.cache import Cache, named_root

    store = Cache(named_root(cache))
    gone = store.prune(keep << 20)
    data = {"root": str(store.root), "removed": len(gone), "bytes": sum(e.size for e in gone)}
    report.emit(data, as_json, lambda: print(f"{store.root}: removed {len(gone)} entries, {data['bytes']:,} bytes"))
