"""`report.html`: one file for a run, or one that compares several. No scripts, nothing fetched, all text escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...config.yaml_file import flatten
from ..display import PHASE_NAMES
from ..metrics import format_number, success_metric
from ..timeline import TIMELINE_FILE
from .curves import comparison_charts, learning_charts, section_charts
from .metric_titles import LEARNING, PHASES, SECTIONS
from .page import format_change, format_duration, write_page
from .record import Record, as_float, changed_fields, name_apart, read_record
from .rollouts import choose_samples
from .timeline import typical_step

_SHOWN_ELSEWHERE = ("environment", "validation", "compile")  # parts of the summary that other sections show


def write_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of the run in `run_dir` to `out` (by default `run_dir/report.html`) and return its path. Parts
    whose files are missing are left out. Raises `InputError` for a metrics line that cannot be read."""
    record = read_record(Path(run_dir))
    charts, constant = section_charts(record)
    environment = record.summary.get("environment")
    values = {
        "record": record,
        "facts": _facts(record),
        "tiles": _tiles(record),
        "curves": {LEARNING: learning_charts(record), **charts},
        "constant": constant,
        "whole": _time_split(record.summary),
        "startup": _startup(record.summary),
        "step": typical_step(record.path / TIMELINE_FILE),
        "graphs": _graph_tables(record.summary.get("compile")),
        "rollouts": choose_samples(record),
        "changed": changed_fields(record),
        "environment": environment if isinstance(environment, dict) else {},
        "summary": {key: value for key, value in record.summary.items() if key not in _SHOWN_ELSEWHERE},
    }
    return write_page(Path(out or record.path / "report.html"), "run.html", **values)


