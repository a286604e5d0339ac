"""Checks on two ranks: each compares what they do together with one process that runs the same micro-batches, in every
bit. Under torchrun the first rank prints what was found, a JSON object; `ranks.py cuda` does so on two GPUs.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from fake_recorder import FakeRecorder
from processes import PATIENCE
from small import train_groups

from lockstep import distributed, machine
from lockstep.config import (
    CompileConfig,
    GeneratorConfig,
    LossConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
)
from lockstep.distributed import ONE, World, join
from lockstep.environments.ranks.rollouts import COLUMNS, Holders, outline
from lockstep.errors import InputError, LockstepError
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import Captured, GraphError, Runtime, check_against_eager, digest
from lockstep.graph.check import comparison
from lockstep.graph.passes.collectives import gradient_exchanges, weight_gathers
from lockstep.graph.torch_private import trace
from lockstep.models import Decoder, ModelConfig
from lockstep.models.config import MoEConfig
from lockstep.models.init import initialize
from lockstep.rl.loop import Loop
from lockstep.session.build import build, resolve
from lockstep.trainer import BatchShape, Packing, Trainer, optimizer, pack_shards
from lockstep.types import PackedBatch, RolloutGroup, SampleIdentity, SamplingParams, Segment, Trajectory

FILTERED = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, n=3, max_completion_length=9)
OPTIMIZER = OptimizerConfig(weight_decay=0.1)
DEVICE = torch.device("cuda" if sys.argv[1:] == ["cuda"] else "cpu")
SIZES = (97, 48, 64, 2, 4, 2, 16) if DEVICE.type == "cpu" else (4096, 512, 1024, 2, 8, 4, 128)
CONFIG = ModelConfig(*SIZES, rope_theta=1e4, max_position_embeddings=256, family="qwen3")
MOE = replace(CONFIG, moe=MoEConfig(4, num_experts_per_token=2, intermediate_size=SIZES[2] // 2, router_bias=True))
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16

CHECKS: dict[str, Callable[[World], Any]] = {}


def check(function: Callable[[World], Any]) -> Callable[[World], Any]:
    CHECKS[function.__name__] = function
    return function


def decoder(dtype: torch.dtype = DTYPE, config: ModelConfig = CONFIG) -> Decoder:
    model = initialize(Decoder(config, dtype, DEVICE), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    return model


def rollout(model: Decoder, step: int, groups: int = 5) -> list[RolloutGroup]:
    """The same groups on every rank: as many as make shards of unequal size."""
    engine = Engine(SharedWeights(model), GeneratorConfig(), cache_tokens=2048)
    prompts = [[(7 * g + i) % 97 for i in range(3 + 5 * g)] for g in range(groups)]
    identities = [SampleIdentity(0, 0, step, g) for g in range(groups)]
    found = engine.generate(prompts, [FILTERED] * groups, identities)
    return train_groups(prompts, [FILTERED] * groups, found, weight=0.02)


SEVERAL = Packing(44)  # of several sizes
ONE_SIZE = Packing(44, shapes=[BatchShape(44, 32, 16, 44)])  # which a graph is made for once


def batches(groups: list[RolloutGroup], own: list[int], packing: Packing = SEVERAL) -> list[PackedBatch]:
    """Of two shards, of several micro-batches each; the second shard has fewer."""
    packed = pack_shards([groups[::2], groups[1::2]], own, packing, check_parity=True)
    return [batch.to(DEVICE) for batch in packed]


def run(trainer: Trainer, world: World, steps: int = 2, packing: Packing = SEVERAL) -> list[Any]:
    """Accumulated gradients and results of some steps, then weights and state, whole."""
    own = [world.rank] if world.size == 2 else [0, 1]
    seen: list[Any] = []
    for step in range(steps):
        groups = world.from_first(lambda step=step: rollout(trainer.model, step))
        for batch in batches(groups, own, packing):
            if trainer.reference is not None:
                trainer.reference_logprobs(batch)
            if trainer.algorithm.has_critic:
                trainer.values(batch)
                batch.return_C.copy_(batch.old_value_C + batch.advantage_C)
            trainer.forward_backward(batch)
        for batch in batches(groups, own, packing):
            trainer.check(batch)
        seen += [whole(trainer, trainer.flat.grad), trainer.optim_step(1e-2)]
        assert seen[-1].applied and seen[-1].tokens_different == 0, seen[-1]
    weights = [p.detach().cpu() for p in trainer.model.parameters()]
    return [*seen, *weights, *saved(trainer)[0].values()]


def alone(world: World, trainer: Callable[[], Trainer], **options: Any) -> list[Any]:
    """What one process finds, which the first rank does for all."""
    return world.from_first(lambda: run(trainer(), ONE, **options))


def whole(trainer: Trainer, local: Tensor) -> Tensor:
    return trainer.world.gather(trainer.flat.whole(local).cpu().clone())[0]


def saved(trainer: Trainer) -> Any:
    """A checkpoint's contents, on every rank."""
    tensors, numbers = trainer.state()
    return trainer.world.gather(({name: tensor.cpu().clone() for name, tensor in tensors.items()}, numbers))[0]


