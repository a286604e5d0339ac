"""The `lockstep` command: flags, commands, and what goes to which stream."""

from ..session.signals import INTERRUPTED, interrupts_in_imports
