"""`python -m lockstep`: the same as the `lockstep` command."""

from .cli.main import entry

entry()
