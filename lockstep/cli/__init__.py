"""The `lockstep` command: flags, commands, and output streams."""

from ..session.signals import INTERRUPTED, exit_on_interrupts_in_imports
