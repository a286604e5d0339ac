"""`python -m lockstep`: the same as the `lockstep` command."""

from .cli import entry

entry()
