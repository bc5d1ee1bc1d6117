"""The compile cache: two processes make one thing once, damage is noticed, and only files of its own names are ever touched."""

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tapeout.compiler import cache as module
from tapeout.compiler.cache import Cache, default_root, key_of
from tapeout.compiler.commands import main
from tapeout.compiler.errors import CacheRefused

KEY, OTHER, THIRD = (key_of(name) for name in ("one", "two", "three"))

MAKE_ONCE = """
import sys, time
from pathlib import Path
from tapeout.compiler.cache import Cache
root, log, key = sys.argv[1:]
def make():
    with open(log, "a") as f:
        f.write("made\\n")
    time.sleep(0.3)
    return b"content"
Path(log).parent.joinpath("ready").mkdir(exist_ok=True)
print(Cache(Path(root)).get_or_make(key, make).decode())
"""


def refuse() -> bytes:
    raise AssertionError("made again")


def test_two_processes_make_it_once(tmp_path: Path) -> None:
    """Both start before either is done: the second waits for the first one's bytes."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", MAKE_ONCE, str(tmp_path / "cache"), str(log), KEY]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate(timeout=60)[0] for p in running] == ["content\n"] * 2
    assert log.read_text() == "made\n"


def test_threads_make_it_once(tmp_path: Path) -> None:
    made, found, together = [], [], threading.Barrier(4)

    def make() -> bytes:
        made.append(1)
        return b"x" * 1000

    def work() -> None:
        together.wait()
        found.append(Cache(tmp_path).get_or_make(KEY, make))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"x" * 1000] * 4 and made == [1]


def test_an_entry_is_named_by_key_and_content(tmp_path: Path) -> None:
    store = Cache(tmp_path)
    assert store.lookup(KEY) is None
    assert store.get_or_make(KEY, lambda: b"abc") == b"abc" == store.get_or_make(KEY, refuse) == store.lookup(KEY)
    (entry,) = store.entries()
    assert entry.path == tmp_path / KEY[:2] / f"{KEY}.{hashlib.sha256(b'abc').hexdigest()}"
    assert (entry.key, entry.size, entry.is_sound) == (KEY, 3, True)


@pytest.mark.parametrize("damage", [b"", b"abd", b"abcabc"], ids=["cut", "flipped", "longer"])
def test_a_damaged_entry_is_made_again(tmp_path: Path, damage: bytes) -> None:
    store = Cache(tmp_path)
    store.get_or_make(KEY, lambda: b"abc")
    (entry,) = store.entries()
    entry.path.write_bytes(damage)
    assert not entry.is_sound and [e.is_sound for e in store.entries()] == [False]
    assert store.lookup(KEY) is None
    assert store.get_or_make(KEY, lambda: b"new") == b"new"
    assert [e.is_sound for e in store.entries()] == [True]


def test_a_failed_make_leaves_nothing(tmp_path: Path) -> None:
    store = Cache(tmp_path)
    with pytest.raises(ZeroDivisionError):
        store.get_or_make(KEY, lambda: bytes(1 // 0))
    assert list(store.entries()) == []
    assert store.get_or_make(KEY, lambda: b"abc") == b"abc"


def test_a_full_disk_leaves_no_half_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(CacheRefused, match="found No space left on device, expected a folder that can be written"):
        Cache(tmp_path).get_or_make(KEY, lambda: b"abc")
    assert sorted(p.suffix for p in tmp_path.rglob("*") if p.is_file()) == [".lock"]


def test_an_entry_that_vanishes_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process prunes between the listing and the reading."""
    store = Cache(tmp_path)
    store.get_or_make(KEY, lambda: b"abc")
    (entry,) = store.entries()
    real = Path.glob

    def racing(self: Path, pattern: str) -> list[Path]:
        found = list(real(self, pattern))
        entry.path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "glob", racing)
    assert store.lookup(KEY) is None
    assert store.prune(0) == [] and list(store.entries()) == []
    assert not entry.is_sound


def fill(store: Cache) -> None:
    """Three entries of 10, 20 and 30 bytes; the first was used last."""
    for age, (key, size) in enumerate([(KEY, 10), (OTHER, 20), (THIRD, 30)]):
        store.get_or_make(key, lambda size=size: b"x" * size)  # type: ignore[misc]
        entry = next(e for e in store.entries() if e.key == key)
        os.utime(entry.path, (1000 - age, 1000 - age))


@pytest.mark.parametrize(
    ("keep", "left"), [(0, set()), (9, set()), (10, {KEY}), (29, {KEY}), (30, {KEY, OTHER}), (59, {KEY, OTHER}), (60, {KEY, OTHER, THIRD})]
)
def test_prune_drops_the_least_recently_used(tmp_path: Path, keep: int, left: set[str]) -> None:
    store = Cache(tmp_path)
    fill(store)
    gone = store.prune(keep)
    assert {e.key for e in store.entries()} == left
    assert {e.key for e in gone} == {KEY, OTHER, THIRD} - left


