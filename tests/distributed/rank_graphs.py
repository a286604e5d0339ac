"""Graphs of two ranks: what eager computes, alike on both, with few collectives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from fake_recorder import FakeRecorder
from rank_setup import DEVICE, FILTERED, OPTIMIZER, check, decoder, different, on_all, run
from torch import Tensor

from lockstep.config import CompileConfig, LossConfig
from lockstep.distributed import World
from lockstep.errors import LockstepError
from lockstep.graph import Captured, GraphError, Inputs, Runtime, check_against_eager, digest
from lockstep.graph.check import against_eager, comparison
from lockstep.graph.passes.collectives import gradient_exchanges, weight_gathers
from lockstep.graph.torch_private import trace
from lockstep.trainer import BatchShape, Packing, Trainer


@check
def graphs(world: World) -> Any:
    """Weights read whole, with layers computed again, or gathered: results like eager's, graphs alike on all ranks, and
    what was logged of them; collectives of a micro-batch, and their elements on a rank."""
    eager = run(Trainer(decoder(), OPTIMIZER, LossConfig(), world=world), world, packing=Packing(256))
    ways: dict[str, dict[str, Any]] = {
        "stage 2": {"recompute": ("full",)},
        "stage 3": {"cudagraph_mode": "full"},
    }
    found = {}
    for name, fields in ways.items():
        config = CompileConfig("step", **fields)
        recorder = FakeRecorder() if DEVICE.type == "cpu" else None
        runtime = Runtime(config, DEVICE, recorder=recorder, mesh={"fsdp": world.size}, peers=world)
        stage = int(name[-1])
        trainer = Trainer(decoder(), OPTIMIZER, LossConfig(), world=world, runtime=runtime, zero_stage=stage)
        unlike = different(run(trainer, world, packing=Packing(256)), eager)
        made = {f.name: [digest(g.captured) for g in f.graphs.values()] for f in runtime.programs}
        log = [line for title, lines in runtime.builder.logs.items() if "forward_backward" in title for line in lines]
        found[name] = {"different": on_all(world, unlike), "digests": on_all(world, made), "log": log}
        found[name]["captures"] = on_all(world, runtime.captures)
        traces = trainer.programs.by_name["forward_backward"].cache.traces.values()  # the first rank has them for all
        found[name]["wire"] = [wire(captured, world) for captured in traces]
        checks = [g.captured.module.graph for f in runtime.programs if f.name == "check" for g in f.graphs.values()]
        found[name]["scoring"] = on_all(world, sorted({str(node.target) for nodes in checks for node in nodes.nodes}))
        runtime.close()
    return found


def wire(captured: Captured, world: World) -> dict[str, list[int]]:
    """How many collectives of each kind a graph has for weights and gradients, and what a rank gets from the others by
    them, in bytes."""
    found = {}
    for name, of in {"gathers": weight_gathers, "exchanges": gradient_exchanges}.items():
        calls = [collective.collective for collective in of(captured)]
        results = [value for call in calls for value in flattened(trace.fake_value(call))]
        found[name] = [len(calls), sum(x.nbytes for x in results) * (world.size - 1) // world.size]
    return found


def flattened(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else list(value)


@check
def a_graph_of_other_statics(world: World) -> Any:
    """What each rank is told where they ask for graphs of one program with different statics, or constants."""
    recorder = FakeRecorder() if DEVICE.type == "cpu" else None
    runtime = Runtime(CompileConfig("step"), DEVICE, recorder=recorder, mesh={"fsdp": world.size}, peers=world)
    scaled = runtime.program("scaled", lambda inputs, by: {"y": inputs.user["x"] * by}, Inputs())
    constants = {"shift": world.rank + 1}
    shifted = runtime.program("shifted", lambda inputs: {"y": inputs.user["x"] + 1}, Inputs(), constants=constants)
    x = torch.ones(2, device=DEVICE)
    same = scaled({"x": x}, by=2)["y"].tolist()
    messages = []
    for call in (lambda: scaled({"x": x}, by=3 + world.rank), lambda: shifted({"x": x})):
        try:
            call()
        except LockstepError as error:
            messages.append(str(error))
    runtime.close()
    return on_all(world, (same, *messages))


@check
def ranks_apart(world: World) -> Any:
    """What each is told where one asks for a graph that the other does not need."""
    try:
        world.require_same("the graph f()", dict) if world.rank else world.gather(True)
        message = ""
    except LockstepError as error:
        message = str(error)
    return on_all(world, message)


@check
def an_update_that_is_put_back(world: World) -> Any:
    """Bytes that its check copies for each weight of a shard, before the first update and after it; of micro-batches
    that gather weights, too. All is left as it was."""
    found, snapshot, copied = [], against_eager.Snapshot, list[int]()

    class Counted(snapshot):  # type: ignore[valid-type,misc]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            copied.append(self.nbytes)

    against_eager.Snapshot = Counted  # type: ignore[misc]
    for dtype, stage in ((torch.bfloat16, 2), (torch.float32, 2), (torch.bfloat16, 3)):
        if DEVICE.type == "cuda" and dtype == torch.float32:
            continue
        runtime = Runtime(CompileConfig("step"), DEVICE, mesh={"fsdp": world.size}, peers=world)
        model = decoder(dtype)
        trainer = Trainer(model, OPTIMIZER, LossConfig(), world=world, runtime=runtime, zero_stage=stage)
        for updated in (False, True):
            if updated:
                trainer.flat.grad.copy_(trainer.optimizer.local_state()["master"])  # 0 where they are
                assert trainer.optim_step(1e-2).applied
            before = [tensor.clone() for tensor in _held(trainer)]
            cases = trainer.check_cases([BatchShape(64, 32, 4, 64)], FILTERED, check_parity=True)
            copied.clear()
            check_against_eager(runtime, [w for w in cases if w[0].name == "optim_step"], "strict")
            found.append((sum(copied) / trainer.flat.layout.size, all(map(torch.equal, _held(trainer), before))))
        runtime.close()
    against_eager.Snapshot = snapshot  # type: ignore[misc]
    return on_all(world, found)


def _held(trainer: Trainer) -> list[Tensor]:
    state = trainer.optimizer.local_state().values()
    return [trainer.flat.data, trainer.flat.grad, *state, *(p.data for p in trainer.model.parameters())]


@check
def a_graph_that_is_wrong_on_one_rank(world: World) -> Any:
    """The check before the first step passes; then eager's update is another on the last rank, always and of tiny
    gradients alone: all ranks are told. Of the weights that are gathered nothing is copied to be put back."""
    runtime = Runtime(CompileConfig("step"), DEVICE, mesh={"fsdp": world.size}, peers=world)
    trainer = Trainer(decoder(), OPTIMIZER, LossConfig(), world=world, runtime=runtime)
    shapes = [BatchShape(64, 32, 4, 64)]
    cases, copied = trainer.check_cases(shapes, FILTERED, check_parity=True), list[int]()
    work = [w for w in cases if w[0].name in ("optim_step", "gather_weights")]
    snapshot = comparison.Snapshot
    comparison.Snapshot = lambda tensors: copied.append(0) or snapshot(tensors)  # type: ignore[assignment,misc]
    verdict, _ = check_against_eager(runtime, work, "strict")
    comparison.Snapshot = snapshot  # type: ignore[misc]
    assert len(copied) == verdict.cases
    function = trainer.programs.by_name["optim_step"]
    body, messages = function.body, []
    for least in (0.0, 1e-6):

        def wrong(inputs: Inputs, least: float = least) -> Any:
            rate = inputs.buffer["lr"]
            odd = world.rank == 1 and bool(inputs.grad["grad"].abs().max() < (least or torch.inf))
            return body(replace(inputs, buffer={**inputs.buffer, "lr": 2 * rate}) if odd else inputs)

        function.body = wrong
        try:
            check_against_eager(runtime, work, "strict")
        except GraphError as error:
            messages.append(str(error))
    return on_all(world, [verdict.cases, *messages])
