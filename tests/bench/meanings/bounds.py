"""What a kernel may leave where its op's meaning is a real number: unrounded results and how far a kernel's own FP32 sums may be from them.

One rule an op: `RULES[name](a, results, inputs, spreads)` returns for each result (values in float64, slack) and is the op's own meaning, never a
second one; `spreads` say how uncertain an input is because an op in front of it in the same kernel rounded it. An op without a rule moves,
quantizes or counts: its result is the meaning's, bit for bit. Bounds are those of docs/architecture.md, Tolerances.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.dialects import cache, dspark, engram, fused, mhc, mla, moe, nn, sample, selection, step  # noqa: F401
from tapeout.dialects.define import REGISTRY, as_tuple
from tapeout.dialects.format import DTYPES, LARGEST, REAL, Number, Scaled, decode, encode, quantize, scale_values, to_odd
from tapeout.dialects.real import root_mean
from tapeout.dialects.types import Tensor
from tests.bench.meanings.cases import Case

Real = NDArray[np.float64]
Bounded = tuple[Any, Any]
"""(unrounded value, slack); slack None where the value is exact: an array of any kind, to be met bit for bit."""
UNIT = {"bf16": 2.0**-7, "f32": 2.0**-23}
WEIGHT_ROWS = 256  # of a product that are decoded at a time: few enough that memory is used again, not mapped anew


_VALUES = {kind: decode(np.arange(count, dtype=np.uint8).view(kind)) for kind, count in ((DTYPES["f8E4M3FN"], 256), (DTYPES["f4E2M1FN"], 16))}


def decoded(value: Any) -> Real:
    """What `decode` gives, by a table of all codes: weights are large."""
    if not isinstance(value, Scaled) or value.codes.dtype not in _VALUES:
        return decode(value)
    s, shape = value.scaling, value.codes.shape
    if len(shape) != 2 or shape[0] % s.rows or shape[1] % s.columns:
        return decode(value)
    out = _VALUES[value.codes.dtype][value.codes.view(np.uint8)]
    blocks = out.reshape(shape[0] // s.rows, s.rows, shape[1] // s.columns, s.columns)
    blocks *= scale_values(value.scales, s.scale)[:, None, :, None]
    return out


class Experts:
    """Weights of experts, each decoded when it is first asked for."""

    def __init__(self, weight: Any) -> None:
        self._weight, self._made, self.shape = weight, dict[int, Real](), weight.shape

    def __getitem__(self, expert: int) -> Real:
        if expert not in self._made:
            self._made[expert] = decoded(self._weight[expert])
        return self._made[expert]


def gamma(n: int) -> float:
    """The FP32 factor of a sum of n products, each term rounded at most n + 2 times."""
    return (n + 2) * 2.0**-23


def meaning(name: str, a: Any, results: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """An op's meaning with its real results unrounded."""
    real = [Tensor(v.shape, REAL) if isinstance(v, Tensor) and v.number.is_float else v for v in results]
    return list(as_tuple(REGISTRY[name].meaning(a, real, *inputs)))


# -- rules


def _linear(a: Any, results: Any, inputs: Any, spreads: Any) -> list[Bounded]:
    x, weight = inputs
    if a.groups > 1:
        return [_product(a, results, x, weight)]
    n, rows = weight.shape[0], WEIGHT_ROWS
    found = [_product(a, results, x, _rows(weight, slice(at, at + rows))) for at in range(0, n, rows)]
    return [(np.concatenate([v for v, _ in found], 1), np.concatenate([s for _, s in found], 1))]


