"""Updates of two ranks: gradients, weights and statistics are those of one process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_recorder import FakeRecorder
from rank_setup import (
    DEVICE,
    DTYPE,
    FILTERED,
    MOE,
    ONE_SIZE,
    OPTIMIZER,
    alone,
    check,
    decoder,
    different,
    on_all,
    parts,
    run,
    saved,
)
from small import of_one_shape

from lockstep import distributed
from lockstep.config import (
    CompileConfig,
    LossConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
)
from lockstep.distributed import ONE_PROCESS, World
from lockstep.errors import InputError
from lockstep.graph import Runtime, Store, build_in_parallel, check_against_eager, digest
from lockstep.ops.linear import choice as linear_choice
from lockstep.rl.loop import Loop
from lockstep.session import warm_up as session_warm_up
from lockstep.session.build import build, resolve, resolve_device
from lockstep.trainer import BatchShape, Trainer, optimizer
from lockstep.types import RolloutGroup


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
    trainer = of_one_shape(Trainer(decoder(), optimizer, loss, world=world, runtime=runtime))
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
    cases = trainer.check_cases([BatchShape(64, 32, 4, 64)], FILTERED, check_parity=True)
    (verdict,) = check_against_eager(runtime, [w for w in cases if w[0].name == "reference_logprobs"], "strict")
    log = [line for lines in runtime.builder.logs.values() for line in lines]
    runtime.close()
    parts = on_all(world, sum(held.values.numel() for of in trainer.reference.own_ranges().values() for held in of))
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
    """Two steps of two updates: a critic whose rewards are less the divergence a token, of two mini-batches, and
    dynamic sampling."""
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
            made = replace(config, loss=loss, trainer=replace(config.trainer, num_mini_batches=1 + (name == "ppo")))
            one = world.broadcast_from_first(lambda made=made: stepped(made, ONE_PROCESS, whole=True))
            metrics, replaced, sampled, *weights = one
            if not world.is_first:  # it has not all of each group
                replaced, sampled = ([[group[:1] for group in step] for step in steps] for steps in (replaced, sampled))
            unlike = different(stepped(made, world, world.is_first), [metrics, replaced, sampled, *weights])
            found[name] = on_all(world, [unlike, sum(map(len, replaced)), metrics[1]["kl"]])
    return found


@check
def balanced_experts(world: World) -> Any:
    """In steps of two mini-batches, of ranks that check no parity, and of one process that does: what is saved."""
    if DEVICE.type != "cpu":
        return None

    def after_steps(config: RunConfig, others: World) -> dict[str, torch.Tensor]:
        loop = Loop(config, build(resolve(config, others.size), others))
        for step in range(2):
            loop.step(step)
        return saved(loop.run.trainer)[0]

    with tempfile.TemporaryDirectory() as folder:
        config = replace(of_a_run(Path(folder)), arch="tiny-glm4-moe")
        optimizer = replace(config.optimizer, router_bias_rate=0.01)
        config = replace(config, optimizer=optimizer, trainer=replace(config.trainer, num_mini_batches=2))
        one = world.broadcast_from_first(lambda: after_steps(config, ONE_PROCESS))
        two = after_steps(replace(config, parity="off"), world)
    assert one.keys() == two.keys()
    return on_all(world, [name for name in one if not torch.equal(one[name], two[name])])


@check
def worked_examples(world: World) -> Any:
    """Of an environment that answers each process otherwise, as a service may: they are the first rank's."""
    if DEVICE.type != "cpu":
        return None
    with tempfile.TemporaryDirectory() as here:
        folder = Path(world.broadcast_from_first(lambda: here))
        config = of_a_run(folder)
        (folder / "search.py").write_text(SEARCH)
        world.gather(None)  # its files are there
        task = replace(config.task, environment=f"{folder / 'search.py'}:Search", max_turns=2)
        trainer = replace(config.trainer, warmup_steps=1, warmup_batch_size=4, max_tokens_per_micro_batch=256)
        config = replace(config, task=task, trainer=trainer)
        loop = Loop(config, build(resolve(config, world.size), world))
        found = on_all(world, loop.warmup_step(0).loss)
        world.gather(None)  # nobody needs the folder
    return found


