"""The `lockstep` command, also run by `python -m lockstep`."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

from .cli import INTERRUPTED, exit_on_interrupts_in_imports


def entry() -> NoReturn:
    """Run the command as a process. Ctrl-C, however often, ends it with exit code 130 and no traceback, from the first
    import to the end."""
    exit_on_interrupts_in_imports()
    try:
        from .cli.main import entry as command

        command()
    except KeyboardInterrupt:
        _ignore_interrupts()
        print("lockstep: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        # Under `python -m`, after a KeyboardInterrupt passed through exec() of a string (as dataclasses use), Python
        # ends the process by SIGINT even though it was caught, unless another exec() has completed since.
        exec("")


def _ignore_interrupts() -> None:
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:  # Ctrl-C again
        _ignore_interrupts()


if __name__ == "__main__":
    entry()
