"""A Python interpreter as a tool: each program runs in a separate process, with limits and cut off from the machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from queue import SimpleQueue

from ...errors import InputError, ToolUnavailable, refuse

MIB = 1 << 20
GRACE = 10.0  # seconds beyond a program's limit until the process that watches it is killed too

PythonTool = Callable[[str], Coroutine[None, None, str]]


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of a program. Those on processor time and memory hold for each of its processes.

    Attributes:
        seconds, cpu_seconds: elapsed time, and processor time.
        memory_mib, files_mib: address space (not resident memory), and all files together.
        processes: including threads.
        output_bytes: output, beyond which it is cut off and the program killed.
        patience: seconds that a program may wait to start; as many run at once as there are cores.
    """

    seconds: float = 15.0
    cpu_seconds: int = 5
    memory_mib: int = 512
    files_mib: int = 16
    processes: int = 8
    output_bytes: int = 8192
    patience: float = 30.0

    @classmethod
    def within(cls, timeout: float) -> SandboxLimits:
        """The default limits, lowered such that a call takes less than `timeout` seconds (0: any time)."""
        limits = cls()
        if not timeout:
            return limits
        return replace(limits, seconds=min(limits.seconds, timeout / 4), patience=min(limits.patience, timeout / 2))

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            refuse(value <= 0, f"SandboxLimits: {name} is {value}; it must be more than 0")


@dataclass(frozen=True)
class ProgramResult:
    """A program's output, including standard error, and how it ended: "exit", or the limit that it hit ("time", "cpu"
    or "output"). `code` is its exit code, or the negative number of the signal that ended it."""

    output: str
    ended: str
    code: int = 0


def run_python(
    code: str,
    limits: SandboxLimits = SandboxLimits(),
    allow_unsandboxed: bool = False,
) -> ProgramResult:
    """Run a program and wait for it. `ToolUnavailable`: it cannot be started or, without `allow_unsandboxed`, cannot be
    cut off."""
    isolate = not allow_unsandboxed or isolation_failure() == ""
    sizes = limits.memory_mib * MIB, limits.processes, limits.output_bytes, limits.files_mib * MIB
    arguments = (limits.seconds, limits.cpu_seconds, *sizes, int(isolate), os.getpid())
    script, runner = Path(__file__).with_name("confine.py"), Path(__file__).with_name("runner.py")
    command = [sys.executable, "-I", "-S", str(script), *map(str, arguments), runner.read_text()]
    try:
        done = subprocess.run(
            command,
            input=code.encode(errors="replace"),
            capture_output=True,
            env={},
            timeout=limits.seconds + GRACE,
            start_new_session=True,  # Ctrl-C is for the run
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolUnavailable(f"the Python tool: {error}") from error
    head, _, output = done.stdout.partition(b"\n")
    ended, _, about = head.decode().partition(" ")
    if ended not in ("exit", "time", "cpu", "output"):
        last_line = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ToolUnavailable(
            f"the Python tool cannot start a program: {about or last_line or f'code {done.returncode}'}"
        )
    return ProgramResult(output.decode(errors="replace"), ended, int(about or 0))


# A program that tries what must not succeed, and prints what does.
_ESCAPE_ATTEMPTS = """
import os, socket, time
found = [] if os.getppid() == 0 else ["other processes"]
found += ["files"] * any(map(os.path.exists, ("/etc/passwd", "/proc/self", "/home")))
try:
    open("/lib/written", "w")
    found.append("files to write")
except OSError:
    pass
try:
    socket.create_connection(("127.0.0.1", 9), 1)
except OSError as error:
    found += [] if error.errno == 101 else ["the network"]
try:
    for _ in range(16):
        os.fork() or (time.sleep(9), os._exit(0))
    found.append("any number of processes")
except OSError:
    pass
print(*found, sep=", ")
"""


@cache
def isolation_failure() -> str:
    """Why programs cannot be cut off from this machine, found by one that tries to get out; "" if they can."""
    try:
        result = run_python(_ESCAPE_ATTEMPTS)
    except ToolUnavailable as error:
        return str(error)
    if result.ended != "exit" or result.code:
        return f"a program that tries to get out failed: {result.output.strip()[-300:]}"
    return f"a program gets at {result.output.strip()}" if result.output.strip() else ""


def python_tool(limits: SandboxLimits = SandboxLimits(), allow_unsandboxed: bool = False) -> PythonTool:
    """A function `python(code)` for `task.tools`. Programs of different calls share nothing. `InputError`: programs
    cannot be started, or cannot be cut off although that is required."""
    if (reason := isolation_failure()) and not allow_unsandboxed:
        raise InputError(
            f"task.tools python: programs cannot be cut off from this machine: {reason}. It needs Linux with user "
            "namespaces that users may have (in a container often a setting of its own), or task.allow_unsandboxed, "
            "with which what the model writes has the network and all files that this user has"
        )
    try:
        result = run_python("6 * 7", limits, allow_unsandboxed)
    except ToolUnavailable as error:
        raise InputError(f"task.tools python: {error}") from error
    shown = format_result(result, limits)
    refuse(result.output != "42\n", f"task.tools python: {limits} do not let Python start: {shown}")

    async def python(code: str) -> str:
        """Run a Python program and return what it prints, and the value of its last line if that is an expression.
        Each program starts anew, with the standard library alone and without network.

        Args:
            code: The program.
        """
        answer: Future[str] = Future()
        until = time.monotonic() + limits.patience

        def run() -> str:
            if time.monotonic() > until:
                return "[not run: too many programs were waiting]"
            return format_result(run_python(code, limits, allow_unsandboxed), limits)

        _waiting().put((answer, run))
        return await asyncio.wrap_future(answer)

    return python


def format_result(result: ProgramResult, limits: SandboxLimits) -> str:
    """The answer that the model sees."""
    endings = {
        "time": f"[stopped: it ran longer than {limits.seconds:g} s]",
        "cpu": f"[stopped: it used more than {limits.cpu_seconds} s of processor time]",
        "output": f"[stopped: it wrote more than {limits.output_bytes} bytes]",
        "exit": "" if result.output else "[no output]",
    }
    ending = f"[ended by signal {-result.code}]" if result.code < 0 else endings[result.ended]
    return "\n".join(part for part in (result.output.rstrip("\n"), ending) if part)


_Waiting = SimpleQueue[tuple[Future[str], Callable[[], str]]]  # where each answer goes, and what makes it


@cache
def _waiting() -> _Waiting:
    """Programs that wait for one of as many threads as there are cores. The run's end does not wait for these threads,
    and programs end with it."""
    waiting: _Waiting = SimpleQueue()
    for _ in range(os.cpu_count() or 1):
        threading.Thread(target=_run_programs, args=(waiting,), daemon=True).start()
    return waiting


def _run_programs(waiting: _Waiting) -> None:
    while True:
        answer, run = waiting.get()
        if not answer.set_running_or_notify_cancel():  # nobody waits for it any more
            continue
        try:
            answer.set_result(run())
        except Exception as error:
            answer.set_exception(error)
