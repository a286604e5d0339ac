"""`report.html`: one file a run, or one that compares several; no scripts, nothing fetched, every text escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...config.yaml_file import flat
from ..metrics import PHASES, SECTIONS
from ..timeline import TIMELINE_FILE
from .curves import compared, details, learning
from .page import (
    bar,
    card,
    change,
    duration,
    folded,
    number,
    preformatted,
    section,
    table,
    tiles,
    values_list,
    write_page,
)
from .record import Record, as_float, changed_fields, read_record
from .rollouts import rollouts
from .timeline import typical_step

# Phases of start-up, and what they are called.
STARTUP = {
    "import": "imports",
    "task": "task and data",
    "load": "model and tokenizer",
    "restore": "checkpoint",
    "trackers": "trackers",
    "import_tracer": "import of the tracer",
    "load_graphs": "stored graphs",
    "trace": "tracing graphs",
    "passes": "passes over graphs",
    "store_graphs": "storing graphs",
    "compile": "compiling kernels",
    "record": "recording graphs",
    "verify": "graphs against eager",
    "gate": "check of the machine",
    "other": "the rest",
}

__all__ = ["write_comparison", "write_report"]


def write_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of the run in `run_dir` to `out` (`run_dir/report.html`) and return its path.

    A file that is missing leaves its part out. Raises `InputError` for a metrics line that cannot be read.
    """
    record = read_record(Path(run_dir))
    parts = [
        _header(record),
        _failure(record),
        _tiles(record),
        learning(record),
        *details(record),
        section("Time", _time(record)),
        section("Parity", _certificate(record)),
        section("Compiled graphs", _compiled(record)),
        rollouts(record),
        section("Configuration", _configuration(record)),
        section("Environment", _environment(record)),
    ]
    return write_page(Path(out or record.path / "report.html"), record.name, parts)


