"""Binding operands to tensors: mapped where stored as read, packed when asked for elsewhere, checked before anything is packed."""

import gc
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tapeout.runtime import weights
from tapeout.runtime.artifact import Derived, Rotary, TokenMap, WeightOperand, WeightPart
from tapeout.runtime.device.memory import address
from tapeout.runtime.errors import (
    ScaleTooLarge,
    ScaleTooSmall,
    TableUnavailable,
    TensorMismatch,
    TensorMissing,
    TransformRefused,
    WeightsError,
    ZeroScales,
)
from tapeout.runtime.weights import bind_weights, rotary_table
from tests.runtime.test_engine import GREEDY, prompt, run_one
from tests.runtime.toy import Tensors, toy_answer, toy_engine

bfloat16 = ml_dtypes.bfloat16


def part(name: str, dtype: Any, shape: tuple[int, ...], *tensors: str, transforms: tuple[str, ...] = (), layout: Any = None) -> WeightPart:
    size = {"bf16": 2, "f32": 4, "i32": 4}.get(dtype, 1) * int(np.prod(shape))
    kind = layout or ("packed" if transforms else "as_stored")
    return WeightPart(part=name, dtype=dtype, shape=shape, bytes=size, layout=kind, tensors=tensors, transforms=transforms)


def operand(*parts: WeightPart, derived: Derived | None = None) -> WeightOperand:
    return WeightOperand(name="op", kind="weight", parts=parts, derived=derived)


def test_as_stored_parts_are_the_views_themselves() -> None:
    stored = np.arange(6, dtype=bfloat16).reshape(2, 3)
    bound = bind_weights([operand(part("values", "bf16", (2, 3), "w"))], Tensors(w=stored))
    assert bound.parts["op", "values"] is stored
    assert (bound.mapped_bytes, bound.packed_bytes) == (12, 0)


def test_packed_parts_are_aligned_copies() -> None:
    codes = np.arange(1, 16, dtype=np.uint8).reshape(3, 5)
    parts = (
        part("codes", "f8E4M3FN", (1, 5, 4), "w", transforms=("transpose", "panels:4")),
        part("scales", "i8", (1, 2, 4), "s", transforms=("transpose", "panels:4")),
    )
    scales = np.array([[130, 131], [132, 133], [134, 135]], dtype=np.uint8)
    bound = bind_weights([operand(*parts)], Tensors(w=codes.view(ml_dtypes.float8_e4m3fn), s=scales))
    packed = bound.parts["op", "codes"]
    assert address(packed) % 64 == 0 and packed.dtype == ml_dtypes.float8_e4m3fn
    assert packed.view(np.uint8)[0, 1].tolist() == [2, 7, 12, 0], "values pad with zero"
    assert bound.parts["op", "scales"][0].tolist() == [[130, 132, 134, 127], [131, 133, 135, 127]], "scales pad with 2^0"
    assert (bound.mapped_bytes, bound.packed_bytes) == (0, 28)


def test_widening_counts_as_the_element_it_makes() -> None:
    wide = operand(part("values", "f32", (3,), "w", transforms=("f32",)))
    bound = bind_weights([wide], Tensors(w=np.array([1, 2, 3], dtype=bfloat16)))
    assert bound.parts["op", "values"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("wanted", "error", "words"),
    [
        (part("values", "bf16", (2, 3), "v"), TensorMissing, "found v not there"),
        (part("values", "bf16", (3, 2), "w"), TensorMismatch, "found shape [2, 3], expected [3, 2]"),
        (part("values", "f32", (2, 3), "w"), TensorMismatch, "found elements bfloat16, expected f32"),
        (part("values", "bf16", (2, 3), "w", transforms=("transpose",)), TensorMismatch, "found shape [3, 2], expected [2, 3]"),
        (part("values", "bf16", (2, 3), "w", transforms=("fp4_split",)), TransformRefused, "a multiple of 128"),
        (part("values", "bf16", (2, 2, 3), "w", "b", transforms=("stack",)), TransformRefused, "equal shapes"),
        (part("values", "bf16", (2, 2, 3), "w", "gone", transforms=("stack",)), TensorMissing, "gone"),
        (part("scales", "i8", (1, 3, 16), "zero", transforms=("panels:16",)), ZeroScales, "zero - found byte 0"),
        (part("scales", "i8", (3, 2), "zero"), ZeroScales, "zero - found byte 0"),
    ],
)
def test_misfits_are_refused(wanted: WeightPart, error: type[WeightsError], words: str) -> None:
    stored = Tensors(w=np.zeros((2, 3), dtype=bfloat16), b=np.zeros((3, 3), dtype=bfloat16), zero=np.zeros((3, 2), dtype=np.uint8))
    with pytest.raises(error) as refused:
        bind_weights([operand(wanted)], stored)
    assert words in str(refused.value)