def parts(trainer: Trainer) -> dict[str, Any]:
    """What each rank has of them, by rank, and what all have alike."""
    own, alike, _ = trainer.local_state()
    found = trainer.world.gather({name: tensor.cpu().clone() for name, tensor in own.items()})
    return {name: [part[name] for part in found] for name in own} | {n: x.cpu().clone() for n, x in alike.items()}


def different(a: list[Any], b: list[Any]) -> list[int]:
    assert len(a) == len(b)
    pairs = enumerate(zip(a, b, strict=True))
    return [i for i, (x, y) in pairs if not (torch.equal(x, y) if isinstance(x, Tensor) else x == y)]


def on_all(world: World, found: Any) -> list[Any]:
    return world.gather(found)


@check
def float32(world: World) -> Any:
    kind = DTYPE  # a GPU computes in bfloat16 alone
    one = alone(world, lambda: Trainer(decoder(kind), OPTIMIZER, LossConfig()))
    return on_all(world, different(run(Trainer(decoder(kind), OPTIMIZER, LossConfig(), world=world), world), one))


@check
def bfloat16(world: World) -> Any:
    """Of weights that are gathered."""
    kind = torch.bfloat16
    one = alone(world, lambda: Trainer(decoder(kind), OPTIMIZER, LossConfig()))
    gathers = Trainer(decoder(kind), OPTIMIZER, LossConfig(), world=world, zero_stage=3)
    return on_all(world, different(run(gathers, world), one))


@check
def experts(world: World) -> Any:
    optimizer, loss = replace(OPTIMIZER, router_bias_rate=0.01), LossConfig()
    one, unlike = alone(world, lambda: Trainer(decoder(config=MOE), optimizer, loss)), []
    for stage in (2, 3):
        trainer = Trainer(decoder(config=MOE), optimizer, loss, world=world, zero_stage=stage)
        unlike += different(run(trainer, world), one)
    return on_all(world, unlike)


@check
def parameter_groups(world: World) -> Any:
    """Frozen parameters and other rates, by ratios of whole sequences; of graphs on the ranks and eager in one
    process."""
    optimizer = replace(
        OPTIMIZER, freeze=("model.layers.0",), lr_scales=("model.norm=3",), weight_decays=("*_proj=0.2",)
    )
    start, loss = decoder(), LossConfig("gspo", epsilon=1e-3)
    one = alone(world, lambda: Trainer(decoder(), optimizer, loss), packing=ONE_SIZE)
    recorder = FakeRecorder() if DEVICE.type == "cpu" else None
    config = CompileConfig("step", cudagraph_mode="full")
    runtime = Runtime(config, DEVICE, recorder=recorder, mesh={"fsdp": world.size}, peers=world)
    trainer = Trainer(decoder(), optimizer, loss, world=world, runtime=runtime)
    unlike = different(run(trainer, world, packing=ONE_SIZE), one)
    runtime.close()
    now = dict(trainer.model.named_parameters())
    kept = [name for name, parameter in start.named_parameters() if torch.equal(parameter, now[name])]
    return on_all(world, [unlike, len(trainer.optimizer.groups), kept])