SEARCH = """
import os
from lockstep.environments import Environment, End

class Search(Environment):
    def step(self, turn):
        return End(1.0) if "end" in turn.text else " result" * (1 + 9 * int(os.environ["RANK"]))

    @classmethod
    def worked_turns(cls, row, worked_example):
        return ["look", "end"]
"""


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


@check
def graphs_made_side_by_side(world: World) -> Any:
    """By one process, by both at the same time, and as both have stored them; and parts of which one fails."""
    if DEVICE.type != "cpu":
        return None  # kernels are compiled there, too
    found, both = [], (session_warm_up._make_trainer_graphs, session_warm_up._make_generator_graphs)
    with tempfile.TemporaryDirectory() as here:
        folder = Path(world.broadcast_from_first(lambda: here))
        config = replace(of_a_run(folder), compile=CompileConfig("step", verify="off"))
        world.gather(None)  # its files are there

        for kept, together in (("alone", True), ("both", False), ("both", False)):
            session = build(resolve(config, world.size), world)
            runtime, parts = session.runtime, [partial(make, session) for make in both]
            runtime.builder.store = Store(folder / kept)
            if together:
                parts = [partial(session_warm_up._make_all, parts)]
            session_warm_up.make_ready(session, parts, list, None)
            graphs = {f"{p.name} {key}": digest(g.captured) for p in runtime.programs for key, g in p.graphs.items()}
            counts = runtime.captures, runtime.loaded, len(runtime.builder.prebuilt)
            found.append([graphs, *counts, "trace" in session.timings.seconds])
            runtime.close()
        world.gather(None)  # nobody needs the folder
    try:
        session.runtime.begin_warm_up(world)
        build_in_parallel(session.runtime, [list, partial(resolve_device, "tpu")])
    except InputError as error:
        found.append(str(error))
    return on_all(world, found)


@check
def kernels_named_side_by_side(world: World) -> Any:
    """Of two parts that two processes make: which graphs each asks for, whose kernels it has in the end, as if each
    graph were one, what it loads, and of how many products the check of the machine is rehearsed."""
    if DEVICE.type != "cpu":
        return None  # kernels are compiled there
    made, named, loaded, products = list[str](), dict[str, None](), list[list[str]](), list[int]()

    def noted(request: Any, *arguments: Any) -> Any:
        made.append(request.title)
        named[request.title] = None
        linear_choice.requested.add(("linear", len(named), 8 + world.rank, 8))
        return once(request, *arguments)

    @contextmanager
    def rehearsal(compiles: bool) -> Iterator[Any]:
        yield SimpleNamespace(listed=named, add=lambda others: named.update(dict.fromkeys(others)))

    with tempfile.TemporaryDirectory() as here, pytest.MonkeyPatch.context() as patch:
        folder = Path(world.broadcast_from_first(lambda: here))
        config = replace(of_a_run(folder), compile=CompileConfig("step"))
        world.gather(None)  # its files are there
        session = build(resolve(config, world.size), world)
        once = session.runtime.builder._make_once
        makers = session_warm_up._make_trainer_graphs, session_warm_up._make_generator_graphs
        patch.setattr(session.runtime.builder, "_make_once", noted)
        patch.setattr(session.runtime.warm_up, "rehearsal", rehearsal)
        patch.setattr(session.runtime.warm_up, "preload", lambda kernels: loaded.append([*kernels]))
        patch.setattr(linear_choice, "requested", set())
        session.runtime.begin_warm_up(world)
        parts = [partial(make, session) for make in makers]
        check = lambda: products.append(len(linear_choice.requested))  # noqa: E731
        session_warm_up._prepare_kernels(session, folder / "kernels", parts, check)
        world.gather(None)  # nobody needs the folder
    return on_all(world, [made, named, loaded, products])