@pytest.mark.parametrize("wrong", [None, "a.0", "b.0", "a.1", "b.1"])
def test_of_tensors_that_are_one_matrix_the_one_that_does_not_fit_is_named(wrong: str | None) -> None:
    """Two matrices of 3 rows below 1, then two of a row: a total alone would not say which tensor has a row too many."""
    names = ("a.0", "b.0", "a.1", "b.1")
    stored = {name: np.full((2 if name == wrong else 1, 3), i + 1, dtype=bfloat16) for i, name in enumerate(names)}
    stacked = part("values", "bf16", (2, 2, 3), *names, transforms=("stack", "rows_together:2")).model_copy(update={"stored": ((1, 3), (1, 3))})
    below = part("values", "bf16", (2, 3), *names[:2], transforms=("concat",)).model_copy(update={"stored": ((1, 3), (1, 3))})
    if wrong is None:
        bound = bind_weights([operand(stacked)], Tensors(**stored)).parts["op", "values"]
        assert bound[:, :, 0].tolist() == [[1, 2], [3, 4]]
    for one in (stacked, below) if wrong in names[:2] else (stacked,) if wrong else ():
        with pytest.raises(TensorMismatch) as refused:
            bind_weights([operand(one)], Tensors(**stored))
        assert f"op.values of {wrong} - found shape [2, 3], expected [1, 3]" in str(refused.value)
    with pytest.raises(TensorMismatch, match=r"op\.values of b\.0 - found elements float32, expected bf16"):
        bind_weights([operand(below)], Tensors(**{name: np.ones((1, 3), np.float32 if name == "b.0" else bfloat16) for name in names}))


@pytest.mark.parametrize("transforms", [(), ("transpose",)])
@pytest.mark.parametrize(("most", "fits"), [(166, True), (165, False), (None, True)])
def test_scales_beyond_what_kernels_take_are_refused(transforms: tuple[str, ...], most: int | None, fits: bool) -> None:
    shape = (3, 2) if transforms else (2, 3)
    scales = part("scales", "i8", shape, "s", transforms=transforms).model_copy(update={"most_scale": most})
    stored = Tensors(s=np.array([[0, 127, 166], [1, 2, 3]], dtype=np.uint8))
    if fits:
        assert bind_weights([operand(scales)], stored).parts["op", "scales"].size == 6
        return
    with pytest.raises(ScaleTooLarge) as refused:
        bind_weights([operand(scales)], stored)
    assert str(refused.value) == (
        "[W108] a scale is larger than the artifact's kernels can multiply by - s - found byte 166 (2^39), expected at most byte 165 (2^38) - "
        "repair the checkpoint, or compile with tuning rows that set override to 0"
    )


