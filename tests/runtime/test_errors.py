"""Error classes and the list in docs/runtime.md are one."""

import re
from pathlib import Path

from tapeout.runtime import errors
from tapeout.runtime.errors import FieldsRefused, TapeoutError

PAGE = Path(__file__).parents[2] / "docs" / "runtime.md"


def kinds() -> list[type[TapeoutError]]:
    """Classes that are raised: those with a code of their own."""
    found = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TapeoutError)]
    return [kind for kind in found if "code" in vars(kind) and kind is not TapeoutError]


def test_codes_are_unique_and_documented() -> None:
    listed = dict(re.findall(r"^\| ([A-Z]\d{3}) \| (.+) \|$", PAGE.read_text(), flags=re.MULTILINE))
    assert listed == {kind.code: kind.sentence for kind in kinds()}
    assert len({kind.code for kind in kinds()}) == len(kinds()) > 30


def test_messages_have_one_shape() -> None:
    error = errors.TensorMissing("here", "this", "that", remedy="do so")
    assert str(error) == "[W101] the checkpoint lacks a tensor that a kernel reads - here - found this, expected that - do so"
    assert (error.where, error.found, error.expected, error.advice) == ("here", "this", "that", "do so")
    assert str(errors.SlotBusy("slot 1")) == "[B102] the sequence slot is not free - slot 1 - use another slot, or end its request first"


def test_values_are_cut_where_they_are_long_and_never_fail_to_print() -> None:
    error = errors.ParameterRange("n", 10**5000, "1 to 128")
    assert "found an int that is too long to print (int), expected 1 to 128" in str(error) and error.value == 10**5000
    assert len(str(errors.ParameterType("n", "x" * 10_000, "a number"))) < 500
    assert "found 'x' (str)" in str(errors.ParameterType("n", "x", "a number"))


def test_many_problems_are_counted() -> None:
    error = FieldsRefused("file", [f"p{i}" for i in range(8)])
    assert "found p0; p1; p2; p3; p4; and 3 more - " in str(error) and len(error.problems) == 8
