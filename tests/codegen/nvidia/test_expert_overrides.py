"""The override for products of experts: what it covers, how rows of real shapes are cut, its decoding on numpy, what it compiles to.

Its sums come from a GPU (`python -m tests.bench.gpu_meaning`): Gluon has no interpreter. That all classes take them in one order is
test_row_classes.py's matter.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tapeout.codegen.kernel import Request
from tapeout.codegen.lower_to_tile import TileKernel, lower
from tapeout.codegen.nvidia import overrides
from tapeout.codegen.nvidia.emit import EmitError
from tapeout.codegen.nvidia.facts import SM90, SM100
from tapeout.codegen.nvidia.overrides import expert_linear_sm90, source_for
from tapeout.codegen.nvidia.overrides.expert_linear_sm90 import SHARED
from tapeout.codegen.nvidia.product_schedules import expert_linear_for
from tapeout.codegen.select_kernels import Choice, in_launches
from tapeout.dialects.format import BF16, FP4_WEIGHT, FP8_WEIGHT, FP32, INT32, Q8
from tapeout.dialects.types import Tensor
from tests.codegen.nvidia import ptx
from tests.codegen.nvidia.compiling import compiled, jobs

UP, DOWN = (4608, 5120), (5120, 2304)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def request(shape=UP, experts=16, choices=6, x=Q8, weight=FP4_WEIGHT, out=BF16) -> Request:
    n, k = shape
    rows = Tensor((None, k), x) if shape == UP else Tensor((None, choices, k), x)
    views = (rows, Tensor((experts, n, k), weight), Tensor((None, choices), INT32), Tensor((experts + 1,), INT32))
    return Request("moe.expert_linear", (("gathered", shape == UP),), views, (Tensor((None, choices, n), out),))


def kernels(one: Request, rows: int, **settings: int) -> list[TileKernel]:
    row = {**expert_linear_for(one, SM90, rows), **settings}
    return [lower(choice) for choice in in_launches(Choice(one, "expert_linear", tuple(sorted(row.items()))))]


@pytest.mark.parametrize(("shape", "rows", "experts", "wanted"), [
    (UP, 1, 16, (2, 128, 1, 0)), (UP, 2, 16, (2, 64, 2, 0)), (UP, 4, 16, (2, 256, 4, 0)), (UP, 5, 16, (2, 256, 8, 0)), (DOWN, 8, 16, (2, 64, 8, 0)),
    (UP, 8, 16, (1, 256, 4, 132)),
    (DOWN, 16, 16, (1, 256, 4, 132)), (UP, 64, 16, (1, 256, 4, 132)), (UP, 320, 32, (1, 256, 4, 132)),
    (UP, 256, 16, (1, 128, 4, 132)), (UP, 4096, 16, (1, 128, 4, 132)),
    (UP, 1, 384, (2, 128, 1, 0)), (UP, 4, 384, (2, 64, 4, 0)), (UP, 64, 384, (2, 256, 4, 0)), (UP, 128, 384, (2, 256, 8, 0)),
    (UP, 2048, 384, (1, 64, 4, 0)),
    (UP, 4096, 384, (1, 256, 4, 0))])  # fmt: skip
def test_the_mean_of_an_experts_pairs_chooses_the_form(shape, rows: int, experts: int, wanted: tuple[int, ...]):
    """Where rows are decoded, rows of weight of an instance, rows of pairs that are decoded at a time, instances."""
    row = expert_linear_for(request(shape, experts), SM90, rows)
    assert (row["decoded"], row["block_n"], row["part_rows"], row["instances"], row["override"]) == (*wanted, 1)


def test_rows_that_are_held_fit():
    assert expert_linear_for(request((256, 16384), 384), SM90, 100)["part_rows"] == 3


def test_any_number_of_rows_has_a_row_that_can_be_cut():
    for shape, experts, rows in product((UP, DOWN), (16, 384), (1, 5, 16, 80, 128, 320, 640, 4096, 8192)):
        assert all(source_for(kernel, SM90) is not None for kernel in kernels(request(shape, experts), rows))


@pytest.mark.parametrize(("one", "chip", "words"), [
    (request(), SM100, "sm100 multiplies codes by other instructions"),
    (replace(request(), op="nn.linear"), SM90, "nn.linear is no product of experts"),
    (request(x=BF16), SM90, "expected FP8 rows and packed FP4"),
    (request(weight=FP8_WEIGHT), SM90, "expected FP8 rows and packed FP4"),
    (request(out=FP32), SM90, "expected BF16"),
    (request((128, 256)), SM90, "expected rows in groups of 256 and columns in groups of 256"),
    (request((256, 384)), SM90, "expected rows in groups of 256 and columns in groups of 256"),
])  # fmt: skip
def test_others_are_left_to_the_plain_form(one: Request, chip, words: str):
    assert words in expert_linear_sm90.why_not(one, chip)
    if one.op == "moe.expert_linear":
        assert not expert_linear_for(one, chip, 16).get("override")


def test_the_tile_kernels_are_those_that_were_checked_on_a_gpu():
    """If this fails, the definition changed: compare on a GPU (tests/bench/gpu_meaning.py) before MEANINGS is set anew."""
    assert overrides.meanings_of("expert_linear", expert_linear_sm90) == expert_linear_sm90.MEANINGS


def test_another_definition_stops_the_build(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(expert_linear_sm90, "MEANINGS", (*expert_linear_sm90.MEANINGS[:2], "0" * 16))
    with pytest.raises(EmitError, match="the override was checked against tile kernel 0000000000000000, the definition now gives"):
        source_for(kernels(request(), 1)[0], SM90)


@pytest.mark.parametrize(("rows", "settings"), [
    *((4, one) for one in ({"block_n": 32}, {"warps": 32}, {"block_m": 4}, {"part_rows": 9}, {"block_k": 256}, {"stages": 1}, {"decoded": 0})),
    *((64, one) for one in ({"block_n": 128}, {"stages": 3}, {"decoded": 2}, {"block_m": 32})),
    *((4096, one) for one in ({"block_n": 32}, {"stages": 1})),
])  # fmt: skip
def test_a_row_that_cuts_otherwise_is_refused(rows: int, settings: dict[str, int]):
    with pytest.raises(EmitError, match="the override of expert products cannot cut so"):
        source_for(kernels(request(), rows, **settings)[-1], SM90)


def test_without_the_entry_the_plain_form_is_emitted():
    assert [source_for(kernel, SM90) for kernel in kernels(request(), 128, override=0)] == [None, None]


def test_the_source_names_its_kernel_and_has_the_requests_numbers():
    (few,), (front, some) = kernels(request(), 4), kernels(request(DOWN), 128)
    for made, arguments, words in (
        (few, "order, offsets, out, rows, count", "HELD = gl.constexpr(4)"),
        (some, "order, offsets, out, rows, count", "hands those sums on as they are"),
        (front, "order, offsets, out, rows, count", "PIECE = gl.constexpr(256)"), (kernels(request(DOWN), 4)[0], "order, offsets, out, count", ""),
    ):  # fmt: skip
        source = source_for(made, SM90)
        assert source is not None and (source.name, source.language) == (made.symbol, "gluon")
        assert f"def {made.symbol}(x, x_scales, w, w_scales, {arguments}):" in source.text and words in source.text and "{{" not in source.text
        assert len(source.parameters) == len(made.buffers) and source == source_for(made, SM90)


def _inline(text: str, function: str, number: int) -> str:
    body = text[text.index(f"def {function}(") :]
    return re.findall(r'inline_asm_elementwise\(\s*"""(.*?)"""', body, re.S)[number]


def _text(rows: int, launch: int = 0, experts: int = 16) -> str:
    source = source_for(kernels(request(UP, experts), rows)[launch], SM90)
    assert source is not None
    return source.text


@pytest.mark.parametrize("scale", [11, 100, 127, 144])
def test_weights_are_exact_and_kept_small(scale: int):
    """All pairs of codes of a word that can meet, times 2^(scale - 127), times 2^-16."""
    codes = np.random.default_rng(scale).integers(0, 16, (4096, 8))
    codes[:16] = np.arange(16)[:, None]
    words = (codes << 4 * np.arange(8)).sum(1).astype(np.uint32)
    text = _text(4096, -1, 384)
    scales = np.full(4096, scale * 0x01010101, np.uint32)
    factors = ptx.run(_inline(text, "_decoded_weights", 0), [scales], [4] * 4, 1)
    for factor in factors:
        found = ptx.run(_inline(text, "_decoded_weights", 1), [words, factor], [4] * 4, 1)
        for pair, places in zip(found, ((0, 4), (2, 6), (1, 5), (3, 7)), strict=True):
            wanted = E2M1[codes[:, places]] * 2.0 ** (scale - 127 - 16)
            np.testing.assert_array_equal(pair.view(ml_dtypes.bfloat16).astype(np.float64).reshape(-1, 2), wanted)


def _written(text: str, name: str, outputs: list[int], inputs: list[int], *settings: int) -> str:
    """What a function of a template writes for so many registers of each operand, as the register machine reads it."""
    scope: dict[str, Any] = {"APART": SimpleNamespace(value=64), "HELD": SimpleNamespace(value=4)}
    for needed in ("_list(names", *["_all(pieces"] * ("def _all" in text), f"{name}(outputs"):
        body = re.search(rf"def {re.escape(needed)}.*?(?=\n\n\n)", text, re.S)
        assert body is not None
        exec(body[0], scope)
    names, groups = iter(f"${i}" for i in range(sum(outputs) + sum(inputs))), []
    for count in (*outputs, *inputs):
        groups.append(tuple(next(names) for _ in range(count)))
    made = scope[name](tuple(groups[: len(outputs)]), tuple(groups[len(outputs) :]), *settings)
    made = re.sub(r"ld.shared.b32 s, \[(\S+)\+\d+\];", r"mov.b32 s, \1;", made)
    return re.sub(r"mov.b32 {h0, h1}, (\S+); mov.b32 f, {h(\d), h\d};",
                  lambda m: f"prmt.b32 f, {m[1]}, 0, {('0x1010', '0x3232')[int(m[2])]};", made)  # fmt: skip


@pytest.mark.parametrize("rows", [4, 64, 4096])
@pytest.mark.parametrize("scale", [11, 100, 127, 144])
def test_weights_of_few_and_some_pairs_are_exact_and_lie_alike(scale: int, rows: int):
    """Codes of a lane's words of two rows and four groups, each with a scale of its own, as left factors of eight products."""
    codes = np.random.default_rng(scale).integers(0, 16, (1024, 8, 8))
    codes[:16, :] = np.arange(16)[:, None, None]
    words = [(codes[:, i] << 4 * np.arange(8)).sum(1).astype(np.uint32) for i in range(8)]  # group by group, row 0 and row 1
    scales = [min(scale + i, 144) for i in range(4)]
    word = np.full(1024, sum(s << 8 * i for i, s in enumerate(scales)), np.uint32)
    text = _text(rows, -1)
    factors = ptx.run(_written(text, "_factors", [4], [1]), [word], [4] * 4, 1)
    for odd in (0, 1):
        found = ptx.run(_written(text, "_decoded", [16], [8, 4, *[1] * odd]), [*words, *factors, *words[:odd]], [4] * 16, 1)
        for i, register in enumerate(found):
            group, row, second = i // 4, i % 2, i % 4 // 2
            places = [odd + 2 * second, odd + 2 * second + 4]
            wanted = E2M1[codes[:, 2 * group + row, places]] * 2.0 ** (scales[group] - 127 - 16)
            np.testing.assert_array_equal(register.view(ml_dtypes.bfloat16).astype(np.float64).reshape(-1, 2), wanted)


