"""The options that `tapeout compile` and `tapeout plan` share: what a step may hold. Said once; the rules are those of settings.py.

Imports nothing heavy: `tapeout --help` reads it.
"""

from pathlib import Path
from typing import Annotated

import typer

ROWS, SEQUENCES, OUTPUTS, CONTEXT, BLOCK_TOKENS, WORKSPACE = 512, 8, 512, 4096, 128, 256
"""What `Settings` takes where nothing is said; the last in MiB."""

Rows = Annotated[int, typer.Option(help="rows of the largest step")]
Sequences = Annotated[int, typer.Option(help="sequences that run at once")]
Outputs = Annotated[int, typer.Option(help="rows of a step that may ask for logits")]
Context = Annotated[int, typer.Option(help="tokens of the longest sequence")]
BlockTokens = Annotated[int, typer.Option(help="tokens of one cache block")]
Workspace = Annotated[int, typer.Option(help="MiB that index scoring may use")]
RowBuckets = Annotated[str, typer.Option(help="ascending row counts to plan for, as 16,128,512; the last is --max-rows")]
Tuning = Annotated[Path | None, typer.Option(help="schedule rows that come before the target's own (docs/tuning.md)")]
UnknownKeys = Annotated[bool, typer.Option("--allow-unknown-keys", help="accept configuration keys that are not known")]
