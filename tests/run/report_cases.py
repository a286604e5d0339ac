"""Run folders to report on, and a reader of pages."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path

from lockstep.config import RunConfig, TaskConfig, yaml_file
from lockstep.run.metrics import SUMMARY_FILE, MetricsWriter, write_json
from lockstep.run.report import write_report
from lockstep.run.report.metric_titles import SECTIONS

HOSTILE = "</pre><script>alert(1)</script>&\"'<img src=x onerror=alert(1)>"
STARTUP = {"startup/import": 1.5, "startup/trace": 4.25, "startup/record": 0.25}
COMPILE = {
    "graphs": 4321,
    "functions": {"decode": {"graphs": 7, "faults": []}, "optim_step": {"graphs": 1, "faults": [HOSTILE]}},
    "passes": {"decode(greedy=True)": ["canonicalize: 698 -> 670 nodes", "recompute: 3 layers"]},
}


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
    values = {name: 0.25 * step for metrics in SECTIONS.values() for name in metrics if "<fn>" not in name}
    by_name = {name.replace("<fn>", "exact"): 0.5 * step for name in SECTIONS["Environment"] if "<fn>" in name}
    return (
        values
        | by_name
        | {
            "step": step,
            "rewards/exact/mean": 1.0,
            "rewards/format/mean": 0.5,
            "reward_errors/exact": step,
            "graph_replays/exact": step,
            "validation/reward/mean": 0.125 * step,
            "my/metric": 0.01 * step,
            "my/constant": 7.0,
            "time/step": 4.0 + step % 3,
            "parity/tokens_checked": 100,
            "parity/tokens_different": different,
            "parity/tokens_not_covered": 0,
            "parity/prompt_tokens_routed_differently": 0,
            "loss": math.nan if step == 2 else 0.5 + step,
        }
    )


def make_run(folder: Path, steps: int = 5, different: int = 0, config: RunConfig | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    yaml_file.save(config or RunConfig(task=TaskConfig(reward=(HOSTILE,))), folder / "config.yaml")
    with MetricsWriter(folder / "metrics.jsonl") as metrics, MetricsWriter(folder / "rollouts.jsonl") as rollouts:
        for step in range(steps):
            metrics.write(step_metrics(step, different))
            if steps < 100 or step in (0, steps - 1):
                rollouts.write({"step": step, "group": 0, "prompt": messages(), "samples": samples(step)})
    summary = {
        "startup_s": 2.0,
        "generator_s": 6.0,
        "trainer_s": 4.0,
        "total_s": 12.5,
        HOSTILE: HOSTILE,
        "warmup": None,
    }
    write_json(folder / SUMMARY_FILE, summary | STARTUP | {"environment": {"torch": "9.9"}, "compile": COMPILE})
    write_json(folder / "parity.json", {"identical": different == 0, "device": HOSTILE})
    return folder


def messages() -> list[dict[str, str]]:
    return [{"role": "user", "content": HOSTILE}]


def samples(step: int) -> list[dict[str, object]]:
    rows = [("good", 1.0, 3), ("bad", 0.0, 4), ("middling", 0.5, 5), ("long", 0.5, 50)]
    return [{"text": f"{t} {step} {HOSTILE}", "reward": r, "tokens": n, "finish_reason": "stop"} for t, r, n in rows]


def read(folder: Path) -> Outline:
    return Outline(write_report(folder).read_text(encoding="utf-8"))
