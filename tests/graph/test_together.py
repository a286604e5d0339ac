"""A batch that lies in one buffer is launched without a look at its tensors; one that does not any more, with one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lockstep.config import LossConfig, OptimizerConfig
from lockstep.graph import EAGER, GraphError, GraphLauncher
from lockstep.trainer import Trainer, pack
from lockstep.types import CoalescedTensors, PackedBatch, coalesce_to

CPU = torch.device("cpu")
Change = Callable[[PackedBatch], PackedBatch | None]


def changed(name: str) -> Change:
    """Another tensor in place of one, with other values."""

    def change(batch: PackedBatch) -> None:
        old = getattr(batch, name)
        setattr(batch, name, old * 2 if old.dtype == torch.float32 else old.roll(1))

    return change


def in_place(batch: PackedBatch) -> None:
    batch.advantage_C.mul_(-1)


def none(batch: PackedBatch) -> None:
    pass


CHANGES: dict[str, Change] = {
    **{name: changed(name) for name in ("targets_C", "weight_C", "ref_logprob_C")},
    "nothing": none,
    "in place": in_place,
    "a copy": lambda batch: copy.copy(batch),
    "a copy with another tensor": lambda batch: replace(batch, weight_C=batch.weight_C * 2),
    "moved again": lambda batch: batch.to(CPU),
}


@pytest.fixture(scope="module")
def trainers(decoder, rollout, runtime_of) -> tuple[list, Trainer, Trainer]:
    """Groups to train on, and two trainers of one model: eager, and recorded, whose graphs serve every change."""
    loss, reference = LossConfig(beta=0.1), decoder(seed=1, layers=1)
    made = (
        Trainer(decoder(layers=1), OptimizerConfig(), loss, reference=reference, runtime=runtime)
        for runtime in (EAGER, runtime_of(recorded=True))
    )
    return rollout(decoder(layers=1), 0), *made


def gradients(trainer: Trainer, groups: list, change: Change) -> list[Tensor]:
    """Those of a batch as it was packed, twice, and as it was changed, twice."""
    (batch,) = pack(groups, max_tokens=256, check_parity=False)
    batch = batch.to(CPU)
    trainer.reference_logprobs(batch)
    found = []
    for launch in range(4):
        if launch == 2:
            batch = change(batch) or batch
        trainer.forward_backward(batch)
        found.append(trainer.flat.grad.clone())
        trainer.flat.grad.zero_()
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_a_batch_that_was_changed_is_launched_as_it_is(trainers, name: str) -> None:
    groups, eager, recorded = trainers
    before = sum(graph.launches for graph in recorded.programs.by_name["forward_backward"].graphs.values())
    found = gradients(recorded, groups, CHANGES[name])
    assert all(map(torch.equal, found, gradients(eager, groups, CHANGES[name])))
    assert torch.equal(found[1], found[2]) == (name in ("nothing", "a copy", "moved again"))
    (graph,) = recorded.programs.by_name["forward_backward"].graphs.values()
    assert graph.launches == before + 4  # one graph, however its batch lies


def test_launches_of_a_batch_in_its_buffer_look_at_no_tensor(decoder, rollout, runtime_of, monkeypatch) -> None:
    looked = []
    monkeypatch.setattr(GraphLauncher, "_check_user", lambda self, user: looked.append(len(user)))
    model = decoder(layers=1)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime_of(recorded=True))
    for step in range(3):
        (batch,) = pack(rollout(model, step), max_tokens=256, check_parity=True)
        batch = batch.to(CPU)
        trainer.forward_backward(batch)
        batch.check_parity = False
        trainer.forward_backward(batch)
    assert looked == [18, 18]  # each graph's first
    batch.weight_C = batch.weight_C.clone()
    trainer.forward_backward(batch)
    assert looked == [18, 18, 18]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight_C": torch.float64},
            "user 'weight_C' has dtype torch.float64, the graph was captured for torch.float32",
        ),
        ({"support_C": None}, "missing or unknown"),
    ],
)
def test_a_wrong_tensor_in_a_moved_batch_is_refused(decoder, rollout, runtime_of, change, message: str) -> None:
    model = decoder(layers=1)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime_of(recorded=True))
    (batch,) = pack(rollout(model, 0), max_tokens=256, check_parity=True)
    batch = batch.to(CPU)
    for _ in range(2):
        trainer.forward_backward(batch)
    (graph,) = trainer.programs.by_name["forward_backward"].graphs.values()
    for name, dtype in change.items():
        setattr(batch, name, getattr(batch, name).to(dtype) if dtype else torch.zeros(1, 1, dtype=torch.uint8))
    with pytest.raises(GraphError, match=message):
        graph(batch.tensors())
    assert graph.launches == 2


def test_a_moved_batch_with_a_wrong_dtype_is_refused(decoder, rollout, runtime_of) -> None:
    model = decoder(layers=1)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime_of(recorded=True))
    (batch,) = pack(rollout(model, 0), max_tokens=256, check_parity=True)
    trainer.forward_backward(batch.to(CPU))
    batch.top_k_C = batch.top_k_C.long()
    with pytest.raises(GraphError, match="user 'top_k_C' has dtype torch.int64"):
        trainer.forward_backward(batch.to(CPU))


def test_a_layout_is_of_names_types_shapes_and_their_order() -> None:
    def layout(**tensors: Tensor) -> str:
        return coalesce_to(tensors, CPU).layout

    a, b = torch.zeros(3), torch.zeros(5, dtype=torch.int32)
    assert layout(a=a, b=b) is layout(a=a + 1, b=b * 2)
    others = [{"b": b, "a": a}, {"a": a, "c": b}, {"a": a.int(), "b": b}, {"a": a.view(3, 1), "b": b}, {"a": a}]
    assert len({layout(a=a, b=b), *(layout(**other) for other in others)}) == 6


def _together(batch: PackedBatch) -> CoalescedTensors | None:
    """What a launch is given, where the tensors lie side by side."""
    given = batch.tensors()
    return given if isinstance(given, CoalescedTensors) else None


def test_what_a_batch_has_together_is_what_it_has(decoder, rollout) -> None:
    (packed,) = pack(rollout(decoder(), 0), max_tokens=256, check_parity=True)
    assert _together(packed) is None
    batch = packed.to(CPU)
    assert _together(batch) is batch.coalesced and batch.tensors().keys() == packed.tensors().keys()
    batch.check_parity, batch.max_len = False, 7
    assert _together(batch) is not None and _together(copy.deepcopy(batch)) is not None
    batch.support_C = torch.zeros(len(batch.targets_C), 13, dtype=torch.uint8)
    assert _together(batch) is None and "support_C" in batch.tensors()
    again = batch.to(CPU)
    assert _together(again) is not None and again.tensors()["support_C"] is again.support_C
    again.support_C = None
    assert _together(again) is None and "support_C" not in again.tensors()
