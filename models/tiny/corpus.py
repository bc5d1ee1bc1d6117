"""The text the trained checkpoint learns from and is judged on: sources of CPython's standard library, and its reference topics.

`corpus.json` pins every file of CPython 3.11.7 by SHA-256 and says which ones are held out; `pinning.py` makes that list. Reading
promises exactly those bytes, from an installation or from a pack, or raises `CorpusError`. Needs the standard library only, since
training runs where little else is installed.

    python -m tapeout.models.tiny.corpus check            is this Python's library the pinned one
    python -m tapeout.models.tiny.corpus pack -o FILE     all texts in one compressed file, for a machine with another Python
"""

import argparse
import ast
import hashlib
import json
import lzma
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PINS = Path(__file__).with_name("corpus.json")
TOPICS = "pydoc_data/topics.py"
DIGEST = 16  # hexadecimal digits kept of a file's SHA-256; one whole SHA-256 over all of them stands beside the list
PACK_MAGIC = b"tapeout corpus 1\n"

Pins = dict[str, dict[str, str]]
"""`train` and `held_out`, each from path to digest, in reading order."""


class CorpusError(Exception):
    """The pinned texts are not here. The message is one sentence that says which Python has them."""


@dataclass(frozen=True)
class Document:
    """One text. `name` is its path below the standard library."""

    name: str
    text: str

    @cached_property
    def utf8(self) -> bytes:
        return self.text.encode()


@dataclass(frozen=True)
class Corpus:
    """Documents by split, in the order of `corpus.json`. No file is on both sides, nor are near copies."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]


def read_corpus(source: Path | str | None = None) -> Corpus:
    """Reads the pinned texts from a pack, a library folder, or (None) this Python's own library. Raises `CorpusError`."""
    path = Path(source or sysconfig.get_path("stdlib"))
    pinned = read_pins()
    read = _pack_reader(path) if path.is_file() else _folder_reader(path)
    found = {name: _checked(path, name, digest, read) for split in pinned.values() for name, digest in split.items()}
    train, held_out = (tuple(Document(name, text_of(name, found[name])) for name in pinned[split]) for split in ("train", "held_out"))
    return Corpus(train, held_out)


def read_pins() -> Pins:
    """Returns the pinned list, checked against its own SHA-256. Raises `CorpusError`."""
    document = json.loads(PINS.read_text())
    pinned: Pins = {split: flat(document[split]) for split in ("train", "held_out")}
    if digest_of_pins(pinned) != document["sha256"]:
        raise CorpusError(f"{PINS.name}: its list does not have the SHA-256 {document['sha256']}; restore the file of the repository")
    return pinned


def pinned_python() -> str:
    """The version of CPython that has the texts."""
    return str(json.loads(PINS.read_text())["python"])


def write_pack(output: Path | str, source: Path | str | None = None) -> int:
    """Writes the pinned files, byte for byte, as one compressed file; returns its size. Same input, same bytes. Raises `CorpusError`."""
    path = Path(source or sysconfig.get_path("stdlib"))
    read = _pack_reader(path) if path.is_file() else _folder_reader(path)
    files = {name: _checked(path, name, digest, read) for split in read_pins().values() for name, digest in split.items()}
    head = json.dumps([[name, len(data)] for name, data in files.items()]).encode()
    packed = lzma.compress(PACK_MAGIC + b"%d\n" % len(head) + head + b"".join(files.values()), preset=6)
    Path(output).write_bytes(packed)
    return len(packed)


def text_of(name: str, data: bytes) -> str:
    """Returns the text of a file: itself, but for the reference topics, which are stored as one Python dictionary of texts."""
    text = data.decode()
    if name != TOPICS:
        return text
    topics = ast.literal_eval(text.partition("=")[2].strip())
    return "\n\n".join(topics[key].strip() for key in topics) + "\n"


def digest_of(data: bytes) -> str:
    """The pinned digest of a file."""
    return hashlib.sha256(data).hexdigest()[:DIGEST]


def digest_of_pins(pinned: Pins) -> str:
    """SHA-256 over splits, paths and digests."""
    lines = "".join(f"{split} {name} {digest}\n" for split, files in pinned.items() for name, digest in files.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def flat(folders: dict[str, dict[str, str]]) -> dict[str, str]:
    """From folder, file name and digest to path and digest."""
    return {f"{folder}/{name}".removeprefix("./"): digest for folder, files in folders.items() for name, digest in files.items()}


def _folder_reader(folder: Path) -> Callable[[str], bytes]:
    return lambda name: (folder / name).read_bytes()


def _pack_reader(path: Path) -> Callable[[str], bytes]:
    """Reads a whole pack; a file is then looked up by name."""
    try:
        data = lzma.decompress(path.read_bytes())
        if not data.startswith(PACK_MAGIC):
            raise ValueError("no corpus pack")
        length, _, rest = data.removeprefix(PACK_MAGIC).partition(b"\n")
        entries = json.loads(rest[: int(length)])
        return _split(entries, rest[int(length) :]).__getitem__
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise CorpusError(f"{path}: {error}; expected a file written by `python -m tapeout.models.tiny.corpus pack`") from error


def _split(entries: Iterable[tuple[str, int]], data: bytes) -> dict[str, bytes]:
    files, at = {}, 0
    for name, size in entries:
        files[name], at = data[at : at + size], at + size
    return files


def _checked(source: Path, name: str, digest: str, read: Callable[[str], bytes]) -> bytes:
    """Returns a file that is the pinned one."""
    try:
        data = read(name)
    except (OSError, KeyError):
        raise _refused(source, name, "is missing") from None
    if digest_of(data) != digest:
        raise _refused(source, name, "has other bytes")
    return data


def _refused(source: Path, name: str, fault: str) -> CorpusError:
    here = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    return CorpusError(
        f"{source}: {name} {fault}; the corpus is the standard library of CPython {pinned_python()}, with its test package, as released "
        f"(this is Python {here}): run with that Python, or pass a pack made by it"
    )


def main(arguments: list[str] | None = None) -> int:
    """The command; returns 0, or 1 with the refusal on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m tapeout.models.tiny.corpus", description="The pinned corpus of the trained checkpoint."
    )
    parser.add_argument("action", choices=("check", "pack"))
    parser.add_argument("--source", type=Path, help="library folder or pack; by default this Python's library")
    parser.add_argument("-o", "--output", type=Path, default=Path("corpus.xz"), help="the pack to write")
    given = parser.parse_args(arguments)
    try:
        if given.action == "pack":
            print(f"{given.output}: {write_pack(given.output, given.source):,} bytes")
            return 0
        corpus = read_corpus(given.source)
    except (CorpusError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for split in ("train", "held_out"):
        documents: tuple[Document, ...] = getattr(corpus, split)
        print(f"{split}: {len(documents)} documents, {sum(len(d.utf8) for d in documents):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
