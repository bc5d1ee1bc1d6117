"""Every error code means one thing, wherever it comes from, and the pages of `docs` list exactly the codes that exist."""

import re
from pathlib import Path

from tapeout.compiler import errors as compiler_errors
from tapeout.compiler.errors import CompilerError
from tapeout.models.deepseek_v41.errors import CODES
from tapeout.runtime import errors as runtime_errors
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.sim import errors as simulator_errors

ROOT = Path(__file__).parents[2]
FAMILIES = {"C000", "R000"}  # of base classes, which nobody raises


def raised() -> list[tuple[str, str]]:
    """Code and owner of every error class that has a code of its own, and of every problem of `models`."""
    modules = (compiler_errors, runtime_errors, simulator_errors)
    found = [(kind.code, name) for module in modules for name, kind in vars(module).items() if is_own(kind, module.__name__)]
    return [*found, *((code, f"models {code}") for code in CODES)]


def is_own(kind: object, module: str) -> bool:
    is_error = isinstance(kind, type) and issubclass(kind, CompilerError | TapeoutError)
    return is_error and kind.__module__ == module and "code" in vars(kind) and vars(kind)["code"] not in FAMILIES


def test_a_code_has_one_owner() -> None:
    codes = [code for code, _ in raised()]
    assert len(codes) == len(set(codes)) > 80, sorted(code for code in codes if codes.count(code) > 1)


def test_pages_list_exactly_the_codes_that_exist() -> None:
    rows = [re.findall(r"^\| ([A-Z]\d{3}) \| .+ \|$", page.read_text(), flags=re.MULTILINE) for page in sorted((ROOT / "docs").glob("*.md"))]
    listed = [code for page in rows for code in page]
    assert len(listed) == len(set(listed)), "a code is explained on one page"
    assert set(listed) == {code for code, _ in raised()}


def test_sources_name_no_other_code() -> None:
    """A code written out in a source (a message, a remedy, a problem) is one that exists."""
    known = {code for code, _ in raised()} | FAMILIES
    for folder in ("compiler", "codegen", "passes", "dialects", "models", "runtime"):
        for file in (ROOT / folder).rglob("*.py"):
            for code in re.findall(r"[\"\[]([A-Z]\d{3})[\"\]]", file.read_text()):
                assert code in known, f"{file.relative_to(ROOT)}: {code}"
