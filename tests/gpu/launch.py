"""Scripts that torchrun starts on several GPUs, or on fewer that its ranks share."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from processes import finished
from sharing import AS_RANK, on_shared_gpus


@dataclass(frozen=True)
class Launch:
    """Starts so many ranks of a script.

    Attributes:
        shared: whether ranks share GPUs (`pytest --ranks-share-gpu`), and their times mean nothing.
    """

    shared: bool = False

    def __call__(self, ranks: int, script: Path, *arguments: str, **environment: str) -> Any:
        """The last line that the ranks print, as JSON; they end well."""
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        start += AS_RANK if self.shared else []
        where = on_shared_gpus(ranks, torch.cuda.device_count()) if self.shared else {}
        run = finished([*start, str(script), *arguments], env=os.environ | where | environment)
        assert run.returncode == 0, run.stderr[-6000:]
        assert "terminate called" not in run.stderr
        return json.loads(run.stdout.splitlines()[-1])
