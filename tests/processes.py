"""Processes that tests start: each has a deadline, and none outlives its test."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import io
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
# What `_interpreters` have imported.
PRELOADED = ["pytest", "hypothesis", "torch", "torch._dynamo", "triton", "transformers", "lockstep.rl.loop"]
PRELOADED += ["torch.export._trace", "triton.experimental.gluon"]  # which a trace and the interpreter begin with
PRELOADED += ["lockstep.session.build", "lockstep.cli.main", "lockstep.run.train", "processes"]
DEADLINE = 480.0  # seconds, on a busy machine; below `faulthandler_timeout`, which ends everything
INTERPRETER = (3, 9)  # the first Triton whose interpreter runs every kernel; compiled, they run from 3.6 on
PATIENCE = 400.0  # seconds that ranks wait for one another; below `DEADLINE`, so that they say who is late


def finished(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """`command`, run to its end, with its output as text."""
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.run(command, timeout=DEADLINE, **given)  # type: ignore[call-overload]


@contextmanager
def running(command: Sequence[str], cwd: Path | None = None, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`command` while it runs on one thread, its standard error in a pipe; killed at the end, however that comes.

    Should the tests be killed themselves, it ends after `DEADLINE` seconds of work.
    """
    with _default_signals():
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # not ours, which whoever reads it would find held open
            stderr=subprocess.PIPE,
            text=True,
        )
    with process:
        try:
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (int(DEADLINE), int(DEADLINE)))
            yield process
        finally:
            process.kill()


@contextmanager
def _default_signals() -> Iterator[None]:
    """What starts within ignores neither SIGHUP nor SIGINT, as it would under `nohup` or in the background of a script.

    A signal that is handled here has its default in a new process.
    """
    before = {number: signal.signal(number, _handled) for number in (signal.SIGHUP, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handled(number: int, _: object) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str] | Forked | None = None) -> None:
    """Wait until `condition` holds; fails when `process` ends first, or it takes too long."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert process is None or process.poll() is None, f"ended with {process.returncode}: {process.stderr.read()}"
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.005)


@contextmanager
def unread_pipe() -> Iterator[int]:
    """A file descriptor to write to, whose reader has gone."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        yield write_end
    finally:
        os.close(write_end)


def run_interpreted(file: str) -> None:
    """Run the class `Interpreted` of a test file in a process of its own, under Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) < INTERPRETER:
        pytest.skip("Triton's interpreter before 3.9 has no unsigned -1, no switches as numbers, or no numpy 2.4")
    arguments = ["-q", "-o", "addopts=", "-o", "python_classes=Interpreted", "-p", "no:cacheprovider"]
    arguments += ["-p", "interpreter", "-W", "ignore::RuntimeWarning", f"{file}::Interpreted"]
    with tempfile.NamedTemporaryFile() as said, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        process = _interpreters().Process(target=_pytest, args=(arguments, said.name, dict(os.environ)))
        process.start()
        process.join(DEADLINE)
        process.kill()
        process.join()
        assert process.exitcode == 0, said.read().decode(errors="replace")


@functools.cache
def _interpreters() -> multiprocessing.context.ForkServerContext:
    """Processes that have imported what takes four seconds: each is forked from one that did, and that has Triton's
    interpreter, whoever asks first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        multiprocessing.forkserver.ensure_running()
    return context


class Forked:
    """A process that was forked, with what `subprocess.Popen` has for those who wait for one."""

    def __init__(self, process: Any, said: Path) -> None:
        self._process, self._said = process, said

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stderr(self) -> io.StringIO:
        return io.StringIO(self._said.read_text())

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What went to standard error, when it has ended."""
        self._process.join(timeout)
        assert self.returncode is not None, f"not ended after {timeout} s: {self.stderr.read()}"
        return "", self.stderr.read()


@contextmanager
def running_lockstep(
    arguments: Sequence[str], cwd: Path | None = None, shallow: bool = False, **environment: str
) -> Iterator[Forked]:
    """`lockstep` with these arguments as `running` has it, in a process that need not import anything; `shallow`: its
    random models have two layers."""
    with tempfile.NamedTemporaryFile() as said:
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        given = list(arguments), str(cwd or Path.cwd()), said.name, variables, shallow
        process = _interpreters().Process(target=_lockstep, args=given)
        process.start()
        try:
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (int(DEADLINE), int(DEADLINE)))
            yield Forked(process, Path(said.name))
        finally:
            process.kill()
            process.join()


def _lockstep(arguments: list[str], folder: str, said: str, environment: dict[str, str], shallow: bool) -> None:
    """The command in this process, which is left as an interpreter that ends is left."""
    _take_over(environment, said)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = ["lockstep", *arguments]
    from lockstep.__main__ import entry

    if shallow:
        from small import two_layers

        from lockstep.models.init import ARCHITECTURES

        ARCHITECTURES.update(two_layers())
    entry()


def on_ranks(count: int, work: Callable[..., T], *arguments: Any) -> list[T]:
    """What `work` of these arguments returns in each of so many processes, by rank, which find each other as those that
    torchrun starts do. It is a function of a module beside the tests."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        shared["MASTER_PORT"] = str(free.getsockname()[1])
        processes = []
        for rank in range(count):
            environment = dict(os.environ) | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            file = str(Path(folder, str(rank)))
            processes.append(_interpreters().Process(target=_rank, args=(work, arguments, file, environment)))
        free.close()
        for process in processes:
            process.start()
        for process in processes:
            process.join(DEADLINE)
            process.kill()
        outcomes = [Path(folder, str(rank)) for rank in range(count)]
        said = [pickle.loads(file.read_bytes()) if file.exists() else (None, "nothing") for file in outcomes]
        assert all(error is None for _, error in said), [error for _, error in said]
        assert not any(process.exitcode for process in processes), [process.exitcode for process in processes]
        return [value for value, _ in said]


def said_by_a_script(file: str, *arguments: str) -> str:
    """What `main` of a script says on standard error with these arguments, on each rank; it returns 0."""
    path, sys.argv = Path(file), [file, *arguments]
    sys.path.insert(0, str(path.parent))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert importlib.import_module(path.stem).main() == 0, said.getvalue()
    return said.getvalue()


def _rank(work: Callable[..., Any], arguments: tuple[Any, ...], file: str, environment: dict[str, str]) -> None:
    """Leave in a file what came of `work`."""
    _begin(environment)
    try:
        outcome = work(*arguments), None
    except BaseException:
        outcome = None, traceback.format_exc()
    Path(file).write_bytes(pickle.dumps(outcome))


def _pytest(arguments: list[str], said: str, environment: dict[str, str]) -> None:
    """Run pytest in this process, with what it says in a file."""
    _take_over(environment, said)
    sys.exit(int(pytest.main(arguments)))


def _take_over(environment: dict[str, str], said: str) -> None:
    """These variables in this process, and both standard streams in a file."""
    _begin(environment)
    file = os.open(said, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _begin(environment: dict[str, str]) -> None:
    """These variables in this process. What it was forked with stays, so the garbage collector leaves it out.

    A thread that wakes ends no other's turn: on a busy processor that one may hold the lock of a connection of gloo's,
    whose own thread then asks for it again and again, up to 3 ms a collective.
    """
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
