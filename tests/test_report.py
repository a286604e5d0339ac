"""report.html: whole, self-contained, escaped, and drawn from what the run recorded."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.dom import minidom

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import config_file
from lockstep.charts import line_chart, stacked_chart
from lockstep.config import RunConfig, TaskConfig
from lockstep.errors import InputError
from lockstep.metrics import NAMES, MetricsWriter, write_json, write_summary
from lockstep.report import write_report

HOSTILE = "</pre><script>alert(1)</script>&\"'<img src=x onerror=alert(1)>"


class Outline(HTMLParser):
    """Collects tags, attributes and text, and checks that tags close in order."""

    VOID = {"meta", "br"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def step_metrics(step: int, different: int = 0) -> dict[str, object]:
    values = {name: 0.25 * step for name in NAMES if "<fn>" not in name}
    return values | {
        "step": step,
        "rewards/exact/mean": 1.0,
        "rewards/format/mean": 0.5,
        "validation/accuracy": 0.125 * step,
        "my/metric": 0.01,
        "time/step": 4.0,
        "parity/tokens_checked": 100,
        "parity/tokens_different": different,
        "loss": math.nan if step == 2 else 0.5,
    }


def make_run(folder: Path, steps: int = 5, different: int = 0) -> Path:
    config_file.save(RunConfig(task=TaskConfig(reward=(HOSTILE,))), folder / "config.yaml")
    with MetricsWriter(folder / "metrics.jsonl") as metrics, MetricsWriter(folder / "rollouts.jsonl") as rollouts:
        for step in range(steps):
            metrics.write(step_metrics(step, different))
            sample = {"text": f"{HOSTILE} {step}", "reward": 1.3, "advantage": 0.1, "finish_reason": "stop"}
            messages = [{"role": "user", "content": HOSTILE}]
            rollouts.write({"step": step, "group": 0, "prompt": messages, "samples": [sample]})
    write_summary(folder, {"total_s": 12.5, HOSTILE: HOSTILE})
    write_json(folder / "parity.json", {"identical": different == 0, "device": HOSTILE})
    return folder


def read(folder: Path) -> Outline:
    return Outline(write_report(folder).read_text(encoding="utf-8"))


def test_a_run_is_shown_in_full(tmp_path: Path) -> None:
    outline = read(make_run(tmp_path))
    text = outline.text
    for title in (*NAMES, "Validation", "validation/accuracy", "Other", "my/metric", "time split, seconds a step"):
        assert title in text, title
    assert {"rewards/exact/mean", "rewards/format/mean"} <= set(text)  # one chart, keyed
    assert "bitwise identical" in text and "parity: 500 tokens checked" in text
    assert "0 → 1" in text and "0 → 0.5" in text  # reward, validation
    assert "12.5" in text and "Configuration" in text
    samples = [t for t in text if t.startswith(HOSTILE) and t[-1].isdigit()]
    assert [sample[-1] for sample in samples] == ["0", "4"]  # the first step's and the last's


def test_nothing_executes_and_nothing_is_fetched(tmp_path: Path) -> None:
    outline = read(make_run(tmp_path))
    assert {tag for tag, _ in outline.tags}.isdisjoint({"script", "img", "link", "iframe", "object", "a", "base"})
    for _, attributes in outline.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "href")]
    page = (tmp_path / "report.html").read_text()
    assert "url(" not in page and "@import" not in page and "http" not in page


def test_broken_parity_is_loud(tmp_path: Path) -> None:
    text = read(make_run(tmp_path, different=2)).text
    assert "BROKEN" in text and "parity: 10 of 500 tokens differ" in text


def test_a_certificate_that_says_no_outweighs_silent_metrics(tmp_path: Path) -> None:
    write_json(tmp_path / "parity.json", {"identical": False})
    assert "BROKEN" in read(tmp_path).text


@pytest.mark.parametrize("missing", ["config.yaml", "metrics.jsonl", "rollouts.jsonl", "summary.json", "parity.json"])
def test_a_missing_file_leaves_its_part_out(tmp_path: Path, missing: str) -> None:
    make_run(tmp_path)
    (tmp_path / missing).unlink()
    assert read(tmp_path).tags


def test_an_empty_folder_and_one_step(tmp_path: Path) -> None:
    assert "not checked" in read(tmp_path).text
    assert "1 steps recorded" in read(make_run(tmp_path, steps=1)).text


def test_damaged_files(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "summary.json").write_text("{torn")
    assert any("summary.json: " in text for text in read(tmp_path).text)
    (tmp_path / "metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(InputError, match="metrics.jsonl, line 1"):
        write_report(tmp_path)


def coordinates(svg: str) -> list[float]:
    document = minidom.parseString(svg)
    numbers = [
        float(number)
        for kind in ("polyline", "polygon")
        for element in document.getElementsByTagName(kind)
        for number in re.split("[ ,]", element.getAttribute("points"))
        if number
    ]
    assert all(0 <= number <= 360 for number in numbers)
    return numbers


VALUES = st.floats() | st.sampled_from([0.0, 5e-324, 1e-6, 1.0, 1.7e308, -1.7e308])


@given(st.lists(st.lists(VALUES, max_size=5), min_size=1, max_size=3))
def test_line_chart_draws_any_numbers_inside_its_box(columns: list[list[float]]) -> None:
    svg = line_chart([(f"s{i}", list(enumerate(values))) for i, values in enumerate(columns)])
    if "svg" in svg:
        coordinates(svg)
    else:
        assert not [v for values in columns for v in values if abs(v) < 1e300]


def test_line_chart_breaks_at_a_value_that_is_not_finite() -> None:
    svg = line_chart([("loss", [(0, 1.0), (1, math.nan), (2, 0.0), (3, 0.5)])])
    assert svg.count("<polyline") == 2
    assert "step 3: 0.5" in svg and "step 1" not in svg


def test_stacked_chart_adds_up() -> None:
    points = [(0.0, 1.0), (1.0, 3.0)]
    svg = stacked_chart([("a", points), ("b", points)])
    # The plot spans x 52 to 352 and, for values 0 to 6, y 148 to 8.
    assert re.findall(r'polygon points="([^"]*)"', svg) == [
        "52.0,124.7 352.0,78.0 352.0,148.0 52.0,148.0",
        "52.0,101.3 352.0,8.0 352.0,78.0 52.0,124.7",
    ]


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=6))
def test_stacked_chart_stays_inside_its_box(rows: list[tuple[float, float]]) -> None:
    series = [(name, [(float(x), row[i]) for x, row in enumerate(rows)]) for i, name in enumerate("ab")]
    assert len(coordinates(stacked_chart(series))) >= 16