@pytest.mark.parametrize("sums", [[16], [16, 8], [64, 32]])
def test_sums_that_are_handed_on_are_taken_from_where_they_lie(sums: list[int]):
    text, count = _text(64, -1), sum(sums)
    left = _written(text, "_hand_on", [], [*sums, 1, 1, 1]).replace("st.global.v4.f32 ", "")
    found = _written(text, "_taken", sums, [1, 1]).replace("ld.global.cg.v4.f32 ", "")
    there = {int(at): registers for at, registers in re.findall(rf"\[\${count}\+(\d+)\], {{(.*?)}};", left)}
    assert {int(at): registers for registers, at in re.findall(rf"{{([$\d, ]+)}}, \[\${count}\+(\d+)\];", found)} == there
    assert sorted(there) == [512 * i for i in range(count // 4)]
    assert ", ".join(there[at] for at in sorted(there)) == ", ".join(f"${i}" for i in range(count))
    assert left.index("bar.warp.sync") < left.index("st.release.gpu") and found.index("fence.acq_rel.gpu") < found.index("bar.warp.sync")


class _Scalar(int):
    def to(self, _: type) -> "_Scalar":
        return self


def _run_as_python(text: str, table: list[int], instance: int) -> tuple[list[tuple[int, ...]], int]:
    """The pieces of an instance, as the kernel's own text finds them in the table, and what they take."""
    gl = SimpleNamespace(where=lambda c, a, b: a if c else b, minimum=min, maximum=max, to_tensor=_Scalar, int32=int,
                         program_id=lambda _: instance, constexpr=lambda value: value)  # fmt: skip
    scope: dict[str, Any] = {"gl": gl, "_got": lambda table, at: table[at]}
    scope["_up_to"] = lambda table, at, number, _: sum(end <= number for end in table[at : at + 32])
    names = re.findall(r"^[A-Z_, ]+ = .*gl\.constexpr.*$", text, re.M)
    functions = [re.search(rf"^def {name}\(.*?(?=\n\n\n)", text, re.S | re.M) for name in ("_cost", "_behind", "_piece")]
    exec("\n\n".join([*names, *(f[0] for f in functions if f is not None)]), scope)
    share = text[text.index("    whole, instance = _got") : text.index("    own, number = (")]
    scope |= {"table": table, "lane": 0}
    exec(re.sub(r"^    ", "", share, flags=re.M), scope)
    own = [scope[name] for name in ("pieces", "first", "first_turn", "last", "last_turn")]
    table[scope["COUNT"] : scope["COUNT"] + 8] = [*own, 0, scope["whole"], scope["left"]]
    pieces = [scope["_piece"](number, table, 0) for number in range(scope["pieces"] + scope["dealt"])]
    assert sum(p[5] - p[4] for p in pieces) == scope["total"]
    costs = [(p[5] - p[4]) * scope["_cost"](p[3] - p[2])[0] for p in pieces]
    return pieces, sum(costs)


@pytest.mark.parametrize("form", [64, 128, 256])
@pytest.mark.parametrize("counts", [[1], [0, 1, 7, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 0], [3430, 0, 5], [64] * 32, [256] * 16, [0, 0]])
def test_shares_are_all_blocks_once_and_sums_are_handed_to_the_next(counts: list[int], form: int):
    """Every block's turns are one instance's, or end where the instance in front stopped; and no instance has much more to do than another."""
    row = kernels(request(), 64, block_m=form, block_n=16 * SHARED[form].warps, warps=SHARED[form].warps, stages=SHARED[form].stages)[-1]
    source = source_for(row, SM90)
    assert source is not None
    text, turns, rows = source.text, 5120 // SHARED[form].turn, 16 * SHARED[form].warps
    n = np.array([*counts, *[0] * (32 - len(counts))])
    cost = {width: of[0] * turns + of[1] for width, of in SHARED[form].costs.items()}
    each = np.array([cost[min(w for w in cost if w >= rest)] if rest else 0 for rest in n % form])
    lists = [n // form * (4608 // rows), (n % form > 0) * (4608 // rows)]
    lists.append(lists[1] * each)
    table = [int(v) for one in lists for v in (*np.cumsum(one), *(np.cumsum(one) - one))] + [int(v) for v in (*(np.cumsum(n) - n), *np.cumsum(n))]
    done: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    taken = []
    for instance in range(132):
        pieces, took = _run_as_python(text, [*table, *[0] * 64], instance)
        taken.append(took)
        for place, (*block, begin, until) in enumerate(pieces):
            assert 0 <= begin < until <= turns and (until == turns or place == 0)
            done.setdefault(tuple(block), []).append((begin, until, instance))
    wanted = {(e, n0, start + p, start + min(p + form, count)) for e, (count, start) in enumerate(zip(n, np.cumsum(n) - n, strict=True))
              for p in range(0, count, form) for n0 in range(0, 4608, rows)}  # fmt: skip
    assert set(done) == wanted
    for parts in done.values():
        parts.sort()
        assert parts[0][0] == 0 and parts[-1][1] == turns
        assert all(after[0] == before[1] and after[2] == before[2] + 1 for before, after in pairwise(parts))
    assert max(taken) - min(taken) <= max(cost.values()) / 4 or not wanted or len(wanted) < 132


def _row_codes(scale: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """Words of codes of units of eight, and what even and odd columns are kept as, two and two."""
    codes = np.random.default_rng(scale).integers(0, 256, (2048, 8)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # NaN: no encoder makes one
    low, high = (codes[:, half].copy().view(np.uint32).reshape(-1) for half in (slice(0, 4), slice(4, 8)))
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0 ** (scale - 127 + 16)
    return low, high, np.full(2048, scale, np.uint32), [values[:, places] for places in ([0, 4], [2, 6], [1, 5], [3, 7])]


def _are_kept_as(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for pair, values in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(pair.view(ml_dtypes.bfloat16).astype(np.float64).reshape(-1, 2), values)


@pytest.mark.parametrize("scale", [0, 1, 100, 127, 200])
def test_rows_are_exact_and_kept_large(scale: int):
    *given, wanted = _row_codes(scale)
    body = _inline(_text(64), "_decoded_rows", 0).replace("$5", "$6").replace("mov.b64 {a, b}, $4;", "mov.b32 a, $4; mov.b32 b, $5;")
    _are_kept_as(ptx.run(body, given, [4] * 4, 1), wanted)


@pytest.mark.parametrize("scale", [0, 1, 100, 127, 200])
def test_rows_that_an_instance_decodes_are_the_same_and_odd_columns_lie_behind(scale: int):
    *given, wanted = _row_codes(scale)
    body = _written(_text(4), "_put_rows", [], [1, 1, 1, 1])
    assert body.count("done0") == 2 and "@p bra.uni done0;" in body
    body = re.sub(r"setp.*?done0;|done0:|\.pred p;", "", body).replace("$1", "$6").replace("mov.b64 {a, b}, $0;", "mov.b32 a, $4; mov.b32 b, $5;")
    stored = re.findall(r"st.shared.v2.b32 \[\$2\+(\d+)\], {f, e};", body)
    assert stored == ["0", "512"]  # two groups of four rows' 64 bytes
    for first, at in zip((0, 2), stored, strict=True):
        body = body.replace(f"st.shared.v2.b32 [$2+{at}], {{f, e}};", f"mov.b32 ${first}, f; mov.b32 ${first + 1}, e;")
    _are_kept_as(ptx.run(body, given, [4] * 4, 1), wanted)


LANES = np.arange(32)
WARP: dict[str, Callable[..., np.ndarray]] = {
    "mov": lambda a: a, "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "popc": lambda a: np.array([int(v).bit_count() for v in a]),
    "bfind": lambda a: np.array([int(v).bit_length() - 1 for v in a]), "setp.lt": np.less, "setp.ne": np.not_equal,
    "setp.eq": lambda a, b, c: (a == b) & c.astype(bool), "vote": lambda p, _: np.full(32, sum(1 << int(i) for i in LANES[p])),
    "shfl": lambda a, lane, *_: a[lane & 31],
}  # fmt: skip


def _of_a_warp(text: str, registers: dict[str, np.ndarray]) -> None:
    """Runs the few instructions by which lanes find an expert together; registers have a number for each lane."""
    registers["%lanemask_lt"] = (1 << LANES) - 1
    for line in (line.strip() for line in re.sub(r"\.reg [^;]*;|[{}]", "", text).split(";")):
        guard, name, operands = re.fullmatch(r"(?:@(\w+) )?(\S+) (.*)", line).groups() if line else (None, None, "")
        if name is not None:
            target, *given = operands.split(", ")
            values = [registers[v] if v in registers else np.full(32, int(v, 0)) for v in given]
            found = WARP[".".join(name.split(".")[: 2 if name.startswith("setp") else 1])](*values)
            registers[target] = np.where(registers[guard], found, registers.get(target, 0)) if guard else found


@pytest.mark.parametrize("experts", [3, 32, 40])
def test_instances_find_the_experts_that_have_pairs(experts: int):
    counts = np.random.default_rng(experts).integers(0, 3, 64) * (np.arange(64) < experts)
    ends = np.cumsum(counts)
    begins = ends - counts
    text = _written(_text(4), "_chosen", [1, 1, 1], [2, 2, 1])
    hit = np.flatnonzero(counts)
    for number in range(len(hit) + 2):
        registers = {f"${3 + i}": values[32 * (i % 2) :][:32] for i, values in enumerate((begins, begins, ends, ends))} | {"$7": np.full(32, number)}
        _of_a_warp(text, registers)
        expert, first, end = (registers[f"${i}"] for i in range(3))
        if number < len(hit):
            assert (expert == hit[number]).all() and (first == begins[hit[number]]).all() and (end == ends[hit[number]]).all()
        else:
            assert (first == end).all()


def test_it_compiles_without_spills_twice_the_same():
    cases = [(UP, 1, 16), (UP, 1, 16), (DOWN, 64, 16), (UP, 2048, 384), (UP, 4096, 384), (DOWN, 4096, 16), (UP, 512, 16), (DOWN, 8, 16),
             (UP, 128, 384), (UP, 1, 384)]  # fmt: skip
    made = [kernel for shape, rows, experts in cases for kernel in kernels(request(shape, experts), rows)]
    found = [(kernel, problems) for _, kernel, problems in compiled(jobs(made, "sm90"))]
    for kernel, problems in found:
        assert not isinstance(kernel, str), kernel
        assert (problems, kernel.report.spill_stores, kernel.report.stack_bytes, kernel.waits) == ([], 0, 0, True)
        assert kernel.shared_bytes <= SM90.shared_bytes_per_block
    assert [bool(dict(kernel.report.instructions).get("wgmma.mma_async")) for kernel, _ in found] == [False] * 2 + [False, True] * 5 + [False] * 3
    assert "ldmatrix" in found[0][0].ptx and "mma.sync" in found[0][0].ptx and found[0][0].cubin == found[1][0].cubin
