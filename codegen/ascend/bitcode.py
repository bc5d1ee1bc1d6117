"""Names of the functions that an LLVM bitcode file defines: just enough of the bitstream format to list them, whatever LLVM wrote it.

Read are the records of the module block itself (functions among them) and the string table; nested blocks are stepped over by their length.
Format: LLVM's BitCodeFormat page (bitstream container, MODULE_CODE_FUNCTION, STRTAB_BLOCK).
"""

from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = b"BC\xc0\xde"
WRAPPER = b"\xde\xc0\x17\x0b"
MODULE_BLOCK, STRTAB_BLOCK = 8, 23
END_BLOCK, ENTER_SUBBLOCK, DEFINE_ABBREV, UNABBREV_RECORD = range(4)
FUNCTION, STRTAB_BLOB = 8, 1
FIXED, VBR, ARRAY, CHAR6, BLOB = range(1, 6)


class BitcodeError(ValueError):
    """A file that is not bitcode, or ends inside a record."""


@dataclass
class _Bits:
    """A cursor over little-endian bits."""

    data: bytes
    at: int = 0

    def fixed(self, width: int) -> int:
        first = self.at >> 3
        window = int.from_bytes(self.data[first : first + 9], "little") >> (self.at & 7)
        self.at += width
        return window & ((1 << width) - 1)

    def vbr(self, width: int) -> int:
        high, value, shift = 1 << (width - 1), 0, 0
        while True:
            chunk = self.fixed(width)
            value |= (chunk & (high - 1)) << shift
            if not chunk & high:
                return value
            shift += width - 1
            if self.at >> 3 > len(self.data):
                raise BitcodeError("the file ends inside a record")

    def align(self) -> None:
        self.at = (self.at + 31) & ~31


Abbreviation = list[tuple[int, int]]
"""(encoding, value): encoding 0 is a literal."""


def defined_functions(data: bytes) -> frozenset[str]:
    """Names of functions with a body; raises `BitcodeError`."""
    if data[:4] == WRAPPER:
        first, size = (int.from_bytes(data[n : n + 4], "little") for n in (8, 12))
        data = data[first : first + size]
    if data[:4] != MAGIC:
        raise BitcodeError(f"starts with {data[:4].hex() or 'nothing'}, expected {MAGIC.hex()}: this is not LLVM bitcode")
    bits, places, names = _Bits(data, 32), [], b""
    while bits.at + 64 <= len(data) * 8:
        if bits.fixed(2) != ENTER_SUBBLOCK:
            break
        block, width, end = _enter(bits)
        if block == MODULE_BLOCK:
            places += [(r[0], r[1]) for code, r, _ in _records(bits, width, end) if code == FUNCTION and not r[4]]
        elif block == STRTAB_BLOCK:
            names = next((blob for code, _, blob in _records(bits, width, end) if code == STRTAB_BLOB), b"")
        bits.at = end
    return frozenset(names[at : at + size].decode() for at, size in places)


def _enter(bits: _Bits) -> tuple[int, int, int]:
    """Block number, width of its abbreviation numbers, bit behind its end."""
    block, width = bits.vbr(8), bits.vbr(4)
    bits.align()
    words = bits.fixed(32)
    return block, width, bits.at + words * 32


def _records(bits: _Bits, width: int, end: int) -> Iterator[tuple[int, list[int], bytes]]:
    abbreviations: list[Abbreviation] = []
    while bits.at < end:
        number = bits.fixed(width)
        if number == END_BLOCK:
            return
        if number == ENTER_SUBBLOCK:
            bits.at = _enter(bits)[2]
        elif number == DEFINE_ABBREV:
            abbreviations.append(_abbreviation(bits))
        elif number == UNABBREV_RECORD:
            code, count = bits.vbr(6), bits.vbr(6)
            yield code, [bits.vbr(6) for _ in range(count)], b""
        else:
            (code, *values), blob = _abbreviated(bits, abbreviations[number - 4])
            yield code, values, blob


def _abbreviation(bits: _Bits) -> Abbreviation:
    out: Abbreviation = []
    for _ in range(bits.vbr(5)):
        if bits.fixed(1):
            out.append((0, bits.vbr(8)))
        else:
            encoding = bits.fixed(3)
            out.append((encoding, bits.vbr(5) if encoding in (FIXED, VBR) else 0))
    return out


def _abbreviated(bits: _Bits, form: Abbreviation) -> tuple[list[int], bytes]:
    values, blob, left = [], b"", list(form)
    while left:
        encoding, size = left.pop(0)
        if encoding == ARRAY:
            count, (inner, inner_size) = bits.vbr(6), left.pop(0)
            values += [_scalar(bits, inner, inner_size) for _ in range(count)]
        elif encoding == BLOB:
            count = bits.vbr(6)
            bits.align()
            blob = bits.data[bits.at >> 3 : (bits.at >> 3) + count]
            bits.at += count * 8
            bits.align()
        else:
            values.append(_scalar(bits, encoding, size))
    return values, blob


def _scalar(bits: _Bits, encoding: int, size: int) -> int:
    if encoding == 0:
        return size
    if encoding == CHAR6:
        return bits.fixed(6)
    return (bits.fixed(size) if encoding == FIXED else bits.vbr(size)) if size else 0
