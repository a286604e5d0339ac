"""When requests are taken in, between the launches of an engine."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from small import make_model

from lockstep.config import GeneratorConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.generator.request import Sequence
from lockstep.serve import batcher as batching
from lockstep.serve.batcher import Batcher, Job, News
from lockstep.types import SampleIdentity, SamplingParams

LAUNCH_S = 60.0


def job(seed: int, new: int) -> Job:
    params = SamplingParams(max_completion_length=new, ignore_eos=True)
    return Job([1, 2, 3], params, SampleIdentity(seed, 0, 0, 0))


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_client_that_comes_back_is_in_the_next_launch_while_the_device_is_busy(monkeypatch, ahead: int) -> None:
    """By a clock that launches alone move: whom it waits for comes a little later, and whom it does not once it has
    launched."""
    engine = Engine(SharedWeights(make_model(torch.float32)), GeneratorConfig(steps_per_sync=4), 4096, ahead=ahead)
    advance, answered, launched = engine.advance, threading.Event(), threading.Event()
    running: list[int] = []  # requests of each launch
    now = [0.0]

    def slow() -> list[Sequence]:
        running.append(len(engine.requests))
        launched.set()
        now[0] += LAUNCH_S
        return advance()

    def come_back() -> None:
        launched.wait(0.02 if ahead else 5.0)
        batcher.submit(job(2, 40))

    def deliver(news: News) -> None:
        launched.clear()
        threading.Thread(target=come_back).start()
        answered.set()

    monkeypatch.setattr(engine, "advance", slow)
    monkeypatch.setattr(batching, "MAX_FOLLOWER_WAIT_S", LAUNCH_S)
    monkeypatch.setattr(batching, "time", SimpleNamespace(monotonic=lambda: now[0]))
    batcher = Batcher(engine, deliver)
    for one in (job(0, 4), job(1, 40)):
        batcher.submit(one)
    while not answered.is_set():
        batcher.step()
    batcher.step()
    assert running[-2:] == [2, 2 if ahead else 1]  # what runs on a device that is idle does not wait
