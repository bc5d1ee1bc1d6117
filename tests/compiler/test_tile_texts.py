"""Texts of tile modules that come from the cache: the same as made ones, and never those of other sources."""

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tapeout.codegen.kernel import Request
from tapeout.codegen.lower_to_tile import lower
from tapeout.codegen.select_kernels import Choice
from tapeout.compiler import api, sources, tile_texts
from tapeout.compiler.cache import Cache
from tapeout.compiler.errors import SettingsError
from tapeout.compiler.settings import Settings
from tapeout.compiler.sources import tree_fingerprint
from tapeout.compiler.tile_texts import cached_texts, text_key
from tapeout.dialects.format import BF16
from tapeout.dialects.types import Tensor


def choice(width: int = 6, **row: int) -> Choice:
    """A row-wise kernel."""
    x, y, given = Tensor((None, 2 * width), BF16), Tensor((None, width), BF16), {"block_rows": 2, "block_columns": 6} | row
    return Choice(Request("moe.swiglu", (("limit", 7.0),), (x,), (y,)), "swiglu", tuple(sorted(given.items())))


def refuse() -> str:
    raise AssertionError("made again")


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources that nobody edits meanwhile."""
    monkeypatch.setattr(tile_texts, "_sources", lambda: "a hash")


def test_a_text_that_is_known_is_not_made_again(tmp_path: Path) -> None:
    texts, asked = cached_texts(Cache(tmp_path)), []

    def counting(one: Choice, make: Callable[[], str]) -> str:
        asked.append(one)
        return texts(one, make)

    first = lower(choice(), counting)
    assert first.text == lower(choice()).text and asked == [choice()]
    assert texts(choice(), refuse) == first.text
    with pytest.raises(AssertionError, match="made again"):
        texts(choice(width=7), refuse)


def test_a_damaged_text_is_made_again(tmp_path: Path) -> None:
    texts = cached_texts(Cache(tmp_path))
    wanted = lower(choice(), texts).text
    (entry,) = tmp_path.glob("*/*.*[!k]")
    entry.write_bytes(entry.read_bytes().replace(b"arith", b"ariht"))
    assert lower(choice(), texts).text == wanted


def test_the_key_holds_the_choice_and_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {text_key(choice()), text_key(choice(width=7)), text_key(choice(warps=4)), text_key(choice(warps=8))}
    assert len(keys) == 4 and text_key(choice()) in keys
    for home, name in ((tile_texts, "_sources"), (tile_texts.platform, "python_version"), (tile_texts.importlib.metadata, "version")):
        with monkeypatch.context() as changed:
            changed.setattr(home, name, lambda *_: "another")
            assert text_key(choice()) not in keys


def package(folder: Path, files: dict[str, str]) -> ModuleType:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    made = ModuleType(folder.name)
    made.__path__ = [str(folder)]
    return made


FILES = {"a.py": "1\n", "b.py": "", "inner/deep/c.py": "2\n"}


@pytest.mark.parametrize(
    "changed",
    [
        FILES | {"a.py": "3\n"}, FILES | {"inner/deep/c.py": "3\n"}, FILES | {"inner/d.py": ""}, {"a.py": "1\n", "inner/deep/c.py": "2\n"},
        {"a.py": "", "b.py": "1\n", "inner/deep/c.py": "2\n"}, {"a.py": "1\n", "b.py": "", "inner/c.py": "2\n"},
    ],
)  # fmt: skip
def test_every_edit_of_a_source_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str]) -> None:
    """Content, new files, lost ones, content that moves to another file, places."""
    monkeypatch.setattr(sources, "process_began", lambda: time.time() + 60)
    same = [tree_fingerprint([package(tmp_path / str(number) / "code", FILES)]) for number in range(2)]
    assert same[0] == same[1] != tree_fingerprint([package(tmp_path / "other" / "code", changed)]) and same[0] is not None


def test_a_process_that_began_before_an_edit_keeps_no_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run another text than lies there."""
    assert time.time() - 3600 < sources.process_began() < time.time()
    assert tree_fingerprint([package(tmp_path / "code", FILES)]) is None
    monkeypatch.setattr(tile_texts, "_sources", lambda: None)
    texts = cached_texts(Cache(tmp_path / "cache"))
    assert [texts(choice(), lambda text=text: text) for text in ("one", "two")] == ["one", "two"]  # type: ignore[misc]
    assert not (tmp_path / "cache").exists()


def test_all_that_lowering_imports_is_in_the_sources() -> None:
    """A kernel cannot depend on a module of ours that the key does not know."""
    text = (
        "import json, sys\nfrom tapeout.codegen.kernel import load_families\nimport tapeout.codegen.lower_to_tile\nload_families()\n"
        "print(json.dumps([name for name in sys.modules if name.startswith('tapeout')]))"
    )
    found = json.loads(subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout)
    known = ("tapeout.codegen", "tapeout.dialects", "tapeout.passes")
    assert sum(name.startswith("tapeout.codegen.kernels.") for name in found) > 10
    assert [name for name in found if name != "tapeout" and not name.startswith(known)] == []


def test_a_family_of_another_package_is_lowered_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = cached_texts(Cache(tmp_path))
    monkeypatch.setattr(tile_texts, "_codegen", lambda: "somewhere.else")
    assert [texts(choice(), lambda text=text: text) for text in ("one", "two")] == ["one", "two"]  # type: ignore[misc]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("before", [True, False])
def test_a_compile_leaves_the_collector_as_it_was(tmp_path: Path, before: bool) -> None:
    (gc.enable if before else gc.disable)()
    try:
        with pytest.raises(SettingsError):
            api.compile_path(Path("models/deepseek_v41/config-tiny.json").resolve(), tmp_path / "out", Settings(max_context=10**9))
        assert gc.isenabled() == before
    finally:
        gc.enable()
