"""--check-passes: a pass that breaks its promise is named, with the first op whose results changed and the value that moved."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from tapeout.compiler.check_passes import Checker, Meaning, _difference
from tapeout.compiler.errors import PromiseBroken, SettingsError
from tapeout.compiler.pipeline import PASSES, run
from tapeout.dialects._mlir import ir
from tapeout.passes.define import Pass, Promise
from tests.passes.modules import OPTIONS, REAL, TINY, every_op, graph

EPSILON = "epsilon"


@dataclass(frozen=True)
class Loosen(Pass):
    """A deliberately wrong pass: gives the norm at one location another epsilon."""

    name: ClassVar[str] = "loosen"
    keeps: ClassVar[Promise] = "bits"
    epsilon: float = 0.5
    where: str = "layers.1.attn.query_latent"

    def run(self, module: ir.Module) -> None:
        for op in every_op(module):
            if op.name == "nn.rms_norm" and str(op.location) == f'loc("{self.where}")':
                op.attributes[EPSILON] = ir.FloatAttr.get(ir.F64Type.get(), self.epsilon)


@dataclass(frozen=True)
class LoosenSums(Loosen):
    """The same, and promises only to keep sums."""

    name: ClassVar[str] = "loosen-sums"
    keeps: ClassVar[Promise] = "sums"


@dataclass(frozen=True)
class DropCommit(Pass):
    """A deliberately wrong pass: forgets to commit a window."""

    name: ClassVar[str] = "drop-commit"
    keeps: ClassVar[Promise] = "bits"

    def run(self, module: ir.Module) -> None:
        next(op for op in every_op(module) if op.name == "cache.commit" and "layers.2.attn.window" in str(op.location)).erase()


def checked(one: Pass, before: str | None = None) -> None:
    with graph(before) as module:
        checker = Checker(module, TINY, OPTIONS)
        run(module, [one], checker.before, checker.after)


@pytest.mark.parametrize("before", ["assign-formats", "fuse-query-path", "bucket-rows"])
def test_names_pass_and_op_at_every_level(before: str) -> None:
    """In the real graph, in the rounded one, and inside groups of functions that several layers share."""
    with pytest.raises(PromiseBroken) as caught:
        checked(Loosen(), before)
    text = str(caught.value)
    assert text.startswith("[C104] pass loosen promised to keep bits and changed ")
    assert text.endswith('; the first op whose results changed is nn.rms_norm at loc("layers.1.attn.query_latent"), result 0')


def test_sums_may_move_in_their_last_bits_only() -> None:
    checked(LoosenSums(epsilon=1e-9))
    with pytest.raises(PromiseBroken, match="pass loosen promised to keep bits and changed "):
        checked(Loosen(epsilon=1e-9))
    with pytest.raises(PromiseBroken, match="pass loosen-sums promised to keep sums and changed "):
        checked(LoosenSums(epsilon=0.5))


def test_states_count_as_values() -> None:
    with pytest.raises(PromiseBroken, match=r"pass drop-commit promised to keep bits and changed layers.2.attn.window: at \(\d+, \d+\) "):
        checked(DropCommit())


def test_a_pass_that_changes_nothing_passes() -> None:
    checked(Loosen(where="nowhere"))


def test_only_assign_formats_promises_so_little() -> None:
    assert [p.name for p in PASSES.values() if p.keeps == "formats"] == ["assign-formats"]
    assert all(p.keeps == "bits" for p in PASSES.values() if p.name != "assign-formats")


def test_real_widths_are_refused() -> None:
    with graph(None, REAL) as module, pytest.raises(SettingsError) as caught:
        Checker(module, REAL, OPTIONS)
    assert "--check-passes: the module has" in str(caught.value) and "use a small configuration such as config-tiny.json" in str(
        caught.value
    )


def test_every_entry_point_is_measured() -> None:
    with graph() as module:
        found: Meaning = Checker(module, TINY, OPTIONS).measure(module)
    assert {"patched", "streams", "logits", "sampled", "logprobs", "drafts", "confidences", "layers.0.attn.window"} <= set(found.values)
    names = [name for name, _ in found.ops]
    assert len(set(names)) > 300
    assert names.count('step.window at loc("window"), result 0') == 2  # one name in @step and in @decoder


NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([NAN, 2.0], [NAN, 2.0], None),
        ([INF, 2.0], [INF, 2.0], None),
        ([NAN], [1.0], r"at (0,) np.float64(nan) became np.float64(1.0)"),
        ([1.0, 2.0, INF], [1.5, 4.0, INF], r"at (1,) np.float64(2.0) became np.float64(4.0)"),
        ([1.0, INF], [1.5, -INF], r"at (1,) np.float64(inf) became np.float64(-inf)"),
        ([1.0], [1.0, 2.0], "shape (1,) became (2,)"),
    ],
)
def test_differences(old: list[float], new: list[float], sentence: str | None) -> None:
    assert _difference(np.array(old), np.array(new), exact=True) == sentence


def test_a_value_that_is_gone() -> None:
    observe: Callable[..., str | None] = _difference
    assert observe(np.zeros(1), None, exact=True) == "it is gone"
