"""One checked launch against its meaning: what `gpu_meaning` runs in processes of their own, which inherit the jobs."""

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from tapeout.dialects.define import REGISTRY, as_tuple
from tapeout.dialects.format import Scaled
from tapeout.dialects.state import State
from tests.bench.meanings.bounds import bounded, compared
from tests.bench.meanings.cases import Case
from tests.bench.meanings.choices import CHOICES
from tests.bench.meanings.launch import Job, Packed, Weight

JOBS: list[Job] = []
_MADE: dict[str, Any] = {}
"""The weights of the last kernel's jobs: jobs of one kernel come one after the other."""


def verdicts_of(numbers: list[int]) -> list[tuple[int, dict[str, Any]]]:
    """The comparisons of some jobs that share their weights."""
    _MADE.clear()
    return [(number, verdict(number)) for number in numbers]


def _made(weight: Weight) -> Any:
    if weight.operand.name not in _MADE:
        _MADE[weight.operand.name] = weight.value()
    return _MADE[weight.operand.name]


def verdict(number: int) -> dict[str, Any]:
    """One job's comparison; runs in a process that inherits the jobs."""
    job = JOBS[number]
    try:
        job.inputs = [_made(x) if isinstance(x, Weight) else x for x in job.inputs]
        verdicts = _verdicts(job)
    except Exception as error:  # a meaning that refuses what a kernel was given is a finding, not a fault of this suite
        verdicts = [{"same": False, "ratio": float("inf"), "wrong": f"{type(error).__name__}: {error}"}]
    if job.untouched:
        verdicts.append({"same": False, "ratio": float("inf"), "wrong": job.untouched})
    job.inputs, job.found = [], []
    return {"kernel": job.case.symbol, "op": job.case.op, "rows": job.rows, "count": job.count, "results": verdicts}


def _verdicts(job: Job) -> list[dict[str, Any]]:
    case, op = job.case, job.case.body[-1]
    if not job.count:
        return []
    with np.errstate(all="ignore"):
        if op.name in CHOICES:
            return CHOICES[op.name](SimpleNamespace(**op.attributes), list(op.results), _given(case, job.inputs), job.found)
        if not case.results:
            return _state_verdicts(job)
        return [compared(f, one, view) for f, one, view in zip(job.found, bounded(case, job.inputs), case.results, strict=True)]


def _given(case: Case, inputs: list[Any]) -> list[Any]:
    """Operands of the last op of a body; what ops in front of it make, by their meanings."""
    made: list[Any] = []

    def value(ref: Any) -> Any:
        return inputs[ref[1]] if ref[0] == "in" else made[ref[1]][ref[2]]

    for op in case.body[:-1]:
        made.append(as_tuple(REGISTRY[op.name].meaning(SimpleNamespace(**op.attributes), list(op.results), *map(value, op.operands))))
    return [value(ref) for ref in case.body[-1].operands]


def _state_verdicts(job: Job) -> list[dict[str, Any]]:
    """Ops that change a state: the state afterwards, all of it, bit for bit."""
    op, out = job.case.body[0], []
    given = [_raw(x) for x in job.inputs]
    as_tuple(REGISTRY[op.name].meaning(SimpleNamespace(**op.attributes), [], *[given[r[1]] for r in op.operands]))
    wanted = [x for x in given if isinstance(x, State)]
    for f, w in zip(job.found, wanted, strict=True):
        found, right = _bytes(f.value), _bytes(w.value)
        differ = [int(np.argwhere((a != b).any(1))[0][0]) for a, b in zip(found, right, strict=True) if (a != b).any()]
        wrong = f"state row {min(differ)} differs" if differ else None
        out.append({"same": wrong is None, "ratio": float("inf") if wrong else 0.0, "wrong": wrong})
    return out


def _raw(value: Any) -> Any:
    """States and rows whose FP4 codes stay packed: these ops only move them."""
    if isinstance(value, Packed):
        return State(value.value)
    if isinstance(value, Scaled) and value.codes.dtype == ml_dtypes.float4_e2m1fn:
        nibbles = value.codes.view(np.uint8) & 15
        return Scaled((nibbles[..., ::2] | (nibbles[..., 1::2] << 4)).view(np.int8), value.scales, value.scaling)
    return value


def _bytes(value: Any) -> list[Any]:
    parts = [value.codes, value.scales] if isinstance(value, Scaled) else [value]
    return [np.ascontiguousarray(p).view(np.uint8).reshape(len(p), -1) for p in parts]
