"""`pytest --forks N`: modules beside each other, in processes that are forked once everything is collected.

One that starts anew imports and collects it all again, which takes the time of a twentieth of the tests.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import select
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

BYTES = 2  # of a module's number


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="N", help="run modules beside each other in N processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Whoever is free reads the next module's number from a pipe; what comes of each test is reported here."""
    count = session.config.getoption("forks")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    modules: dict[str, list[pytest.Item]] = {}
    for item in session.items:
        modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all, cleaned up here
    turns, numbers = os.pipe()
    assert BYTES * len(modules) <= select.PIPE_BUF
    os.write(numbers, b"".join(number.to_bytes(BYTES) for number in range(len(modules))))
    os.close(numbers)
    context, processes = multiprocessing.get_context("fork"), {}
    for _ in range(count):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(session, list(modules.values()), turns, there))
        process.start()
        there.close()
        processes[here] = process
    try:
        _report(session, processes)
    finally:
        for process in processes.values():
            process.terminate()
    return True


def _report(session: pytest.Session, processes: dict[Connection, Any]) -> None:
    """Until all have ended.

    Raises:
        RuntimeError: one of them ended otherwise than by having no more to do.
    """
    hook, current = session.config.hook, dict.fromkeys(processes, "nothing yet")
    waiting = list(processes)
    while waiting:
        for here in wait(waiting):
            try:
                name, said = here.recv()  # type: ignore[union-attr]
            except EOFError:
                waiting.remove(here)  # type: ignore[arg-type]
                continue
            if name == "started":
                current[here] = said["nodeid"]  # type: ignore[index]
                hook.pytest_runtest_logstart(**said)
            elif name == "reported":
                report = hook.pytest_report_from_serializable(config=session.config, data=said)
                hook.pytest_runtest_logreport(report=report)
            else:
                hook.pytest_warning_recorded.call_historic(kwargs=said)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
    for here, process in processes.items():
        process.join()
        if process.exitcode:
            raise RuntimeError(f"a process ended with {process.exitcode} in {current[here]}")


def _work(session: pytest.Session, modules: list[list[pytest.Item]], turns: int, parent: Connection) -> None:
    """Modules, until none is left, on streams of this process alone."""
    config = session.config
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where this process would report
    capture.start_global_capturing()
    capture.suspend_global_capture()
    # Of a fork server that the parent has started, which is no child of this process to look after.
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    config.pluginmanager.register(_Tells(config, parent))

    def taken() -> Iterator[list[pytest.Item]]:
        while number := os.read(turns, BYTES):
            yield modules[int.from_bytes(number)]

    rest = taken()
    module = next(rest, None)
    while module:
        for item, then in itertools.pairwise(module):
            config.hook.pytest_runtest_protocol(item=item, nextitem=then)
        following = next(rest, None)  # as late as can be: before the last test, which tears down what is not needed on
        then = following[0] if following else None
        config.hook.pytest_runtest_protocol(item=module[-1], nextitem=then)
        module = following


class _Tells:
    """Brings what is reported to the process that shows it."""

    def __init__(self, config: pytest.Config, parent: Connection) -> None:
        self._config, self._parent = config, parent

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._parent.send(("started", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._parent.send(("reported", data))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        said = warning_message
        plain = warnings.WarningMessage(str(said.message), said.category, said.filename, said.lineno)
        told = {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}
        self._parent.send(("warned", told))
