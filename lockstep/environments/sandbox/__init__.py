"""Programs that a model writes, run confined: `python_tool` makes the tool, `run_python` is one call of it."""

from .python import Ran, SandboxLimits, python_tool, run_python
