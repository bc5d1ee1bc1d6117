"""Which kernels may begin before the launch in front has ended: paths of PTX up to the wait, and what emitted kernels and overrides compile to."""

from dataclasses import replace

import pytest

from tapeout.codegen.kernel import Request
from tapeout.codegen.lower_to_tile import TileKernel, lower
from tapeout.codegen.nvidia.early import waits
from tapeout.codegen.nvidia.facts import SM90, SM100, Chip
from tapeout.codegen.nvidia.overrides import source_for
from tapeout.codegen.nvidia.product_schedules import linear_for
from tapeout.codegen.select_kernels import Choice
from tapeout.dialects.format import BF16, FP8_WEIGHT, Q8
from tapeout.dialects.types import Tensor
from tests.codegen.nvidia.compiling import compiled, jobs

WAIT = "griddepcontrol.wait ;\n griddepcontrol.launch_dependents ;"


def entry(body: str) -> str:
    return f".version 8.7\n.visible .entry kernel(\n .param .u64 kernel_param_0\n)\n.reqntid 128\n{{\n .reg .pred %p<2>;\n// %bb.0:\n{body}\n}}\n"


PATHS = {
    "at once": (f"{WAIT}\n ld.global.b32 %r1, [%rd1];\n st.global.b32 [%rd2], %r1;\n ret;", True, 0),
    "behind its count": (
        f"ld.param.b64 %rd1, [kernel_param_0];\n ld.global.b32 {{ %r1 }}, [ %rd1 + 0 ];\n {WAIT}\n st.global.b32 [%rd2], %r1;\n ret;", True, 1),
    "on both sides of a branch": (f"@%p1 bra $L__BB0_2;\n {WAIT}\n bra.uni $L__BB0_3;\n$L__BB0_2:\n {WAIT}\n$L__BB0_3:\n ret;", True, 0),
    "behind a loop of copies": (
        "$L__BB0_1:\n cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, 0x10;\n cp.async.commit_group;\n @%p1 bra $L__BB0_1;\n"
        f" {WAIT}\n ret;", True, 1),
    "in inline text": ("// begin inline asm\n { .reg .b32 a; mov.b32 a, 1; griddepcontrol.wait; }\n // end inline asm\n ret;", True, 0),
    "behind a bulk copy": (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];\n"
        f" {WAIT}\n ret;", True, 1),
    "behind a volatile read": (f"ld.volatile.global.b32 %r1, [%rd1];\n {WAIT}\n ret;", True, 1),
    "behind memory of its own": (
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64;\n ld.shared.b32 %r2, [global_smem];\n"
        f" ld.volatile.shared.b32 %r3, [%r1];\n st.shared.v2.b32 [%r1], {{%r2, %r3}};\n {WAIT}\n ret;", True, 0),
    "never": ("st.global.b32 [%rd2], %r1;\n ret;", False, 0),
    "on one side only": (f"@%p1 bra $L__BB0_2;\n {WAIT}\n$L__BB0_2:\n ret;", False, 0),
    "not where it leaves early": (f"@%p1 ret;\n {WAIT}\n ret;", False, 0),
    "behind a store": (f"st.global.v2.b32 [%rd2], {{%r1, %r2}};\n {WAIT}\n ret;", False, 0),
    "behind a store under a condition": (f"@%p1 st.global.b32 [ %rd2 + 0 ], {{ %r1 }};\n {WAIT}\n ret;", False, 0),
    "behind a volatile store": (f"st.volatile.global.b32 [%rd2], %r1;\n {WAIT}\n ret;", False, 0),
    "behind a store that is seen": (f"@%p1 st.release.gpu.global.b32 [%rd2], %r1;\n {WAIT}\n ret;", False, 0),
    "behind a bulk copy to memory": (f"cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1], 128;\n {WAIT}\n ret;", False, 0),
    "behind a new tensor map": (
        f"tensormap.replace.tile.global_address.global.b1024.b64 [%rd2], %rd1;\n {WAIT}\n ret;", False, 0),
    "behind an addition": (f"atom.global.gpu.relaxed.add.u32 %r1, [%rd1], 1;\n {WAIT}\n ret;", False, 0),
    "after it let the next one go": (f"griddepcontrol.launch_dependents;\n {WAIT}\n ret;", False, 0),
    "in a comment": ("// griddepcontrol.wait;\n st.global.b32 [%rd2], %r1;\n ret;", False, 0),
    "with the end behind a jump": (f"@%p1 bra $L__BB0_9;\n {WAIT}\n ret;\n$L__BB0_9:\n exit;", False, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", PATHS)
def test_every_path_waits_before_anything_shows(name: str):
    body, wanted, reads = PATHS[name]
    assert waits(entry(body), reads=None, groups=False) is wanted
    assert waits(entry(body), reads=reads, groups=False) is wanted
    assert not waits(entry(body), reads=reads - 1, groups=False) or not reads


def test_of_groups_of_warps_one_waits():
    """Those that store wait at a barrier in shared memory, which no path shows."""
    body = f"@%p1 bra $L__BB0_1;\n {WAIT}\n bar.sync 0;\n ret;\n$L__BB0_1:\n bar.sync 0;\n st.global.b32 [%rd2], %r1;\n ret;"
    assert waits(entry(body), reads=None, groups=True) and not waits(entry(body), reads=None, groups=False)
    assert not waits(entry(f"griddepcontrol.launch_dependents;\n{body}"), reads=None, groups=True)
    assert not waits(entry("ret;"), reads=None, groups=True)


def kernel(rows: int, chip: Chip = SM90, n: int = 256, k: int = 512) -> TileKernel:
    request = Request("nn.linear", (("groups", 1), ("wide", False)), (Tensor((None, k), Q8), Tensor((n, k), FP8_WEIGHT)),
                      (Tensor((None, n), BF16),))  # fmt: skip
    return lower(Choice(request, "linear", tuple(sorted(linear_for(request, chip, rows).items()))))


def test_an_override_without_the_wait_is_launched_as_ever():
    """Few rows copy weights first and wait then; the same text without the wait, or with an instance that leaves before it, does not count."""
    one = kernel(16)
    (job,) = jobs([one], "sm90")
    source = job[4]
    assert source is not None and source.text.index("_copy_weights(i, i") < source.text.index("    gdc_wait()") < source.text.index("_copy_x(i, i")
    without = replace(source, text=source.text.replace("    gdc_wait()", "    pass"))
    leaving = replace(source, text=source.text.replace("    gdc_wait()", "    if rows <= 0:\n        return\n    gdc_wait()"))
    assert leaving.text != source.text != without.text
    made = [made for _, made, _ in compiled([job, (*job[:4], without), (*job[:4], leaving)])]
    assert [m if isinstance(m, str) else m.waits for m in made] == [True, False, False]


@pytest.mark.parametrize("chip", [SM90, SM100])
def test_emitted_kernels_wait_behind_their_count(chip: Chip):
    one = kernel(4096, chip)
    plain = replace(one, choice=replace(one.choice, schedule=tuple((key, 0 if key == "override" else v) for key, v in one.choice.schedule)))
    assert source_for(plain, chip) is None
    ((_, made, _),) = compiled(jobs([plain], chip.name))
    assert not isinstance(made, str) and made.waits
    before = made.ptx.split("griddepcontrol.wait")[0]
    assert before.count("ld.global") == 1 and "st.global" not in before and "griddepcontrol.launch_dependents" in made.ptx
