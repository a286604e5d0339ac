"""Programs that a model writes, run confined: `python_tool` makes the tool, `run_python` is one call of it."""

from .limits import SandboxLimits
from .python import Ran, python_tool, run_python