@check
def a_teacher(world: World) -> Any:
    """Of which each rank has a part; graphs of it, which gather it layer by layer, are held to eager's."""
    loss, teacher = LossConfig("distillation", teacher="a folder"), decoder()
    with torch.no_grad():
        teacher.embed.mul_(0.5)
    one = alone(world, lambda: Trainer(decoder(), OPTIMIZER, loss, reference=teacher))
    found = run(Trainer(decoder(), OPTIMIZER, loss, reference=teacher, world=world), world)
    runtime = Runtime(CompileConfig("step"), DEVICE, mesh={"fsdp": world.size}, peers=world)
    trainer = Trainer(decoder(), OPTIMIZER, loss, reference=teacher, world=world, runtime=runtime)
    cases = trainer.trust_cases([BatchShape(64, 32, 4, 64)], FILTERED, check_parity=True)
    (verdict,) = check_against_eager(runtime, [w for w in cases if w[0].name == "reference_logprobs"], "strict")
    log = [line for lines in runtime.builder.nodes.values() for line in lines]
    runtime.close()
    parts = on_all(world, sum(held.values.numel() for of in trainer.reference.own().values() for held in of))
    whole = sum(parameter.numel() for parameter in teacher.parameters())
    return [*on_all(world, different(found, one)), sum(parts) == whole, verdict.cases, on_all(world, log)[0]]


@check
def a_critic(world: World) -> Any:
    """Of graphs on the ranks and eager in one process."""
    loss = LossConfig("ppo")
    one = alone(world, lambda: Trainer(decoder(), OPTIMIZER, loss), packing=ONE_SIZE)
    runtime = Runtime(CompileConfig("step"), DEVICE, mesh={"fsdp": world.size}, peers=world)
    found = run(Trainer(decoder(), OPTIMIZER, loss, world=world, runtime=runtime), world, packing=ONE_SIZE)
    runtime.close()
    return on_all(world, different(found, one))


@check
def whole_steps(world: World) -> Any:
    """Two steps of two updates: a critic whose rewards are less the divergence a token, and dynamic sampling."""
    if DEVICE.type != "cpu":
        return None  # it is of what the host decides; the device's part the others hold
    losses = {
        "ppo": LossConfig("ppo", beta=0.2, use_kl_in_reward=True, kl_estimator="k1"),
        "reinforce_pp": LossConfig("reinforce_pp", beta=0.2, use_kl_in_reward=True, kl_estimator="k1"),
        "dapo": LossConfig("dapo", dynamic_sampling=True, max_num_gen_batches=4),
    }
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        config = of_a_run(Path(folder))
        for name, loss in losses.items():
            made = replace(config, loss=loss)
            both = [stepped(made, others, world.first) for others in (ONE, world)]
            metrics, replaced = both[0][:2]
            found[name] = on_all(world, [different(*both), sum(map(len, replaced)), metrics[1]["kl"]])
    return found


