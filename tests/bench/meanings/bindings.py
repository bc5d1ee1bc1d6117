"""Lets the meanings of ops be imported where the MLIR bindings are not installed, as on a GPU host.

A meaning is a plain numpy function, but the class it stands in is declared to MLIR. `install` puts stand-ins in place of the bindings that keep
names and functions and nothing else: whatever builds or parses IR does not work with them. With the bindings at hand it does nothing.
"""

import importlib.util
import sys
from types import ModuleType
from typing import Any


class _Named(type):
    """A class for any name that is asked of it: fit for annotations, subclassing, subscripts and calls at import time."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        return super().__call__() if "OPERATION_NAME" in vars(cls) else cls


class _Part(ModuleType):
    """A module of the bindings in which every name is a stand-in."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (), {})
        setattr(self, name, made)
        return made


def _dialect() -> Any:
    """`ext.Dialect`: subclasses get bases for their ops that know the op's full name."""

    class Dialect:
        def __init_subclass__(cls, name: str = "", **settings: Any) -> None:
            class Operation:
                def __init_subclass__(op, name: str = "", **more: Any) -> None:
                    op.OPERATION_NAME, op._fields, op._dialect_obj = f"{cls._name}.{name}", (), cls

            class Named:
                def __init_subclass__(op, name: str = "", **more: Any) -> None:
                    pass

            cls._name, cls.Operation, cls.Attribute, cls.Type = name, Operation, Named, type("Type", (Named,), {})

    return Dialect


def install() -> None:
    """Stand-ins for `tapeout.dialects._mlir`, unless the bindings are there or something has been imported already."""
    name = "tapeout.dialects._mlir"
    if name in sys.modules or importlib.util.find_spec("torch_mlir") is not None:
        return
    module: Any = _Part(name)
    module.ext = _Part(f"{name}.ext")
    module.ext.Dialect = _dialect()
    for part in ("ir", "func", "passmanager", "rewrite"):
        setattr(module, part, _Part(f"{name}.{part}"))
    module.MlirMissing = ImportError
    sys.modules[name] = module
