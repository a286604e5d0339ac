"""Scripts that torchrun starts on several GPUs, or on one that its ranks share."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import finished
from sharing import on_one_gpu


@dataclass(frozen=True)
class Launch:
    """Starts so many ranks of a script.

    Attributes:
        shared: whether all have the same GPU (`pytest --ranks-share-gpu`), and their times mean nothing.
    """

    shared: bool = False

    def __call__(self, ranks: int, script: Path, *arguments: str, **environment: str) -> Any:
        """The last line that the ranks print, as JSON; they end well."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), str(script)]
        where = on_one_gpu(ranks) if self.shared else {}
        run = finished([*command, *arguments], env=os.environ | where | environment)
        assert run.returncode == 0, run.stderr[-6000:]
        assert "terminate called" not in run.stderr
        return json.loads(run.stdout.splitlines()[-1])
