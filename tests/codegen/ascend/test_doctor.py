"""What `tapeout doctor` says of the Ascend target: the compiler by version, and the missing back end as something to install, not an error."""

import importlib.util

from tapeout.codegen.ascend import toolchain
from tapeout.compiler.doctor import findings
from tests.codegen.ascend.harness import tools


def _ascend() -> dict[str, tuple[str, bool, str]]:
    return {f.what: (f.found, f.is_ok, f.remedy) for f in findings() if "scend" in f.what}


def test_the_compiler_and_the_missing_back_end(monkeypatch):
    tools()
    monkeypatch.setenv("PATH", "/nonexistent")
    assert _ascend() == {
        "Ascend compiler (compiling for ascend950)": ("ascendnpu-ir 1.2.0", True, ""),
        "Ascend back end hivmc-a5 (objects for ascend950)": (
            "none", False, "install CANN 9.2 and source its environment script; until then kernels are lowered and checked, not assembled")}


def test_without_the_package(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == toolchain.MODULE else found(name))
    ((what, (version, is_ok, remedy)),) = _ascend().items()
    assert (what, version, is_ok) == ("Ascend compiler (compiling for ascend950)", "none", False)
    assert remedy.startswith("the Ascend compiler is not installed: found no package ascendnpu-ir")
