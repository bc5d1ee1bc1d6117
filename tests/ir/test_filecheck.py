"""Runs the RUN lines of every .mlir file of this folder in this process: no interpreter start, no second import.

Two forms: `tapeout opt %s -p "passes" | filecheck %s` and `not tapeout opt %s -p "passes" 2>&1 | filecheck %s`.
"""

import re
import shlex
from pathlib import Path

import pytest
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import parse_argv_options
from filecheck.parser import Parser, pattern_for_opts

from tapeout.compiler.errors import CompilerError
from tapeout.compiler.opt import SEPARATOR, run_passes
from tapeout.compiler.pipeline import PASSES

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.glob("*.mlir"))
RUN = re.compile(r"// RUN: (.*)")


def filecheck(arguments: list[str], text: str) -> int:
    """Matches `text` against the CHECK lines of the file that `arguments` name; 0 where they hold."""
    options = parse_argv_options(["filecheck", *arguments])
    with Path(options.match_filename).open() as file:
        return int(Matcher(options, FInput("-", text), Parser(options, file, *pattern_for_opts(options))).run())


def opt(source: str, passes: str) -> tuple[bool, str]:
    """What `tapeout opt` prints, and whether it refused."""
    try:
        return False, SEPARATOR.join(run_passes(source, passes))
    except CompilerError as error:
        return True, f"tapeout: {error}\n"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_run_lines(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = RUN.findall(path.read_text())
    assert lines, "the file has no RUN line"
    for line in lines:
        command, check = (shlex.split(side) for side in line.replace("%s", str(path)).replace("2>&1", "").split("|"))
        refuses = command[0] == "not"
        assert command[refuses : refuses + 4] == ["tapeout", "opt", str(path), "-p"] and len(command) == refuses + 5, line
        assert check[0] == "filecheck", line
        refused, text = opt(path.read_text(), command[-1])
        assert refused == refuses, text
        assert filecheck(check[1:], text) == 0, capsys.readouterr().out + text


def test_every_pass_has_a_file_and_a_refused_case() -> None:
    """A fuse pass refuses by leaving ops alone, any other with an error."""
    names = {path.stem for path in FILES}
    wanted = {name for one in PASSES for name in (one, f"{one}-left" if one.startswith("fuse-") else f"{one}-refused")}
    assert wanted <= names


def test_a_wrong_check_line_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.mlir"
    path.write_text("// CHECK: nn.nothing\n")
    assert filecheck([str(path)], "module {\n}\n") == 1
    assert capsys.readouterr()
