"""Attention over one shared key-value row per token: pooling of the ratio-2 compressor, and attention with a sink.

`mla.select` and its two relatives are declared in selection.py. Keys are values: every head reads the same rows, of the window's ring and
of the paged entries (docs/model.md 4.4, 4.7). Which rows those are is data, made by `step.window` and `mla.select`.
"""

from typing import Any, Optional

import numpy as np

from tapeout.dialects._mlir import ext, ir
from tapeout.dialects.define import READS, Cost, Group, Sizes, builder, declare, moved_once, require
from tapeout.dialects.format import BF16, REAL, Array, Number, Scaled, decode, encode
from tapeout.dialects.rows import Ids, Mask, Real, left_aligned, read_rows, tables
from tapeout.dialects.rules import ROWS, blocks, index, made, narrow, positive, ring, rows, shaped
from tapeout.dialects.state import State
from tapeout.dialects.types import Ring, Tensor

Numbers = tuple[Number | None, ...]
Value = Array | Scaled
KEYS_AT_ONCE = 1 << 23
"""Key elements that the meaning of `mla.attend` holds at once; rows are independent, so the split changes no bit."""


class Mla(ext.Dialect, name="mla"):
    """Latent attention: compressor, index selection, attention."""


@declare
class PoolOp(Mla.Operation, name="pool", traits=[READS]):
    """Merges the two tokens of a group: per channel, the mean of their e weighted by the softmax of their g.

    pairs: ring of [2D], g then e; row r's own pair is staged row r; partners [?] names the physical row of the token before it
    -> [?, D] (docs/model.md 4.4). A row with partner below 0 completes no group: it is its own partner, and nobody uses the result.
    """

    pooled: ext.Result[Any]
    pairs: ext.Operand[Any]
    partners: ext.Operand[Any]
    length: ir.IntegerAttr
    sequences: ir.IntegerAttr

    @staticmethod
    def infer(a: Any, pairs: Group, partners: Group, *, out: Numbers) -> Tensor:
        entry = ring(pairs, "pairs", a.length).entry
        tables(partners=partners)
        positive(sequences=a.sequences)
        require(len(entry.shape) == 1 and entry.sized(0)[0] % 2 == 0, f"pairs has entries {entry}, expected g and e, equally long")
        return made((ROWS, entry.sized(0)[0] // 2), out[0] or (REAL if entry.number == REAL else BF16))

    @staticmethod
    def meaning(a: Any, results: list[Tensor], pairs: State, partners: Ids) -> Value:
        own = a.sequences * a.length + np.arange(len(partners), dtype=np.int32)
        first = np.split(decode(pairs.read(np.where(partners < 0, own, partners))), 2, axis=-1)
        second = np.split(decode(pairs.read(own)), 2, axis=-1)
        peak = np.maximum(first[0], second[0])
        grown = np.exp(first[0] - peak), np.exp(second[0] - peak)
        pooled = (grown[0] * first[1] + grown[1] * second[1]) / (grown[0] + grown[1])
        return encode(pooled, results[0].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        pair = operands[0].entry
        read = Cost(read=2 * sizes.rows * pair.bytes(), operations={"f32": 4 * sizes.rows * pair.shape[0]})
        return moved_once(a, operands, results, sizes) + read


pool = builder(PoolOp)


@declare
class AttendOp(Mla.Operation, name="attend", traits=[READS]):
    """o_h = sum_v exp(scale q_h.v) v / (sum_v exp(scale q_h.v) + exp(sink_h)), v over the row's window, then its selected entries.

    q [?, heads*D], window: ring of [D], window_ids [?, W], window_counts [?], sink [heads]; entries: blocks of [D], ids [?, K], counts [?],
    all three or none -> [?, heads*D] (docs/model.md 4.7). Rows are physical, left aligned; a row that sees no key yields 0.
    """

    attended: ext.Result[Any]
    q: ext.Operand[Any]
    window: ext.Operand[Any]
    window_ids: ext.Operand[Any]
    window_counts: ext.Operand[Any]
    sink: ext.Operand[Any]
    entries: Optional[ext.Operand[Any]]  # noqa: UP045
    ids: Optional[ext.Operand[Any]]  # noqa: UP045
    counts: Optional[ext.Operand[Any]]  # noqa: UP045
    heads: ir.IntegerAttr
    scale: ir.FloatAttr

    @staticmethod
    def infer(a: Any, q: Group, window: Group, window_ids: Group, window_counts: Group, sink: Group, entries: Group, ids: Group,
              counts: Group, *, out: Numbers) -> Tensor:
        found = rows(q, "q", 2)
        width = found.sized(0)[1]
        positive(heads=a.heads)
        require(width % a.heads == 0, f"q is {found}, expected whole columns for each of {a.heads} heads")
        shaped(sink, "sink", a.heads)
        require(isinstance(window, Ring), f"window is {window}, expected a ring")
        _keys(window, "window", width // a.heads)
        index(window_ids, "window_ids", ROWS, "W")
        tables(window_counts=window_counts)
        given = [part is not None for part in (entries, ids, counts)]
        require(all(given) or not any(given), "entries, ids and counts are given together or not at all")
        if entries is not None:
            _keys(blocks(entries, "entries"), "entries", width // a.heads)
            index(ids, "ids", ROWS, "K")
            tables(counts=counts)
        return made((ROWS, width), out[0] or narrow(found.number))

    @staticmethod
    def meaning(a: Any, results: list[Tensor], q: Value, window: State, window_ids: Ids, window_counts: Ids, sink: Value,
                entries: State | None, ids: Ids | None, counts: Ids | None) -> Value:
        queries = decode(q)
        queries = queries.reshape(len(queries), a.heads, queries.shape[1] // a.heads)
        attended = np.zeros_like(queries)
        sources = [(window, window_ids, left_aligned(window_counts, window_ids.shape[1]))]
        if entries is not None and ids is not None and counts is not None:
            sources.append((entries, ids, left_aligned(counts, ids.shape[1])))
        step = max(1, KEYS_AT_ONCE // max(1, queries.shape[2] * sum(i.shape[1] for _, i, _ in sources)))
        for at in range(0, len(queries), step):
            part = slice(at, at + step)
            keys = np.concatenate([read_rows(s, i[part], seen[part]) for s, i, seen in sources], axis=1)
            seen = np.concatenate([seen[part] for _, _, seen in sources], axis=1)
            attended[part] = _attend(queries[part], keys, seen, decode(sink), a.scale)
        return encode(attended.reshape(len(attended), results[0].sized(0)[1]), results[0].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        """4*A*D operations a key; every row reads its own W + min(K, visible) keys (docs/model.md 12.2)."""
        q, window, window_ids, _, _, entries, ids, _ = operands
        selected = 0 if entries is None else min(ids.shape[1], sizes.entries)
        read = window_ids.shape[1] * window.entry.bytes() + (0 if entries is None else selected * entries.entry.bytes())
        keys = window_ids.shape[1] + selected
        work = {"bf16": 4 * sizes.rows * q.shape[1] * keys}
        return moved_once(a, operands, results, sizes) + Cost(read=sizes.rows * read, operations=work)


attend = builder(AttendOp)


def _keys(state: Any, name: str, width: int) -> None:
    """The entries of a state are key vectors of one head's width."""
    entry = state.entry
    require(entry.shape == (width,) and entry.number.is_float, f"{name} has entries {entry}, expected the {width} columns of one head of q")


def _attend(q: Real, keys: Real, seen: Mask, sink: Real, scale: float) -> Real:
    """q [rows, heads, D], keys [rows, keys, D], seen [rows, keys] -> [rows, heads, D]."""
    logits = np.where(seen[:, None, :], q @ keys.transpose(0, 2, 1) * scale, -np.inf)
    peak = np.maximum(logits.max(axis=2, initial=-np.inf), sink)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    grown = np.exp(logits - peak[:, :, None])
    total = grown.sum(axis=2) + np.exp(sink - peak)
    attended: Real = grown @ keys / np.where(total > 0, total, 1.0)[:, :, None]
    return attended

