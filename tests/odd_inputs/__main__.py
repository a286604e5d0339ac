"""`python tests/odd_inputs [KIND ...]`: some 800 odd inputs through the command line, in one process.

Answered well is: the exit code that is due (2 for bad input), a message with the words that name the field, the file or
the line, no traceback, and a model folder that is as it was. What is not is printed, and the script ends with code 1
below 97 % or for a single traceback. It is no part of the suite: it takes minutes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from agents import environments, replays, servers
from case import Odd
from commands import other_commands
from data import REWARDS, rewards, rows
from folders import models, run_folders
from layouts import launches, layouts, parts_of_a_layout
from settings import flags, yaml_files

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

CASES = (flags, yaml_files, rows, rewards, models, run_folders, other_commands)
CASES += (layouts, parts_of_a_layout, launches, environments, servers, replays)


def digest(folder: Path) -> str:
    """Of all files in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def ask(odd: Odd, shared: Path) -> str:
    """What is wrong with the answer; empty where it is good."""
    from lockstep.cli import main as cli_main

    for name in ("tiny", "run", "good.jsonl", "r.py"):
        os.symlink(shared / name, name)
    for name, content in odd.files.items():
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if odd.prepare is not None:
        odd.prepare()
    out, err = io.StringIO(), io.StringIO()
    before, stdin = dict(os.environ), sys.stdin
    os.environ |= odd.environment
    resource.setrlimit(resource.RLIMIT_FSIZE, (odd.largest, resource.RLIM_INFINITY))
    sys.stdin = io.StringIO(odd.stdin)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), left_out():
            code: object = cli_main.main(odd.line.split("\0") if "\0" in odd.line else odd.line.split())
    except BaseException:
        return f"TRACEBACK {traceback.format_exc()[-600:]}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        sys.stdin = stdin
        os.environ.clear()
        os.environ |= before
    said = out.getvalue() + err.getvalue()
    missing = [word for word in odd.words if word not in said]
    if "Traceback" in said and not (odd.raises and f'/{odd.raises}", line' in said.split("Traceback")[-1]):
        return f"TRACEBACK {said[-600:]}"
    if code != odd.code or missing:
        return f"code {code}, due {odd.code}; without {missing}; said {said[-400:]!r}"
    return ""


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """A process of several leaves at once, which would be this one."""
    from lockstep.cli import main as cli_main

    kept, cli_main._exit_now = cli_main._exit_now, lambda code: None  # type: ignore[assignment]
    try:
        yield
    finally:
        cli_main._exit_now = kept


def prepared(shared: Path) -> None:
    """The model folder, the finished run, the rows and the rewards that all share."""
    from lockstep.cli.main import main

    os.chdir(shared)
    Path("good.jsonl").write_text('{"prompt": "hello"}\n' * 4)
    Path("r.py").write_text(REWARDS)
    train = (
        "train --model tiny --steps 1 --trainer.warmup-steps 0 --trainer.prompts-per-step 1 --task.validation-prompts 0"
    )
    small = "--sampling.num-generations 2 --sampling.max-completion-length 4 --checkpoint.interval 1 --run-dir run"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main(["init", "tiny", "--out", "tiny"]) == 0
        assert main(f"{train} {small}".split()) == 0


def main() -> int:
    """Ask all, print what was not answered well, and a line of figures."""
    began, answered, total, tracebacks = time.monotonic(), 0, 0, 0
    only = sys.argv[1:]
    with tempfile.TemporaryDirectory() as temporary:
        shared = Path(temporary).resolve() / "shared"
        shared.mkdir()
        os.environ["LOCKSTEP_CACHE"] = str(Path(temporary) / "cache")
        prepared(shared)
        good = digest(shared / "tiny")
        for kind in CASES:
            for odd in kind() if not only or kind.__name__ in only else ():
                total += 1
                with tempfile.TemporaryDirectory() as place:
                    os.chdir(place)
                    wrong = ask(odd, shared)
                    os.chdir(shared)
                answered += not wrong
                tracebacks += wrong.startswith("TRACEBACK")
                if wrong:
                    print(f"{kind.__name__}: {odd.line!r} {list(odd.files.values())[:1]!r:.100}: {wrong}", flush=True)
        lost = digest(shared / "tiny") != good
    share = answered / total
    print(
        f"{total} odd inputs: {answered} answered well ({share:.1%}), {tracebacks} tracebacks, "
        f"{'something was lost' if lost else 'nothing lost'}, {time.monotonic() - began:.0f} s"
    )
    return int(share < 0.97 or tracebacks > 0 or lost)


if __name__ == "__main__":
    sys.exit(main())
