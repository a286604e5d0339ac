"""`report.html` of a run folder: one file, no scripts, nothing fetched; every text from the run is escaped."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from .charts import Series, line_chart, stacked_chart
from .metrics import METRICS_FILE, ROLLOUTS_FILE, SECTIONS, SUMMARY_FILE, read_lines

_GROUPS_SHOWN, _SAMPLES_SHOWN, _TEXT_SHOWN = 3, 4, 4000
_PHASES = ("generate", "forward_backward", "optim_step", "sync")

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #66707e; --line: #d9dee5; --card: #fff; --page: #f4f6f8;
  --good: #1a7f4b; --bad: #c0322b; --s0: #2864c7; --s1: #d4722a; --s2: #2d8f6f; --s3: #8a5bc4; --s4: #98a2ae; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --dim: #98a2ae; --line: #353d48; --card: #1d232b;
  --page: #14181e; --good: #4cc38a; --bad: #ff7b72; --s0: #6ea3f5; --s1: #f0a062; --s2: #5cc5a0; --s3: #b794ea; } }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 34px 0 10px; }
p { margin: 0; color: var(--dim); }
.grid { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); }
.tiles { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(170px, 1fr)); margin-top: 18px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.card h3 { font-size: 13px; margin: 0 0 6px; font-weight: 600; }
.card svg { width: 100%; height: auto; display: block; }
.tile b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; } .tile span { color: var(--dim); }
.good { color: var(--good); } .bad { color: var(--bad); }
svg text { fill: var(--dim); font: 11px system-ui, sans-serif; } svg .axis { stroke: var(--line); }
.key { font-size: 12px; color: var(--dim); }
.key i { display: inline-block; width: 10px; height: 10px; margin: 0 5px 0 10px; }
table { border-collapse: collapse; width: 100%; } td { padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; font-variant-numeric: tabular-nums; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 6px 0; font: 13px/1.45 ui-monospace, monospace; }
details { margin-top: 10px; } summary { cursor: pointer; }
.sample { border-top: 1px solid var(--line); padding-top: 8px; }
"""


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` from the files a run leaves there and return its path.

    A file that is missing leaves its part out. Raises `InputError` for a metrics or rollouts line that cannot be read.
    """
    metrics = _lines(run_dir / METRICS_FILE)
    summary, certificate = _object(run_dir / SUMMARY_FILE), _object(run_dir / "parity.json")
    parts = [
        f"<h1>{escape(run_dir.resolve().name)}</h1>",
        f"<p>{len(metrics)} steps recorded</p>",
        _tiles(metrics, summary, certificate),
        *_curves(metrics),
        _table("Summary", summary),
        _table("Parity certificate", certificate),
        _rollouts(run_dir / ROLLOUTS_FILE),
        _configuration(run_dir / "config.yaml"),
    ]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run_dir.resolve().name)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main></body></html>\n"
    )
    path, temporary = run_dir / "report.html", run_dir / ".tmp-report.html"
    temporary.write_text(page, encoding="utf-8", errors="replace")
    os.replace(temporary, path)
    return path


def _lines(path: Path) -> list[dict[str, Any]]:
    return list(read_lines(path)) if path.is_file() else []


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return {"unreadable": f"{path.name}: {error}"}
    return value if isinstance(value, dict) else {path.name: value}


def _series(metrics: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """(step, value) of the steps that have the metric as a number ("NaN" and "Infinity" included)."""
    points = []
    for record in metrics:
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            continue
        try:
            points.append((float(record["step"]), float(value)))
        except ValueError:
            continue
    return points


def _recorded(metrics: list[dict[str, Any]]) -> list[str]:
    """Names that occur, in the order of their first appearance."""
    return list({name: None for record in metrics for name in record if name != "step"})


def _tiles(metrics: list[dict[str, Any]], summary: dict[str, Any], certificate: dict[str, Any]) -> str:
    rewards = [value for _, value in _series(metrics, "reward/mean")]
    speed = sorted(value for _, value in _series(metrics, "perf/tokens_per_s_per_gpu"))
    tiles = [_verdict(metrics, certificate)]
    if rewards:
        tiles.append(("reward, first to last step", f"{_number(rewards[0])} → {_number(rewards[-1])}", ""))
    validations = _validations(metrics, summary)
    for name in [name for name in _recorded(validations) if name.startswith("validation/")][:2]:
        values = [value for _, value in _series(validations, name)]
        if values:
            tiles.append((f"{name}, first to last", f"{_number(values[0])} → {_number(values[-1])}", ""))
    if speed:
        tiles.append(("tokens/s per device, median", _number(speed[len(speed) // 2]), ""))
    if "total_s" in summary:
        tiles.append(("seconds in total", _number(summary["total_s"]), ""))
    cards = (
        f'<div class="card tile"><b class="{style}">{escape(value)}</b><span>{escape(label)}</span></div>'
        for label, value, style in tiles
    )
    return f'<div class="tiles">{"".join(cards)}</div>'


def _validations(metrics: list[dict[str, Any]], summary: dict[str, Any]) -> list[dict[str, Any]]:
    """What each validation found, in order. The summary has the one before the first step too; a run that was killed
    has no summary."""
    found = summary.get("validation") or {}
    return [{"step": int(step), **found[step]} for step in sorted(found, key=int)] or metrics


def _verdict(metrics: list[dict[str, Any]], certificate: dict[str, Any]) -> tuple[str, str, str]:
    """Label, value and style of the parity tile."""
    checked, different = (
        int(sum(value for _, value in _series(metrics, f"parity/tokens_{kind}"))) for kind in ("checked", "different")
    )
    if different or certificate.get("identical") is False:
        return f"parity: {different:,} of {checked:,} tokens differ", "BROKEN", "bad"
    if checked or certificate.get("identical") is True:
        return f"parity: {checked:,} tokens checked", "bitwise identical", "good"
    return "parity", "not checked", ""


def _curves(metrics: list[dict[str, Any]]) -> list[str]:
    """A heading and a grid of charts for each section that has data."""
    sections = {title: list(names) for title, names in SECTIONS.items()}
    recorded = _recorded(metrics)
    functions = [name for name in recorded if name.startswith("rewards/")]
    known = {name for names in sections.values() for name in names} | set(functions)
    sections["Validation"] = [name for name in recorded if name.startswith("validation/") and name not in known]
    sections["Other"] = [name for name in recorded if name not in known and not name.startswith("validation/")]
    parts = []
    for title, names in sections.items():
        charts = [_split(metrics)] if title == "Time" else []
        for name in names:
            members = functions if name == "rewards/<fn>/mean" else [name]
            charts.append(_chart(name, [(member, _series(metrics, member)) for member in members]))
        shown = "".join(charts)
        if shown:
            parts.append(f'<h2>{escape(title)}</h2><div class="grid">{shown}</div>')
    return parts


def _chart(title: str, series: list[Series]) -> str:
    series = [(name, points) for name, points in series if points]
    return _card(title, line_chart(series), series if len(series) > 1 else []) if series else ""


def _split(metrics: list[dict[str, Any]]) -> str:
    """The step's time by phase, stacked; what no phase accounts for is `other`."""
    rows = [record for record in metrics if _finite(record.get("time/step"))]
    if not rows:
        return ""
    series: list[Series] = []
    rest = [float(record["time/step"]) for record in rows]
    for phase in _PHASES:
        values = [float(record[key]) if _finite(record.get(key := f"time/{phase}")) else 0.0 for record in rows]
        rest = [left - value for left, value in zip(rest, values, strict=True)]
        series.append((phase, [(float(record["step"]), v) for record, v in zip(rows, values, strict=True)]))
    series.append(("other", [(float(record["step"]), max(0.0, v)) for record, v in zip(rows, rest, strict=True)]))
    return _card("time split, seconds a step", stacked_chart(series), series)


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _card(title: str, svg: str, keyed: Iterable[Series]) -> str:
    keys = "".join(
        f'<i style="background: var(--s{index % 5})"></i>{escape(name)}' for index, (name, _) in enumerate(keyed)
    )
    return f'<div class="card"><h3>{escape(title)}</h3>{svg}<div class="key">{keys}</div></div>'


def _table(title: str, values: dict[str, Any]) -> str:
    if not values:
        return ""
    rows = "".join(f"<tr><td>{escape(key)}</td><td>{escape(_text(value))}</td></tr>" for key, value in values.items())
    return f'<h2>{escape(title)}</h2><div class="card"><table>{rows}</table></div>'


def _rollouts(path: Path) -> str:
    """The first groups of the first and of the last recorded step."""
    first: list[dict[str, Any]] = []
    last: list[dict[str, Any]] = []
    for record in read_lines(path) if path.is_file() else ():
        if not first or record["step"] == first[0]["step"]:
            first.append(record)
        if last and record["step"] != last[0]["step"]:
            last.clear()
        last.append(record)
    if not first:
        return ""
    same = first[0]["step"] == last[0]["step"]
    groups = first[:_GROUPS_SHOWN] + ([] if same else last[:_GROUPS_SHOWN])
    return "<h2>Sample rollouts</h2>" + "".join(map(_group, groups))


def _group(record: dict[str, Any]) -> str:
    samples = "".join(map(_sample, record.get("samples", [])[:_SAMPLES_SHOWN]))
    return (
        f'<div class="card" style="margin-bottom: 14px"><h3>step {escape(_text(record["step"]))}, '
        f"group {escape(_text(record.get('group')))}</h3><details><summary>prompt</summary>"
        f"<pre>{_clipped(record.get('prompt'))}</pre></details>{samples}</div>"
    )


def _sample(sample: dict[str, Any]) -> str:
    facts = ", ".join(
        f"{name} {_text(sample[name])}" for name in ("reward", "advantage", "tokens", "finish_reason") if name in sample
    )
    return f'<div class="sample"><p>{escape(facts)}</p><pre>{_clipped(sample.get("text"))}</pre></div>'


def _configuration(path: Path) -> str:
    if not path.is_file():
        return ""
    text = escape(path.read_text(encoding="utf-8", errors="replace"))
    folded = f"<details><summary>config.yaml</summary><pre>{text}</pre></details>"
    return f'<h2>Configuration</h2><div class="card">{folded}</div>'


def _clipped(value: Any) -> str:
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "\N{REPLACEMENT CHARACTER}", _text(value))  # HTML allows none of these
    return escape(text if len(text) <= _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]} … ({len(text):,} characters)")


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return _number(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _number(value: Any) -> str:
    if not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
