"""The `lockstep` command: flags, commands, and what goes to which stream."""
