"""Runs artifacts: `LLM` is the offline interface, `load_artifact` and `write_artifact` are the contract with the compiler.

Names are resolved on first use, so that importing one part (the artifact's schema, say) loads no other.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapeout.runtime.artifact import Artifact, load_artifact, write_artifact
    from tapeout.runtime.engine import Engine, EngineOptions
    from tapeout.runtime.errors import TapeoutError
    from tapeout.runtime.llm import LLM
    from tapeout.runtime.params import SamplingParams
    from tapeout.runtime.request import CompletionOutput, RequestOutput

__all__ = [
    "LLM",
    "Artifact",
    "CompletionOutput",
    "Engine",
    "EngineOptions",
    "RequestOutput",
    "SamplingParams",
    "TapeoutError",
    "load_artifact",
    "write_artifact",
]

_HOMES = {
    "Artifact": "artifact",
    "load_artifact": "artifact",
    "write_artifact": "artifact",
    "Engine": "engine",
    "EngineOptions": "engine",
    "TapeoutError": "errors",
    "LLM": "llm",
    "SamplingParams": "params",
    "CompletionOutput": "request",
    "RequestOutput": "request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