def _rows(weight: Any, part: slice) -> Any:
    """Rows of a weight, by whole scale blocks."""
    if not isinstance(weight, Scaled):
        return weight[part]
    each = weight.scaling.rows
    return Scaled(weight.codes[part], weight.scales[part.start // each : -(-part.stop // each)], weight.scaling)


def _product(a: Any, results: Any, x: Any, weight: Any) -> Bounded:
    """The meaning with a weight decoded once, and gamma times the sum of magnitudes."""
    w, v = decoded(weight), decode(x)
    (value,) = meaning("nn.linear", a, results, [v, w])
    g, (n, k) = a.groups, w.shape
    sizes = np.abs(v).astype(np.float32).reshape(len(v), g, k).transpose(1, 0, 2)
    size = sizes @ np.abs(w).astype(np.float32).reshape(g, n // g, k).transpose(0, 2, 1)
    return value, gamma(k) * size.transpose(1, 0, 2).reshape(len(v), n).astype(np.float64)


def _rms_norm(a: Any, results: Any, inputs: Any, spreads: Any) -> list[Bounded]:
    (value,) = meaning("nn.rms_norm", a, results, inputs)
    x, weight = decode(inputs[0]), decode(inputs[1])
    slack = gamma(x.shape[-1]) * np.abs(value)
    if spreads[0] is not None:
        inverse = root_mean(x, a.epsilon)
        drift = (np.abs(x) * spreads[0]).mean(axis=-1, keepdims=True) * inverse**2
        slack = slack + np.abs(weight) * inverse * spreads[0] + np.abs(value) * drift
    return [(value, slack)]


def _rope(a: Any, results: Any, inputs: Any, spreads: Any) -> list[Bounded]:
    (value,) = meaning("nn.rope", a, results, inputs)
    x, positions, table = inputs
    angles = np.abs(decode(table[np.maximum(positions + a.offset, 0)]))[:, None, :]
    half = angles.shape[-1] // 2
    cos, sin = angles[..., :half], angles[..., half:]
    slack = np.zeros((len(positions), a.heads, a.width))
    at = a.width - 2 * half
    v = np.abs(decode(x)).reshape(slack.shape)
    grown = 2.0**-22 * v
    if spreads[0] is not None:
        slack += spreads[0].reshape(slack.shape)
        grown = grown + spreads[0].reshape(slack.shape)
    even, odd = grown[..., at::2], grown[..., at + 1 :: 2]
    slack[..., at::2], slack[..., at + 1 :: 2] = even * cos + odd * sin, even * sin + odd * cos
    return [(value, slack.reshape(value.shape))]


def _quantize(a: Any, results: Any, inputs: Any, spreads: Any) -> list[Bounded]:
    return [(decode(inputs[0]), spreads[0])]


def _mixer(a: Any, results: Any, inputs: Any, spreads: Any) -> list[Bounded]:
    """A coefficient is a smooth function of products whose errors average out; 20 divisions of numbers below 1 keep it there."""
    return [(v, 2e-5 * np.abs(v) + 2e-6) for v in meaning("mhc.mixer", a, results, inputs)]


def _collapse(a: Any, results: Any, inputs: Any, spreads: Any) -> list[Bounded]:
    (value,) = meaning("mhc.collapse", a, results, inputs)
    terms = np.abs(decode(inputs[1])[:, :, None] * decode(inputs[0]))
    return [(value, gamma(terms.shape[1]) * terms.sum(1))]


def _mean(a: Any, results: Any, inputs: Any, spreads: Any) -> list[Bounded]:
    (value,) = meaning("mhc.mean", a, results, inputs)
    return [(value, gamma(inputs[0].shape[1]) * np.abs(decode(inputs[0])).mean(1))]


def _expand(a: Any, results: Any, inputs: Any, spreads: Any) -> list[Bounded]:
    (value,) = meaning("mhc.expand", a, results, inputs)
    (size,) = meaning("mhc.expand", a, results, [np.abs(decode(x)) for x in inputs])
    return [(value, gamma(inputs[0].shape[1] + 1) * size)]


def _swiglu(a: Any, results: Any, inputs: Any, spreads: Any) -> list[Bounded]:
    (value,) = meaning("moe.swiglu", a, results, inputs)
    return [(value, np.abs(value) * 2.0**-20 + 2.0**-100)]


def _combine(a: Any, results: Any, inputs: Any, spreads: Any) -> list[Bounded]:
    (value,) = meaning("moe.combine", a, results, inputs)
    (size,) = meaning("moe.combine", a, results, [np.abs(decode(inputs[0])), inputs[1], np.abs(decode(inputs[2]))])
    return [(value, gamma(inputs[0].shape[1] + 1) * size)]


def _expert_linear(a: Any, results: Any, inputs: Any, spreads: Any) -> list[Bounded]:
    x, weight, order, offsets = inputs
    n, rows = weight.shape[1], WEIGHT_ROWS
    found = [_expert_product(a, results, x, _rows_of_experts(weight, slice(at, at + rows)), order, offsets) for at in range(0, n, rows)]
    return [(np.concatenate([v for v, _ in found], -1), np.concatenate([s for _, s in found], -1))]


def _rows_of_experts(weight: Any, part: slice) -> Any:
    """Rows of every expert's weight."""
    if not isinstance(weight, Scaled):
        return weight[:, part]
    each = weight.scaling.rows
    return Scaled(weight.codes[:, part], weight.scales[:, part.start // each : -(-part.stop // each)], weight.scaling)


def _expert_product(a: Any, results: Any, x: Any, weight: Any, order: Any, offsets: Any) -> Bounded:
    """The meaning with weights decoded once, and gamma times the sum of magnitudes."""
    held, v = Experts(weight), decode(x)
    (value,) = meaning("moe.expert_linear", a, results, [v, held, order, offsets])
    k, width = order.shape[1], weight.shape[2]
    pairs = np.abs(v).astype(np.float32)
    pairs = pairs[order.reshape(-1) // k] if a.gathered else pairs.reshape(-1, width)
    size = np.zeros((order.size, weight.shape[1]), np.float32)
    for e in np.flatnonzero(np.diff(offsets)):
        span = slice(offsets[e], offsets[e + 1])
        size[span] = pairs[span] @ np.abs(held[int(e)]).astype(np.float32).T
    return value, gamma(width) * size.reshape(value.shape).astype(np.float64)


def _engram_gate(a: Any, results: Any, inputs: Any, spreads: Any) -> list[Bounded]:
    """The gate's argument is a quotient of sums: its error is gamma of its magnitude, halved by the root, quartered by the logistic."""
    (value,) = meaning("engram.gate", a, results, inputs)
    s, h = inputs[0].shape[1:]
    return [(value, np.abs(value) * 2.0**-22 + np.abs(decode(inputs[1]))[:, None, s * h :] * 8 * gamma(h))]


def _pool(a: Any, results: Any, inputs: Any, spreads: Any) -> list[Bounded]:
    (value,) = meaning("mla.pool", a, results, inputs)
    pairs, partners = inputs
    held, own = decode(pairs.value), a.sequences * a.length + np.arange(len(partners))
    width = held.shape[1] // 2
    size = np.abs(held[own, width:]) + np.abs(held[np.where(partners < 0, own, partners), width:])
    return [(value, size * 2.0**-20)]


def _attend(a: Any, results: Any, inputs: Any, spreads: Any) -> list[Bounded]:
    """Weights are off by twice the largest error of a logit; their sum with keys adds its own."""
    (value,) = meaning("mla.attend", a, results, inputs)
    q, sink = np.abs(decode(inputs[0])), inputs[4]
    width = q.shape[1] // a.heads
    signed, slack = decode(inputs[0]).reshape(-1, a.heads, width), np.zeros((len(q), a.heads, width))
    sources = [inputs[1:4], inputs[5:8]]
    for r in range(len(q)):
        keys = np.concatenate([decode(s.read(ids[r, : counts[r]])) for s, ids, counts in sources if s is not None])
        logits = a.scale * signed[r] @ keys.T
        peak = np.maximum(logits.max(axis=1, initial=-np.inf), sink)[:, None]
        weights = np.exp(logits - peak)
        weights /= weights.sum(1, keepdims=True) + np.exp(sink[:, None] - peak)
        off = (width + 4) * 2.0**-23 * a.scale * (q[r].reshape(a.heads, width) @ np.abs(keys).T).max(axis=1, initial=0)
        slack[r] = weights @ np.abs(keys) * (2 * off[:, None] + (len(keys) + 16) * 2.0**-22)
    return [(value, slack.reshape(value.shape))]


def _confidence(a: Any, results: Any, inputs: Any, spreads: Any) -> list[Bounded]:
    (value,) = meaning("dspark.confidence", a, results, inputs)
    x, embedded, projection = inputs
    (size,) = meaning("dspark.confidence", a, results, [np.abs(decode(x)), [np.abs(decode(e)) for e in embedded], np.abs(decode(projection))])
    return [(value, gamma(projection.shape[1]) * size)]


RULES: dict[str, Callable[[Any, Any, Any, Any], list[Bounded]]] = {
    "nn.linear": _linear, "nn.rms_norm": _rms_norm, "nn.rope": _rope, "nn.quantize": _quantize, "mhc.mixer": _mixer,
    "mhc.collapse": _collapse, "mhc.mean": _mean, "mhc.expand": _expand, "moe.swiglu": _swiglu, "moe.combine": _combine,
    "moe.expert_linear": _expert_linear, "engram.gate": _engram_gate, "mla.pool": _pool, "mla.attend": _attend,
    "dspark.confidence": _confidence,
}  # fmt: skip


# -- a whole kernel


def bounded(case: Case, inputs: Sequence[Any]) -> list[Bounded]:
    """What each result of a kernel must be near to: the ops of its body one by one, every rounding kept, its uncertainty handed on."""
    made: dict[tuple[str, int, int], Bounded] = {}
    held: dict[tuple[str, int, int], Bounded] = {}

    def pick(ref: Any) -> Bounded:
        if ref is None:
            return None, None
        if isinstance(ref[0], list | tuple):
            return [pick(r)[0] for r in ref], None
        return (inputs[ref[1]], None) if ref[0] == "in" else held[tuple(ref)]

    for number, op in enumerate(case.body):
        values, spreads = zip(*map(pick, op.operands), strict=True)
        a = SimpleNamespace(**op.attributes)
        rule = RULES.get(op.name)
        found = rule(a, op.results, values, spreads) if rule else [(v, None) for v in _exact(op, a, values)]
        for i, (one, view) in enumerate(zip(found, op.results, strict=True)):
            made["op", number, i] = one
            if number < len(case.body) - 1 and isinstance(view, Tensor) and view.number.scaling is None:
                held["op", number, i] = _rounded(one, view.number)
    return [made[tuple(ref)] for ref in case.outputs]


def _exact(op: Any, a: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    return as_tuple(REGISTRY[op.name].meaning(a, list(op.results), *values))


def _rounded(one: Bounded, number: Number) -> Bounded:
    """A value as the next op of the same kernel sees it, and how far the kernel's may be from that."""
    value, slack = one
    if slack is None:
        return one
    near, low, high = (decode(encode(x, number)) for x in (value, value - slack, value + slack))
    return encode(value, number), np.maximum(high - near, near - low)


# -- comparisons


def compared(found: Any, one: Bounded, view: Any) -> dict[str, Any]:
    """How a result agrees: `ratio` error over bound (0 where bit for bit), `same` whether bit for bit, `wrong` a sentence or None."""
    value, slack = one
    if slack is None and not isinstance(value, Scaled) and value.dtype == np.float64 and isinstance(view, Tensor):
        value = encode(value, view.number)
    if slack is None:
        same = _equal(found, value)
        return {"same": same, "ratio": 0.0 if same else np.inf, "wrong": None if same else _first_difference(found, value)}
    if isinstance(found, Scaled):
        return _compared_codes(found, value, slack, view.number)
    unit = UNIT[view.number.element]
    bound = slack + unit / 2 * (np.abs(value) + slack) + 2.0**-130
    error = np.abs(decode(found) - value)
    ratio = np.where(np.isfinite(error), error / bound, np.inf)
    at = np.unravel_index(int(np.argmax(ratio)), ratio.shape) if ratio.size else ()
    worst = float(ratio.max(initial=0.0))
    sentence = None
    if worst > 1:
        near = f"{float(value[at])!r} within {float(bound[at]):.3g}"
        sentence = f"at {tuple(map(int, at))} found {float(decode(found)[at])!r}, expected {near}"
    relative = float((error / np.maximum(np.abs(value), np.abs(value).mean() + 1e-300)).max(initial=0.0)) if ratio.size else 0.0
    return {"same": _equal(found, encode(value, view.number)), "ratio": worst, "relative": relative, "wrong": sentence}


def _compared_codes(found: Scaled, value: Real, slack: Real, number: Number) -> dict[str, Any]:
    """Scales between those of the least and the greatest values, codes between the roundings of both at the scale that was found."""
    scaling = found.scaling
    groups = (*value.shape[:-1], value.shape[-1] // scaling.columns, scaling.columns)
    size, give = np.abs(value), slack
    lowest, highest = (quantize(np.maximum(x, 0.0), number).scales.astype(np.float64) for x in (size - give, size + give))
    scales = found.scales.astype(np.float64)
    factor = scale_values(found.scales, scaling.scale)[..., None]
    codes = decode(found.codes).reshape(groups)
    largest = LARGEST[number.element]

    def code(x: Real) -> Real:
        return decode(to_odd(np.clip(x.reshape(groups) / factor, -largest, largest)).astype(DTYPES[number.element]))

    low, high = code(value - give), code(value + give)
    bad_scale, bad_code = (scales < lowest) | (scales > highest), (codes < low) | (codes > high) | ~np.isfinite(codes)
    wanted = quantize(value, number)
    flips = int((decode(wanted.codes).reshape(groups) != codes).sum())
    sentence = None
    if bad_scale.any():
        sentence = f"{int(bad_scale.sum())} scales outside their range, first at {tuple(map(int, np.argwhere(bad_scale)[0]))}"
    elif bad_code.any():
        at = tuple(map(int, np.argwhere(bad_code)[0]))
        sentence = f"{int(bad_code.sum())} codes outside their range, first at {at}: found {codes[at]}, expected {low[at]} to {high[at]}"
    return {"same": _equal(found, wanted), "ratio": np.inf if sentence else 1.0 if flips else 0.0, "flips": flips, "wrong": sentence}


def _equal(found: Any, wanted: Any) -> bool:
    """Bit for bit, both zeros being one number."""
    if isinstance(wanted, Scaled):
        return isinstance(found, Scaled) and _equal(found.codes, wanted.codes) and _equal(found.scales, wanted.scales)
    if found.shape != wanted.shape:
        return False
    if found.dtype.kind in "iub" and wanted.dtype.kind in "iub":
        return bool((found.astype(np.int64) == wanted.astype(np.int64)).all())
    return bool((found.astype(np.float64) == wanted.astype(np.float64)).all())


def _first_difference(found: Any, wanted: Any) -> str:
    if isinstance(wanted, Scaled):
        part = "codes" if not _equal(found.codes, wanted.codes) else "scales"
        return f"{part}: {_first_difference(getattr(found, part), getattr(wanted, part))}"
    if found.shape != wanted.shape:
        return f"shape {found.shape}, expected {wanted.shape}"
    differ = np.argwhere(found.astype(np.float64) != wanted.astype(np.float64))
    at = tuple(map(int, differ[0])) if len(differ) else ()
    return f"{len(differ)} of {found.size} differ, first at {at}: found {found[at]}, expected {wanted[at]}"
