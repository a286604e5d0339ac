"""The progress display of a run; a stream whose failure does not end the run, and a standard output whose does."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from ..errors import LockstepError
from ..session.signals import reraise_received
from .metrics import format_number

if TYPE_CHECKING:
    from rich.live import Live


class _Stream:
    def __init__(self, stream: IO[str]) -> None:
        self._stream: Any = stream

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Any, *arguments: Any) -> None:
        """Call `action`, which may fail."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class FailsafeStream(_Stream):
    """A text stream that writes to `stream` until that fails, and discards everything from then on: the run continues
    when the reader of its output goes away (`lockstep train 2>&1 | head`, a closed terminal). The file descriptor is
    redirected to the null device too, for code that writes to it directly and for the flush at exit."""

    def __init__(self, stream: IO[str] | None) -> None:
        """`stream` is None if Python was started without one (`2>&-`)."""
        super().__init__(io.StringIO() if stream is None else stream)
        self._failed = stream is None

    def isatty(self) -> bool:
        return not self._failed and self._stream.isatty()

    def _try(self, action: Any, *arguments: Any) -> None:
        if self._failed:
            return
        try:
            action(*arguments)
        except UnicodeEncodeError:  # a locale without the display's characters
            self._try(action, *(text.encode("ascii", "replace").decode() for text in arguments))
        except (OSError, ValueError):  # a broken pipe or closed terminal; ValueError: a closed file
            self._failed = True
            _discard(self._stream)


class RequiredStream(_Stream):
    """Standard output, whose failure ends the command: by `BrokenPipeError` if its reader has gone, and `LockstepError`
    for any other failure. The file descriptor is then redirected to the null device, for the flush at exit. Characters
    that its encoding lacks are written as escapes, such as `\\u4f60`."""

    def _try(self, action: Any, *arguments: Any) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            action(*(text.encode(encoding, "backslashreplace").decode(encoding) for text in arguments))
        except (OSError, ValueError) as error:  # ValueError: a closed file
            if isinstance(error, OSError):
                _discard(self._stream)
            if isinstance(error, BrokenPipeError):
                raise
            raise LockstepError(f"standard output cannot be written: {error}") from error


