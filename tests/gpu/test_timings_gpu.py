"""A GPU's own clock: what it measures without being waited for is what waiting for it finds."""

import time
from functools import partial

import pytest
import torch

from lockstep.timings import Timings, seconds_by_name


def work(matrix: torch.Tensor, times: int) -> None:
    for _ in range(times):
        torch.mm(matrix, matrix)


@pytest.mark.timed
def test_the_device_measures_what_the_host_would_by_waiting() -> None:
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    work(matrix, 3)
    matrix.sum().item()  # the first launch of a kernel loads it
    torch.cuda.synchronize()
    began = time.perf_counter()
    work(matrix, 60)
    torch.cuda.synchronize()
    waited = time.perf_counter() - began

    timings = Timings(keep_spans=True, event=partial(torch.cuda.Event, enable_timing=True))
    for _ in range(2):  # steps
        began = time.perf_counter()
        with timings.measure("step"):
            with timings.measure("forward_backward", on_device=True):
                work(matrix, 60)
            launched = time.perf_counter() - began
            with timings.measure("optim_step", on_device=True):
                work(matrix, 30)
                matrix.sum().item()
        total = time.perf_counter() - began
        spans = timings.take_spans()
        found, device = seconds_by_name(spans), {s.name: s for s in spans if s.on_device}
        assert launched < waited / 2  # it did not wait
        assert found["forward_backward"] == pytest.approx(waited, rel=0.3)
        assert found["optim_step"] == pytest.approx(waited / 2, rel=0.3)
        assert found["forward_backward"] + found["optim_step"] == pytest.approx(total, rel=0.1)
        first, second = device["forward_backward"], device["optim_step"]
        assert first.began == pytest.approx(began, abs=0.002)
        assert second.began == pytest.approx(first.began + first.seconds, abs=0.001)