def write_comparison(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Write a page that lays the runs in `run_dirs` over each other and return its path."""
    records = [read_record(Path(path)) for path in run_dirs]
    names = list({name: None for r in records for name in ["reward/mean", *r.validations, *r.metric_names]})
    charts, constant = compared(records, [name for name in names if not name.startswith("parity/")])
    steady = table(constant, ("", *(r.name for r in records))) if constant else ""
    parts = [
        f"<header><h1>{len(records)} runs</h1></header>",
        section("Final figures", f'<div class="card">{_figures(records)}</div>'),
        section("Configuration differences", f'<div class="card">{_differences(records)}</div>'),
        section("Curves", f'<div class="grid">{charts}</div>' if charts else ""),
        section("The same at every step of a run", f'<div class="card">{steady}</div>' if steady else ""),
    ]
    return write_page(Path(out), f"{len(records)} runs: {', '.join(r.name for r in records)}", parts)


def _header(record: Record) -> str:
    verdict, sentence, style = record.verdict()
    config = record.config
    facts = [f"{len(record.steps):,} steps recorded"]
    if config is not None:
        facts = [config.recipe, config.model or f"a random {config.arch} model", f"seed {config.seed}", *facts]
    return (
        f'<header><h1>{escape(record.name)}</h1><span class="pill {style}">parity: {escape(verdict)}</span></header>'
        f'<p class="lead">{escape(" · ".join(facts))}</p><p class="lead">{escape(sentence)}</p>'
    )


def _failure(record: Record) -> str:
    """What ended the run, when a check did."""
    message = record.failure.get("error")
    return section("The run failed", f'<div class="card bad">{preformatted(message)}</div>') if message else ""


def _tiles(record: Record) -> str:
    found: list[tuple[str, str, str]] = []
    if ends := record.ends("reward/mean"):
        found.append(("reward, first ten steps to last ten", change(*ends), ""))
    held_out = sorted(record.validations, key=lambda name: not name.startswith("validation/rewards/"))
    if held_out and (points := record.validations[held_out[0]]):
        label = f"held-out {held_out[0].removeprefix('validation/').removesuffix('/mean')}, before to after"
        found.append((label, change(points[0][1], points[-1][1]), ""))
    for name, label in (("time/step", "a step, median"), ("perf/tokens_per_s_per_gpu", "tokens a second, median")):
        middle = record.median(name)
        if middle is not None:
            found.append((label, duration(middle) if name == "time/step" else number(middle), ""))
    if memory := record.values("memory/peak_gib"):
        found.append(("peak memory", f"{max(memory):.3g} GiB", ""))
    if (total := as_float(record.summary.get("total_s"))) is not None:
        found.append(("in total", duration(total), ""))
    return tiles(found) if found else ""


def _time(record: Record) -> str:
    """The whole run and its start-up, each as a bar, and a step."""
    summary = record.summary
    names = {"startup_s": "start-up", "warmup_s": "supervised warm-up", "generator_s": "generation"}
    names |= {"trainer_s": "training", "sync_s": "weight sync"}
    whole = [(label, float(summary[key])) for key, label in names.items() if _positive(summary.get(key))]
    if whole and _positive(summary.get("total_s")):
        rest = float(summary["total_s"]) - sum(seconds for _, seconds in whole)
        whole += [("validation, checkpoints and the rest", rest)] if rest > 0 else []
    cards = [card(title, bar(parts)) for title, parts in (("The run", whole), ("Start-up", _startup(summary))) if parts]
    cards.append(typical_step(record.path / TIMELINE_FILE))
    return f'<div class="wide">{"".join(cards)}</div>' if cards else ""


def _startup(summary: dict[str, Any]) -> list[tuple[str, float]]:
    """Seconds by phase, longest first; what is under a hundredth goes to the rest."""
    measured = {name.removeprefix("startup/"): s for name, s in summary.items() if name.startswith("startup/")}
    phases = {name: float(seconds) for name, seconds in measured.items() if _positive(seconds)}
    total, rest = sum(phases.values()), phases.pop("other", 0.0)
    shown = {name: seconds for name, seconds in phases.items() if seconds >= total / 100}
    rest += sum(phases.values()) - sum(shown.values())
    split = [
        (STARTUP.get(name, name.replace("_", " ")), seconds)
        for name, seconds in sorted(shown.items(), key=lambda part: -part[1])
    ]
    return [*split, (STARTUP["other"], rest)] if rest > 0 else split


def _positive(value: Any) -> bool:
    seconds = as_float(value)
    return seconds is not None and math.isfinite(seconds) and seconds > 0


def _certificate(record: Record) -> str:
    if not record.certificate:
        return ""
    verdict, sentence, style = record.verdict()
    lead = f'<p><b class="{style}">{escape(verdict)}</b>: {escape(sentence)}.</p>'
    return f'<div class="card">{lead}{values_list(record.certificate)}</div>'


def _compiled(record: Record) -> str:
    """The summary's `compile`: its figures, and a table for whatever is given by function or graph."""
    report = record.summary.get("compile")
    if not isinstance(report, dict) or not report:
        return ""
    single = {name: value for name, value in report.items() if not isinstance(value, dict)}
    parts = [card("Graphs", values_list(single))]
    for title, rows in report.items():
        if not isinstance(rows, dict) or not rows:
            continue
        if all(isinstance(row, dict) for row in rows.values()):
            columns = list({name: None for row in rows.values() for name in row})
            cells = ([name, *(row.get(column, "") for column in columns)] for name, row in rows.items())
            parts.append(card(title.capitalize(), table(cells, ("", *columns))))
        else:
            parts.append(card(title.capitalize(), table(rows.items())))
    return f'<div class="stack">{"".join(parts)}</div>'


def _configuration(record: Record) -> str:
    if not record.config_text:
        return ""
    whole = folded("the whole config.yaml", preformatted(record.config_text))
    if record.config is None:
        return f'<div class="card"><p class="dim">Written by another version.</p>{whole}</div>'
    changed = changed_fields(record)
    default = f"default of {record.config.recipe}"
    rows = table(changed, ("field", "this run", default)) if changed else "<p>Everything has its default.</p>"
    return f'<div class="card">{rows}{whole}</div>'


def _environment(record: Record) -> str:
    environment = record.summary.get("environment")
    shown = values_list(environment) if isinstance(environment, dict) else ""
    rest = {key: value for key, value in record.summary.items() if key not in ("environment", "validation", "compile")}
    shown += folded("summary.json", values_list(rest)) if rest else ""
    return f'<div class="card">{shown}</div>' if shown else ""


def _figures(records: Sequence[Record]) -> str:
    """A row a figure, a column a run."""
    rows: dict[str, list[str]] = {"steps": [f"{len(r.steps):,}" for r in records]}
    for label, index in (("reward, first ten steps", 0), ("reward, last ten steps", 1)):
        rows[label] = [number(ends[index]) if (ends := r.ends("reward/mean")) else "-" for r in records]
    for name in dict.fromkeys(name for r in records for name in r.validations):
        rows[f"held-out {name.removeprefix('validation/').removesuffix('/mean')}, last"] = [
            number(found[-1][1]) if (found := r.validations.get(name)) else "-" for r in records
        ]
    medians = {"time/step": "seconds a step, median", "perf/tokens_per_s_per_gpu": "tokens a second and device, median"}
    medians |= {name: f"{label}, seconds a step" for name, label in SECTIONS[PHASES].items()}
    for name, label in medians.items():
        rows[label] = [number(middle) if (middle := r.median(name)) is not None else "-" for r in records]
    totals = [as_float(r.summary.get("total_s")) for r in records]
    rows["seconds in total"] = [number(total) if total else "-" for total in totals]
    rows["peak memory, GiB"] = [number(max(m)) if (m := r.values("memory/peak_gib")) else "-" for r in records]
    rows["parity"] = [r.verdict()[0].removeprefix("bitwise ") for r in records]
    known = {name: values for name, values in rows.items() if set(values) != {"-"}}
    return table(([name, *values] for name, values in known.items()), ("", *(r.name for r in records)))


def _differences(records: Sequence[Record]) -> str:
    flats = [flat(r.config) if r.config is not None else {} for r in records]
    names = {name: None for values in flats for name in values}
    rows = [[name, *(values.get(name, "-") for values in flats)] for name in names]
    rows = [row for row in rows if any(value != row[1] for value in row[2:])]
    if not rows:
        return "<p>None.</p>"
    return table(rows, ("", *(r.name for r in records)))
