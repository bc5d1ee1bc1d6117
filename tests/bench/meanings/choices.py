"""Kernels that choose by sums of their own: experts, index entries, tokens. A choice may differ from the meaning's only where the scores of
what was taken and what was left lie within their FP32 error of each other; counts, order and padding are exact.

Each check is `CHOICES[op](a, results, inputs, found)` and returns what `bounds.compared` does, once a result.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.dialects import moe, sample
from tapeout.dialects.format import BF16, decode, encode
from tapeout.dialects.rows import entry_rows, left_aligned, visible_entries
from tests.bench.meanings.bounds import compared, gamma, meaning

Real = NDArray[np.float64]
Verdict = dict[str, Any]


def _verdict(wrong: str | None, same: bool) -> Verdict:
    return {"same": same, "ratio": np.inf if wrong else 0.0 if same else 1.0, "wrong": wrong}


def outranked(low: Real, high: Real, chosen: NDArray[np.bool_]) -> bool:
    """Whether something left out surely beats something taken; equal scores go to the lowest number."""
    if chosen.all() or not chosen.any():
        return False
    border = low[~chosen].max()
    if high[chosen].min() < border:
        return True
    sure = (low == high) & (low == border)
    taken, left = np.flatnonzero(sure & chosen), np.flatnonzero(sure & ~chosen)
    return bool(taken.size and left.size and taken.max() > left.min())


def _gate(a: Any, results: Any, inputs: Any, found: Any) -> list[Verdict]:
    x, weight, bias = (decode(v) for v in inputs)
    ids, weights = found
    z, slack = x @ weight.T, gamma(x.shape[1]) * (np.abs(x) @ np.abs(weight).T)
    low, score, high = (np.sqrt(moe.softplus(v)) for v in (z - slack, z, z + slack))
    wrong = None
    if ids.min(initial=0) < 0 or ids.max(initial=0) >= len(bias) or any(len(set(row)) < len(row) for row in ids.tolist()):
        return [_verdict("ids outside the experts, or one twice", False)] * 2
    for r, row in enumerate(ids):
        chosen = np.zeros(len(bias), bool)
        chosen[row] = True
        falls = (high[r] + bias)[row[:-1]] * (1 + 2.0**-21) + 2.0**-100 >= (low[r] + bias)[row[1:]]
        if outranked(low[r] + bias, high[r] + bias, chosen) or not falls.all():
            wrong = wrong or f"row {r}: experts {row.tolist()} are not the best"
    picked = np.take_along_axis(score, ids, 1)
    value = a.scale * picked / (picked.sum(1, keepdims=True) + 1e-20)
    relative = np.take_along_axis((high - low) / 2 / score, ids, 1).max(1, keepdims=True)
    same = np.array_equal(meaning("moe.gate", a, results, inputs)[0], ids)
    return [_verdict(wrong, same), compared(weights, (value, value * (2 * relative + 2.0**-20)), results[1])]


# -- index entries


def _scores(a: Any, inputs: Any) -> Iterator[tuple[Any, Real, Real]]:
    """For every row the physical rows of the entries it sees, and the least and greatest score each may have."""
    iq, weights, keys, positions, slots, table = inputs[:6]
    queries, factors = decode(iq).reshape(len(slots), a.heads, -1), decode(weights)
    for r, count in enumerate(visible_entries(positions, a.ratio)):
        physical = entry_rows(table, slots[r], np.arange(count), a.block_tokens // a.ratio)
        held = decode(keys.read(physical)) if count else np.zeros((0, queries.shape[2]))
        total = factors[r] @ np.maximum(queries[r] @ held.T, 0.0)
        size = np.abs(factors[r]) @ (np.abs(queries[r]) @ np.abs(held).T)
        slack = (queries.shape[2] + a.heads + 4) * 2.0**-23 * size
        yield physical, *(decode(encode(v, BF16)) for v in (total - slack, total + slack))


def _picked(ids: Any, count: int, numbers: Any, low: Real, high: Real, most: int) -> str | None:
    """Whether `ids`, left aligned and -1 behind `count`, are the best `most` of what can be seen, in ascending order."""
    allowed = np.flatnonzero(high > -np.inf)
    if count != min(most, len(allowed)) or (ids[count:] != -1).any():
        return f"count {count}, expected {min(most, len(allowed))} and -1 behind"
    place = {int(number): i for i, number in enumerate(numbers)}
    taken = [place.get(int(i), -1) for i in ids[:count]]
    if taken != sorted(set(taken)) or (taken and (taken[0] < 0 or not np.isin(taken, allowed).all())):
        return "ids not ascending, or of entries that the row does not see"
    chosen = np.zeros(len(low), bool)
    chosen[taken] = True
    return "a better entry was left out" if outranked(low[allowed], high[allowed], chosen[allowed]) else None


def _select(a: Any, results: Any, inputs: Any, found: Any) -> list[Verdict]:
    wrong: list[str | None] = [None, None]
    for r, (physical, low, high) in enumerate(_scores(a, inputs)):
        if len(inputs) > 6:
            inside = _inside(inputs[6][r], inputs[7][r], len(low), a.block)
            low, high = np.where(inside, low, -np.inf), np.where(inside, high, -np.inf)
        wrong[0] = wrong[0] or _picked(found[0][r], int(found[1][r]), physical, low, high, a.top_k)
        if len(found) > 2:
            low, high = (_worth(v, a.block) for v in (low, high))
            wrong[1] = wrong[1] or _picked(found[2][r], int(found[3][r]), np.arange(len(low)), low, high, a.blocks)
    name = "mla.select" if len(found) == 2 and len(inputs) == 6 else "mla.select_within" if len(found) == 2 else "mla.select_candidates"
    wanted = meaning(name, a, results, inputs)
    same = [np.array_equal(f, w) for f, w in zip(found, wanted, strict=True)]
    return [_verdict(wrong[i // 2], one) for i, one in enumerate(same)]


def _inside(candidates: Any, count: int, entries: int, block: int) -> Any:
    return np.isin(np.arange(entries) // block, candidates[:count])


def _worth(score: Real, block: int) -> Real:
    """The best score of each block of entries; the newest block comes before all."""
    padded = np.full(-(-len(score) // block) * block, -np.inf)
    padded[: len(score)] = score
    worth = padded.reshape(-1, block).max(axis=1)
    if len(worth):
        worth[-1] = np.inf
    return worth


# -- tokens


def _draw(a: Any, results: Any, inputs: Any, found: Any) -> list[Verdict]:
    """Each token has the largest noisy score among those that stay, up to FP32 errors of the score and of the mass at the top_p border."""
    logits, temperature, top_k, top_p, seeds, positions = inputs
    x, tokens, wrong = decode(logits), found[0], None
    if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= x.shape[1]:
        return [_verdict("tokens outside the vocabulary", False)] * len(found)
    hot = np.where(temperature > 0, np.maximum(temperature.astype(np.float64), sample.COOLEST), 1.0)[:, None]
    scaled = x / hot
    scaled -= scaled.max(axis=1, keepdims=True)
    log_p = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    score = log_p - np.log(-np.log(sample.uniform(seeds, positions, a.stream, x.shape[1])))
    slack, border = 2.0**-20 * (20 + np.abs(scaled)), x.shape[1] * 2.0**-23
    wide, narrow = (sample.kept(log_p, top_k, np.where(top_p >= 1, top_p, top_p + side)) for side in (border, -border))
    for r, token in enumerate(tokens):
        best = np.where(narrow[r], score[r] - slack[r], -np.inf).max()
        right = token == x[r].argmax() if temperature[r] == 0 else wide[r, token] and score[r, token] + slack[r, token] >= best
        wrong = wrong or (None if right else f"row {r}: token {int(token)} is not the one to draw")
    wanted = meaning("sample.draw", a, results, inputs)
    raw = x - x.max(axis=1, keepdims=True)
    logprobs = (raw - np.log(np.exp(raw).sum(axis=1, keepdims=True)))[np.arange(len(x)), tokens]
    bound = 2.0**-22 * (np.abs(logprobs) + 4) + x.shape[1] * 2.0**-24
    more = [compared(found[1], (logprobs, bound), results[1])] if found[1:] else []  # tokens alone are asked for where they are drafts
    return [_verdict(wrong, np.array_equal(tokens, wanted[0])), *more]


CHOICES: dict[str, Callable[[Any, Any, Any, Any], list[Verdict]]] = {
    "moe.gate": _gate, "mla.select": _select, "mla.select_within": _select, "mla.select_candidates": _select, "sample.draw": _draw,
}  # fmt: skip

__all__ = ["CHOICES", "left_aligned", "outranked"]
