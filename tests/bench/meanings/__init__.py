"""Kernels against the meanings of their ops, on the device they are compiled for. `python -m tests.bench.gpu_meaning` is the command.

Importing the package makes the meanings importable where the MLIR bindings are not installed (bindings.py).
"""

from tests.bench.meanings.bindings import install

install()