@pytest.mark.parametrize(("cells", "least", "found"), [
    ([0, 35, 127], 35, None), ([0, 34, 127], 35, 34), ([1, 0, 35], 35, 1), ([255, 35, 0], 35, None), ([1, 2, 3], None, None),
])  # fmt: skip
def test_scales_below_what_kernels_take_are_refused_but_for_those_of_zeros(cells: list[int], least: int | None, found: int | None) -> None:
    scales = part("scales", "i8", (1, 3), "s").model_copy(update={"least_scale": least})
    stored = Tensors(s=np.array([cells], dtype=np.uint8))
    if found is None:
        assert bind_weights([operand(scales)], stored).parts["op", "scales"].tolist() == [cells]
        return
    with pytest.raises(ScaleTooSmall) as refused:
        bind_weights([operand(scales)], stored)
    assert str(refused.value) == (
        f"[W109] a scale is smaller than the artifact's kernels can multiply by - s - found byte {found} (2^{found - 127}), expected byte 0 (a group "
        "of zeros) or at least byte 35 (2^-92) - repair the checkpoint, or compile with tuning rows that set override to 0"
    )


def test_all_missing_tensors_are_counted_before_any_packing() -> None:
    class Counting(Tensors):
        touched = 0

        def tensor(self, name: str, /) -> Any:
            self.touched += name == "w"
            return super().tensor(name)

    source = Counting(w=np.ones((2, 3), dtype=bfloat16))
    first = WeightOperand(name="first", kind="weight", parts=(part("values", "bf16", (3, 2), "w", transforms=("transpose",)),))
    gone = operand(part("values", "bf16", (9, 2), *(f"gone.{i}" for i in range(9)), transforms=("stack",)))
    with pytest.raises(TensorMissing, match=r"gone\.0, gone\.1, gone\.2, gone\.3, gone\.4 and 4 more not there"):
        bind_weights([first, gone], source)
    assert source.touched <= 2, "only its header facts were asked for"


def test_rotary_tables_round_frequency_and_angle_to_float32() -> None:
    frequencies = (1.0, 10000 ** (-2 / 64), 0.1, 1e-4 / 3)
    table = rotary_table(Rotary(frequencies=frequencies, positions=70001))
    assert table.shape == (70001, 8) and table.dtype == np.float32
    for position in (0, 1, 2, 65535, 65536, 69999):
        for i, frequency in enumerate(frequencies):
            angle = float(np.float32(np.float32(position) * np.float32(frequency)))
            assert table[position, i] == np.float32(np.cos(angle)) and table[position, 4 + i] == np.float32(np.sin(angle))
    exact = np.cos(69999 * frequencies[1])
    assert abs(table[69999, 1] - exact) > 1e-4, "far out, the float32 angle shows: the table is the model's, not the ideal one"


def test_derived_tables() -> None:
    rotary = operand(part("values", "f32", (5, 2), layout="packed"), derived=Derived(rotary=Rotary(frequencies=(0.5,), positions=5)))
    tokens = operand(part("values", "i32", (4,), layout="packed"), derived=Derived(token_map=TokenMap()))
    bound = bind_weights([rotary], Tensors())
    assert np.array_equal(bound.parts["op", "values"], rotary_table(Rotary(frequencies=(0.5,), positions=5)))
    bound = bind_weights([tokens], Tensors(), lambda: np.array([3, 0, 0, 1], dtype=np.int32))
    assert bound.parts["op", "values"].tolist() == [3, 0, 0, 1] and address(bound.parts["op", "values"]) % 64 == 0
    with pytest.raises(TableUnavailable, match="found no tokenizer"):
        bind_weights([tokens], Tensors())
    with pytest.raises(TableUnavailable, match=r"found int32 \[3\], expected i32 \[4\]"):
        bind_weights([tokens], Tensors(), lambda: np.zeros(3, dtype=np.int32))


def test_rotary_tables_agree_with_the_model() -> None:
    from tapeout.models.deepseek_v41.config import shipped_config

    config = shipped_config("v4.1-flash")
    for ratio in (0, 1, 2):
        frequencies = tuple(float(f) for f in config.rope_frequencies(ratio))
        table = rotary_table(Rotary(frequencies=frequencies, positions=3))
        assert table.shape == (3, 64)
        assert table[2, 0] == np.float32(np.cos(2.0)) and table[1, 32] == np.float32(np.sin(1.0))


