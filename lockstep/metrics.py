"""What a run records and shows: JSON lines that survive a kill, a summary, and the progress display."""

from __future__ import annotations

import json
import math
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    from rich.live import Live

    from .types import RolloutGroup

# Every metric by what it is about. `<fn>` stands for a reward function's name.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Reward": ("reward/mean", "reward/std", "rewards/<fn>/mean", "frac_reward_zero_std"),
    "Policy": ("loss", "grad_norm", "entropy", "kl", "clip_ratio", "lr", "policy_age"),
    "Responses": ("response_length/mean", "response_length/clip_ratio"),
    "Parity": ("logprob_diff/max", "parity/tokens_checked", "parity/tokens_different"),
    "Time": ("time/step", "time/generate", "time/forward_backward", "time/optim_step", "time/sync"),
    "Performance": ("perf/tokens_per_s_per_gpu", "memory/peak_gib", "padding_waste", "recompiles", "graph_replays"),
}
NAMES: tuple[str, ...] = tuple(name for names in SECTIONS.values() for name in names)

METRICS_FILE, ROLLOUTS_FILE, SUMMARY_FILE = "metrics.jsonl", "rollouts.jsonl", "summary.json"


def to_json(value: Any, indent: int | None = None) -> str:
    """`value` as standard JSON. NaN and infinities, which JSON lacks, become "NaN", "Infinity" and "-Infinity"."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return _plain(value.item()) if hasattr(value, "item") else str(value)  # scalars of torch and numpy; paths


class MetricsWriter:
    """Appends JSON objects, one a line, each flushed to the operating system before `write` returns.

    Opened with `start_step=N` (a run that resumes before step N, or 0 for a new one), it first drops the lines of
    steps N and later and a torn last line, atomically, so that the file never holds a step of two histories.
    Raises `InputError` when another line of the file cannot be read.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        if path.exists():
            _keep_before(path, start_step)
        self._file = path.open("ab")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`; its `step` is what resuming goes by."""
        self._file.write((to_json({"step": int(record["step"]), **record}) + "\n").encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSON-lines file, without a torn last line. Raises `InputError` naming an unreadable one."""
    return (record for _, record in _lines(path))


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # the process died while writing it
            try:
                record = json.loads(line)
                int(record["step"])
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{path}, line {number}: not a JSON object with a whole number `step` ({error}); delete the line"
                ) from error
            yield line, record


def _keep_before(path: Path, step: int) -> None:
    temporary = path.with_name(f".tmp-{path.name}")
    with temporary.open("wb") as file:
        for line, record in _lines(path):
            if record["step"] < step:
                file.write(line)
    _replace(temporary, path)


def _replace(temporary: Path, path: Path) -> None:
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON object to `path`, whole or not at all."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(to_json(value, indent=2) + "\n", encoding="utf-8")
    _replace(temporary, path)


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary.json` of a run folder."""
    write_json(run_dir / SUMMARY_FILE, summary)


def rollout_records(step: int, groups: list[RolloutGroup]) -> Iterator[dict[str, Any]]:
    """One record a group for `rollouts.jsonl`: the prompt, and each sample with what scoring made of it."""
    for group in groups:
        samples = [
            {
                "text": rollout.completion.text,
                "reward": rollout.reward,
                "rewards": rollout.rewards,
                "advantage": rollout.advantage,
                "tokens": len(rollout.completion.token_ids),
                "token_ids": rollout.completion.token_ids,
                "finish_reason": rollout.completion.finish_reason,
            }
            for rollout in group.rollouts
        ]
        yield {"step": step, "group": group.group, "prompt": group.prompt, "samples": samples}


class Display:
    """Progress on standard error: a live table on a terminal, otherwise (or with `live=False`) a line a step.

    Use it as a context manager. It never touches standard output.
    """

    def __init__(self, steps: int, live: bool = True, stream: IO[str] | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._wants_live = live and self._stream.isatty()
        self._live: Live | None = None
        self._steps = steps
        self._rewards: deque[float] = deque(maxlen=40)
        self._seconds: deque[float] = deque(maxlen=20)
        self._checked = self._different = 0

    def __enter__(self) -> Display:
        if self._wants_live:
            from rich.console import Console
            from rich.live import Live

            # No refresh thread: it would take the interpreter from the loop that feeds the device.
            self._live = Live(console=Console(file=self._stream), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        """Show a line that is not about a step (start-up, validation, a warning)."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show that step `step`, counted from 0, is done. Metrics that are absent show as a dash."""
        self._rewards.append(float(metrics.get("reward/mean", math.nan)))
        self._seconds.append(float(metrics.get("time/step", math.nan)))
        self._checked += int(metrics.get("parity/tokens_checked", 0))
        self._different += int(metrics.get("parity/tokens_different", 0))
        if self._live is not None:
            self._live.update(self._table(step, metrics), refresh=True)
        else:
            print("  ".join(self._cells(step, metrics).values()), file=self._stream, flush=True)

    def _cells(self, step: int, metrics: Mapping[str, Any]) -> dict[str, str]:
        split = ", ".join(
            f"{name} {_number(metrics.get(f'time/{name}'))}" for name in ("generate", "forward_backward", "optim_step")
        )
        return {
            "step": f"step {step + 1}/{self._steps}",
            "reward": f"reward {_number(metrics.get('reward/mean'))}",
            "loss": f"loss {_number(metrics.get('loss'))}",
            "length": f"length {_number(metrics.get('response_length/mean'))}",
            "parity": f"parity {self._parity()}",
            "time": f"{_number(metrics.get('time/step'))} s ({split})",
            "speed": f"{_number(metrics.get('perf/tokens_per_s_per_gpu'))} tokens/s",
            "eta": f"eta {self._eta(step)}",
        }

    def _table(self, step: int, metrics: Mapping[str, Any]) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        cells = self._cells(step, metrics)
        style = "red" if self._different else "green"
        table = Table.grid(padding=(0, 2))
        table.add_row(cells["step"], ProgressBar(total=max(1, self._steps), completed=step + 1, width=40), cells["eta"])
        table.add_row(cells["reward"], Text(sparkline(self._rewards), style="cyan"), cells["length"])
        table.add_row(cells["loss"], Text(cells["parity"], style=style), cells["speed"])
        return Group(table, Text(f"time {cells['time']}", style="dim"))

    def _parity(self) -> str:
        if not self._checked:
            return "not checked"
        if self._different:
            return f"BROKEN ({self._different:,} of {self._checked:,} tokens differ)"
        return f"identical ({self._checked:,} tokens)"

    def _eta(self, step: int) -> str:
        known = [seconds for seconds in self._seconds if math.isfinite(seconds)]
        if not known:
            return "-"
        minutes, seconds = divmod(round((self._steps - step - 1) * sum(known) / len(known)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def sparkline(values: deque[float] | list[float]) -> str:
    """Block characters from the lowest to the highest of `values`; a blank where one is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(blocks[int((value - low) / span * 7)] if math.isfinite(value) else " " for value in values)


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
