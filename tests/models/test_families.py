"""Random tiny models of every family: what `transformers` makes of a folder, and one arithmetic in both roles.

One of each here; `tests/matrix.py` has the others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_cases import MAKERS, assert_roles_agree, assert_same_model

from lockstep.models.families import FAMILIES


def test_every_family_has_cases_here_or_beside() -> None:
    assert FAMILIES.keys() - MAKERS.keys() == {"qwen3", "qwen3_moe", "llama", "deepseek_v3"}  # test_model_folder


@pytest.mark.parametrize("family", MAKERS)
def test_a_folder_is_the_model_that_transformers_makes_of_it(family: str, tmp_path: Path) -> None:
    for seed in range(2):
        assert_same_model(family, seed, tmp_path / str(seed))


@pytest.mark.parametrize("family", MAKERS)
def test_both_roles_agree_over_updates_captured_or_not(family: str, tmp_path: Path) -> None:
    assert_roles_agree(family, 0, tmp_path, torch.bfloat16)
