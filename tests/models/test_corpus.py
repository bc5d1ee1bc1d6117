"""The corpus: pinned bytes, disjoint splits, a pack that reads back, and refusals of one sentence."""

import json
import sysconfig
from pathlib import Path

import pytest

from tapeout.models.tiny import corpus as pinned
from tapeout.models.tiny.corpus import CorpusError, digest_of, digest_of_pins, main, read_corpus, read_pins, write_pack

LIBRARY = Path(sysconfig.get_path("stdlib"))


def _has_corpus() -> bool:
    try:
        read_corpus()
    except CorpusError:
        return False
    return True


needs_corpus = pytest.mark.skipif(not _has_corpus(), reason="this Python's library is not the pinned one")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of three files with its own list; returns its folder."""
    library = tmp_path / "library"
    (library / "pkg").mkdir(parents=True)
    (library / "pydoc_data").mkdir()
    (library / "a.py").write_text("x = 'ä'\n")
    (library / "pkg/b.py").write_text("def f():\n    return 1\n")
    (library / "pydoc_data/topics.py").write_text("# topics\ntopics = {'one': 'First\\n'\n  ' line\\n', 'two': 'Second'}\n")
    names = {"train": ["a.py", "pydoc_data/topics.py"], "held_out": ["pkg/b.py"]}
    pins = {split: {name: digest_of((library / name).read_bytes()) for name in listed} for split, listed in names.items()}
    nested = {"train": {".": {"a.py": pins["train"]["a.py"]}, "pydoc_data": {"topics.py": pins["train"]["pydoc_data/topics.py"]}},
              "held_out": {"pkg": {"b.py": pins["held_out"]["pkg/b.py"]}}}  # fmt: skip
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps({"python": "3.11.7", "sha256": digest_of_pins(pins), **nested}))
    monkeypatch.setattr(pinned, "PINS", listed)
    return library


def test_the_list_is_whole_and_its_splits_are_apart() -> None:
    pins = read_pins()
    train, held_out = (set(pins[split]) for split in ("train", "held_out"))
    assert (len(train), len(held_out)) == (1374, 79)
    assert not train & held_out
    assert all(len(digest) == 16 for split in pins.values() for digest in split.values())
    assert not [name for name in train | held_out if name.startswith(("encodings/", "lib2to3/tests/data/", "site-packages/"))]


@needs_corpus
def test_the_corpus_has_its_sizes_and_a_fair_share_is_held_out() -> None:
    found = read_corpus()
    train, held_out = (sum(len(d.utf8) for d in split) for split in (found.train, found.held_out))
    assert (train, held_out) == (27_874_677, 1_180_827)
    assert max(len(d.utf8) for d in found.held_out) <= 80_000
    topics = next(d for d in found.train if d.name == pinned.TOPICS)
    assert topics.text.startswith('The "assert" statement\n***')


@needs_corpus
def test_no_held_out_file_is_a_near_copy() -> None:
    """Of a held-out file's runs of four lines at most 8 % occur anywhere in the train split: the definition, computed naively."""
    found = read_corpus()

    def runs(text: str) -> set[tuple[str, ...]]:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return {tuple(lines[i : i + 4]) for i in range(len(lines) - 3)}

    seen = {run for document in found.train for run in runs(document.text)}
    shares = {document.name: len(runs(document.text) & seen) / max(1, len(runs(document.text))) for document in found.held_out}
    assert max(shares.values()) <= 0.08, max(shares, key=lambda name: shares[name])


def test_a_pack_is_deterministic_and_reads_back(small: Path, tmp_path: Path) -> None:
    sizes = [write_pack(tmp_path / name, small) for name in ("one", "two")]
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert sizes[0] == (tmp_path / "one").stat().st_size
    found = read_corpus(tmp_path / "one")
    assert found == read_corpus(small)
    assert [d.text for d in found.train] == ["x = 'ä'\n", "First\n line\n\nSecond\n"]
    assert [(d.name, d.text) for d in found.held_out] == [("pkg/b.py", "def f():\n    return 1\n")]
    write_pack(tmp_path / "again", tmp_path / "one")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "one").read_bytes()


@pytest.mark.parametrize("fault", ["is missing", "has other bytes"])
def test_a_wrong_file_is_refused_with_the_python_that_has_it(small: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    if fault == "is missing":
        (small / "pkg/b.py").unlink()
    else:
        (small / "pkg/b.py").write_text("def f():\n    return 2\n")
    with pytest.raises(CorpusError, match=rf"^{small}: pkg/b\.py {fault}; the corpus is the standard library of CPython 3\.11\.7, "):
        read_corpus(small)
    assert main(["check", "--source", str(small)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_damaged_pack_or_list_is_refused(small: Path, tmp_path: Path) -> None:
    write_pack(tmp_path / "pack", small)
    data = (tmp_path / "pack").read_bytes()
    for damaged in (data[:-20], data[:40] + b"\0" + data[41:], b"", b"no pack"):
        (tmp_path / "pack").write_bytes(damaged)
        with pytest.raises(CorpusError, match="expected a file written by"):
            read_corpus(tmp_path / "pack")
    document = json.loads(pinned.PINS.read_text())
    document["train"]["."]["a.py"] = "0" * 16
    pinned.PINS.write_text(json.dumps(document))
    with pytest.raises(CorpusError, match="restore the file of the repository"):
        read_corpus(small)
