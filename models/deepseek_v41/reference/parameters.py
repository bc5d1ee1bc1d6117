"""Checkpoint tensors, decoded on first use into the dtype of the sums and kept.

Promises: names are those of model spec 10 without the `model.` prefix; decoding is exact; Engram tables and embeddings
are decoded row by row. Leaves to others: reading files, checking shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from . import formats
from .formats import Array


class Parameters:
    """A view of the tensors whose names start with `prefix`; views share one store of decoded arrays."""

    def __init__(
        self,
        tensors: Mapping[str, Array],
        dtype: type[np.floating[Any]],
        prefix: str = "",
        decoded: dict[str, Array] | None = None,
    ) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self._prefix = prefix
        self._decoded = {} if decoded is None else decoded

    def under(self, prefix: str) -> Parameters:
        """Returns the view of the names below `prefix`."""
        return Parameters(self._tensors, self._dtype, f"{self._prefix}{prefix}.", self._decoded)

    def array(self, name: str) -> Array:
        """A BF16 or F32 tensor stored under exactly this name (norm weights, mixers, sinks, biases)."""
        full = self._prefix + name
        if full not in self._decoded:
            self._decoded[full] = self._stored(full).astype(self._dtype)
        return self._decoded[full]

    def matrix(self, name: str) -> Array:
        """The weight `[out, in]` of a linear, whatever its storage: FP8 blocks, packed FP4 or BF16."""
        full = self._prefix + name
        if full not in self._decoded:
            self._decoded[full] = self._decode(full)
        return self._decoded[full]

    def rows(self, name: str, ids: Array) -> Array:
        """Rows `ids` of a BF16 table: `[len(ids), width]`."""
        return self._stored(f"{self._prefix}{name}.weight")[ids].astype(self._dtype)

    def fp8_rows(self, name: str, ids: Array) -> Array:
        """Rows `ids` of an FP8 table with one scale per row and 32 columns: `[len(ids), width]`."""
        full = self._prefix + name
        rows, scale = self._stored(f"{full}.weight")[ids], self._stored(f"{full}.scale")[ids]
        return formats.decode_fp8_rows(rows, scale, self._dtype)

    def _decode(self, full: str) -> Array:
        stored = self._stored(f"{full}.weight")
        if stored.dtype == ml_dtypes.float8_e4m3fn:
            return formats.decode_fp8_blocks(stored, self._stored(f"{full}.scale"), self._dtype)
        if stored.dtype in (np.uint8, np.int8):
            return formats.decode_fp4_rows(stored, self._stored(f"{full}.scale"), self._dtype)
        return stored.astype(self._dtype)

    def _stored(self, full: str) -> Array:
        if full not in self._tensors:
            raise ValueError(
                f"a tensor is missing - reference, tensors['{full}'] - found {len(self._tensors)} other names, "
                "expected every text tensor of the checkpoint without the 'model.' prefix - pass the complete mapping"
            )
        return self._tensors[full]
