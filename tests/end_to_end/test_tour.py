"""The guided tour and the README's commands run as printed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Model

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_the_tour_runs() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "examples/tour.py")], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "tile kernels; one of them" in done.stdout


def test_the_readme_commands_run(model: Model, tmp_path: Path) -> None:
    """The block of `tapeout …` lines, in a folder where out/tiny is the tiny checkpoint."""
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/tiny").symlink_to(model.weights)
    lines = re.findall(r"^tapeout .*$", (ROOT / "README.md").read_text(), re.M)
    assert len(lines) >= 5
    environment = {**os.environ, "TAPEOUT_CACHE_DIR": str(model.artifact.parent / "link")}
    for line in lines:
        done = subprocess.run([sys.executable, "-m", "tapeout.compiler", *shlex.split(line)[1:]], cwd=tmp_path, env=environment,
                              capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert done.stdout.strip(), line
