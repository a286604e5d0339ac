"""Which metrics a report shows, under which titles, and the sections of charts they make."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .charts import Points, Series, line_chart, stacked_chart
from .page import card, legend, number, section
from .record import Record

PHASES = {
    "generate": "Generation",
    "forward_backward": "Forward and backward pass",
    "optim_step": "Optimizer step",
    "sync": "Weight sync",
}

# Section, then metric and title. What a run records beyond these is shown under "More".
SECTIONS: dict[str, dict[str, str]] = {
    "Policy and responses": {
        "entropy": "Entropy, nats a token",
        "kl": "KL from the reference, nats a token",
        "clip_ratio": "Tokens clipped, share",
        "grad_norm": "Gradient norm before clipping",
        "loss": "Loss",
        "lr": "Learning rate",
        "frac_reward_zero_std": "Groups without a difference, share",
        "groups_without_reward": "Groups without a reward",
        "updates": "Updates of the weights",
        "policy_age": "Policy age, updates",
        "response_length/mean": "Response length, tokens",
        "response_length/clip_ratio": "Responses cut at the limit, share",
    },
    "Experts": {
        "moe/load_imbalance": "Busiest expert over the mean",
        "moe/expert_tokens/min": "Tokens of the least busy expert",
        "moe/expert_tokens/max": "Tokens of the busiest expert",
        "moe/aux_loss": "Load-balancing loss",
    },
    "Speed and memory": {
        "time/step": "Step time, seconds",
        "perf/tokens_per_s_per_gpu": "Tokens a second and device",
        "memory/peak_gib": "Peak memory, GiB",
        "padding_waste": "Padding, share of packed tokens",
        "recompiles": "Captures after warm-up",
        "graph_replays": "Graph replays",
    },
}
# Shown by the learning section, the time split and the certificate.
_ELSEWHERE = {"reward/mean", "reward/std", "logprob_diff/max", "parity/tokens_checked", "parity/tokens_different"}
_ELSEWHERE |= {"parity/tokens_routed_differently"}
_ELSEWHERE |= {f"time/{phase}" for phase in PHASES}
_TITLES_ELSEWHERE = {
    "reward/mean": "Reward",
    "reward/std": "Spread of the reward within a prompt",
    "logprob_diff/max": "Largest difference of log-probabilities",
} | {f"time/{phase}": f"{label}, seconds" for phase, label in PHASES.items()}
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
    functions = {name: record.metric(name) for name in record.metric_names if _of_function(name)}
    if len(functions) > 1 and (series := _finite(functions)):
        charts.append(card("Each reward function", line_chart(series) + legend(series), "rewards/..."))
    style = "wide" if len(charts) < 3 else "grid"
    return section("Learning", f'<div class="{style}">{"".join(charts)}</div>' if charts else "")


def _of_function(name: str) -> bool:
    return name.startswith("rewards/") and name.endswith("/mean")


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
    known = {name for metrics in SECTIONS.values() for name in metrics}
    more = {name: name for name in record.metric_names if name not in known | _ELSEWHERE and not _shown_above(name)}
    for title, metrics in {**SECTIONS, "More": more}.items():
        charts = [time_split(record)] if title == "Speed and memory" else []
        for name, label in metrics.items():
            values = record.values(name)
            if len(values) > 1 and min(values) == max(values):
                constant[name] = values[0]
            elif points := record.metric(name):
                chart = line_chart([Series(name, points)], smooth=name not in _AS_IT_IS)
                charts.append(card(label, chart, name if name != label else ""))
        shown = "".join(charts)
        parts.append(section(title, f'<div class="grid">{shown}</div>' if shown else ""))
    if constant:
        listed = ", ".join(f"{name} {number(value)}" for name, value in constant.items())
        parts.append(section("The same at every step", f'<div class="card"><code>{listed}</code></div>'))
    return parts


def _shown_above(name: str) -> bool:
    return name.startswith("validation/") or _of_function(name)


def time_split(record: Record) -> str:
    """The step's time by phase, stacked; what no phase accounts for is `Other`."""
    steps = {step: seconds for step, seconds in record.metric("time/step") if math.isfinite(seconds)}
    if not steps:
        return ""
    rest = dict(steps)
    series = []
    for phase, label in PHASES.items():
        found = {step: max(0.0, value) for step, value in record.metric(f"time/{phase}") if math.isfinite(value)}
        if any(found.values()):
            series.append(Series(label, [(step, found.get(step, 0.0)) for step in steps]))
            rest = {step: left - found.get(step, 0.0) for step, left in rest.items()}
    series.append(Series("Other", [(step, max(0.0, left)) for step, left in rest.items()]))
    return card("Where a step's seconds go", stacked_chart(series) + legend(series), "time/...")


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
    if _of_function(name):
        return f"Reward function {_short(name)}"
    titles = {name: title for metrics in SECTIONS.values() for name, title in metrics.items()} | _TITLES_ELSEWHERE
    return titles.get(name, name)


def _validation(name: str) -> bool:
    return name.startswith("validation/")