def _discard(stream: Any) -> None:
    """Redirect the file descriptor of `stream` to the null device."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


# Names of a run's phases on the screen and in the report. Phases not listed here are parts of these.
PHASE_NAMES = {
    "import": "imports",
    "task": "the task's data",
    "load": "loading the model",
    "state": "making the optimizer's state",
    "prompts": "measuring prompts",
    "inputs": "hashing the model's files",
    "restore": "restoring the checkpoint",
    "trackers": "trackers",
    "warmup": "worked examples",
    "validation": "held-out problems",
    "graphs": "graphs",
    "load_graphs": "loading stored graphs",
    "import_tracer": "importing the tracer",
    "trace": "tracing graphs",
    "passes": "rewriting graphs",
    "store_graphs": "storing graphs",
    "inductor": "compiling with inductor",
    "compile": "compiling kernels",
    "record": "recording CUDA graphs",
    "verify": "checking graphs",
    "gate": "checking this machine's arithmetic",
    "generate": "generating",
    "rewards": "in rewards",
    "critic": "asking the critic",
    "forward_backward": "training",
    "optim_step": "training",
    "sync": "gathering weights",
    "checkpoint": "saving a checkpoint",
    "save_model": "exporting the model",
}
_SELF_REPORTED = ("warmup", "validation", "graphs")  # they report their result and duration in a line of their own
_MIN_SECONDS_SHOWN = 0.1  # seconds from which a part of start-up is reported
_REFRESH_S = 1.0  # seconds between refreshes
# Seconds in one phase, during start-up and later, before a line reports it if there is no terminal; doubled each time.
_STARTUP_PATIENCE_S, _PATIENCE_S = 10.0, 30.0


@dataclass
class _Phase:
    name: str
    began: float
    detail: str = ""
    due: float = 0.0  # seconds after which the next line reports it

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        return f"{PHASE_NAMES[self.name]}{detail}, {self.seconds:.0f} s"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class Display:
    """Progress on standard error: a live table on a terminal, otherwise (or with `live=False`) one line per step. As a
    `PhaseObserver` it also shows phases: each part of start-up in a line once it is done, and a long phase's progress
    while it lasts. Without `shown`, as on ranks other than the first, it shows nothing."""

    def __init__(
        self,
        steps: int,
        live: bool = True,
        stream: IO[str] | None = None,
        tick: float = _REFRESH_S,
        shown: bool = True,
    ) -> None:
        self._stream: Any = FailsafeStream((stream or sys.stderr) if shown else None)
        self._wants_live = live and self._stream.isatty()
        self._live: Live | None = None
        self._table: Any = None  # the latest step's
        self._steps = steps
        self._stepping = False
        self._phases: list[_Phase] = []  # those that have not ended, innermost last
        self._tick, self._closed = tick, threading.Event()
        self._rewards: deque[float] = deque(maxlen=40)
        self._seconds: deque[float] = deque(maxlen=20)
        self._checked = self._different = self._not_covered = 0

    def __enter__(self) -> Display:
        if self._wants_live:
            from rich.console import Console
            from rich.live import Live

            # No auto-refresh thread: it would take the GIL several times a second from the loop that feeds the device.
            console = Console(file=self._stream)
            self._live = Live(console=console, auto_refresh=False, get_renderable=self._render)
            self._live.start()
        self._ticker = threading.Thread(target=self._keep_refreshing, daemon=True)
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._ticker.join()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase_began(self, phase: str) -> None:
        """A phase began, nested in those that have not ended. Raises for a signal whose exception was lost."""
        reraise_received()
        self._stepping |= phase == "step"
        due = _PATIENCE_S if self._stepping else _STARTUP_PATIENCE_S
        self._phases.append(_Phase(phase, time.monotonic(), due=due))

    def phase_progressed(self, detail: str) -> None:
        """The progress of the innermost phase, or what it is working on."""
        if self._phases:
            self._phases[-1].detail = detail

    def phase_ended(self, phase: str, seconds: float) -> None:
        """The innermost phase ended. A part of start-up gets a line."""
        self._phases.pop()
        if not self._stepping and not self._phases and phase in PHASE_NAMES and phase not in _SELF_REPORTED:
            self.note_startup(PHASE_NAMES[phase], seconds)

    def note_startup(self, part: str, seconds: float) -> None:
        if seconds >= _MIN_SECONDS_SHOWN:
            self.note(f"start-up: {part} {seconds:.1f} s")

    def current_phase(self) -> str:
        """The innermost phase with a name in `PHASE_NAMES`, its progress and duration; empty if there is none."""
        return str(next(reversed(self._named_phases()), ""))

    def _named_phases(self) -> list[_Phase]:
        return [phase for phase in self._phases.copy() if phase.name in PHASE_NAMES]

    def _keep_refreshing(self) -> None:
        """Refresh the screen regularly, since a slow reward or a long generation would otherwise leave it unchanged."""
        while not self._closed.wait(self._tick):
            phases = self._named_phases()
            if self._live is not None:
                self._live.refresh()
            elif phases and (seconds := phases[0].seconds) >= phases[0].due:
                while phases[0].due <= seconds:
                    phases[0].due *= 2
                within = "" if len(phases) == 1 else f" ({PHASE_NAMES[phases[0].name]}, {seconds:.0f} s)"
                self.note(f"still {phases[-1]}{within}")

    def note(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show that step `step`, counted from 0, is done. Missing metrics are shown as a dash."""
        self._rewards.append(float(metrics.get("reward/mean", math.nan)))
        self._seconds.append(float(metrics.get("time/step", math.nan)))
        self._checked += int(metrics.get("parity/tokens_checked", 0))
        kinds = "parity/tokens_different", "parity/prompt_tokens_routed_differently"
        self._different += sum(int(metrics.get(kind, 0)) for kind in kinds)
        self._not_covered += abs(int(metrics.get("parity/tokens_not_covered", 0)))
        if self._live is not None:
            self._table = self._make_table(step, metrics)
            self._live.refresh()
        else:
            print("  ".join(self._cells(step, metrics).values()), file=self._stream, flush=True)

    def _cells(self, step: int, metrics: Mapping[str, Any]) -> dict[str, str]:
        split = ", ".join(
            f"{name} {format_number(metrics.get(f'time/{name}'))}"
            for name in ("generate", "forward_backward", "optim_step")
        )
        without = metrics.get("groups_without_reward", 0)
        left_out = f" ({without:,.0f} {'groups have' if without > 1 else 'group has'} none)" if without else ""
        return {
            "step": f"step {step + 1}/{self._steps}",
            "reward": f"reward {format_number(metrics.get('reward/mean'))}{left_out}",
            "loss": f"loss {format_number(metrics.get('loss'))}",
            "length": f"length {format_number(metrics.get('response_length/mean'))}",
            "parity": f"parity {self._parity()}",
            "time": f"{format_number(metrics.get('time/step'))} s ({split})",
            "speed": f"{format_number(metrics.get('perf/tokens_per_s_per_gpu'))} tokens/s",
            "eta": f"eta {self._eta(step)}",
        }

    def _make_table(self, step: int, metrics: Mapping[str, Any]) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        cells = self._cells(step, metrics)
        style = "red" if self._different or self._not_covered else "green"
        table = Table.grid(padding=(0, 2))
        table.add_row(cells["step"], ProgressBar(total=max(1, self._steps), completed=step + 1, width=40), cells["eta"])
        table.add_row(cells["reward"], Text(sparkline(self._rewards), style="cyan"), cells["length"])
        table.add_row(cells["loss"], Text(cells["parity"], style=style), cells["speed"])
        return Group(table, Text(f"time {cells['time']}", style="dim"))

    def _render(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        doing = self.current_phase()
        return Group(*([self._table] if self._table else []), *([Text(doing, style="dim")] if doing else []))

    def _parity(self) -> str:
        if self._different:
            return f"BROKEN ({self._different:,} of {self._checked:,} tokens differ)"
        if self._not_covered:
            return f"BROKEN ({self._not_covered:,} sampled tokens were not compared)"
        if not self._checked:
            return "not checked"
        return f"identical ({self._checked:,} tokens)"

    def _eta(self, step: int) -> str:
        known = [seconds for seconds in self._seconds if math.isfinite(seconds)]
        if not known:
            return "-"
        minutes, seconds = divmod(round((self._steps - step - 1) * sum(known) / len(known)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def sparkline(values: deque[float] | list[float]) -> str:
    """The `values` as block characters, scaled from the lowest to the highest; a blank for one that is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(blocks[int((value - low) / span * 7)] if math.isfinite(value) else " " for value in values)
