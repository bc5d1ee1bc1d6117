"""What steps cost: the quadratic model of prompt steps, the table of decode steps, and an artifact's launch costs at run-time sizes.

Everything is milliseconds and pure: an observation returns a new fit. Models are fitted online by recursive least squares with forgetting;
a table answers for every number of rows at once, because the planner asks for all of them. Who measures, and when, is left to the engine.
docs/planning.md, costs.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import isfinite, prod, sqrt
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tapeout.runtime.errors import OptionRefused, ProgramsInconsistent

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STEP_TOKENS = 32_768  # the most tokens of prompts in one step
CHUNK_ALIGNMENT = 128  # tokens of a cache block
FORGETTING = 0.999
_ANCHOR = 1e-6  # weight of the previous estimate: holds a coefficient that the load has stopped exciting


# -- recursive least squares


@dataclass(frozen=True)
class Fit:
    """Least squares of milliseconds on features, old observations fading. `values` are ms per unit of each feature.

    Kept in information form, the same estimate as the textbook recursion: `information` = sum of l^age x x', `moment` = sum of l^age x ms,
    both in features divided by `scales`. Bounded fits keep every value >= 0 by solving for the best subset of features.
    """

    scales: Floats
    information: Floats
    moment: Floats
    values: Floats
    is_bounded: bool = True


def new_fit(scales: ArrayLike, *, is_bounded: bool = True) -> Fit:
    """A fit that knows nothing and predicts 0. `scales` are typical sizes of the features."""
    units = np.asarray(scales, np.float64)
    size = len(units)
    return Fit(units, np.zeros((size, size)), np.zeros(size), np.zeros(size), is_bounded)


def observed(fit: Fit, features: ArrayLike, ms: float, forgetting: float = FORGETTING) -> Fit:
    """The fit after one more measurement. What no clock can show (not finite, below 0 where values are bounded) is ignored."""
    if not isfinite(ms) or (fit.is_bounded and ms < 0):
        return fit
    x = np.asarray(features, np.float64) / fit.scales
    information = forgetting * fit.information + np.outer(x, x)
    moment = forgetting * fit.moment + ms * x
    weight = _ANCHOR * (1 + np.trace(information))
    matrix = information + weight * np.eye(len(x))
    target = moment + weight * fit.values * fit.scales
    scaled = np.linalg.solve(matrix, target)
    if fit.is_bounded and scaled.min() < 0:
        scaled = _non_negative(matrix, target)
    return replace(fit, information=information, moment=moment, values=scaled / fit.scales)


def _non_negative(matrix: Floats, target: Floats) -> Floats:
    """The minimum of x'Mx/2 - t'x over x >= 0: the best of all subsets, exact for the handful of features here."""
    size = len(target)
    used = np.array(list(product((False, True), repeat=size)))
    both = used[:, :, None] & used[:, None, :]
    systems = np.where(both, matrix, 0) + np.eye(size) * ~used[:, :, None]
    found = np.linalg.solve(systems, np.where(used, target, 0)[:, :, None])[:, :, 0]
    value = 0.5 * np.einsum("si,ij,sj->s", found, matrix, found) - found @ target
    value[(found < 0).any(axis=1)] = np.inf
    return found[np.argmin(value)]  # type: ignore[no-any-return]


# -- prompt steps


class Chunk(NamedTuple):
    """A chunk of one prompt: `tokens` new rows behind `prefix` computed ones, of which `kept` go through the decoder."""

    tokens: int
    prefix: int
    kept: int = 0


def prefill_features(chunks: Sequence[Chunk]) -> Floats:
    """[1, sum q, sum q (p + (q + 1) / 2), n, kept]: all but scoring is linear in the rows; scoring reads every visible key."""
    scored = sum(q * (p + (q + 1) / 2) for q, p, _ in chunks)
    return np.array([1.0, sum(x.tokens for x in chunks), scored, len(chunks), sum(x.kept for x in chunks)])


def new_prefill_fit() -> Fit:
    """A fit for prompt steps that knows nothing yet."""
    return new_fit([1, 1024, 1024 * 16_384, 1, 128])


def prefill_ms(fit: Fit, chunks: Sequence[Chunk]) -> float:
    """The predicted time of a prompt step; with no chunks its constant part."""
    return float(fit.values @ prefill_features(chunks))


def chunk(fit: Fit, prefix: int, todo: int, *, left_ms: float, used_tokens: int = 0, keep: int = 0,
          step_tokens: int = STEP_TOKENS, alignment: int = CHUNK_ALIGNMENT) -> int:
    """Tokens of a prompt to compute next: the most that fit the time and the token budget, 0 to skip the prompt in this step.

    `todo` tokens are left behind `prefix` computed ones; the last `keep` of the prompt also go through the decoder. A chunk that does not
    finish its prompt is a multiple of `alignment`.
    """
    most = min(_most_in_time(fit, prefix, todo, keep, left_ms), step_tokens - used_tokens, todo)
    if most >= todo:
        return todo
    return max(0, most // alignment * alignment)


def _most_in_time(fit: Fit, prefix: int, todo: int, keep: int, left_ms: float) -> int:
    """The largest q with c2/2 q^2 + (c1 + c2 p + c2/2) q + c3 + c4 kept(q) <= left, where rows beyond todo - keep are kept."""
    _, per_token, per_key, per_sequence, per_kept = map(float, fit.values)
    left, linear = left_ms - per_sequence, per_token + per_key * (prefix + 0.5)
    before = max(0, todo - keep)
    plain = _largest(per_key / 2, linear, left, todo)
    if plain < before or per_kept == 0:
        return plain
    return max(before, _largest(per_key / 2, linear + per_kept, left + per_kept * before, todo))


def _largest(square: float, linear: float, left: float, limit: int) -> int:
    """The largest whole q <= limit with square q^2 + linear q <= left; below 0 if not even none fits."""
    if left < 0:
        return -1
    if square * limit * limit + linear * limit <= left:
        return limit
    return int(2 * left / (linear + sqrt(linear * linear + 4 * square * left)) + 1e-9)


# -- decode steps


@dataclass(frozen=True)
class DecodeTable:
    """Measured milliseconds of decode steps: `ms[i, j]` at `rows[i]` rows that each see `contexts[j]` tokens on average.

    Padded: a step runs at the next listed size (device graphs); otherwise times between sizes are interpolated. Contexts are interpolated
    linearly and extended beyond the last; one context means that time does not depend on it. No rows: nothing was measured.
    """

    rows: Ints
    contexts: Floats
    ms: Floats
    is_padded: bool = True

    def __post_init__(self) -> None:
        if self.ms.shape != (len(self.rows), len(self.contexts)):
            raise OptionRefused("decode table, ms", f"shape {self.ms.shape}", f"({len(self.rows)}, {len(self.contexts)})")
        if (np.diff(self.rows) <= 0).any() or (np.diff(self.contexts) <= 0).any():
            raise OptionRefused("decode table, rows and contexts", (self.rows.tolist(), self.contexts.tolist()), "strictly increasing")
        if self.ms.size and not (np.isfinite(self.ms).all() and self.ms.min() > 0):
            raise OptionRefused("decode table, ms", self.ms.tolist(), "finite times above 0")

    @cached_property
    def size_index(self) -> Ints:
        """For every number of rows up to the largest size, the index of the size that holds it."""
        return np.searchsorted(self.rows, np.arange(self.rows[-1] + 1) if len(self.rows) else np.zeros(0))

    @property
    def is_empty(self) -> bool:
        return not len(self.rows)


def decode_table(rows: ArrayLike, ms: ArrayLike, contexts: ArrayLike = (0.0,), *, is_padded: bool = True) -> DecodeTable:
    """A table from plain lists; `ms` is [rows, contexts], or [rows] for one context. Raises OptionRefused."""
    sizes, seen = np.asarray(rows, np.int64).reshape(-1), np.asarray(contexts, np.float64).reshape(-1)
    times = np.asarray(ms, np.float64)
    return DecodeTable(sizes, seen, times.reshape(-1, len(seen)) if times.ndim < 2 else times, is_padded)


def measured_ms(runs: Sequence[float]) -> float:
    """One time from repeated runs of a size: the first warms up, the best and the worst of the rest are dropped."""
    rest = sorted(runs[1:])
    if len(rest) < 3:
        raise OptionRefused("runs of one size", len(runs), "a warm-up and at least three runs")
    return fmean(rest[1:-1])


def step_times(table: DecodeTable, sequences: int, drafts: int, *, context: float = 0.0, row_slope: float = 0.0,
               extra_ms: float = 0.0) -> Floats:
    """Times of steps with sequences + 0 .. drafts rows [drafts + 1]; infinite where no size fits, empty if nothing was measured.

    `context`: mean tokens that a row sees. `row_slope`: ms per row of the size that runs. `extra_ms`: sampling and drafting.
    """
    if table.is_empty:
        return np.zeros(0)
    by_size = _at_context(table, context) + row_slope * table.rows
    fitting = max(0, min(drafts, int(table.rows[-1]) - sequences) + 1) if sequences <= table.rows[-1] else 0
    times = np.full(drafts + 1, np.inf)
    if table.is_padded:
        times[:fitting] = by_size[table.size_index[sequences : sequences + fitting]]
    else:
        times[:fitting] = np.interp(np.arange(sequences, sequences + fitting), table.rows, by_size)
    times += extra_ms
    return times


def _at_context(table: DecodeTable, context: float) -> Floats:
    seen = table.contexts
    left: Floats = table.ms[:, 0]
    if len(seen) == 1:
        return left
    right = int(np.clip(np.searchsorted(seen, context), 1, len(seen) - 1))
    share = max(0.0, (context - seen[right - 1]) / (seen[right] - seen[right - 1]))
    left = table.ms[:, right - 1]
    between: Floats = left + share * (table.ms[:, right] - left)
    return between


def new_decode_fit() -> Fit:
    """What steps take beyond the table: a constant, ms a row, ms a row and token seen (scoring is linear in the sum of contexts)."""
    return new_fit([1, 64, 64 * 16_384], is_bounded=False)


def decode_observed(fit: Fit, table: DecodeTable, rows: int, context: float, ms: float) -> Fit:
    """The fit after a decode step of `rows` rows took `ms`; `table` is the one measured at start."""
    expected = step_times(table, rows, 0, context=context)
    if not expected.size or not isfinite(expected[0]):
        return fit
    size = float(table.rows[table.size_index[rows]]) if table.is_padded else float(rows)
    return observed(fit, [1.0, size, size * context], ms - float(expected[0]))


def corrected(table: DecodeTable, fit: Fit) -> DecodeTable:
    """The table with the fitted correction; no time falls below a tenth of the measured one."""
    if not fit.information.any():
        return table
    constant, per_row, per_key = map(float, fit.values)
    extra = constant + table.rows[:, None] * (per_row + per_key * table.contexts)
    return replace(table, ms=np.maximum(table.ms + extra, table.ms / 10))


class RowSlope:
    """The peer's correction for context: ms per row beyond the table, the median over sizes of each size's median.

    Samples of the last 5,000 steps count, sizes with fewer than 10 do not; a negative slope is 0.
    """

    def __init__(self, window: int = 5000, least: int = 10) -> None:
        self._window, self._least = window, least
        self._order: deque[int] = deque()
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}

    def observe(self, size: int, table_ms: float, ms: float) -> None:
        """Adds a decode step that ran at `size` rows."""
        self._order.append(size)
        self._samples.setdefault(size, deque()).append((ms - table_ms) / size)
        self._medians.pop(size, None)
        if len(self._order) > self._window:
            oldest = self._order.popleft()
            self._samples[oldest].popleft()
            self._medians.pop(oldest, None)

    @property
    def value(self) -> float:
        """ms per row, at least 0."""
        for size, samples in self._samples.items():
            if len(samples) >= self._least and size not in self._medians:
                self._medians[size] = float(np.median(np.fromiter(samples, np.float64)))
        known = [self._medians[size] for size, samples in self._samples.items() if len(samples) >= self._least]
        return max(0.0, median(known)) if known else 0.0


# -- launch costs of an artifact

LaunchCost = Mapping[str, Mapping[str, float]]
"""`Launch.cost` of an artifact: for each quantity (read, written, operations by kind) coefficients of terms like `rows*entries`."""


def evaluated(cost: LaunchCost, sizes: Mapping[str, float]) -> dict[str, float]:
    """Quantities at run-time sizes (rows, kept, entries, experts, ...). Raises ProgramsInconsistent for a size that is not given."""
    try:
        return {quantity: sum(value * prod(sizes[name] for name in term.split("*") if name != "fixed") for term, value in terms.items())
                for quantity, terms in cost.items()}
    except KeyError as error:
        raise ProgramsInconsistent("programs.json, cost of a launch", f"a term of {error}", f"terms of fixed, {', '.join(sizes)}") from None


def experts_touched(experts: int, chosen: int) -> Callable[[int], float]:
    """Expected distinct experts of a step when every row chooses `chosen` of `experts` evenly: E (1 - (1 - k / E)^rows)."""
    return lambda rows: experts * (1 - (1 - chosen / experts) ** rows)
