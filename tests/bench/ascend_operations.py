"""Executed vector operations of Ascend kernels at the model's widths, against figures measured for hand-written kernels of the same work.

The compiler's dump is counted (`codegen.ascend.work`), which is what the simulator executes for a full tile; no NPU is needed. Run as a module
it prints the table; the test beside the target holds every row to 1.25 times its figure.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tapeout.codegen.ascend.build import Built, build
from tapeout.codegen.ascend.work import PRODUCTS, VECTOR
from tapeout.dialects import mla, moe, nn
from tapeout.dialects.format import BF16, FP4_WEIGHT, INT32, Q4_INDEX, Q8
from tapeout.dialects.types import Tensor
from tests.codegen.ascend.harness import on_ascend, tools
from tests.codegen.kernels.harness import KernelCase
from tests.codegen.kernels.test_attention import views

LANES = 64
HEADS, WIDTH, KEYS = 64, 512, 512
HIDDEN, MIDDLE = 5120, 2304
MOST = 1.25


@dataclass(frozen=True)
class Row:
    """One line: what is counted, the figure, what our kernel executes, and for what."""

    name: str
    figure: float
    found: float
    unit: str

    @property
    def ratio(self) -> float:
        return self.found / self.figure


def rows() -> Iterator[Row]:
    """Every figure that names work which a kernel of ours does."""
    for name in COUNTED:
        yield row(name)


def row(name: str) -> Row:
    """The line of one name in COUNTED; compiles its kernel."""
    figure, unit, count = COUNTED[name]
    with on_ascend():
        return Row(name, figure, count(), unit)


def made(case: KernelCase) -> Built:
    """The kernel of a case, its last launch."""
    return build(case.module, tools())


def _per_lanes(case: Callable[[], KernelCase], columns: int) -> Callable[[], float]:
    """Vector operations for 64 elements of a kernel over rows of `columns`."""

    def count() -> float:
        found = case()
        rows_of = int(dict(found.row).get("block_rows", 1))
        return made(found).work.instance[VECTOR] / (rows_of * columns / LANES)

    return count


def _norm() -> KernelCase:
    return KernelCase(partial(nn.rms_norm, epsilon=1e-6, out=BF16), [Tensor((None, HIDDEN), BF16), Tensor((HIDDEN,), BF16)])


def _quantize(number: Any) -> KernelCase:
    return KernelCase(partial(nn.quantize, out=number), [Tensor((None, HIDDEN), BF16)])


def _swiglu() -> KernelCase:
    return KernelCase(partial(moe.swiglu, limit=7.0, out=BF16), [Tensor((None, 2 * MIDDLE), BF16), None, None])


def experts() -> KernelCase:
    """The gate and up projections of eight experts."""
    operands = [Tensor((None, HIDDEN), Q8), Tensor((8, 2 * MIDDLE, HIDDEN), FP4_WEIGHT), Tensor((None, 6), INT32), Tensor((9,), INT32)]
    return KernelCase(partial(moe.expert_linear, gathered=True, out=BF16), operands)


def attention() -> KernelCase:
    """All heads of a row over a window of 128 keys and KEYS entries."""
    return KernelCase(partial(mla.attend, heads=HEADS, scale=0.1), views(HEADS, WIDTH, 128, KEYS))


def _weights() -> float:
    """Both vector cores, for the tile of weights of one instance: all of K and a block of columns."""
    case = experts()
    return 2 * made(case).work.instance[VECTOR] / (HIDDEN * case.row["block_n"] / LANES)


def _decoded() -> float:
    """The second launch in front of attention, which takes the entries, for the elements that it decodes at once."""
    case = attention()
    return build(case.parts[1], tools()).work.instance[VECTOR] / (case.row["decoded_keys"] * WIDTH / LANES)


def _attention() -> float:
    """Both vector cores and all blocks of heads of one row; the two loops over window and entries are alike."""
    case = attention()
    found, each = made(case).work, case.row
    a_step = found.step[f"{PRODUCTS}.bf16"] / 2  # a pass may take several blocks of keys: what it multiplies says how many
    steps = 3 * each["block_heads"] * WIDTH * KEYS / a_step  # logits, and sums in two pieces
    return 2 * HEADS / each["block_heads"] * (found.instance[VECTOR] + steps * found.step[VECTOR] / 2)


COUNTED: dict[str, tuple[float, str, Callable[[], float]]] = {
    "RMSNorm": (13, f"{LANES} elements", _per_lanes(_norm, HIDDEN)),
    "quantizer e4m3, groups of 32": (32, f"{LANES} elements", _per_lanes(partial(_quantize, Q8), HIDDEN)),
    "quantizer FP4, groups of 32": (92, f"{LANES} elements", _per_lanes(partial(_quantize, Q4_INDEX), HIDDEN)),
    "SwiGLU (its figure includes a quantizer)": (23, f"{LANES} elements", _per_lanes(_swiglu, MIDDLE)),
    "FP4 weights unpacked": (13.5, f"{LANES} weights", _weights),
    "FP4 rows gathered and decoded": (16.5, f"{LANES} elements", _decoded),
    f"attention of {HEADS} heads over {KEYS} BF16 keys": (43_400, "token", _attention),
}
"""By name: figure, what it is for, and how ours is counted."""


if __name__ == "__main__":
    for one in rows():
        print(f"{one.name:45s} {one.found:10,.1f} per {one.unit:14s} figure {one.figure:10,.1f}   ratio {one.ratio:.2f}")
