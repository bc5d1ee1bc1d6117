"""The driver: the missing back end as a state, the same bytes twice, sentences for what the compiler says, no paths in the result."""

import importlib.util

import pytest

from tapeout.codegen.ascend import toolchain
from tapeout.codegen.ascend.build import build
from tapeout.codegen.ascend.emit import emit
from tapeout.codegen.ascend.facts import ChipError
from tapeout.codegen.ascend.toolchain import CompileError, PackageMissing, compile_kernel, find_tools, normalised
from tests.codegen.ascend import sample_kernels
from tests.codegen.ascend.harness import tools


def test_without_the_package_one_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PackageMissing) as caught:
        find_tools()
    assert str(caught.value) == ("the Ascend compiler is not installed: found no package ascendnpu-ir, needed ascendnpu-ir==1.2.0; "
                                 "pip install ascendnpu-ir==1.2.0 (x86-64 Linux)")


def test_without_the_back_end_a_kernel_is_lowered():
    assert tools().state == "lowered"
    built = build(sample_kernels.scale(), tools())
    assert built.compiled.binary is None
    assert built.compiled.command == (
        "hivmc-a5 MODULE --target=Ascend950PR_9589 --enable-hfusion-compile=true --enable-hivm-compile=true "
        "--enable-triton-kernel-compile=true -o OBJECT --only-run-hivm-pipeline=false")


def test_a_back_end_on_the_path_assembles(tmp_path):
    """Any program of that name is taken; its output is the kernel's binary."""
    fake = tmp_path / "hivmc-a5"
    fake.write_text('#!/bin/sh\nbefore=""\nfor word in "$@"; do [ "$before" = "-o" ] && echo object > "$word"; before="$word"; done\n')
    fake.chmod(0o755)
    tools()
    found = find_tools(str(tmp_path))
    assert found.state == "assembled"
    assert compile_kernel(emit(sample_kernels.scale()), "scale", found).binary == b"object\n"


def test_twice_the_same_bytes_and_no_paths():
    first, second = (build(sample_kernels.product(), tools()).compiled for _ in range(2))
    assert (first.module, first.dump) == (second.module, second.dump)
    assert "${ASCENDNPUIR}/lib/meta_op" in first.module
    assert str(tools().folder) not in first.module and "/tmp" not in first.module


def test_paths_become_a_word():
    assert normalised('{a = "/x/y z/lib/meta_op.aiv.c310.bc", b = "/x/lib/host-a5.bc"}') == (
        '{a = "${ASCENDNPUIR}/lib/meta_op.aiv.c310.bc", b = "${ASCENDNPUIR}/lib/host-a5.bc"}')


@pytest.mark.parametrize(("messages", "sentence"), [
    ("error: ub overflow, requires 4063232 bits while 2031616 bits available!",
     "needs 4063232 bits of ub and has 2031616: take smaller blocks in the schedule row"),
    ("x: Assertion `idx < size()' failed.", "meets an assertion of the compiler: idx < size()"),
    ("Unknown PIPE!", "copies inside the unified buffer of a mixed kernel: only vector kernels may"),
    ("", "is not lowered, and the compiler says nothing that is known here: nothing at all")])
def test_what_the_compiler_says_becomes_a_sentence(messages, sentence):
    assert toolchain._cause(messages) == sentence


def test_an_unknown_chip_is_refused_before_the_compiler_runs():
    with pytest.raises(ChipError, match="no Ascend 950 chip is called 'Ascend960'"):
        compile_kernel("", "none", tools(), target="Ascend960")


def test_a_module_that_is_refused():
    with pytest.raises(CompileError, match=r"^kernel broken is refused: .*\(bishengir-compile-a5 returned 1\)$"):
        compile_kernel("func.func @broken() { nonsense }", "broken", tools())


def test_a_tile_that_no_memory_holds_is_refused_before_emission():
    with pytest.raises(CompileError, match="takes 1048576 bytes, the largest local memory has 524288: take smaller blocks"):
        build(sample_kernels.scale(rows=512, columns=512), tools())


def test_a_plan_that_overflows_is_a_sentence():
    with pytest.raises(CompileError, match="bits of ub and has 2031616: take smaller blocks in the schedule row"):
        build(sample_kernels.scale(rows=512, columns=250), tools())


def test_resources_of_a_product():
    used = build(sample_kernels.product(), tools()).resources
    assert used.mode == "aic"
    assert used.memory == {"ub": 0, "cbuf": 2 * (16 * 64 * 2 + 64 * 32 * 2), "cc": 2 * 16 * 32 * 4}, "loads and sums are double-buffered"
    assert (used.pipes["M"], used.pipes["MTE2"], used.pipes["FIX"], used.vector_functions) == (1, 2, 1, 0)