def test_packed_parts_are_made_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that copies them finds no more than the part before beside the one that it is given; what is mapped stays what it is."""
    made: list[weakref.ref[Any]] = []
    packed, most = weights._aligned, [0]

    def watched(array: Any, part: WeightPart) -> Any:
        most[0] = max(most[0], sum(ref() is not None for ref in made))
        found = packed(array, part)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(weights, "_aligned", watched)
    monkeypatch.setattr(weights, "address", lambda array: 16)  # a small array may happen to lie well
    names = [f"w{i}" for i in range(8)]
    stored = Tensors(mapped=np.ones((2, 3), bfloat16), **{name: np.full((3, 2), i, bfloat16) for i, name in enumerate(names)})
    operands = [operand(part("values", "bf16", (2, 3), name, transforms=("transpose",))).model_copy(update={"name": name}) for name in names]
    bound = bind_weights([*operands, operand(part("values", "bf16", (2, 3), "mapped"))], stored)
    assert not made, "nothing is packed before it is asked for"
    assert {key: float(array[0, 0]) for key, array in bound.parts.items()} == {**{(n, "values"): i for i, n in enumerate(names)}, ("op", "values"): 1}
    assert len(made) == 8 and most[0] <= 1 and len(bound.parts) == 9
    assert bound.parts["w3", "values"] is not bound.parts["w3", "values"] and bound.parts["op", "values"] is stored.tensors["mapped"]
    assert [(name, array is stored.tensors["w3"]) for name, array in bound.parts.stored(("w3", "values"))] == [("w3", True)]


def test_a_device_that_reads_arrays_where_they_are_keeps_them(toy: Path) -> None:
    engine = toy_engine(toy)
    placed = [weakref.ref(array) for array in engine.device._placed]  # type: ignore[attr-defined]
    gc.collect()
    assert placed and all(ref() is not None for ref in placed)
    assert list(run_one(engine, prompt(9), GREEDY)) == toy_answer(prompt(9), 7)
    engine.close()


@pytest.mark.parametrize(("transforms", "copies"), [
    (("stack",), 0), (("concat",), 0), (("stack", "rows_together:2"), 0), (("stack", "transpose"), 1),
])  # fmt: skip
def test_parts_that_are_only_joined_are_copied_once(monkeypatch: pytest.MonkeyPatch, transforms: tuple[str, ...], copies: int) -> None:
    """At a boundary that kernels can rely on, of their own, and a table that is joined from one tensor is not that tensor."""
    stored = Tensors(**{name: np.arange(6 * i, 6 * i + 6, dtype=np.uint8).reshape(2, 3) for i, name in enumerate("abcd")})
    shape = {"stack": (4, 2, 3), "concat": (8, 3), "rows_together:2": (2, 4, 3), "transpose": (4, 3, 2)}[transforms[-1]]
    packed, made = weights._aligned, []
    monkeypatch.setattr(weights, "_aligned", lambda array, part: made.append(part) or packed(array, part))
    found = bind_weights([operand(part("codes", "i8", shape, *"abcd", transforms=transforms))], stored).parts["op", "codes"]
    expected = np.stack(list(stored.tensors.values()))
    assert np.array_equal(found, np.swapaxes(expected, 1, 2) if transforms[-1] == "transpose" else expected.reshape(shape))
    assert address(found) % 64 == 0 and len(made) <= copies and found.flags.c_contiguous  # it may happen to lie well
    alone = bind_weights([operand(part("codes", "i8", (2, 3), "a", transforms=("concat",)))], stored).parts["op", "codes"]
    assert not np.may_share_memory(alone, stored.tensors["a"]) and np.array_equal(alone, stored.tensors["a"])
