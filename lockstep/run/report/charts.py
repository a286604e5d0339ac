"""Small SVG charts, as text: lines over steps with bands, and stacked areas. Colours are the page's `--s0` to `--s7`.
Long series are reduced to means over ranges of steps, with a band from the smallest to the largest value. Values under
the pointer are shown by style rules alone, without scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise

Points = Sequence[tuple[float, float]]  # (x, y) with ascending x; a y that is not finite breaks the line

COLOURS = 8
WIDTH, HEIGHT = 360, 176
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 14, 22
_MAX_POINTS, _MAX_READINGS, _SMOOTHED_FROM = 240, 48, 30


@dataclass(frozen=True)
class Series:
    """A named line. `spread` is half the height of a band around each point; `marks` shows each point; a `dashed` line
    leaves a line under it visible."""

    name: str
    points: Points
    spread: Sequence[float] | None = None
    marks: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class _Dot:
    """A point of a reduced line, with the range of values that it stands for."""

    x: float
    y: float
    low: float
    high: float


class _Plot:
    """Maps data to the SVG's units and draws the axes."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.x_low, self.x_high = _widen(min(xs), max(xs))
        self.ticks = ticks(*_widen(min(ys), max(ys)))
        self.y_low, self.y_high = self.ticks[0], self.ticks[-1]

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)

    def at(self, x: float, y: float) -> str:
        return f"{self.x(x):.1f},{self.y(y):.1f}"

    def axes(self, xs: Sequence[float]) -> str:
        parts = []
        step = self.ticks[1] - self.ticks[0]
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(f'<path class="axis" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{_tick(tick, step)}</text>')
        for value, anchor in {min(xs): "start", max(xs): "end"}.items():
            parts.append(f'<text x="{self.x(value):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{value:g}</text>')
        return "".join(parts)


def line_chart(series: Sequence[Series], smooth: bool = True) -> str:
    """The series as lines with gaps; with `smooth`, a long one is drawn faintly under its moving average."""
    lines = [_downsample(one) for one in series]
    dots = [dot for line in lines for dot in line if dot is not None]
    if not dots:
        return '<p class="none">no finite value</p>'
    xs = [dot.x for dot in dots]
    plot = _Plot(xs, [value for dot in dots for value in (dot.low, dot.high)])
    drawn = [_line(plot, line, index, one, smooth) for index, (one, line) in enumerate(zip(series, lines, strict=True))]
    return _svg(plot.axes(xs) + "".join(drawn) + _hover_readings(plot, series, lines))


