"""The safetensors container: an 8-byte little-endian length, a JSON header, the payload.

Reads and writes headers only, strictly: every byte of the payload belongs to exactly one tensor, sizes follow from shape and
dtype, and nothing is allocated from an unchecked number. Payload bytes are mapped by `checkpoint.py`.
"""

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

from tapeout.models.deepseek_v41.errors import Problem, shown
from tapeout.models.deepseek_v41.json_document import parse_object

HEADER_LIMIT_BYTES = 100_000_000  # the limit of the format's reference reader
LENGTH_BYTES = 8
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


class Entry(NamedTuple):
    """Where one tensor lies: bytes `start` to `stop` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> tuple[dict[str, Entry], list[Problem]]:
    """Returns the tensors of a shard by name and the problems met (M204); with problems the tensors are not to be used."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(LENGTH_BYTES)
            length = int.from_bytes(head, "little")
            if len(head) < LENGTH_BYTES or length > min(HEADER_LIMIT_BYTES, size - LENGTH_BYTES):
                found = f"{size} bytes with a header of {length}" if len(head) == LENGTH_BYTES else f"{size} bytes"
                return {}, [_bad(path.name, found, f"a header of at most {HEADER_LIMIT_BYTES} bytes inside the file")]
            text = file.read(length).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return {}, [_bad(path.name, getattr(error, "strerror", None) or str(error), "a readable safetensors file")]
    members, problems = parse_object(text, path.name, "M204")
    if problems:
        return {}, [_bad(_inside(path.name, problem.path), problem.found, problem.expected) for problem in problems]
    return _entries(path.name, members, LENGTH_BYTES + length, size)


def pack_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """Returns the length and header of a file that holds (name, dtype, shape, bytes) one after the other, 8-byte aligned."""
    members: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name, dtype, shape, size in tensors:
        members[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(members, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _inside(shard: str, path: str) -> str:
    return path if path == shard else f"{shard}: {path}"


def _bad(where: str, found: str, expected: str) -> Problem:
    return Problem("M204", where, found, expected, "download the shard again")


def _entries(shard: str, members: Mapping[str, object], payload: int, size: int) -> tuple[dict[str, Entry], list[Problem]]:
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    for name, member in members.items():
        if name == "__metadata__":
            if not isinstance(member, dict) or not all(isinstance(value, str) for value in member.values()):
                problems.append(_bad(f"{shard}: __metadata__", shown(member), "an object of strings"))
            continue
        entry = _entry(member, payload)
        if isinstance(entry, str):
            problems.append(_bad(f"{shard}: {name}", shown(member), entry))
        else:
            entries[name] = entry
    return entries, problems or _coverage(shard, entries, payload, size)


def _entry(member: object, payload: int) -> Entry | str:
    """Returns the entry, or what was expected of it."""
    if not isinstance(member, dict) or set(member) != {"dtype", "shape", "data_offsets"}:
        return "an object of dtype, shape and data_offsets"
    dtype, shape, offsets = member["dtype"], member["shape"], member["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        return f"a dtype among {', '.join(BITS)}"
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return "whole numbers as shape, and two ascending offsets"
    bits = prod(shape) * BITS[dtype]
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        return f"{bits / 8:g} bytes for this shape and dtype"
    return Entry(dtype, tuple(shape), payload + offsets[0], payload + offsets[1])


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _coverage(shard: str, entries: Mapping[str, Entry], payload: int, size: int) -> list[Problem]:
    """Checks that the tensors tile the payload: no overlap, no hole, nothing past the end."""
    end = payload
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            word = "overlap with the tensor before it" if entry.start < end else "a hole before it"
            return [_bad(f"{shard}: {name}", f"offset {entry.start - payload}, {word}", f"offset {end - payload}")]
        end = entry.stop
    if end != size:
        return [_bad(shard, f"{size} bytes in the file", f"{end} bytes by its header")]
    return []
