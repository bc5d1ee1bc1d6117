"""Tapeout compiles DeepSeek-V4.1-Flash to hardware binaries ahead of time and runs them offline.

`tapeout.compile(path, output, …)` needs the compiler's dependencies; `tapeout.LLM(artifact, weights)` needs only the runtime's. Names are
loaded on first use, and nothing else is: the command stands behind this file, and should be there before an interrupt can come.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tapeout.compiler.api import Compiled, compile
    from tapeout.runtime.llm import LLM
    from tapeout.runtime.params import SamplingParams
    from tapeout.runtime.request import RequestOutput

__all__ = ["LLM", "Compiled", "RequestOutput", "SamplingParams", "compile"]

_HOMES = {
    "LLM": "tapeout.runtime.llm",
    "SamplingParams": "tapeout.runtime.params",
    "RequestOutput": "tapeout.runtime.request",
    "compile": "tapeout.compiler.api",
    "Compiled": "tapeout.compiler.api",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> "Any":
    if name not in _HOMES:
        raise AttributeError(f"module 'tapeout' has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
