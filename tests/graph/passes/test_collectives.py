"""Graphs of sharded training, traced for two ranks in one process. What they compute is in `tests/parallel`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from fake_recorder import FakeRecorder
from small import Apart, completed, train_group
from torch import fx

from lockstep.config import CompileConfig, LossConfig, OptimizerConfig
from lockstep.graph import Captured, Runtime, digest, pipeline, run_passes
from lockstep.graph.ir.captured import is_backward, module_of, op_name, origins
from lockstep.graph.passes import recompute, reshard, saved_bytes
from lockstep.graph.passes.collectives import (
    activation_collectives,
    by_layer,
    communicates,
    first_use,
    gradient_exchanges,
    layer_of,
    weight_gathers,
)
from lockstep.graph.torch_private.collectives import GATHER, GATHER_MANY, WAIT, merge_exchanges
from lockstep.graph.torch_private.trace import set_fake_value
from lockstep.models import Decoder
from lockstep.models.init import architecture, initialize
from lockstep.trainer import Trainer, pack
from lockstep.types import SamplingParams

LAYERS = [f"layers.{i}" for i in range(3)]


@cache
def traced(rank: int = 0, tie: bool = True, tp: int = 1) -> Captured:
    """The graph of `forward_backward` of a tiny model on two shards, its collectives where the trace met them; weights
    are gathered in it."""
    world = Apart(rank, 2 * tp, 10.0, tp=tp)
    config = CompileConfig("step", reshard_after_forward=False, bucket_collectives=False, reorder_collectives=False)
    runtime = Runtime(config, torch.device("cpu"), mesh=world.sizes)
    of_layers = replace(architecture("tiny"), num_layers=len(LAYERS), tie_word_embeddings=tie)
    model = initialize(Decoder(of_layers, torch.bfloat16), 0)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime, world=world, zero_stage=3)
    sequences = [completed([3, 4, 5], 1.0, 0.1, [0.0] * 3, [0.0] * 3) for _ in range(2)]
    (batch,) = pack([train_group([1, 2], sequences, SamplingParams())], max_tokens=64, check_parity=True)
    programs = trainer.programs
    case = programs.case("forward_backward", "", batch, lambda: None, loss_type="grpo", with_support=False)
    return programs.by_name["forward_backward"].graph(case.user, case.statics).captured


@cache
def arranged(
    rank: int = 0, tie: bool = True, recomputed: tuple[str, ...] = (), tp: int = 1, **without: bool
) -> Captured:
    """That graph after the passes, but those that are set to False."""
    config = CompileConfig(canonicalize=False, recompute=recomputed, **without)
    return run_passes(traced(rank, tie, tp), pipeline(config, sharded=True))


def order_of(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def test_all_ranks_have_the_same_graph() -> None:
    assert digest(arranged(rank=1)) == digest(arranged())


def test_a_weight_has_a_gather_and_a_gradient_an_exchange() -> None:
    gathers, exchanges = weight_gathers(traced()), gradient_exchanges(traced())
    weights = sum(spec.role == "param" for spec in traced().inputs)
    assert len(gathers) == len(exchanges) == weights == 26
    assert {gather.layer for gather in gathers} == {"", *LAYERS} == {exchange.layer for exchange in exchanges}
    assert not any(is_backward(gather.collective) for gather in gathers)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_has_one_collective_each_way_in_the_order_of_the_layers(tp: int) -> None:
    captured = arranged(tp=tp)
    gathers = [(gather.layer, is_backward(gather.collective)) for gather in weight_gathers(captured)]
    forward = [("", False), *((layer, False) for layer in LAYERS), ("", False)]
    assert gathers == forward + [(layer, True) for layer in reversed(LAYERS)]
    assert [exchange.layer for exchange in gradient_exchanges(captured)] == ["", *reversed(LAYERS), ""]
    log = "\n".join(captured.log)
    assert "24 of 26 gathered again" in log and "50 -> 8 gathers, 26 -> 5 exchanges" in log


def test_exchanges_of_several_dtypes_are_not_merged() -> None:
    graph = fx.Graph()
    values = [torch.zeros(4, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    exchanges = [set_fake_value(graph.placeholder(f"x{i}"), value) for i, value in enumerate(values)]
    with pytest.raises(AssertionError, match="several dtypes"):
        merge_exchanges(graph, exchanges)


def test_gathers_begin_a_layer_early_and_waits_stand_before_the_first_use() -> None:
    captured = arranged()
    order = order_of(captured.graph)
    gathers = weight_gathers(captured)
    uses = [order[first_use(gather)] for gather in gathers]
    for i, gather in enumerate(gathers):
        begins, ends = order[gather.collective], max(order[node] for node in gather.finish)
        assert begins < ends < uses[i]
        if i > 0:
            assert begins < uses[i - 1] < min(order[node] for node in gather.finish)
        if i > 1:
            assert uses[i - 2] < begins  # no earlier: memory


def test_exchanges_begin_at_once_and_end_when_the_next_has_begun() -> None:
    captured = arranged()
    order = order_of(captured.graph)
    exchanges = gradient_exchanges(captured)
    for exchange, following in zip(exchanges, exchanges[1:], strict=False):
        assert order[exchange.collective] < order[following.collective]
        assert min(order[node] for node in exchange.finish) > order[following.collective]
    begun = order[exchanges[0].collective]
    computing = [n for n in captured.graph.nodes if order[n] > begun and layer_of(n) == "layers.0" and is_backward(n)]
    assert len(computing) > 50  # the last gradients' exchange begins before the first layers' backward pass


def travelling_together(captured: Captured) -> set[frozenset[str]]:
    """The axes of every two collectives of which one begins before the other is waited for."""
    order, began, found = order_of(captured.graph), list[tuple[int, str]](), set[frozenset[str]]()
    for node in filter(communicates, captured.graph.nodes):
        if op_name(node) != WAIT:
            started = node.users if op_name(node) == GATHER_MANY else [node]
            ends = max(order[waited] for one in started for waited in one.users)
            found |= {frozenset({axis, node.args[-1]}) for end, axis in began if end > order[node]}
            began.append((ends, node.args[-1]))
    return found


def test_collectives_of_several_axes_travel_at_once() -> None:
    """So devices are told in which order to begin them (`machine.prepare_nccl`). As they were traced they do not."""
    assert travelling_together(traced(tp=2)) == set()
    assert travelling_together(arranged()) == {frozenset({"@fsdp"})}
    assert travelling_together(arranged(tp=2)) == {frozenset({"@fsdp"}), frozenset({"@fsdp", "@tp"})}


@pytest.mark.parametrize("without", [{}, {"bucket_collectives": False}, {"reshard_after_forward": False}])
def test_reordering_only_moves(without: dict[str, bool]) -> None:
    moved, before = arranged(**without), arranged(**without, reorder_collectives=False)
    assert sorted(n.name for n in moved.graph.nodes) == sorted(n.name for n in before.graph.nodes)
    assert [n.name for n in moved.graph.nodes] != [n.name for n in before.graph.nodes]


def test_weights_gradients_are_computed_while_activations_travel() -> None:
    """Of every product of every layer, but for the last that there is."""
    orders = {on: arranged(tp=2, reorder_collectives=on) for on in (False, True)}
    found = {}
    for on, captured in orders.items():
        order, found[on] = order_of(captured.graph), 0
        products = [order[node] for node in captured.graph.nodes if op_name(node) == "lockstep.matmul"]
        for started in activation_collectives(captured):
            (waited,) = started.users
            found[on] += sum(order[started] < at < order[waited] for at in products)
            assert waited.args == (started,) and order[waited] < min(order[user] for user in waited.users)
    assert found == {False: 0, True: 4 * len(LAYERS) - 1}
    assert sorted(n.name for n in orders[True].graph.nodes) == sorted(n.name for n in orders[False].graph.nodes)


def test_the_backward_pass_reads_what_was_gathered_for_it() -> None:
    for gather in weight_gathers(arranged()):
        users = {is_backward(user) for node in gather.finish for user in node.users if user not in gather.finish}
        assert users == {is_backward(gather.collective)} or gather.layer == ""  # the head's weights stay


def test_an_untied_head_is_kept_for_its_backward_pass_and_the_embedding_is_not() -> None:
    gathers = weight_gathers(arranged(tie=False, bucket_collectives=False, reorder_collectives=False))
    outside = [gather for gather in gathers if gather.layer == ""]
    assert len(outside) == 3 and not any(is_backward(gather.collective) for gather in outside)


def test_weights_are_no_activations() -> None:
    """A budget for activations, and recomputing them, has nothing to do with how weights are gathered."""
    again, _ = reshard(traced())
    assert saved_bytes(again) == saved_bytes(traced())
    recomputed = arranged(recomputed=("full",))
    assert saved_bytes(recomputed) < saved_bytes(traced()) / 4
    assert len(weight_gathers(recomputed)) == 8


def test_activations_that_ranks_gather_are_gathered_again() -> None:
    """What is computed from them is made again, and would hold what the ranks had sent."""

    def held(captured: Captured) -> list[fx.Node]:
        lies_in = origins(captured.graph)
        read = {source for node in captured.graph.nodes if is_backward(node) for source in node.all_input_nodes}
        found = {origin for source in read for origin in lies_in[source] if op_name(origin) == GATHER}
        return [node for node in found if node.args[-1] == "@tp" and not is_backward(node)]

    kept = traced(tp=2)
    again, _ = recompute(kept, ("full",))
    before, after = (sum(n.args[-1] == "@tp" for n in c.graph.nodes if op_name(n) == GATHER) for c in (kept, again))
    assert held(again) == [] and after >= before + 9  # three a layer: the stream between layers is kept
    assert saved_bytes(again) < saved_bytes(kept) / 4


def test_pieces_are_no_way_out_for_sharded_graphs() -> None:
    config = CompileConfig("step", "full")
    for mesh, levels in (({}, ["piecewise", "captured", "eager"]), ({"fsdp": 2}, ["captured", "eager"])):
        runtime = Runtime(config, torch.device("cpu"), recorder=FakeRecorder(), mesh=mesh)
        assert [runtime.lower_level("check") for _ in levels] == levels


def test_statistics_are_gathered_apart() -> None:
    captured = arranged()
    calls = [n for n in captured.graph.nodes if op_name(n) == "_c10d_functional.all_gather_into_tensor"]
    of_weights = [gather.collective for gather in weight_gathers(captured)]
    statistics = [n for n in calls if not module_of(n) and n not in of_weights]
    assert len(statistics) == 1
    for by in by_layer(weight_gathers(captured)):
        assert len(by) == 1
