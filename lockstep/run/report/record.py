"""Reads a run folder for a report. Parts whose files are missing or damaged are left out."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import mean, median
from typing import Any

from ...config import RunConfig
from ...config.recipes import RECIPES
from ...config.yaml_file import flatten, load
from ...errors import InputError, refuse
from ...json_file import read_json
from ..metrics import METRICS_FILE, ROLLOUTS_FILE, SUMMARY_FILE, WAITS_FILE, line_step, name_read_errors, read_records

ENDS = 10  # values over which "first" and "last" are means

_FILES = METRICS_FILE, SUMMARY_FILE, ROLLOUTS_FILE, "config.yaml", "parity.json", "failure.json"
_FROM_THE_START = "recipe", "seed", "version", "environment", "validation"  # what later steps leave in the summary

Metric = list[tuple[float, float]]  # (steps done, value)


@dataclass
class Record:
    path: Path
    steps: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    certificate: dict[str, Any] = field(default_factory=dict)
    failure: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    config: RunConfig | None = None  # None also where this version cannot read it
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.path.resolve().name

    @cached_property
    def metric_names(self) -> list[str]:
        """All recorded metrics, in the order of their first appearance."""
        return list({name: None for record in self.steps for name in record if name != "step"})

    def metric(self, name: str) -> Metric:
        """The metric at the steps where it is a number ("NaN" and "Infinity" included). Steps count from 1."""
        points = []
        for record in self.steps:
            value = as_float(record.get(name))
            if value is not None:
                points.append((float(record["step"]) + 1, value))
        return points

    def values(self, name: str) -> list[float]:
        return [value for _, value in self.metric(name) if math.isfinite(value)]

    def ends(self, name: str) -> tuple[float, float] | None:
        """The means of the first and of the last `ENDS` finite values."""
        values = self.values(name)
        return (mean(values[:ENDS]), mean(values[-ENDS:])) if values else None

    def median(self, name: str) -> float | None:
        values = self.values(name)
        return median(values) if values else None

    @cached_property
    def validations(self) -> dict[str, Metric]:
        """Each validation metric by steps done. The validation before the first step is only in the summary. A run that
        was killed has none, or that of an earlier process, which lacks later validations."""
        found, points = self.summary.get("validation"), dict[str, dict[float, float]]()
        for step, row in found.items() if isinstance(found, dict) else ():
            for name, value in row.items() if isinstance(row, dict) else ():
                at, y = as_float(step), as_float(value)
                if at is not None and math.isfinite(at) and y is not None:
                    points.setdefault(name, {})[at] = y
        for name in self.metric_names:
            if name.startswith("validation/"):
                points[name] = dict(self.metric(name)) | points.get(name, {})
        return {name: sorted(line.items()) for name, line in points.items()}

    def verdict(self) -> tuple[str, str, str]:
        """The result of the parity check in a word, in a sentence, and as a style."""
        kinds = "checked", "different", "not_covered"
        checked, different, missing = (int(sum(self.values(f"parity/tokens_{kind}"))) for kind in kinds)
        if self.certificate.get("identical") is False and not different and not missing:  # a step that ended the run
            checked, different, missing = (self._certified(f"tokens_{kind}") for kind in kinds)
            if prompts := self._certified("prompt_tokens_routed_differently") * (not different and not missing):
                return "BROKEN", f"{prompts:,} prompt tokens went to other experts", "bad"
        if missing and not different:
            return "BROKEN", f"{missing:,} sampled tokens were not compared", "bad"
        if different or self.certificate.get("identical") is False:
            return "BROKEN", f"{different:,} of {checked:,} tokens differ", "bad"
        if checked or self.certificate.get("identical") is True:
            return "bitwise identical", f"{checked:,} tokens checked, none different", "good"
        return "not checked", "no token was compared between generator and trainer", ""

    def _certified(self, name: str) -> int:
        """A count of the certificate; 0 where it has none."""
        count = as_float(self.certificate.get(name))
        return int(count) if count is not None and math.isfinite(count) else 0

    def rollouts(self) -> dict[int, list[dict[str, Any]]]:
        """The groups of the last and of the first recorded step (counted from 0), in this order."""
        return self._ends(ROLLOUTS_FILE)

    def waits(self) -> dict[tuple[int, Any, Any], list[Any]]:
        """The seconds that each turn was answered in, by step, group and sample, for the steps of `rollouts`."""
        return {
            (step, group.get("group"), sample.get("sample")): sample["wait_s"]
            for step, groups in self._ends(WAITS_FILE).items()
            for group in groups
            for sample in group.get("samples", [])
            if isinstance(sample.get("wait_s"), list)
        }

    def _ends(self, name: str) -> dict[int, list[dict[str, Any]]]:
        """The records of the last and the first step in a file of groups, which may be large: no others are decoded."""
        path = self.path / name
        found: dict[int, list[bytes]] = {}
        with name_read_errors(path), path.open("rb") if path.is_file() else io.BytesIO() as file:
            for line in file:
                step = line_step(line)
                if step is None:
                    continue
                if step not in found and len(found) == 2:
                    found.popitem()  # this step is neither the first nor, any longer, the last
                found.setdefault(step, []).append(line)
        return {step: [g for line in lines if (g := _parse_group(line))] for step, lines in reversed(found.items())}


def read_record(path: Path) -> Record:
    """The run in folder `path`. Raises `InputError` if there is none or a metrics line cannot be read."""
    refuse(not path.is_dir(), f"{path} is not a run folder: there is no such folder")
    refuse(
        not any((path / name).exists() for name in _FILES), f"{path} is not a run folder: it has none of a run's files"
    )
    record = Record(path, summary=_read_object(path / SUMMARY_FILE))
    record.certificate, record.failure = _read_object(path / "parity.json"), _read_object(path / "failure.json")
    if (path / METRICS_FILE).exists():
        record.steps = list(read_records(path / METRICS_FILE))
    done = as_float(record.summary.get("steps_done"))
    if done is not None and done < len(record.steps):  # an earlier process wrote it
        record.summary = {name: value for name, value in record.summary.items() if name in _FROM_THE_START}
    config = path / "config.yaml"
    if config.is_file():
        with name_read_errors(config):
            record.config_text = config.read_text(encoding="utf-8", errors="replace")
        try:
            record.config = load(config)
        except InputError:  # perhaps from another version; its text is shown anyway
            record.config = None
    return record


def name_apart(records: Sequence[Record]) -> None:
    """Add to the names of runs whose folders have the same name the folders above, as far as tells them apart."""
    paths = [record.path.resolve() for record in records]
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    for record, name in zip(records, names, strict=True):
        record.name = name


def changed_fields(record: Record) -> list[tuple[str, Any, Any]]:
    """(field, value, default) for each setting that differs from the recipe's."""
    if record.config is None:
        return []
    name = record.config.recipe
    begin = RECIPES.get(name, lambda model: RunConfig(recipe=name, model=None))
    default = flatten(begin(record.config.model)) | {"model": begin(None).model}
    return [(name, value, default[name]) for name, value in flatten(record.config).items() if value != default[name]]


def as_float(value: Any) -> float | None:
    """A recorded number, also one of the strings "NaN", "Infinity" and "-Infinity"; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _parse_group(line: bytes) -> dict[str, Any]:
    try:
        group = json.loads(line)
        samples = group.get("samples", []) if isinstance(group, dict) else None
        return group if isinstance(samples, list) and all(isinstance(sample, dict) for sample in samples) else {}
    except (ValueError, RecursionError):
        return {}


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        return {"unreadable": f"{path.name}: {error}"}
    return value if isinstance(value, dict) else {path.name: value}
