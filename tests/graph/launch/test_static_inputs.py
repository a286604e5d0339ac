"""A recorded graph's own user inputs: the right values from wherever they lie, in as few copies as there can be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.config import LossConfig, OptimizerConfig
from lockstep.graph.launch.memory import InputBuffers
from lockstep.trainer import Trainer, pack
from lockstep.types import coalesce_to

CPU = torch.device("cpu")


class Copies(TorchDispatchMode):
    """Counts copies, and the tensors that they write."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.counts.append(1)
        elif func is torch.ops.aten._foreach_copy_.default:
            self.counts.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def values(start: int = 0) -> dict[str, Tensor]:
    """Tensors of several types, one of them empty; their values begin at `start`."""
    return {
        "token": torch.arange(start, start + 5),
        "segment": torch.arange(start, start + 3, dtype=torch.int32),
        "valid": torch.arange(start, start + 7) % 2 == 0,
        "weight": torch.arange(start, start + 200, dtype=torch.float32),
        "none": torch.empty(0),
    }


def filled(own: InputBuffers, inputs: Sequence[Tensor]) -> list[int]:
    """Fill, compare, and return what was copied; no address may change."""
    places = [t.data_ptr() for t in own.tensors]
    with Copies() as copies:
        own.fill(inputs)
    assert all(map(torch.equal, own.tensors, inputs)) and places == [t.data_ptr() for t in own.tensors]
    assert all(a.dtype == b.dtype for a, b in zip(own.tensors, inputs, strict=True))
    return copies.counts


def batch(start: int = 0, **replaced: Tensor) -> list[Tensor]:
    return list({**coalesce_to(values(start), CPU), **replaced}.values())


def test_inputs_side_by_side_take_one_copy_and_each_that_lies_elsewhere_another() -> None:
    own = InputBuffers(batch())
    assert filled(own, batch(1))[0] == 1
    assert sum(filled(own, batch(2))) <= 2  # the empty tensor has no address
    assert sum(filled(own, batch(3, weight=torch.full((200,), 0.5)))) <= 3
    assert filled(own, list(values(4).values())) == [5]
    assert sum(filled(own, batch(5))) <= 2
    assert sum(filled(own, batch(6, token=torch.arange(5) * 100))) <= 5  # the first: nothing tells where the rest lies


def test_a_large_input_elsewhere_leaves_the_others_together() -> None:
    large = torch.ones(100_000)
    own = InputBuffers([*batch(), large])
    assert sum(filled(own, [*batch(1), large * 2])) <= 3


def test_another_order_in_a_buffer_of_the_same_size_is_no_other_content() -> None:
    own = InputBuffers(batch())
    names = list(values())
    turned = coalesce_to({name: values(9)[name] for name in reversed(names)}, CPU)
    filled(own, [turned[name] for name in names])
    longer = coalesce_to({**values(11), "more": torch.ones(100)}, CPU)
    filled(own, [longer[name] for name in names])


@pytest.mark.parametrize("wide", [False, True])
def test_separate_inputs_and_parts_of_a_large_buffer_keep_memory_of_their_own(wide: bool) -> None:
    large = torch.arange(1000.0)
    inputs = [large[:10], large[20:30]] if wide else list(values().values())
    own = InputBuffers(inputs)
    assert sum(t.untyped_storage().nbytes() for t in own.tensors) == sum(t.nbytes for t in inputs)
    assert filled(own, [t.clone() for t in inputs]) == [len(inputs)]
    assert filled(InputBuffers([]), []) == []


def test_a_packed_batch_is_copied_in_at_once(decoder, rollout, runtime_of) -> None:
    runtime = runtime_of(recorded=True)
    model = decoder()
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime)
    seen = []
    for step in range(2):
        for packed in pack(rollout(model, step), max_tokens=256, check_parity=True):
            moved = packed.to(CPU)
            trainer.forward_backward(moved)
            (graph,) = (g for f in runtime.programs for g in f.graphs.values() if f.name == "forward_backward")
            given = [getattr(moved, name) for name in graph._user]
            with Copies() as copies:
                graph._own.fill(given)
            seen.append((copies.counts, len(given)))
        assert trainer.optim_step(1e-2).applied
    assert seen == [([1], 18)] * 2


class Calls(TorchDispatchMode):
    """The operators that are called, but for those that launch nothing on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name not in ("empty", "new_empty", "set_", "unbind"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_around_its_two_graphs_a_step_launches_one_small_thing(decoder, rollout, runtime_of, monkeypatch) -> None:
    runtime = runtime_of(recorded=True)
    model = decoder()
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime)
    (batch,) = pack(rollout(model, 0), max_tokens=256, check_parity=True)
    moved = batch.to(CPU)
    trainer.forward_backward(moved)
    assert trainer.optim_step(1e-2).applied
    for graph in (g for f in runtime.programs for g in f.graphs.values()):
        monkeypatch.setattr(graph.recording, "replay", lambda: None)
    sampled = int(moved.valid_C.sum())
    with Calls() as calls:
        trainer.forward_backward(moved)
        trainer.launch_optim_step(1e-2)
        assert calls.names == ["copy_"]  # the batch in; the graphs do all else
        trainer.launch_optim_step(2e-2, sampled)
        assert calls.names[1:] == ["fill_"]
        trainer.forward_backward(moved)
        trainer.forward_backward(moved)  # the first one's log-probabilities are still to be compared
    assert calls.names[2:] == ["copy_", "empty_like", "empty_like", "_foreach_copy_", "copy_"]
