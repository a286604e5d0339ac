"""Words of the C operators' exp and log: a digit of a coefficient changes them, on no machine does anything else."""

from __future__ import annotations

import zlib

import pytest
import torch
from torch import Tensor

from lockstep.ops import native
from lockstep.ops.native import library
from lockstep.ops.records import Filters

pytestmark = pytest.mark.skipif(library.built is None, reason="the C library is not built")

STEPS = torch.arange(-(2**15), 2**15).float()  # with a factor that is a power of two every input is exact


def checksum(x: Tensor) -> int:
    return zlib.crc32(x.contiguous().numpy().tobytes())


@pytest.mark.parametrize(("scale", "words"), [(2.0**-9, 62815044), (2.0**-14, 2674139307)])
def test_exp(scale: float, words: int) -> None:
    gate = STEPS * scale
    assert checksum(native.silu_mul(torch.stack((gate, torch.ones_like(gate)), dim=1))) == words


@pytest.mark.parametrize(("columns", "words"), [(2, 2358583110), (17, 963538428), (300, 2502962922)])
def test_log(columns: int, words: int) -> None:
    """Log-sum-exps of rows whose sums lie anywhere between 1 and the number of columns."""
    rows = STEPS[::128].unsqueeze(1) * 2.0**-13 * torch.arange(columns).float() / 16
    temperature, zero, one = torch.ones(512), torch.zeros(512), torch.ones(512)
    logits = rows.contiguous()
    stats = native.statistics(logits, Filters(temperature, zero.int(), one, zero), None, False, True)
    assert checksum(torch.stack((stats.lse_C, stats.entropy_C))) == words
