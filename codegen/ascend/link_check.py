"""Link check: whether every device-library function that a lowered module calls is defined in the library of its core.

The compiler returns 0 for programs that could never be linked; this says so before anyone needs a device. The libraries are the installed
package's own, read once a process.
"""

import re
from functools import cache
from pathlib import Path

from tapeout.codegen.ascend.bitcode import defined_functions
from tapeout.codegen.ascend.toolchain import CompileError, Tools

CORES = {"AIV": "aiv", "AIC": "aic"}
PREFIX = "_mlir_ciface_"
_DECLARED = re.compile(r'"func\.func"\(\) <\{[^\n]*\}> \(\{\n\s*\}\) \{[^\n]*\} : \(\) -> \(\)|func\.func private @[\w.$]+\([^\n]*[^{\n]\n')


class LinkError(CompileError):
    """A kernel that calls device functions that no library defines."""


def declared(module: str) -> dict[str, str]:
    """Functions that a lowered module declares without a body, each with its core type (AIV, AIC, or empty)."""
    found: dict[str, str] = {}
    for text in (m.group(0) for m in _DECLARED.finditer(module)):
        name = re.search(r'sym_name = "([\w.$]+)"|private @([\w.$]+)', text)
        core = re.search(r"func_core_type<(\w+)>", text)
        if name:
            found[name[1] or name[2]] = core[1] if core else ""
    return found


@cache
def _symbols(path: Path) -> frozenset[str]:
    return defined_functions(path.read_bytes())


def missing(module: str, tools: Tools) -> dict[str, str]:
    """Declared functions that the library of their core does not define: {name: core}."""
    lost: dict[str, str] = {}
    for name, core in declared(module).items():
        cores = [CORES[core]] if core in CORES else list(CORES.values())
        if not any({name, PREFIX + name} & _symbols(tools.library(c)) for c in cores):
            lost[name] = core
    return dict(sorted(lost.items()))


def require_linked(name: str, module: str, tools: Tools) -> None:
    """Raises `LinkError` with a sentence for a kernel that would not link."""
    lost = missing(module, tools)
    if lost:
        listed = ", ".join(f"{function} ({core or 'no core'})" for function, core in lost.items())
        raise LinkError(f"kernel {name} would not link: it calls {listed}, defined in no device library of {tools.folder.name} {tools.version}; "
                        "write it with ops that the library has")
