"""The `lockstep` command and `python -m lockstep`, which are the same."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

from .cli import INTERRUPTED, interrupts_in_imports


def entry() -> NoReturn:
    """The command as a process. Ctrl-C ends it with exit code 130 and no traceback, from its first import to its end,
    however often it comes."""
    interrupts_in_imports()
    try:
        from .cli.main import entry as command

        command()
    except KeyboardInterrupt:
        _ignore_interrupts()
        print("lockstep: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        # Under `python -m` an exception of Ctrl-C that went through an exec() of a text (as dataclasses are made) ends
        # the process by that signal, though it was caught, unless another exec() came to its end.
        exec("")


def _ignore_interrupts() -> None:
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:  # another in between
        _ignore_interrupts()


if __name__ == "__main__":
    entry()
