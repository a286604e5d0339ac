"""A run of an earlier version, kept whole but for its later checkpoints; `old_runs.py` makes others."""

from __future__ import annotations

import tarfile
from pathlib import Path

from old_runs import check

KEPT = Path(__file__).parents[1] / "data" / "old_run.tar.xz"


def test_a_run_a_checkpoint_and_a_model_of_an_earlier_version_keep_their_bits(tmp_path: Path) -> None:
    with tarfile.open(KEPT) as file:
        file.extractall(tmp_path, filter="data")
    check(tmp_path)
