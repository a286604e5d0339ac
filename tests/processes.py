"""Processes that tests start: each has a deadline, and none outlives its test."""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import multiprocessing.context
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

DEADLINE = 480.0  # seconds, on a busy machine; below `faulthandler_timeout`, which ends everything


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


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
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
    arguments = ["-q", "-o", "addopts=", "-o", "python_classes=Interpreted", "-p", "no:cacheprovider"]
    arguments += ["-W", "ignore::RuntimeWarning", f"{file}::Interpreted"]
    with tempfile.NamedTemporaryFile() as said, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # which the server keeps from its start
        process = _interpreters().Process(target=_pytest, args=(arguments, said.name, dict(os.environ)))
        process.start()
        process.join(DEADLINE)
        process.kill()
        process.join()
        assert process.exitcode == 0, said.read().decode(errors="replace")


def on_ranks(count: int, script: Path, *arguments: str) -> str:
    """What a script prints on so many processes, which torchrun would start from nothing; by the first of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.NamedTemporaryFile()) for _ in range(2 * count)]
        processes = []
        for rank in range(count):
            environment = dict(os.environ) | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            said = [file.name for file in files[2 * rank : 2 * rank + 2]]
            processes.append(
                _interpreters().Process(target=_script, args=([str(script), *arguments], said, environment))
            )
            processes[-1].start()
            stack.callback(processes[-1].kill)
        for rank, process in enumerate(processes):
            process.join(DEADLINE)
            assert process.exitcode == 0, files[2 * rank + 1].read().decode(errors="replace")[-4000:]
        return files[0].read().decode()


@functools.cache
def _interpreters() -> multiprocessing.context.ForkServerContext:
    """Processes that have imported what takes two seconds: each is forked from one that did."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "hypothesis", "torch", "triton", "processes"])
    return context


def _pytest(arguments: list[str], said: str, environment: dict[str, str]) -> None:
    """Run pytest in this process, with what it says in a file."""
    _become(environment, said, said)
    sys.exit(int(pytest.main(arguments)))


def _script(arguments: list[str], said: list[str], environment: dict[str, str]) -> None:
    """Run a script in this process, with what it prints in a file, and its errors in another."""
    _become(environment, *said)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def _become(environment: dict[str, str], output: str, errors: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, output), (2, errors)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
