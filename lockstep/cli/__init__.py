"""The `lockstep` command: flags, commands, and output streams."""

from ..session.signals import INTERRUPTED, interrupts_in_imports
