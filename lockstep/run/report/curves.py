"""The charts of a run's metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..metrics import format_number
from .charts import Points, Series, line_chart, stacked_chart
from .metric_titles import LEARNING, PARITY, PHASES, SECTIONS, catalogued_name, title_of
from .record import Record

# Sections with one chart per metric; the others are shown by the learning section, the time split and the certificate.
CHARTED = [section for section in SECTIONS if section not in (LEARNING, PHASES, PARITY)]
_UNSMOOTHED = {"lr", "recompiles", "graph_replays", "memory/peak_gib", "policy_age"}  # drawn without smoothing

_HELD_OUT_REWARDS = "validation/reward/", "validation/rewards/"  # drawn in one chart


@dataclass(frozen=True)
class Chart:
    """A drawing with its title. `name` is the metric's; `series` are those drawn, for the legend."""

    title: str
    svg: str
    series: Sequence[Series]
    name: str


def _line_chart(title: str, series: Sequence[Series], name: str, smooth: bool = True) -> Chart:
    return Chart(title, line_chart(series, smooth), series, name)


def learning_charts(record: Record) -> list[Chart]:
    """Charts of the reward with its spread within groups, the held-out problems, and each reward function."""
    charts = []
    if rewards := record.metric("reward/mean"):
        spread = dict(record.metric("reward/std"))
        bands = [spread.get(step, 0.0) for step, _ in rewards]
        title = "Reward ± its spread within a prompt"
        charts.append(_line_chart(title, [Series("reward", rewards, bands)], "reward/mean"))
    held_out = {name: points for name, points in record.validations.items() if name.startswith(_HELD_OUT_REWARDS)}
    if series := _finite(held_out):
        samples = 1 if record.config is None else record.config.task.validation_samples
        how = "greedy" if samples == 1 else f"{samples} samples each"
        charts.append(_line_chart(f"Held-out problems, {how}", series, "validation/..."))
    for name in [name for name in record.validations if name not in held_out]:  # counts and what was logged
        if series := _finite({name: record.validations[name]}):
            title = title_of(name.removeprefix("validation/"))
            charts.append(_line_chart(f"Held-out problems: {title}", series, name))
    names = [name for name in record.metric_names if catalogued_name(name) == "rewards/<fn>/mean"]
    functions = {name: record.metric(name) for name in names}
    if len(functions) > 1 and (series := _finite(functions)):
        charts.append(_line_chart("Each reward function", series, "rewards/..."))
    return charts


def _finite(metrics: dict[str, list[tuple[float, float]]]) -> list[Series]:
    """A series for each metric with a finite value, under a short name."""
    shown = {name: points for name, points in metrics.items() if any(math.isfinite(y) for _, y in points)}
    return [Series(_short(name), points, marks=len(points) < 12) for name, points in shown.items()]


def _short(name: str) -> str:
    parts = [part for part in name.removeprefix("validation/").removeprefix("rewards/").split("/") if part != "mean"]
    return "/".join(parts) or name


def section_charts(record: Record) -> tuple[dict[str, list[Chart]], dict[str, float]]:
    """The charts of each section of metrics, and the metrics that never change with their values."""
    constant: dict[str, float] = {}
    found = {}
    for title, names in _sections(record).items():
        charts = time_split(record) if title == "Speed and memory" else []
        for name in names:
            values = record.values(name)
            if len(values) > 1 and min(values) == max(values):
                constant[name] = values[0]
            elif points := record.metric(name):
                charts.append(_line_chart(title_of(name), [Series(name, points)], name, name not in _UNSMOOTHED))
        found[title] = charts
    return found, constant


def _sections(record: Record) -> dict[str, list[str]]:
    """Recorded metrics by the section that charts them; last, those in no section."""
    of = {name: catalogued_name(name) for name in record.metric_names}
    found = {section: [n for known in SECTIONS[section] for n in of if of[n] == known] for section in CHARTED}
    return found | {"More": [name for name, known in of.items() if known is None and not _is_validation(name)]}


def time_split(record: Record) -> list[Chart]:
    """A stacked chart of the step's time by phase; time that no phase accounts for is `Other`. Empty without times."""
    steps = {step: seconds for step, seconds in record.metric("time/step") if math.isfinite(seconds)}
    if not steps:
        return []
    rest = dict(steps)
    series = []
    for name, label in SECTIONS[PHASES].items():
        found = {step: max(0.0, value) for step, value in record.metric(name) if math.isfinite(value)}
        if any(found.values()):
            series.append(Series(label, [(step, found.get(step, 0.0)) for step in steps]))
            rest = {step: left - found.get(step, 0.0) for step, left in rest.items()}
    series.append(Series("Other", [(step, max(0.0, left)) for step, left in rest.items()]))
    return [Chart(PHASES, stacked_chart(series), series, "time/...")]


def comparison_charts(records: Sequence[Record], names: Iterable[str]) -> tuple[list[Chart], list[list[str]]]:
    """One chart per metric with a line for each run; and rows (title, one value per run) for metrics that never change
    within a run but differ between runs. Metrics that no run has, or that are equal everywhere, are left out."""
    charts, constant = [], []
    for name in names:
        held_out = _is_validation(name)
        found = [record.validations.get(name, []) if held_out else record.metric(name) for record in records]
        values = [{y for _, y in points if math.isfinite(y)} for points in found]
        if len(set().union(*values)) < 2:
            continue
        title = _title(name)
        if all(len(of_run) <= 1 for of_run in values) and not held_out:
            constant.append([title, *(format_number(*of_run) if of_run else "-" for of_run in values)])
            continue
        series = _overlaid([record.name for record in records], found, held_out)
        charts.append(_line_chart(title, series, name))
    return charts, constant


def _overlaid(runs: Sequence[str], found: Sequence[Points], marks: bool) -> list[Series]:
    """One line per run. A line that overlaps an earlier one is dashed, and one that equals an earlier one says so."""
    series: list[Series] = []
    for i, (run, points) in enumerate(zip(runs, found, strict=True)):
        equal = next((runs[j] for j in range(i) if points and found[j] == points), None)
        covers = any(len(set(points) & set(found[j])) > 1 for j in range(i))
        label = run if equal is None else f"{run} (equal to {equal})"
        series.append(Series(label, points, marks=marks, dashed=covers))
    return series


def _title(name: str) -> str:
    if _is_validation(name):
        return f"Held-out {_short(name)}"
    of_a_phase = catalogued_name(name) in SECTIONS[PHASES]
    return f"{title_of(name)}, seconds" if of_a_phase else title_of(name)


def _is_validation(name: str) -> bool:
    return name.startswith("validation/")
