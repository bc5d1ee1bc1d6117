"""An installed package has every file that a checkout has: pyproject.toml names each kind of file that is not Python."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("codegen", "compiler", "dialects", "models", "passes", "runtime")


def test_every_kind_of_file_is_carried() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    kinds = {f"*{path.suffix}" for path in files} - {"*.py"}
    assert "*.jinja" in kinds and kinds <= set(settings["package-data"]["*"])
