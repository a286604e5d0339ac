"""Small SVG charts, as text: lines over steps, and stacked areas. Colours are the page's `--s0` to `--s4`."""

from __future__ import annotations

import math
from itertools import pairwise

Points = list[tuple[float, float]]  # (x, y), x ascending; a y that is not finite breaks the line
Series = tuple[str, Points]

_WIDTH, _HEIGHT = 360, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 8, 8, 22
_MAX_MARKS = 400  # circles with a tooltip; a longer series is a line only


class _Plot:
    """Maps data to pixels and draws the axes."""

    def __init__(self, xs: list[float], ys: list[float]) -> None:
        self.x_low, self.x_high = _widened(min(xs), max(xs))
        self.ticks = _ticks(*_widened(min(ys), max(ys)))
        self.y_low, self.y_high = self.ticks[0], self.ticks[-1]

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (_HEIGHT - _TOP - _BOTTOM)

    def axes(self, xs: list[float]) -> str:
        parts = []
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
        for value, anchor in {min(xs): "start", max(xs): "end"}.items():
            parts.append(f'<text x="{self.x(value):.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{value:g}</text>')
        return "".join(parts)


def line_chart(series: list[Series]) -> str:
    """One line a series. Values that are not finite leave a gap; without a finite one it says so."""
    finite = [(x, y) for _, points in series for x, y in points if _drawable(y)]
    if not finite:
        return "<p>no finite value</p>"
    xs = [x for x, _ in finite]
    plot = _Plot(xs, [y for _, y in finite])
    lines = [_line(plot, points, index) for index, (_, points) in enumerate(series)]
    return _svg(plot.axes(xs) + "".join(lines))


def stacked_chart(series: list[Series]) -> str:
    """Areas on top of each other, from the first series up. All share their x values; y is finite, not negative."""
    xs = [x for x, _ in series[0][1]]
    edges = [[0.0] * len(xs)]
    for _, points in series:
        edges.append([below + y for below, (_, y) in zip(edges[-1], points, strict=True)])
    if len(xs) == 1:  # an area needs two ends
        edges = [edge * 2 for edge in edges]
        xs = [xs[0], xs[0] + 1]
    plot = _Plot(xs, [0.0, *edges[-1]])
    areas = []
    for index, (low, high) in enumerate(pairwise(edges)):
        outline = [*zip(xs, high, strict=True), *reversed(list(zip(xs, low, strict=True)))]
        corners = " ".join(f"{plot.x(x):.1f},{plot.y(y):.1f}" for x, y in outline)
        areas.append(f'<polygon points="{corners}" fill="var(--s{index % 5})"/>')
    return _svg("".join(areas) + plot.axes(xs))


def _drawable(y: float) -> bool:
    return math.isfinite(y) and abs(y) < 1e300  # beyond, the range itself would overflow


def _line(plot: _Plot, points: Points, index: int) -> str:
    colour = f"var(--s{index % 5})"
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if _drawable(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    parts = []
    for run in runs:
        path = " ".join(f"{plot.x(x):.1f},{plot.y(y):.1f}" for x, y in run)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    if len(points) <= _MAX_MARKS:
        parts += [
            f'<circle cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}" r="2" fill="{colour}">'
            f"<title>step {x:g}: {y:.6g}</title></circle>"
            for run in runs
            for x, y in run
        ]
    return "".join(parts)


def _svg(content: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{content}</svg>'


def _widened(low: float, high: float) -> tuple[float, float]:
    """The range, or one around it when it is too narrow to divide."""
    if high - low > 1e-12 * max(abs(low), abs(high)) + 1e-300:
        return low, high
    margin = abs(low) * 0.1 or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers from at most `low` to at least `high`."""
    raw = (high - low) / 4
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, last + 1)]