def stacked_chart(series: Sequence[Series]) -> str:
    """Stacked areas, the first series at the bottom. All series have the same x values; y is finite, not negative."""
    columns = _chunks(list(zip(*[one.points for one in series], strict=True)))
    xs = [_mean([row[0][0] for row in rows]) for rows in columns]
    layers = [[_mean([row[i][1] for row in rows]) for rows in columns] for i in range(len(series))]
    shown = [[_Dot(x, y, y, y) for x, y in zip(xs, layer, strict=True)] for layer in layers]
    if len(xs) == 1:  # an area needs two x values
        xs, layers = [xs[0], xs[0] + 1], [layer * 2 for layer in layers]
    edges = [[0.0] * len(xs)]
    for layer in layers:
        edges.append([below + y for below, y in zip(edges[-1], layer, strict=True)])
    plot = _Plot(xs, [0.0, *edges[-1]])
    areas = []
    for index, (low, high) in enumerate(pairwise(edges)):
        outline = [*zip(xs, high, strict=True), *reversed(list(zip(xs, low, strict=True)))]
        areas.append(f'<polygon class="f{index % COLOURS}" points="{" ".join(plot.at(*xy) for xy in outline)}"/>')
    return _svg("".join(areas) + plot.axes(xs) + _hover_readings(plot, series, shown))


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Means over a window of values around each, with fewer values at the ends."""
    half = window // 2
    return [_mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _downsample(series: Series) -> list[_Dot | None]:
    """The series as at most `_MAX_POINTS` dots, with None for a range without a finite value."""
    spread = series.spread or [0.0] * len(series.points)
    rows = [(x, y, s) for (x, y), s in zip(series.points, spread, strict=True)]
    return [_dot(chunk, series.spread is not None) for chunk in _chunks(rows)]


def _dot(rows: Sequence[tuple[float, float, float]], banded: bool) -> _Dot | None:
    rows = [row for row in rows if _drawable(row[1])]
    if not rows:
        return None
    xs, ys, spreads = zip(*rows, strict=True)
    y = _mean(ys)
    half = _mean([s for s in spreads if _drawable(s)] or [0.0])
    return _Dot(_mean(xs), y, y - half, y + half) if banded else _Dot(_mean(xs), y, min(ys), max(ys))


def _chunks(rows: list) -> list[list]:
    size = -(-len(rows) // _MAX_POINTS) or 1
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _mean(values: Sequence[float]) -> float:
    """The mean, which rounding cannot move outside the range of `values`."""
    return values[0] if len(values) == 1 else min(max(math.fsum(values) / len(values), min(values)), max(values))


def _drawable(y: float) -> bool:
    return math.isfinite(y) and abs(y) < 1e300  # beyond that, the range would overflow


def _line(plot: _Plot, line: list[_Dot | None], index: int, series: Series, smooth: bool) -> str:
    parts = []
    style = f"l{index % COLOURS}{' dashed' if series.dashed else ''}"
    for run in _finite_runs(line):
        parts.append(_band(plot, run, index))
        smoothed = smooth and len(run) >= _SMOOTHED_FROM
        parts.append(_polyline(plot, [(d.x, d.y) for d in run], f"{style}{' faint' if smoothed else ''}"))
        if smoothed:
            averages = moving_average([d.y for d in run], max(5, len(run) // 12))
            parts.append(_polyline(plot, [(d.x, y) for d, y in zip(run, averages, strict=True)], style))
        if series.marks or len(run) == 1:
            circle = f'<circle class="f{index % COLOURS}" cx="{{:.1f}}" cy="{{:.1f}}" r="2.6"/>'
            parts += [circle.format(plot.x(dot.x), plot.y(dot.y)) for dot in run]
    return "".join(parts)


def _finite_runs(line: list[_Dot | None]) -> list[list[_Dot]]:
    parts = ([dot for dot in part if dot is not None] for _, part in groupby(line, lambda dot: dot is None))
    return [run for run in parts if run]


def _band(plot: _Plot, run: list[_Dot], index: int) -> str:
    if all(dot.low == dot.high for dot in run):
        return ""
    outline = [*((d.x, d.high) for d in run), *((d.x, d.low) for d in reversed(run))]
    return f'<polygon class="f{index % COLOURS} band" points="{" ".join(plot.at(*xy) for xy in outline)}"/>'


def _polyline(plot: _Plot, points: Points, style: str) -> str:
    return f'<polyline class="{style}" points="{" ".join(plot.at(*xy) for xy in points)}"/>'


def _hover_readings(plot: _Plot, series: Sequence[Series], lines: Sequence[Sequence[_Dot | None]]) -> str:
    """Strips over the plot that show the step and the value of each line that has begun and not ended while the pointer
    is on them."""
    longest = max(([dot for dot in line if dot is not None] for line in lines), key=len)
    chosen = longest[:: -(-len(longest) // _MAX_READINGS)]
    edges = [(a.x + b.x) / 2 for a, b in pairwise(chosen)]
    parts = []
    for dot, low, high in zip(chosen, [plot.x_low, *edges], [*edges, plot.x_high], strict=True):
        nearest = [(one.name, _value_at(one, line, dot.x)) for one, line in zip(series, lines, strict=True)]
        values = [f"{name} {y:.4g}" if len(series) > 1 else f"{y:.4g}" for name, y in nearest if y is not None]
        text = escape(f"step {dot.x:.6g}: {', '.join(values)}")
        left, right = plot.x(low), plot.x(high)
        parts.append(
            f'<g class="at"><rect x="{left:.1f}" y="0" width="{right - left:.1f}" height="{HEIGHT}"/>'
            f'<path d="M{plot.x(dot.x):.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
            f'<text x="{WIDTH - RIGHT}" y="9" text-anchor="end">{text}</text></g>'
        )
    return "".join(parts)


def _value_at(series: Series, line: Sequence[_Dot | None], x: float) -> float | None:
    """The value of the nearest dot of the series' `line`; None where it has no points yet, or no more."""
    dots = [dot for dot in line if dot is not None]
    if not dots or not series.points[0][0] <= x <= series.points[-1][0]:
        return None
    return min(dots, key=lambda dot: abs(dot.x - x)).y


def _svg(content: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{content}</svg>'


def _tick(value: float, step: float) -> str:
    """A label with enough decimals to distinguish it from its neighbours."""
    if step >= 1e-5 and abs(value) < 1e4:
        return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size <= abs(value) < 1e12:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"


def _widen(low: float, high: float) -> tuple[float, float]:
    """The range, or a wider one around it if it is too narrow to divide."""
    if high - low > 1e-12 * max(abs(low), abs(high)) + 1e-300:
        return low, high
    margin = abs(low) * 0.1 or 1.0
    return low - margin, high + margin


def ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers from at most `low` to at least `high`."""
    raw = (high - low) / 4
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, last + 1)]
