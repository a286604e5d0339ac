"""A worker process of `RewardWorkers`: loads reward functions by name and calls them until its parent is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from ...errors import InputError
from ...machine import when_parent_is_gone
from .calls import Arguments, Failed, Outcome, RewardFunction, call_all
from .loading import load_reward


def main(descriptor: int) -> None:
    """Answer ("load", spec) and ("call", spec, arguments, count) on the connection of this file descriptor."""
    _leave_signals_to_the_parent()
    os.dup2(2, 1)  # what functions print must not mix with the parent's standard output
    when_parent_is_gone(os.getppid(), partial(os._exit, 1))  # even within a function that never returns
    channel = Connection(descriptor)
    functions: dict[str, RewardFunction] = {}
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            kind, spec, *call = channel.recv()
            channel.send(_load(spec, functions) if kind == "load" else _call(functions[spec], *call))


def _load(spec: str, functions: dict[str, RewardFunction]) -> Any:
    try:
        functions[spec] = load_reward(spec)
    except InputError as error:
        return Failed(f"cannot be loaded in its process: {error}", fatal=True)
    return True


def _call(function: RewardFunction, arguments: Arguments, count: int) -> Outcome:
    try:
        return call_all([(function, arguments, count)])[0]
    except KeyboardInterrupt:  # raised by the function itself
        return Failed("raised KeyboardInterrupt")


def _leave_signals_to_the_parent() -> None:
    """Ignore Ctrl-C and signals that a launcher sends to all processes: this process ends with its parent. Processes
    that functions start or fork have the default handlers."""

    def set_handlers(handler: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, handler)

    set_handlers(lambda *_: None)
    os.register_at_fork(after_in_child=lambda: set_handlers(signal.SIG_DFL))


if __name__ == "__main__":
    main(int(sys.argv[1]))
