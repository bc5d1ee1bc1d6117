"""A line plot as SVG text: points with error bars over a logarithmic axis. Same data, same bytes; no library, no font, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log2, log10

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 40, 52  # margins; the legend is in the right one
COLOURS = ("#1b6ca8", "#c8442c", "#3a7d44", "#7a4fa3", "#b0790f", "#0f8b8d", "#555555", "#d06090", "#8a8d20")


@dataclass(frozen=True)
class Series:
    """A named line: (x, y, error) for each point; x above 0."""

    name: str
    points: tuple[tuple[float, float, float], ...]


def line_plot(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """The SVG document. An error bar spans y - error to y + error."""
    points = [p for one in series for p in one.points]
    ticks = _ticks(min([0.0, *(y - e for _, y, e in points)]), max([0.0, *(y + e for _, y, e in points)]))
    frame = _Frame(*_span([log2(x) for x, _, _ in points] or [0.0]), ticks[0], ticks[-1])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, TOP - 16, title, "start", 'font-size="14"'),
        *(_horizontal(frame, y) for y in ticks),
        *(_vertical(frame, x) for x in sorted({x for x, _, _ in points})),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, x_label, "middle"),
        _text(16, (TOP + HEIGHT - BOTTOM) / 2, y_label, "middle", f'transform="rotate(-90 16 {_number((TOP + HEIGHT - BOTTOM) / 2)})"'),
        *(part for i, one in enumerate(series) for part in _drawn(frame, one, i)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


@dataclass(frozen=True)
class _Frame:
    """Data ranges: x as a base 2 logarithm, y as it is."""

    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (log2(value) - self.left) / (self.right - self.left)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.low) / (self.high - self.low)


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 1, high + 1)


def _ticks(low: float, high: float) -> list[float]:
    """Six or so round values that enclose low and high."""
    rough = max(high - low, 1e-6) / 5
    unit = 10.0 ** floor(log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough)
    first, last = floor(low / step), -floor(-high / step)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _text(x: float, y: float, text: str, anchor: str, extra: str = "") -> str:
    return f'<text x="{_number(x)}" y="{_number(y)}" text-anchor="{anchor}" {extra}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{_number(x1)}" y1="{_number(y1)}" x2="{_number(x2)}" y2="{_number(y2)}" {style}/>'


def _horizontal(frame: _Frame, y: float) -> str:
    style = 'stroke="#444"' if y == 0 else 'stroke="#ddd"'
    return _line(LEFT, frame.y(y), WIDTH - RIGHT, frame.y(y), style) + _text(LEFT - 8, frame.y(y) + 4, f"{y:g}", "end")


def _vertical(frame: _Frame, x: float) -> str:
    place = frame.x(x)
    return _line(place, TOP, place, HEIGHT - BOTTOM, 'stroke="#eee"') + _text(place, HEIGHT - BOTTOM + 18, f"{x:g}", "middle")


def _drawn(frame: _Frame, one: Series, number: int) -> list[str]:
    colour = COLOURS[number % len(COLOURS)]
    path = " ".join(f"{_number(frame.x(x))},{_number(frame.y(y))}" for x, y, _ in one.points)
    legend, label = TOP + 10 + 20 * number, WIDTH - RIGHT + 16
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>',
        *(_line(frame.x(x), frame.y(y - e), frame.x(x), frame.y(y + e), f'stroke="{colour}"') for x, y, e in one.points if e),
        *(f'<circle cx="{_number(frame.x(x))}" cy="{_number(frame.y(y))}" r="2.6" fill="{colour}"/>' for x, y, _ in one.points),
        _line(label, legend, label + 18, legend, f'stroke="{colour}" stroke-width="1.8"'),
        _text(label + 24, legend + 4, one.name, "start"),
    ]
