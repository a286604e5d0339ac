"""The sections of charts that a run's metrics make."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ..metrics import LEARNING, PARITY, PHASES, SECTIONS, listed, title_of
from .charts import Points, Series, line_chart, stacked_chart
from .page import card, legend, number, section
from .record import Record

# Sections of a chart a metric; the others are shown by the learning section, the time split and the certificate.
CHARTED = [section for section in SECTIONS if section not in (LEARNING, PHASES, PARITY)]
_AS_IT_IS = {"lr", "recompiles", "graph_replays", "memory/peak_gib", "policy_age"}  # lines that need no smoothing


def learning(record: Record) -> str:
    """Reward with the spread within groups, the held-out problems, and each reward function."""
    charts = []
    if rewards := record.metric("reward/mean"):
        spread = dict(record.metric("reward/std"))
        bands = [spread.get(step, 0.0) for step, _ in rewards]
        title = "Reward ± its spread within a prompt"
        charts.append(card(title, line_chart([Series("reward", rewards, bands)]), "reward/mean"))
    if series := _finite(record.validations):
        title = "Held-out problems, greedy"
        charts.append(card(title, line_chart(series) + legend(series), "validation/..."))
    functions = {name: record.metric(name) for name in record.metric_names if listed(name) == "rewards/<fn>/mean"}
    if len(functions) > 1 and (series := _finite(functions)):
        charts.append(card("Each reward function", line_chart(series) + legend(series), "rewards/..."))
    style = "wide" if len(charts) < 3 else "grid"
    return section(LEARNING, f'<div class="{style}">{"".join(charts)}</div>' if charts else "")


def _finite(metrics: dict[str, list[tuple[float, float]]]) -> list[Series]:
    """A series for each metric with a finite value, named by what sets it apart."""
    shown = {name: points for name, points in metrics.items() if any(math.isfinite(y) for _, y in points)}
    return [Series(_short(name), points, marks=len(points) < 12) for name, points in shown.items()]


def _short(name: str) -> str:
    parts = [part for part in name.removeprefix("validation/").removeprefix("rewards/").split("/") if part != "mean"]
    return "/".join(parts) or name


def details(record: Record) -> list[str]:
    """A section of charts for each group of metrics; those that never change are listed with their value."""
    constant: dict[str, float] = {}
    parts = []
    for title, names in _sections(record).items():
        charts = [time_split(record)] if title == "Speed and memory" else []
        for name in names:
            values = record.values(name)
            if len(values) > 1 and min(values) == max(values):
                constant[name] = values[0]
            elif points := record.metric(name):
                chart = line_chart([Series(name, points)], smooth=name not in _AS_IT_IS)
                charts.append(card(title_of(name), chart, name if name != title_of(name) else ""))
        shown = "".join(charts)
        parts.append(section(title, f'<div class="grid">{shown}</div>' if shown else ""))
    if constant:
        listed = ", ".join(f"{name} {number(value)}" for name, value in constant.items())
        parts.append(section("The same at every step", f'<div class="card"><code>{listed}</code></div>'))
    return parts


def _sections(record: Record) -> dict[str, list[str]]:
    """Recorded metrics by the section that charts them; last, what no list has."""
    of = {name: listed(name) for name in record.metric_names}
    found = {section: [n for known in SECTIONS[section] for n in of if of[n] == known] for section in CHARTED}
    return found | {"More": [name for name, known in of.items() if known is None and not _validation(name)]}


def time_split(record: Record) -> str:
    """The step's time by phase, stacked; what no phase accounts for is `Other`."""
    steps = {step: seconds for step, seconds in record.metric("time/step") if math.isfinite(seconds)}
    if not steps:
        return ""
    rest = dict(steps)
    series = []
    for name, label in SECTIONS[PHASES].items():
        found = {step: max(0.0, value) for step, value in record.metric(name) if math.isfinite(value)}
        if any(found.values()):
            series.append(Series(label, [(step, found.get(step, 0.0)) for step in steps]))
            rest = {step: left - found.get(step, 0.0) for step, left in rest.items()}
    series.append(Series("Other", [(step, max(0.0, left)) for step, left in rest.items()]))
    return card(PHASES, stacked_chart(series) + legend(series), "time/...")


def compared(records: Sequence[Record], names: Iterable[str]) -> tuple[str, list[list[str]]]:
    """One chart a metric with a line a run; and rows (title, value a run) of the metrics that never change within a run
    but differ between runs. Metrics that no run has, or that are one value everywhere, are left out."""
    charts, constant = [], []
    for name in names:
        found = [record.validations.get(name, []) if _validation(name) else record.metric(name) for record in records]
        values = [{y for _, y in points if math.isfinite(y)} for points in found]
        if len(set().union(*values)) < 2:
            continue
        title = _title(name)
        if all(len(of_run) <= 1 for of_run in values) and not _validation(name):
            constant.append([title, *(number(*of_run) if of_run else "-" for of_run in values)])
            continue
        series = _overlaid([record.name for record in records], found, _validation(name))
        charts.append(card(title, line_chart(series) + legend(series), name if name != title else ""))
    return "".join(charts), constant


def _overlaid(runs: Sequence[str], found: Sequence[Points], marks: bool) -> list[Series]:
    """A line a run. One that runs over an earlier one is dashed, and one that equals it says so."""
    series: list[Series] = []
    for i, (run, points) in enumerate(zip(runs, found, strict=True)):
        equal = next((runs[j] for j in range(i) if points and found[j] == points), None)
        covers = any(len(set(points) & set(found[j])) > 1 for j in range(i))
        label = run if equal is None else f"{run} (equal to {equal})"
        series.append(Series(label, points, marks=marks, dashed=covers))
    return series


def _title(name: str) -> str:
    """What a metric is called above a chart."""
    if _validation(name):
        return f"Held-out {_short(name)}"
    of_a_phase = listed(name) in SECTIONS[PHASES]
    return f"{title_of(name)}, seconds" if of_a_phase else title_of(name)


def _validation(name: str) -> bool:
    return name.startswith("validation/")