def stepped(config: RunConfig, world: World, whole: bool) -> list[Any]:
    """What two steps found, the groups that were replaced in each, what was sampled, and then the weights; `whole`: of
    the groups all, and not only what every rank has."""
    loop = Loop(config, build(resolve(config, world.size), world))
    metrics, replaced, sampled = [], [], []
    for step in range(2):
        found, groups = loop.step(step)
        metrics.append({k: v for k, v in found.items() if k.partition("/")[0] not in ("time", "perf", "memory")})
        metrics[-1].pop("padding_waste")
        replaced.append([of_group(group, whole) for group in loop.excluded_groups])
        sampled.append([of_group(group, whole) for group in groups])
    return [metrics, replaced, sampled, *(p.detach().cpu() for p in loop.run.policy.model.parameters())]


def of_group(group: RolloutGroup, whole: bool) -> Any:
    """What every rank has of a group; `whole`: and all but the seconds that its environment took and the rank that
    sampled it."""
    known = [(r.identity, r.rewards, r.reward, r.advantage, r.length, r.finish_reason) for r in group.rollouts]
    if not whole:
        return [known]
    for segment in (segment for rollout in group.rollouts for segment in rollout.segments):
        segment.wait_s = 0.0
    return [known, asdict(replace(group, sampled_by=None))]


@check
def another_order_of_addition(world: World) -> Any:
    """The mutant: what ranks send is added last rank first."""
    one = alone(world, lambda: Trainer(decoder(), OPTIMIZER, LossConfig()), steps=1)
    exchange = distributed.all_to_all
    distributed.all_to_all = lambda *arguments: exchange(*arguments).flip(0)
    try:
        found = run(Trainer(decoder(), OPTIMIZER, LossConfig(), world=world), world, steps=1)
    finally:
        distributed.all_to_all = exchange
    return on_all(world, different(found, one))


@check
def state_in_one_process(world: World) -> Any:
    """What ranks saved, one process goes on with, and the other way round: the same bits again."""

    def go_on(trainer: Trainer, others: World, state: Any) -> list[Any]:
        trainer.load_state(*state)
        return run(trainer, others, steps=1)

    first = Trainer(decoder(), OPTIMIZER, LossConfig(), world=world)
    run(first, world, steps=1)
    state, apart = saved(first), parts(first)
    one = world.broadcast_from_first(lambda: go_on(Trainer(decoder(), OPTIMIZER, LossConfig()), ONE_PROCESS, state))
    two = go_on(Trainer(decoder(), OPTIMIZER, LossConfig(), world=world), world, state)
    read = world.broadcast_from_first(
        lambda: go_on(Trainer(decoder(), OPTIMIZER, LossConfig()), ONE_PROCESS, (apart, state[1]))
    )
    return on_all(world, different(one, two) + different(one, read))


@check
def offloaded(world: World) -> Any:
    """The optimizer's state in the host's memory, of ranks that go on from what they saved with a part of it on the
    device, and whole on the device."""

    def of_one() -> list[Any]:
        one = Trainer(decoder(torch.bfloat16), OPTIMIZER, LossConfig())
        run(one, ONE_PROCESS, steps=1)
        return run(one, ONE_PROCESS)

    config, chunk = replace(OPTIMIZER, offload=True), optimizer.CHUNK
    optimizer.CHUNK = 5 * 1024
    first, second = (Trainer(decoder(torch.bfloat16), config, LossConfig(), world=world) for _ in range(2))
    optimizer.CHUNK = chunk
    second.optimizer.keep_on_device(6 * second.flat.layout.size)
    assert 0 < second.optimizer.kept_bytes < 6 * second.flat.layout.size
    run(first, world, steps=1)
    second.load_state(parts(first), saved(first)[1])
    return on_all(world, different(run(second, world), world.broadcast_from_first(of_one)))
