"""Flat buffers of one and of several ranks hold the same parameters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import Apart

from lockstep import ops
from lockstep.config import LossConfig, OptimizerConfig
from lockstep.distributed import World
from lockstep.distributed.cells import Cells
from lockstep.distributed.mesh import Axis, Mesh
from lockstep.distributed.parameter_parts import Shares
from lockstep.distributed.placement import WHOLE, Placement
from lockstep.graph.capture.step import capture
from lockstep.graph.ir.captured import Captured, op_name
from lockstep.graph.passes.collectives import gradient_exchanges
from lockstep.models import Decoder, ModelConfig, ResidentWeights, load_part
from lockstep.models.init import initialize
from lockstep.trainer import BatchShape, FlatParameters, Trainer
from lockstep.trainer.gathered import flat_parameters, make_trained_model
from lockstep.trainer.packing import blank_batch
from lockstep.trainer.parameters import ALIGNMENT, Layout
from lockstep.trainer.programs import DYNAMIC_SIZES, statics_of
from lockstep.types import SamplingParams

SHAPES = st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(1, 5))
def test_buffers_are_cut_and_normed_alike(shapes: list[tuple[int, ...]], ranks: int) -> None:
    layout, one = Layout.of(shapes, ranks), Layout.of(shapes)
    whole = torch.zeros(one.size)
    generator = torch.Generator().manual_seed(0)
    for view in one.views(whole):
        view.copy_(torch.randn(view.shape, generator=generator))
    buffers = torch.stack([cut(layout, whole, rank) for rank in range(ranks)])
    assert all(size % ALIGNMENT == 0 for size in layout.sizes) and buffers.shape[1] == layout.size
    for i, shape in enumerate(shapes):  # what an all-gather of the parts gives
        parts = torch.cat([layout.flat_views(buffer)[i] for buffer in buffers])
        count = torch.Size(shape).numel()
        assert torch.equal(parts[:count].view(shape), one.views(whole)[i]) and not parts[count:].any()
    words = torch.stack([ops.exact_sum(ops.square_sums(buffer)) for buffer in buffers]).sum(0)
    assert torch.equal(words, ops.exact_sum(ops.square_sums(whole)))


def cut(layout: Layout, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's buffer, from that of one process."""
    buffer = torch.zeros(layout.size, dtype=whole.dtype)
    for part, view in zip(layout.flat_views(buffer), Layout.of(layout.shapes).views(whole), strict=True):
        own = view.flatten()[rank * part.numel() : (rank + 1) * part.numel()]
        part[: own.numel()] = own
    return buffer


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.data())
def test_any_layout_reads_what_any_wrote(now: int, then: int, tp: int, tp_then: int, data: st.DataObject) -> None:
    """Parts are cut along either dimension, in blocks or not."""
    rows, columns = 4 * data.draw(st.integers(1, 9)), 4 * data.draw(st.integers(1, 9))
    blocks = data.draw(st.sampled_from([(), (4, rows - 4)] if rows > 4 else [()]))
    on = data.draw(
        st.sampled_from([WHOLE, Placement(tp=0, blocks=blocks), Placement(tp=1), Placement(tp=1, blocks=(4,))])
    )
    whole = torch.arange(rows * columns) + 1

    def shares(ranks: int, tp: int) -> Shares:
        part = rows * columns // (tp if on.tp is not None else 1)
        return Shares(on, (rows, columns), tp, -(-part // (7 * ranks)) * 7)

    wrote, reads = shares(then, tp_then), shares(now, tp)
    buffers = [torch.zeros(wrote.size, dtype=torch.int64) for _ in range(then * tp_then)]
    for rank, buffer in enumerate(buffers):
        for at, there, count in wrote.pieces_of(rank):
            buffer[at : at + count] = whole[there : there + count]
    for rank in range(now * tp):
        mesh = Mesh(tp=Axis("tp", tp, rank % tp))
        part = on.take_part(whole.view(rows, columns), mesh).flatten()[rank // tp * reads.size :][: reads.size]
        read = [
            buffers[source][begin : begin + n]
            for _, there, count in reads.pieces_of(rank)
            for source, begin, n in wrote.locate(there, count)
        ]
        assert torch.equal(torch.cat([whole[:0], *read]), part)


def traced(ranks: int, name: str, ranks_per_cell: int = 1) -> Captured:
    """A graph of one of so many ranks, traced without the others."""
    model = initialize(Decoder(ModelConfig(64, 16, 16, 1, 2, 1, 8, family="qwen3"), torch.float32), 0)
    trainer = Trainer(
        model,
        OptimizerConfig(),
        LossConfig(),
        world=World(0, ranks, ranks_per_cell=ranks_per_cell),
        cells=Cells(16, 4, ranks),
    )
    program, sizes = trainer.programs.by_name[name], None
    inputs, statics = program.inputs, dict[str, Any]()
    if name == "forward_backward":
        batch = blank_batch(BatchShape(16, 8, 4, 16), SamplingParams(), True)
        statics = {**statics_of(batch), "loss_type": trainer.loss.loss_type, "with_support": False}
        inputs, sizes = replace(inputs, user=batch.tensors()), DYNAMIC_SIZES
    return capture(name, program.body, inputs, statics=statics, writes=program.writes, dynamic=sizes)


def calls(captured: Captured) -> Counter[str]:
    return Counter(op_name(node) for node in captured.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("name", ["forward_backward", "optim_step"])
def test_a_graph_is_as_large_for_any_number_of_ranks(name: str) -> None:
    of_four = calls(traced(4, name))
    assert of_four == calls(traced(8, name))
    assert name == "optim_step" or of_four["lockstep.fold_rows"] == 1 + of_four["_c10d_functional.all_to_all_single"]


def test_what_a_cell_adds_up_first_leaves_it_once() -> None:
    """Elements that go from a rank to other cells, of which there are two or four: of four ranks the sum alone."""
    flat, two, four = traced(8, "forward_backward"), *(traced(r, "forward_backward", ranks_per_cell=4) for r in (8, 16))
    assert calls(two) == calls(four)

    def leaving(captured: Captured, stage: int, others: int) -> int:
        each = [x.collective.args[1] for x in gradient_exchanges(captured, stage)]
        return sum(sum(sizes[:others]) for sizes in each)  # type: ignore[index,arg-type,misc]

    assert leaving(flat, 0, 4) == 4 * leaving(two, 1, 1) > 0
    assert [len(gradient_exchanges(two, stage)) for stage in (0, 1)] == [len(gradient_exchanges(flat))] * 2


@pytest.mark.parametrize("tp", [1, 2])
def test_masters_begin_as_the_rounded_weights_of_a_source(make_model, tp: int) -> None:
    """Where no rank has the model whole, and the source's are float32."""
    source = ResidentWeights(make_model(torch.float32))
    world = Apart(1, 2 * tp, 10.0, tp=tp, generator_tp=2)
    model = load_part(source, torch.bfloat16, "cpu", world.generator_mesh)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), world=world, source=source)
    master = trainer.optimizer.master
    assert master is trainer.flat.data and master.dtype == torch.float32 and int(master.count_nonzero()) > 0
    assert torch.equal(master, master.bfloat16().float())
    unrounded = flat_parameters(make_trained_model(model, world.mesh), world.mesh, (), model, float32=True)
    source.fill(unrounded.own_ranges())
    assert not torch.equal(master, unrounded.data)


@pytest.mark.parametrize("float32", [False, True])
def test_each_rank_has_its_shard_and_the_model_keeps_its_own(make_model, float32: bool) -> None:
    model: Decoder = make_model(torch.bfloat16)
    before = [p.clone() for p in model.parameters()]
    flats = [flat_parameters(model, World(rank, 3).mesh, float32=float32) for rank in range(3)]
    whole = FlatParameters(make_model(torch.bfloat16)).data
    whole = whole.float() if float32 else whole
    assert {flat.data.dtype for flat in flats} == {whole.dtype} and {flat.dtype for flat in flats} == {torch.bfloat16}
    assert all(torch.equal(flat.data, cut(flat.layout, whole, rank)) for rank, flat in enumerate(flats))
    assert all(map(torch.equal, before, model.parameters()))
    assert all(flat.data.numel() < whole.numel() / 2 for flat in flats)
    for flat in flats:
        flat.data.zero_()
        flat.load_parts(flat.data, [whole])
        assert torch.equal(flat.data, cut(flat.layout, whole, flat.rank))
        assert flat.equals_model()
        flat.data[5] += 1
        assert not flat.equals_model()
        flat.copy_from_model()
        assert flat.equals_model() and torch.equal(flat.data, cut(flat.layout, whole, flat.rank))
    written = {name: torch.zeros_like(p).flatten() for name, p in model.named_parameters()}
    for flat in flats:
        for name, ranges in flat.ranges_to_write(model).items():
            for values, first in ranges:
                assert values.dtype == torch.bfloat16 and not written[name][first : first + values.numel()].any()
                written[name][first : first + values.numel()] = values
    assert all(torch.equal(written[name], p.flatten()) for name, p in model.named_parameters())
    with pytest.raises(ValueError, match=r"expected shape \[\d+\], found \[5\]"):
        flats[0].load_parts(flats[0].data, [torch.zeros(5)] * 3)
