"""Results of updates: written on the device, a few at a time, and read by the host when it asks; and the rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_recorder import FakeRecorder
from small import of_one_shape
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from updates import LR, NoHostReads, bits, make_trainer, one_batch, same

from lockstep.config import CompileConfig
from lockstep.graph import EAGER, Runtime, Store, check_against_eager
from lockstep.trainer import BatchShape, Trainer
from lockstep.trainer.result import MAX_PENDING
from lockstep.types import SamplingParams

SHAPES = [BatchShape(320, 224, 16, 160)]


def recorded() -> Runtime:
    """With the graphs that an earlier one made."""
    return Runtime(CompileConfig("step", "full"), torch.device("cpu"), recorder=FakeRecorder(), store=Store())


@pytest.fixture(params=[lambda: EAGER, recorded], ids=["eager", "recorded"])
def trained(request: pytest.FixtureRequest, make_model, make_groups, record) -> Callable[..., tuple[Trainer, Callable]]:
    """`trained()`: a trainer, and what adds up the gradients of one batch."""

    def make(**options: Any) -> tuple[Trainer, Callable[[], None]]:
        model = make_model()
        batch = one_batch(record(model, make_groups()), check_parity=False)
        trainer = of_one_shape(make_trainer(model, runtime=request.param(), **options))
        return trainer, lambda: trainer.forward_backward(batch)

    return make


def test_more_updates_than_rows_whose_results_wait_are_those_that_were_taken_one_by_one(trained) -> None:
    def updates(wait: bool) -> tuple[list[str], list[Tensor]]:
        trainer, backward = trained()
        pending = []
        for i in range(MAX_PENDING + 3):
            backward()
            pending.append(trainer.launch_optim_step(LR / (1 + i)))
            if not wait:
                pending[-1].get()
            assert trainer.weights_version == (max(0, i + 1 - MAX_PENDING) if wait else i + 1)  # the oldest were taken
        results = [repr(p.get()) for p in pending]
        assert len(set(results)) == len(results) and trainer.weights_version == MAX_PENDING + 3
        return results, bits(trainer)

    (one_by_one, expected), (waited, found) = updates(False), updates(True)
    assert one_by_one == waited and same(expected, found)


def test_results_that_nobody_wants_any_more_are_not_waited_for(trained) -> None:
    trainer, backward = trained()
    backward()
    trainer.optim_step(LR)
    with NoHostReads():
        for _ in range(2 * MAX_PENDING):
            trainer.launch_optim_step(LR)
    backward()
    assert trainer.optim_step(LR).applied and trainer.weights_version == 2


def test_a_result_whose_row_is_lost_is_no_other_ones(trained) -> None:
    trainer, backward = trained()
    backward()
    pending = trainer.launch_optim_step(LR)
    for _ in range(MAX_PENDING):
        trainer.programs.by_name["optim_step"]()  # updates that nobody made room for
    with pytest.raises(RuntimeError, match=r"result of update 1 is gone: the device has those of \[9.0, 8.0, .*2.0\]"):
        pending.get()


def test_a_warm_up_and_its_check_leave_results_as_they_were(make_model, make_groups, record) -> None:
    def results(warm_up: bool) -> list[str]:
        model, runtime = make_model(), recorded()
        batch = one_batch(record(model, make_groups()))
        trainer = make_trainer(model, runtime=runtime)
        found = []
        for i in range(3):
            batch.check_parity = i == 0
            trainer.forward_backward(batch)
            found.append(trainer.launch_optim_step(LR))
            if warm_up and i == 1:
                trainer.warm_up(SHAPES, SamplingParams(), check_parity=True)
                check_against_eager(runtime, trainer.check_cases(SHAPES, SamplingParams(), check_parity=True), "strict")
        return [repr(pending.get()) for pending in found]

    assert results(True) == results(False)


class Fills(TorchDispatchMode):
    """What is written by `fill_`."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.fill_.Scalar and isinstance(args[1], float):
            self.values.append(args[1])
        return func(*args, **(kwargs or {}))


def test_a_rate_is_written_when_it_is_another(trained) -> None:
    rates = [1e-2, 1e-2, 3e-3, 3e-3, 1e-2, 0.0, 1e-2]

    def updates(always: bool) -> list[Tensor]:
        trainer, backward = trained()
        for rate in rates:
            backward()
            trainer._written_lr = math.nan if always else trainer._written_lr
            with Fills() as fills:
                trainer.optim_step(rate)
            written.extend(fills.values)
        return bits(trainer)

    written: list[float] = []
    expected = updates(always=True)
    assert written == rates
    written.clear()
    assert same(updates(always=False), expected) and written == [1e-2, 3e-3, 1e-2, 0.0, 1e-2]


def test_a_rate_that_a_check_wrote_over_is_written_again(make_model, make_groups, record) -> None:
    def updates(checked: bool) -> list[Tensor]:
        model, runtime = make_model(), recorded()
        batch = one_batch(record(model, make_groups()), check_parity=False)
        trainer = make_trainer(model, runtime=runtime)
        for i in range(2):
            trainer.forward_backward(batch)
            trainer.optim_step(LR)
            saved = {k: v.clone() for k, v in trainer.state()[0].items()}, trainer.state()[1]
            if checked and i == 0:
                cases = dict(trainer.check_cases(SHAPES, SamplingParams(), check_parity=True))
                for case in cases[trainer.programs.by_name["optim_step"]]:
                    case.load()  # without what puts state back
                trainer.load_state(*saved)
                trainer._statistics.zero_()
                trainer.flat.grad.zero_()
        return bits(trainer)

    assert same(updates(True), updates(False))