def test_reading_counts_as_use(tmp_path: Path) -> None:
    store = Cache(tmp_path)
    fill(store)
    assert store.lookup(THIRD) == b"x" * 30
    store.prune(30)
    assert [e.key for e in store.entries()] == [THIRD]


def test_prune_drops_damaged_entries_however_much_may_stay(tmp_path: Path) -> None:
    store = Cache(tmp_path)
    fill(store)
    damaged = next(e for e in store.entries() if e.key == OTHER)
    damaged.path.write_bytes(b"y" * 20)
    assert [e.key for e in store.prune(1 << 30)] == [OTHER]


def test_nothing_foreign_is_touched(tmp_path: Path) -> None:
    """Case D08 of the known failures: a cache pointed at a folder of other files leaves every one of them."""
    foreign = {
        "model.safetensors": b"weights",
        f"{KEY[:2]}/model.safetensors": b"weights",
        f"{KEY[:2]}/{KEY}": b"no content hash",
        f"{KEY[:2]}/{KEY}.{'g' * 64}": b"no hash",
        f"{KEY[:2]}/.tapeout-x.part.txt": b"no leftover",
        f"zz/{KEY}.{KEY}": b"no folder of ours",
        f"{KEY[:2]}/{KEY}.{KEY}.bak": b"a copy",
        "deeper/.tapeout-abc.part": b"elsewhere",
    }
    for name, content in foreign.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, (0, 0))
    outside = tmp_path / "outside"
    outside.write_bytes(b"target of a link")
    link = tmp_path / KEY[:2] / f"{KEY}.{'0' * 64}"
    link.symlink_to(outside)
    store = Cache(tmp_path)
    store.get_or_make(OTHER, lambda: b"ours")
    store.lookup(OTHER)
    assert [e.key for e in store.entries()] == [OTHER]
    assert [e.key for e in store.prune(0)] == [OTHER]
    assert {name: (tmp_path / name).read_bytes() for name in foreign} == foreign
    assert link.is_symlink() and outside.read_bytes() == b"target of a link"


def test_prune_removes_abandoned_writes_of_its_own(tmp_path: Path) -> None:
    store = Cache(tmp_path)
    store.get_or_make(KEY, lambda: b"abc")
    old, young = (tmp_path / KEY[:2] / f".tapeout-{name}.part" for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    store.prune(1 << 30)
    assert not old.exists() and young.exists()


def test_prune_removes_locks_of_entries_that_are_gone_and_of_nobody(tmp_path: Path) -> None:
    from filelock import FileLock

    store = Cache(tmp_path)
    fill(store)
    locks = {key: tmp_path / key[:2] / f"{key}.lock" for key in (KEY, OTHER, THIRD)}
    for lock in locks.values():
        lock.touch()
    foreign = tmp_path / KEY[:2] / "mine.lock"
    foreign.touch()
    with FileLock(locks[OTHER]):
        store.prune(10)
        assert {key: lock.exists() for key, lock in locks.items()} == {KEY: True, OTHER: True, THIRD: False}
    assert foreign.exists()


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_root_that_is_no_folder_is_one_sentence(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CacheRefused, match=r"^\[C106\] compile cache .*: found (File exists|Not a directory), expected a folder"):
        Cache(tmp_path / place).get_or_make(KEY, lambda: b"abc")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_refuses_is_one_sentence_in_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Cache(tmp_path)
    store.get_or_make(KEY, lambda: b"one")

    def refused(self: Path, *how: object, **more: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    said = f"tapeout: [C106] compile cache {tmp_path}: found Permission denied, expected a folder that can be written; set TAPEOUT_CACHE_DIR to "
    for method, command in (("unlink", "prune"), ("read_bytes", "verify"), ("stat", "ls"), ("exists", "ls"), ("exists", "prune")):
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, refused)
            if method == "stat":
                patch.setattr(Path, "exists", lambda self: True)
                patch.setattr(Path, "is_dir", lambda self: self == tmp_path)
            assert main(["cache", command, "--cache", str(tmp_path)]) == 1
        assert capsys.readouterr().err.startswith(said)
    assert store.lookup(KEY) == b"one"


def test_what_making_raises_is_not_the_cache_s_fault(tmp_path: Path) -> None:
    def make() -> bytes:
        raise OSError("of the maker")

    with pytest.raises(OSError, match=r"^of the maker$"):
        Cache(tmp_path).get_or_make(KEY, make)


def test_default_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TAPEOUT_CACHE_DIR", str(tmp_path))
    assert default_root() == tmp_path / "v1"
    monkeypatch.delenv("TAPEOUT_CACHE_DIR")
    assert default_root().name == "v1" and "tapeout" in default_root().parts


def test_keys_tell_lists_of_parts_apart() -> None:
    keys = [key_of(), key_of(""), key_of("", ""), key_of("ab"), key_of("a", "b"), key_of("b", "a"), key_of("a", "b", "")]
    assert len(set(keys)) == len(keys)
    assert key_of("ab") == key_of(b"ab") and all(len(key) == 64 for key in keys)


def test_module_imports_no_lock_until_it_writes() -> None:
    assert "FileLock" not in vars(module)
