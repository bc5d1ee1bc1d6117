"""Where survival rates come from: a random process of acceptance, or a recorded trace. Both yield one `Load` that every rule replays alike.

The process: every sequence has a level of acceptance, Beta distributed, that drifts from step to step (a Gaussian AR(1) underneath), and
every position adds noise of its own. docs/planning.md, simulation.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from math import erf, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.planner import survival
from tapeout.runtime.sim.errors import MOST_MS, TraceRefused

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Process:
    """Acceptance of a draft given that all before it were accepted. `persistence` is the AR(1) coefficient of the level between steps,
    `overconfidence` multiplies the logits of acceptance to give the confidences (1: a perfect head)."""

    level_a: float = 0.982
    level_b: float = 0.5
    noise: float = 0.12
    lowest: float = 0.02
    highest: float = 0.99
    persistence: float = 0.0
    overconfidence: float = 1.0


@dataclass(frozen=True)
class Load:
    """Step after step of drafts: true acceptance and confidences, each [sequences, positions] given that all before were accepted.

    `step_ms` and `step_rows` are what a recorded step took and verified, NaN and 0 if not known.
    """

    acceptance: tuple[Floats, ...]
    confidences: tuple[Floats, ...]
    sequences: tuple[tuple[int, ...], ...]
    step_ms: Floats
    step_rows: Ints

    @property
    def steps(self) -> int:
        return len(self.acceptance)


def drawn_load(process: Process, sequences: int, positions: int, steps: int, seed: int) -> Load:
    """A load of the process; the same seed gives the same load."""
    random = np.random.default_rng([seed, sequences])
    fresh = random.standard_normal((steps, sequences))
    latent, share = np.empty_like(fresh), sqrt(1 - process.persistence**2)
    latent[0] = fresh[0]
    for step in range(1, steps):
        latent[step] = process.persistence * latent[step - 1] + share * fresh[step]
    grid, levels = _levels(process.level_a, process.level_b)
    noise = process.noise * random.standard_normal((steps, sequences, positions))
    chance = np.clip(np.interp(latent, grid, levels)[:, :, None] + noise, process.lowest, process.highest)
    claimed = chance if process.overconfidence == 1 else _sharpened(chance, process.overconfidence)
    names = tuple(range(sequences))
    return Load(tuple(chance), tuple(claimed), (names,) * steps, np.full(steps, np.nan), np.zeros(steps, np.int64))


def _sharpened(chance: Floats, factor: float) -> Floats:
    return 1 / (1 + ((1 - chance) / chance) ** factor)


@lru_cache(maxsize=8)
def _levels(a: float, b: float) -> tuple[Floats, Floats]:
    """Normal quantiles and the Beta(a, b) quantiles that belong to them.

    With x = sin^2 t the density is 2 sin^(2a-1) t cos^(2b-1) t dt up to a constant, which has no singularity for a, b >= 1/2.
    """
    angle = np.linspace(0, np.pi / 2, 8193)
    density = np.sin(angle) ** (2 * a - 1) * np.cos(angle) ** (2 * b - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    grid = np.linspace(-6, 6, 2401)
    chance = np.array([0.5 * (1 + erf(z / sqrt(2))) for z in grid])
    return grid, np.sin(np.interp(chance, mass / mass[-1], angle)) ** 2


# -- recorded traces


def recorded_load(path: Path) -> Load:
    """A load from JSON lines, one object a step: `confidences` [sequences][positions]; optional `sequences` (ids), `ms`, `rows`.

    Acceptance is taken to be what the confidences say. Raises TraceRefused with the line and key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise TraceRefused(str(path), "bytes that are not UTF-8", "JSON lines in UTF-8") from None
    except OSError as error:
        raise TraceRefused(str(path), error.strerror or str(error), "a file of JSON lines that can be read") from None
    steps = [_step(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not steps:
        raise TraceRefused(str(path), "no steps", "at least one line")
    widths = sorted({confidences.shape[1] for confidences, *_ in steps})
    if len(widths) > 1:
        raise TraceRefused(str(path), f"blocks of {widths[0]} and of {widths[-1]} drafts", "one block length in all steps")
    confidences, names, ms, rows = zip(*steps, strict=True)
    return Load(confidences, confidences, names, np.array(ms, np.float64), np.array(rows, np.int64))


def _step(where: str, line: str) -> tuple[Floats, tuple[int, ...], float, int]:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        raise TraceRefused(where, line[:40], "one JSON object") from None
    if not isinstance(given, dict) or "confidences" not in given:
        raise TraceRefused(where, line[:40], "an object with the key confidences")
    confidences = _confidences(f"{where}, confidences", given["confidences"])
    names = given.get("sequences", list(range(len(confidences))))
    if not isinstance(names, list) or not all(map(_is_whole, names)) or not len(names) == len(set(names)) == len(confidences):
        raise TraceRefused(f"{where}, sequences", str(names)[:40], f"{len(confidences)} different whole numbers")
    ms, rows = given.get("ms", float("nan")), given.get("rows", 0)
    if isinstance(ms, bool) or not isinstance(ms, int | float) or ms <= 0 or ms > MOST_MS:
        raise TraceRefused(f"{where}, ms", str(ms)[:40], f"milliseconds above 0, up to {MOST_MS:.0f}")
    if not _is_whole(rows) or rows < 0:
        raise TraceRefused(f"{where}, rows", rows, "a whole number, at least 0")
    return confidences, tuple(names), float(ms), rows


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _confidences(where: str, given: Any) -> Floats:
    try:
        values = np.array(given, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise TraceRefused(where, str(given)[:40], "a list of equally long lists of numbers") from None
    if values.ndim != 2 or not values.size:
        raise TraceRefused(where, f"shape {values.shape}", "[sequences, positions], neither empty")
    if not ((values >= 0) & (values <= 1)).all():
        raise TraceRefused(where, "a value outside", "0 to 1")
    return values


def persistence(load: Load) -> float:
    """Correlation of a sequence's expected accepted drafts between steps: how much a lagged budget still knows. NaN if nothing repeats."""
    before: list[float] = []
    after: list[float] = []
    means = [survival(c).sum(axis=1) for c in load.confidences]
    for step in range(1, load.steps):
        last = dict(zip(load.sequences[step - 1], means[step - 1], strict=True))
        for name, mean in zip(load.sequences[step], means[step], strict=True):
            if name in last:
                before.append(last[name])
                after.append(mean)
    if len(before) < 3 or np.std(before) == 0 or np.std(after) == 0:
        return float("nan")
    return float(np.corrcoef(before, after)[0, 1])
