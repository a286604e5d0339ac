"""Hashes by the GPU's kernel, in Triton's interpreter: those of the host."""

from __future__ import annotations

import pytest
import torch
from processes import run_interpreted

from lockstep.graph.check.fingerprints import GOLDEN, _hash


class Interpreted:
    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
    def test_words_have_the_host_s_hash(self, dtype: torch.dtype) -> None:
        from lockstep.graph.check.triton_hash import add_hash

        torch.manual_seed(0)
        for size, first in ((0, 1), (1, 1), (7, 2**40 + 3), (8192, 5), (20_000, 2**33)):
            words = torch.randint(-(2**62), 2**62, (size,)).to(dtype)
            total = torch.tensor(5)
            add_hash(total, words, first, GOLDEN)
            assert int(total) == int(_hash(words, first) + 5)


def test_in_the_interpreter() -> None:
    run_interpreted(__file__)
