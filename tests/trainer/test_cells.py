"""Gradients that are added up in cells of shards, by whoever has them."""

from __future__ import annotations

import pytest
import torch

from lockstep.config import CompileConfig, LossConfig, OptimizerConfig
from lockstep.distributed.cells import Cells
from lockstep.graph import Inputs, Runtime, check_against_eager
from lockstep.trainer import BatchShape, Trainer
from lockstep.trainer.packing import blank_batch
from lockstep.types import SamplingParams


@pytest.mark.parametrize(
    ("cells", "has_several", "cell_size_in_round", "ranks_per_cell", "ends"),
    [
        (Cells(8, 8, 1), False, 0, 1, []),
        (Cells(8, 4, 1), True, 0, 1, [3, 7]),
        (Cells(8, 4, 2), True, 0, 1, [1, 3]),
        (Cells(8, 4, 4), True, 4, 1, []),
        (Cells(16, 4, 8), True, 4, 4, []),
        (Cells(10, 4, 2), True, 0, 1, [1, 3, 4]),  # the last cell is smaller
        (Cells(12, 8, 12), True, 8, 1, []),
    ],
)
def test_where_cells_end(
    cells: Cells, has_several: bool, cell_size_in_round: int, ranks_per_cell: int, ends: list[int]
) -> None:
    found = cells.has_several, cells.cell_size_in_round, cells.ranks_per_cell, cells.span_rounds
    assert found == (has_several, cell_size_in_round, ranks_per_cell, bool(ends))
    assert [number for number in range(cells.shards // cells.ranks) if cells.ends_cell(number)] == ends


def test_cells_are_added_up_one_by_one(make_model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the update reads, of five shards in cells of two, two micro-batches each; nothing is left behind."""
    cells, seen = Cells(5, 2, 1), []
    trainer = Trainer(make_model(), OptimizerConfig(), LossConfig(), cells=cells)
    flat, update = trainer.flat, trainer.programs.by_name["optim_step"]
    added = torch.randn(10, flat.grad.numel(), generator=torch.Generator().manual_seed(0)) * 1e-3
    given, step = iter(added), update.body

    def launch(*_: object, **__: object) -> dict[str, torch.Tensor]:
        flat.grad.add_(next(given))
        return {}

    def looked_at(inputs: Inputs) -> object:
        seen.append(inputs.grad["grad"].clone())
        return step(inputs)

    monkeypatch.setattr(trainer.programs, "launch", launch)
    monkeypatch.setattr(update, "body", looked_at)
    batch = blank_batch(BatchShape(16, 8, 4, 16), SamplingParams(), False)
    for number in range(10):
        batch.ends_cell = cells.ends_cell(number % 5)
        trainer.forward_backward(batch)
    trainer.optim_step(0.0)
    expected = torch.zeros_like(added[0])
    for own in added.split([2, 2, 1, 2, 2, 1]):
        sums = torch.zeros_like(expected)
        for grad in own:
            sums = sums + grad
        expected = expected + sums
    one_by_one = torch.zeros_like(expected)
    for grad in added:
        one_by_one = one_by_one + grad
    assert torch.equal(seen[0], expected) and not torch.equal(seen[0], one_by_one)
    assert flat.cells is not None and not flat.cells.any() and not flat.grad.any()


def test_graphs_that_end_cells_have_eagers_bits(make_model) -> None:
    runtime = Runtime(CompileConfig("step"), torch.device("cpu"))
    trainer = Trainer(make_model(), OptimizerConfig(), LossConfig(), cells=Cells(4, 2, 1), runtime=runtime)
    work = trainer.check_cases([BatchShape(16, 8, 4, 16)], SamplingParams(), check_parity=True)
    own = [cases for cases in work if cases[0].name in ("end_cell", "end_cells")]
    assert [verdict.cases for verdict in check_against_eager(runtime, own, "strict")] == [1, 1]
    runtime.close()