def of_a_run(folder: Path) -> RunConfig:
    """Every second prompt's samples are all rewarded alike."""
    (folder / "rewards.py").write_text(
        "def some(prompts, completion_ids, **_):\n"
        "    pairs = zip(prompts, completion_ids)\n"
        "    return [bool(len(p) % 4) * sum(t % 2 for t in ids) / len(ids) for p, ids in pairs]\n"
    )
    lines = [json.dumps({"prompt": "hello " * (1 + i % 4)}) for i in range(64)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    data, reward = str(folder / "data.jsonl"), f"{folder / 'rewards.py'}:some"
    return RunConfig(
        recipe="dataset",
        device=DEVICE.type,
        task=TaskConfig("dataset", data=data, reward=(reward,), validation_prompts=0),
        sampling=SamplingConfig(num_generations=4, max_completion_length=8, temperature=0.8),
        trainer=TrainerConfig(prompts_per_step=4, num_iterations=2, max_tokens_per_micro_batch=80),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        compile=CompileConfig("none"),
        parallel=ParallelConfig(batch_shards=2),
    )


def stepped(config: RunConfig, world: World, whole: bool) -> list[Any]:
    """What two steps found, the groups that were replaced in each, what was sampled, and then the weights; `whole`: of
    the groups all, and not only what every rank has."""
    loop = Loop(config, build(resolve(config, world.size), world))
    metrics, replaced, sampled = [], [], []
    for step in range(2):
        found, groups = loop.step(step)
        metrics.append({k: v for k, v in found.items() if k.partition("/")[0] not in ("time", "perf", "memory")})
        metrics[-1].pop("padding_waste")
        replaced.append([of_group(group, whole) for group in loop.replaced])
        sampled.append([of_group(group, whole) for group in groups])
    return [metrics, replaced, sampled, *(p.detach().cpu() for p in loop.run.policy.model.parameters())]


def of_group(group: RolloutGroup, whole: bool) -> Any:
    """All of a group but the seconds that its environment took and the rank that sampled it."""
    if not whole:
        return [(r.identity, r.rewards, r.reward, r.advantage, r.length, r.finish_reason) for r in group.rollouts]
    for segment in (segment for rollout in group.rollouts for segment in rollout.segments):
        segment.wait_s = 0.0
    return asdict(replace(group, sampled_by=None))


@check
def another_order_of_addition(world: World) -> Any:
    """The mutant: what ranks send is added last rank first."""
    one = alone(world, lambda: Trainer(decoder(), OPTIMIZER, LossConfig()), steps=1)
    exchange = distributed.exchange
    distributed.exchange = lambda *arguments: exchange(*arguments).flip(0)
    try:
        found = run(Trainer(decoder(), OPTIMIZER, LossConfig(), world=world), world, steps=1)
    finally:
        distributed.exchange = exchange
    return on_all(world, different(found, one))


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
        log = [line for title, lines in runtime.builder.nodes.items() if "forward_backward" in title for line in lines]
        found[name] = {"different": on_all(world, unlike), "digests": on_all(world, made), "log": log}
        found[name]["captures"] = on_all(world, runtime.captures)
        traces = trainer.programs.by_name["forward_backward"].made.traces.values()  # the first rank has them for all
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
def a_graph_that_is_wrong_on_one_rank(world: World) -> Any:
    """The check before the first step passes; then eager's update is another on the last rank: all ranks are told. Of
    the weights that are gathered nothing is copied to be put back."""
    runtime = Runtime(CompileConfig("step"), DEVICE, mesh={"fsdp": world.size}, peers=world)
    trainer = Trainer(decoder(), OPTIMIZER, LossConfig(), world=world, runtime=runtime)
    shapes = [BatchShape(64, 32, 4, 64)]
    cases, copied = trainer.trust_cases(shapes, FILTERED, check_parity=True), list[int]()
    work = [w for w in cases if w[0].name in ("optim_step", "gather_weights")]
    snapshot = comparison.Snapshot
    comparison.Snapshot = lambda tensors: copied.append(0) or snapshot(tensors)  # type: ignore[assignment,misc]
    verdict, _ = check_against_eager(runtime, work, "strict")
    comparison.Snapshot = snapshot  # type: ignore[misc]
    assert len(copied) == verdict.cases
    if world.rank == 1:
        function = trainer.programs.by_name["optim_step"]
        body = function.body
        function.body = lambda inputs: body(replace(inputs, buffer={**inputs.buffer, "lr": 2 * inputs.buffer["lr"]}))
    try:
        check_against_eager(runtime, work, "strict")
    except GraphError as error:
        return on_all(world, [verdict.cases, str(error)])


@check
def a_flipped_bit_on_one_rank(world: World) -> Any:
    model = decoder()
    trainer = Trainer(model, OPTIMIZER, LossConfig(), world=world)
    groups = rollout(model, 0)
    before = trainer.flat.data.clone()
    for batch in batches(groups, [world.rank]):
        if world.rank == 1 and batch.sequences:
            batch.old_logprob_C.view(torch.int32)[2] ^= 1
        trainer.forward_backward(batch)
        break
    result = trainer.optim_step(1e-2)
    named = [(m.request, m.position, m.kind) for m in result.mismatches]
    kept = torch.equal(trainer.flat.data, before) and not trainer.flat.grad.any()
    bit = 0 < result.logprob_diff_max < 1e-5
    return on_all(world, [result.applied, result.tokens_different, bit, named, kept])


@check
def a_loss_that_is_not_finite_on_one_rank(world: World) -> Any:
    model = decoder()
    trainer = Trainer(model, OPTIMIZER, LossConfig(), world=world)
    before = trainer.flat.data.clone()
    batch = batches(rollout(model, 0), [world.rank])[0]
    if world.rank == 1:
        batch.weight_C[0] = math.nan
    trainer.forward_backward(batch)
    result = trainer.optim_step(1e-2)
    return on_all(world, [result.applied, result.finite, torch.equal(trainer.flat.data, before)])


@check
def state_in_one_process(world: World) -> Any:
    """What ranks saved, one process goes on with, and the other way round: the same bits again."""

    def go_on(trainer: Trainer, others: World, state: Any) -> list[Any]:
        trainer.load_state(*state)
        return run(trainer, others, steps=1)

    first = Trainer(decoder(), OPTIMIZER, LossConfig(), world=world)
    run(first, world, steps=1)
    state, apart = saved(first), parts(first)
    one = world.from_first(lambda: go_on(Trainer(decoder(), OPTIMIZER, LossConfig()), ONE, state))
    two = go_on(Trainer(decoder(), OPTIMIZER, LossConfig(), world=world), world, state)
    read = world.from_first(lambda: go_on(Trainer(decoder(), OPTIMIZER, LossConfig()), ONE, (apart, state[1])))
    return on_all(world, different(one, two) + different(one, read))


@check
def offloaded(world: World) -> Any:
    """The optimizer's state in the host's memory, of ranks that go on from what they saved, and on the device."""

    def of_one() -> list[Any]:
        one = Trainer(decoder(torch.bfloat16), OPTIMIZER, LossConfig())
        run(one, ONE, steps=1)
        return run(one, ONE)

    config, chunk = replace(OPTIMIZER, offload=True), optimizer.CHUNK
    optimizer.CHUNK = 5 * 1024
    first, second = (Trainer(decoder(torch.bfloat16), config, LossConfig(), world=world) for _ in range(2))
    optimizer.CHUNK = chunk
    run(first, world, steps=1)
    second.load_state(parts(first), saved(first)[1])
    return on_all(world, different(run(second, world), world.from_first(of_one)))


@check
def brought_rollouts(world: World) -> Any:
    """Groups of two turns and two branches with experts' digests, each sampled by a rank and brought to a rank, and
    then to the first: whether they are whole where they were brought, and what reading others raises."""
    whole = [sampled_group(g) for g in range(6)]
    sampled = world.share(lambda: [g for g in whole if g.sampled_by == world.rank], lambda own: list(map(outline, own)))
    groups = sorted((group for of_rank in sampled for group in of_rank), key=lambda group: group.group)
    holders, found = Holders(world), []
    for _ in range(2):  # the second time nothing travels
        holders.bring((group, [group.group // 2 % 2]) for group in groups)
    for group, expected in zip(groups, whole, strict=True):
        try:
            here: Any = words_of(group) == words_of(expected)
        except RuntimeError as error:
            here = str(error)
        found.append([world.rank in (group.sampled_by, group.group // 2 % 2), here])
    holders.bring_to_first(groups)()
    return on_all(world, [found, [asdict(a) == asdict(b) for a, b in zip(groups, whole, strict=True)]])


def words_of(group: RolloutGroup) -> list[Any]:
    return [list(getattr(s, name) or ()) for r in group.rollouts for s in r.segments for name in COLUMNS]


def sampled_group(number: int) -> RolloutGroup:
    """Of two samples, whose prompt is the same; every word is another."""
    words = iter(range(1000 * number, 1000 * number + 999))

    def take(count: int) -> list[int]:
        return [next(words) for _ in range(count)]

    def segment(count: int, sampled: bool, **more: Any) -> Segment:
        logs = [[-1 / (1 + n) for n in take(count)] for _ in range(2)] if sampled else [None, None]
        logs = [log and torch.tensor([*log[1:], -math.inf]).tolist() for log in logs]
        versions = [7] * count if sampled else None
        return Segment(take(count), sampled, *logs, versions, take(count), f"text {number}", **more)  # type: ignore[arg-type]

    prompt, routes = take(3 + number), take(3 + number)
    rollouts = [
        Trajectory(
            [Segment(list(prompt), route_digests=list(routes)), segment(4, True), segment(2, False, anew=sample == 1)]
            + [segment(3, True, rewards={"own": 1.0})],
            identity=SampleIdentity(0, 0, 0, number, sample),
            extra={"note": number},
        )
        for sample in range(2)
    ]
    return RolloutGroup(rollouts, FILTERED, number, f"prompt {number}", {"row": number}, sampled_by=number % 2)


@check
def made_once(world: World) -> Any:
    """Bytes that a rank receives of what the first makes, from collectives of either kind."""
    from torch.distributed import distributed_c10d as c10d

    received: list[int] = []
    broadcast, all_gather = c10d.broadcast, c10d.all_gather
    c10d.broadcast = lambda x, *a, **k: (received.append(x.nbytes), broadcast(x, *a, **k))[1]
    c10d.all_gather = lambda xs, *a, **k: (received.append(sum(x.nbytes for x in xs)), all_gather(xs, *a, **k))[1]
    try:
        found = world.made_once(lambda: b"graph" * 200_000, bytes, bytes)
    finally:
        c10d.broadcast, c10d.all_gather = broadcast, all_gather
    return on_all(world, [found == b"graph" * 200_000, sum(received)])


@check
def agreement(world: World) -> Any:
    """What one rank raises, all raise, and the first reports; ranks that differ are refused by name."""

    def fails() -> None:
        if world.rank == 1:
            raise InputError("row 7 is bad")

    found = []
    for call in (
        lambda: world.share(fails),
        lambda: world.same("these ranks", lambda: {"alike": 1, "torch": f"2.{world.rank}"}),
        lambda: world.from_first(lambda: 1 // 0),
    ):
        try:
            call()
        except LockstepError as error:
            found.append([type(error).__name__, str(error), getattr(error, "reported", None)])
        except ZeroDivisionError as error:
            found.append([type(error).__name__, getattr(error, "reported", None)])
    found.append(world.from_first(lambda: world.rank))
    return on_all(world, found)


class Left(FakeRecorder):
    """Of a runtime that nobody closes."""

    closed = False

    def close(self) -> None:
        self.closed = True


class Cycle:
    """Of graphs whose runtime is gone."""

    def __init__(self) -> None:
        self.itself = self


def checked() -> dict[str, Any]:
    """What each check found, on each rank."""
    machine.own_gpu()
    world = join(ParallelConfig(timeout=PATIENCE), DEVICE.type)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, function in CHECKS.items():
        try:
            found[name] = function(world)
        except Exception:
            print(traceback.format_exc(), file=sys.stderr)
            raise
    full = CompileConfig("step", cudagraph_mode="full")
    left = Runtime(full, DEVICE, recorder=Left(), mesh={"fsdp": world.size}, peers=world)
    gone, first = weakref.ref(Cycle()), world.first
    world.close()
    assert gone() is None
    assert left.recorder is not None and left.recorder.closed  # type: ignore[attr-defined]
    return found if first else {}


if __name__ == "__main__":
    if of_the_first := checked():
        print(json.dumps(of_the_first))
