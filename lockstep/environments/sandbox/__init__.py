"""Runs programs that a model writes, confined: `python_tool` makes the tool, `run_python` runs one program."""

from .python import ProgramResult, SandboxLimits, python_tool, run_python
