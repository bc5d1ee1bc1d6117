"""What commands print on a terminal: tables and progress bars; words in brackets are words, whatever rich makes of them elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "tapeout.compiler"]


def on_a_terminal(command: list[str], folder: Path) -> tuple[int, str]:
    """Exit code of a command whose outputs are a terminal of 100 columns, and what it wrote there without colours."""
    ours, its = os.openpty()
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=its, stderr=its, cwd=folder, env=environment) as process:
        os.close(its)
        written = b""
        while part := _read(ours):
            written += part
    os.close(ours)
    return process.returncode, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode()).replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other side is closed: the end of a terminal
        return b""


@pytest.mark.parametrize("name", ["plain", "[/red]", "a[bold]b", "[link=x]", "\\[x]"])
def test_a_table_shows_names_as_they_are(tmp_path: Path, name: str) -> None:
    code, said = on_a_terminal([*COMMAND, "cache", "ls", "--cache", name], tmp_path)
    title, *table = said.splitlines()
    assert code == 0 and title.rstrip() == f"{name}: 0 bytes" and "key" in table[1] and table[0].startswith("┏")


def test_numbers_are_right_and_words_left(tmp_path: Path) -> None:
    program = "from tapeout.compiler.report import table; table('t', ['[name]', 'n'], [('[a]', 1234), ('bc', 5), ('[/d]', None)])"
    code, said = on_a_terminal([sys.executable, "-c", program], tmp_path)
    rows = [line for line in said.splitlines() if line.startswith("│")]
    assert code == 0 and rows == ["│ [a]    │ 1,234 │", "│ bc     │     5 │", "│ [/d]   │     - │"]


def test_a_progress_bar_leaves_nothing_behind(tmp_path: Path) -> None:
    program = (
        "from tapeout.compiler import report\n"
        "with report.progress('[kernels]') as update:\n"
        "    for i in range(4): update(i, 3, f'[/{i}]')\n"
        "print('end')"
    )
    code, said = on_a_terminal([sys.executable, "-c", program], tmp_path)
    assert code == 0 and "3/3" in said and "[kernels]" in said and "[/3]" in said and said.splitlines()[-1].endswith("end")