def write_comparison(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Write a page that compares the runs in `run_dirs`, with their curves overlaid, and return its path."""
    records = [read_record(Path(path)) for path in run_dirs]
    name_apart(records)
    names = list({name: None for r in records for name in ["reward/mean", *r.validations, *r.metric_names]})
    charts, constant = comparison_charts(records, [name for name in names if not name.startswith("parity/")])
    values = {"figures": _figure_rows(records), "differences": _differences(records), "curves": charts}
    return write_page(Path(out), "comparison.html", records=records, constant=constant, **values)


def _facts(record: Record) -> list[str]:
    facts = [f"{len(record.steps):,} steps recorded"]
    if (config := record.config) is not None:
        facts = [config.recipe, config.model or f"a random {config.arch} model", f"seed {config.seed}", *facts]
    return facts


def _tiles(record: Record) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if ends := record.ends("reward/mean"):
        found.append(("reward, first ten steps to last ten", format_change(*ends)))
    first = success_metric(record.validations, record.config)
    held_out = sorted(record.validations, key=lambda name: name != first)
    if held_out and (points := record.validations[held_out[0]]):
        label = f"{_held_out_label(held_out[0])}, before to after"
        found.append((label, format_change(points[0][1], points[-1][1])))
    for name, label in (("time/step", "a step, median"), ("perf/tokens_per_s_per_gpu", "tokens a second, median")):
        middle = record.median(name)
        if middle is not None:
            found.append((label, format_duration(middle) if name == "time/step" else format_number(middle)))
    if memory := record.values("memory/peak_gib"):
        found.append(("peak memory", f"{max(memory):.3g} GiB"))
    if (total := as_float(record.summary.get("total_s"))) is not None:
        found.append(("in total", format_duration(total)))
    return found


def _held_out_label(name: str) -> str:
    return f"held-out {name.removeprefix('validation/').removesuffix('/mean')}"


def _time_split(summary: dict[str, Any]) -> list[tuple[str, float]]:
    """Seconds of the whole run by part."""
    names = {"startup_s": "start-up", "warmup_s": "supervised warm-up", "generator_s": "generation"}
    names |= {"trainer_s": "training", "sync_s": "weight sync"}
    parts = [(label, float(summary[key])) for key, label in names.items() if _is_positive(summary.get(key))]
    if parts and _is_positive(summary.get("total_s")):
        rest = float(summary["total_s"]) - sum(seconds for _, seconds in parts)
        if rest > 0:
            parts.append(("validation, checkpoints and the rest", rest))
    return parts


def _startup(summary: dict[str, Any]) -> list[tuple[str, float]]:
    """Seconds by phase, longest first; phases under one percent are added to the rest."""
    measured = {name.removeprefix("startup/"): s for name, s in summary.items() if name.startswith("startup/")}
    phases = {name: float(seconds) for name, seconds in measured.items() if _is_positive(seconds)}
    total, rest = sum(phases.values()), phases.pop("other", 0.0)
    shown = {name: seconds for name, seconds in phases.items() if seconds >= total / 100}
    rest += sum(phases.values()) - sum(shown.values())
    split = [
        (PHASE_NAMES.get(name, name.replace("_", " ")), seconds)
        for name, seconds in sorted(shown.items(), key=lambda part: -part[1])
    ]
    return [*split, ("the rest", rest)] if rest > 0 else split


def _is_positive(value: Any) -> bool:
    seconds = as_float(value)
    return seconds is not None and math.isfinite(seconds) and seconds > 0


def _graph_tables(report: Any) -> list[tuple[str, dict, list, Sequence[str]]]:
    """(title, figures, rows, header) for each part of the summary's `compile`: first its plain figures, then a table
    for each entry that is given by function or graph."""
    if not isinstance(report, dict) or not report:
        return []
    parts: list[tuple[str, dict, list, Sequence[str]]]
    parts = [("Graphs", {name: value for name, value in report.items() if not isinstance(value, dict)}, [], ())]
    for title, found in report.items():
        if not isinstance(found, dict) or not found:
            continue
        rows, header = [*found.items()], ()
        if all(isinstance(row, dict) for row in found.values()):
            columns = list({name: None for row in found.values() for name in row})
            rows, header = [(name, *(row.get(c, "") for c in columns)) for name, row in found.items()], ("", *columns)
        parts.append((title.capitalize(), {}, rows, header))
    return parts


def _figure_rows(records: Sequence[Record]) -> list[list[str]]:
    rows: dict[str, list[str]] = {"steps": [f"{len(r.steps):,}" for r in records]}
    for label, index in (("reward, first ten steps", 0), ("reward, last ten steps", 1)):
        rows[label] = [format_number(ends[index]) if (ends := r.ends("reward/mean")) else "-" for r in records]
    for name in dict.fromkeys(name for r in records for name in r.validations):
        found = [r.validations.get(name) for r in records]
        rows[f"{_held_out_label(name)}, last"] = [format_number(points[-1][1]) if points else "-" for points in found]
    medians = {"time/step": "seconds a step, median", "perf/tokens_per_s_per_gpu": "tokens a second and device, median"}
    medians |= {name: f"{label}, seconds a step" for name, label in SECTIONS[PHASES].items()}
    for name, label in medians.items():
        rows[label] = [format_number(r.median(name)) for r in records]
    totals = [as_float(r.summary.get("total_s")) for r in records]
    rows["seconds in total"] = [format_number(total) if total else "-" for total in totals]
    rows["peak memory, GiB"] = [format_number(max(m)) if (m := r.values("memory/peak_gib")) else "-" for r in records]
    rows["parity"] = [r.verdict()[0].removeprefix("bitwise ") for r in records]
    return [[name, *values] for name, values in rows.items() if set(values) != {"-"}]


def _differences(records: Sequence[Record]) -> list[list[Any]]:
    flats = [flatten(r.config) if r.config is not None else {} for r in records]
    names = {name: None for values in flats for name in values}
    rows = [[name, *(values.get(name, "-") for values in flats)] for name in names]
    return [row for row in rows if any(value != row[1] for value in row[2:])]
