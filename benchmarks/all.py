"""Every benchmark in one go, for a machine that is there for a few minutes: what matters most first, nothing lost.

Each part is a process of its own with a time limit; a part that cannot end within the budget is not begun. What a part
has saved so far is in `results.json` at once, also when it is killed. `--skip-done` goes on where an earlier run ended.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parts import PARTS, Part
from targets import key_figures

RESULTS, LOG = "results.json", "log.txt"
TAIL_LINES, TAIL_CHARACTERS = 40, 4000
SPARE_S = 4.0  # at the end, to stop a part and write
POLL_S = 0.2
IMPORTED = ("torch", "triton", "numpy", "sympy", "mpmath", "transformers", "tokenizers", "safetensors", "yaml")


def write_json(content: Any, path: Path) -> None:
    """In one piece."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


class Results:
    """What is known of each part, in the same file of every folder.

    Args:
        folders: made if need be. What their files hold already is kept.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self.parts: dict[str, dict[str, Any]] = {}
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / RESULTS).exists():
                for name, record in json.loads((folder / RESULTS).read_text(encoding="utf-8")).items():
                    if not self.done(name):
                        self.parts[name] = record

    def done(self, name: str) -> bool:
        """Whether it came to its end, even if that was to say that a target was missed."""
        return str(self.parts.get(name, {}).get("status")).startswith("done")

    def put(self, name: str, record: dict[str, Any]) -> None:
        self.parts[name] = record
        for folder in self.folders:
            write_json(self.parts, folder / RESULTS)

    def log(self, text: str) -> None:
        print(text, flush=True)
        for folder in self.folders:
            with (folder / LOG).open("a", encoding="utf-8") as file:
                file.write(text + "\n")


@dataclass
class Running:
    """A part's process, its output and the file that it writes."""

    part: Part
    process: subprocess.Popen[bytes]
    output: Path
    figures: Path
    began: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def record(self, status: str) -> dict[str, Any]:
        """What is known by now."""
        figures = None
        with suppress(OSError, ValueError):
            figures = json.loads(self.figures.read_text(encoding="utf-8"))
        tail = self.output.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARACTERS:].splitlines()[-TAIL_LINES:]
        command = " ".join(self.part.command)
        return {"status": status, "seconds": round(self.seconds, 1), "command": command, "tail": tail, "json": figures}

    def status(self, code: int | None) -> str:
        """Of a process that ended with this code, or None: that was stopped."""
        if code is None:
            return f"killed after {self.seconds:.0f} s"
        complete = code == 0 or (self.record("")["json"] or {}).get("complete")
        return "done" if code == 0 else f"done, exit code {code}" if complete else f"failed, exit code {code}"

    def stop(self) -> None:
        """End the process and those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def keep_bytecode() -> None:
    """Compile what is imported, as pip does at installation, where an image has left that out and forbids it: every
    process would compile torch anew, which is most of a warm start."""
    found = (importlib.util.find_spec(name) for name in IMPORTED)
    origins = [Path(spec.origin) for spec in found if spec and spec.origin]
    if all(Path(importlib.util.cache_from_source(str(origin))).exists() for origin in origins):
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(tempfile.gettempdir()) / "lockstep-bytecode"))
    folders = [str(origin.parent) for origin in origins]
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "0", *folders], stdout=subprocess.DEVNULL)


def start(part: Part, scratch: Path) -> Running:
    output, figures = scratch / f"{part.name}.out", scratch / f"{part.name}.json"
    command = [word.replace("{json}", str(figures)).replace("{scratch}", str(scratch)) for word in part.command]
    command = [sys.executable, *command] if command[0] != "sh" else command
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=root, env=environment, process_group=0
        )
    return Running(part, process, output, figures, time.monotonic())


def run_part(part: Part, limit: float, results: Results, scratch: Path) -> None:
    """Run it for `limit` seconds at most; its record, kept up to date while it runs."""
    running = start(part, scratch)
    written = 0.0
    try:
        results.put(part.name, running.record("running"))
        while running.process.poll() is None and running.seconds < limit:
            time.sleep(POLL_S)
            with suppress(OSError):
                if running.figures.stat().st_mtime > written:
                    written = running.figures.stat().st_mtime
                    results.put(part.name, running.record("running"))
    finally:
        code = running.process.poll()
        running.stop()
        results.put(part.name, running.record(running.status(code)))


def chosen(names: Sequence[str], device: str) -> list[Part]:
    """The parts of the device, or those that are named, in the order of the table."""
    known = {part.name: part for part in PARTS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no part is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [part for part in PARTS if part.name in names or (not names and part.device == device)]


def run_all(parts: Sequence[Part], results: Results, budget: float, skip_done: bool) -> None:
    end = time.monotonic() + budget
    with tempfile.TemporaryDirectory() as scratch:
        for part in parts:
            left = end - time.monotonic() - SPARE_S
            if skip_done and results.done(part.name):
                continue
            if left < part.need_s:
                results.log(f"{part.name}: not begun, needs {part.need_s} s of the {left:.0f} that are left")
                continue
            run_part(part, min(left, part.cap_s), results, Path(scratch))
            record = results.parts[part.name]
            results.log(f"{part.name}: {record['status']}, {record['seconds']} s")
            if record["status"] != "done" and record["tail"]:
                results.log("\n".join(f"  | {line}" for line in record["tail"]))


def summary(parts: Sequence[Part], results: Results) -> str:
    """Part, seconds, status, and key figures against their targets."""
    lines = []
    for part in parts:
        record = results.parts.get(part.name, {"status": "-", "seconds": 0})
        lines.append(f"{part.name:22s} {record['seconds']:6.1f} s  {record['status']}")
        lines += [f"    {figure}" for figure in key_figures(record.get("json"))]
    return "\n".join(lines)


def unpack(path: Path, folder: Path) -> list[Path]:
    """Write what each part has measured to a file of its own, named after the part and the device."""
    written = []
    for name, record in json.loads(path.read_text(encoding="utf-8")).items():
        if figures := record.get("json"):
            device = str(figures.get("device", "")).lower()
            device = next((known for known in ("h200", "h100", "a100") if known in device), "cpu")
            complete = record["status"].startswith("done")
            content = figures if complete else {"note": f"incomplete: {record['status']}", **figures}
            written.append(folder / f"{name.replace('-', '_')}-{device}.json")
            write_json(content, written[-1])
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, nargs="+", default=[Path("results")], help="folders, each with all results")
    parser.add_argument("--budget", type=float, default=3600, metavar="SECONDS", help="default: an hour")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these parts")
    parser.add_argument("--skip-done", action="store_true", help="not those that an earlier run has finished")
    parser.add_argument(
        "--device", choices=["cuda", "cuda-x2", "cpu"], default="cuda", help="cpu: every script at its smallest"
    )
    parser.add_argument("--unpack", type=Path, metavar="RESULTS", help="write benchmarks/results/*.json from this file")
    args = parser.parse_args()
    if args.unpack:
        for path in unpack(args.unpack, Path(__file__).parent / "results"):
            print(path)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a part's record is written on the way out
    parts, results = chosen(args.only, args.device), Results(args.out)
    if args.device != "cpu":
        keep_bytecode()
    try:
        run_all(parts, results, args.budget, args.skip_done)
    finally:
        results.log(summary(parts, results))
    return int(not all(results.done(part.name) for part in parts))


if __name__ == "__main__":
    sys.exit(main())
