"""What the answers of several routes have."""

from __future__ import annotations

import time
import uuid
from typing import Any

from ...types import Trajectory
from ..batcher import Job
from ..bodies import ChatBody, CompletionBody


def head(kind: str, prefix: str, body: ChatBody | CompletionBody, model: str) -> dict[str, Any]:
    """What every chunk of an answer begins with. `seed` is the one that it was sampled with."""
    made = {"id": f"{prefix}-{body.request_id or uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
    return {**made, "model": model, "seed": body.seed}


def drawn_by(completion: Trajectory) -> dict[str, int]:
    """Which weights drew it: how often they had been updated, 0 those that were loaded."""
    return {"weights_version": completion.weight_versions[-1]} if completion.weight_versions else {}


def usage(jobs: list[Job], sampled: int) -> dict[str, int]:
    """Tokens read and sampled."""
    read = sum(len(job.prompt_ids) for job in jobs)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}
