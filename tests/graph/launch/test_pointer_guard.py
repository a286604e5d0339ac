"""Static inputs that moved are found, and no more tensors asked than need be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.config import LossConfig, OptimizerConfig
from lockstep.graph import GraphError
from lockstep.graph.launch.memory import Addresses
from lockstep.trainer import Trainer, pack


def test_views_are_asked_through_the_tensor_that_they_are_views_of() -> None:
    flat, other = torch.zeros(12), torch.zeros(3)
    parameter = nn.Parameter(torch.zeros(4))
    parameter.data = flat[8:]
    addresses = Addresses([other, flat[:4], flat[4:8].view(2, 2), parameter])
    assert len(addresses._asked) == 3 and addresses.moved() is None
    parameter.data = parameter.data.clone()
    assert addresses.moved() == 3
    flat.data = flat.clone()
    assert addresses.moved() == 1  # the first of its views
    other.data = other.clone()
    assert addresses.moved() == 0


def test_a_view_that_was_given_other_memory_before_is_asked_itself() -> None:
    flat = torch.zeros(8)
    view = flat[:4]
    view.data = torch.zeros(4)
    addresses = Addresses([view, flat[4:]])
    view.data = torch.zeros(4)
    assert len(addresses._asked) == 2 and addresses.moved() == 0


def test_a_train_step_asks_for_parameters_and_once_for_all_gradients(decoder, rollout, runtime_of) -> None:
    runtime = runtime_of(recorded=True)
    model = decoder()
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime)
    (batch,) = pack(rollout(model, 0), max_tokens=256, check_parity=True)
    trainer.forward_backward(batch)
    (graph,) = trainer.programs.by_name["forward_backward"].graphs.values()
    others = len([spec for spec in graph.captured.inputs if spec.role in ("param", "buffer")])
    assert len(graph._addresses._asked) == others + 1
    trainer.flat.grad.data = trainer.flat.grad.clone()
    with pytest.raises(GraphError, match=r"static input grad '.*' has moved in memory"):
        trainer.forward_backward(batch)
