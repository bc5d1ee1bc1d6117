"""The readable text form: the generic form with the quotes around our op names removed, and back.

Python dialects have no assembly format of their own; these two functions are exact inverses on everything our printer writes.
"""

import re
from functools import cache

from tapeout.dialects._mlir import ir
from tapeout.dialects.define import DIALECTS, load_dialects

_QUOTED = re.compile(r'"([a-z]+\.[a-z_][a-z0-9_]*)"(?=\()')


def sugar(text: str) -> str:
    """`"nn.linear"(` becomes `nn.linear(` for ops of our dialects."""
    names = _dialects()
    return _QUOTED.sub(lambda m: m[1] if m[1].split(".")[0] in names else m[0], text)


def unsugar(text: str) -> str:
    """Restores the quotes, so that MLIR's parser takes the text; strings and comments stay as they are."""
    return _bare(frozenset(_dialects())).sub(lambda m: f'"{m[1]}"' if m[1] else m[0], text)


@cache
def _bare(names: frozenset[str]) -> re.Pattern[str]:
    """A string, a comment, or (group 1) an op name of ours in front of its operands."""
    op = rf"(?<![\w!#@%.$-])((?:{'|'.join(sorted(names))})\.[a-z_][a-z0-9_]*)(?=\()"
    return re.compile(rf'"(?:[^"\\\n]|\\.)*"|//[^\n]*|{op}')


def parse(text: str) -> ir.Module:
    """A module from readable text; needs a current context. Raises `ir.MLIRError` with line and column."""
    load_dialects(ir.Context.current)
    return ir.Module.parse(unsugar(text))


def _dialects() -> set[str]:
    return {d.DIALECT_NAMESPACE for d in DIALECTS} | {"cache", "tile"}  # type: ignore[attr-defined]
