"""Generation by ranks that share a model: in every bit that of one process, whatever is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import PATIENCE, on_ranks
from small import two_layers
from torch import Tensor

from lockstep import ops
from lockstep.config import (
    CompileConfig,
    GeneratorConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
)
from lockstep.distributed import ONE_PROCESS, World, collectives, join, join_generator_groups
from lockstep.errors import InputError, LockstepError
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import EAGER, Runtime
from lockstep.models import Decoder, ModelConfig, ResidentWeights, load_part, ranges_of
from lockstep.models.checks import require_divisible
from lockstep.models.init import ARCHITECTURES, architecture, initialize
from lockstep.rl.loop import Loop
from lockstep.session.build import build
from lockstep.session.memory import measure_memory
from lockstep.session.warm_up import warm_up
from lockstep.types import SampleIdentity, SamplingParams

# Of the cases together: prompts in chunks, samples that are preempted, prefixes found again, new weights, and each kind
# of sampling; words by collectives, and pushed (which on a CPU are collectives behind one operator).
CASES = [
    ("tiny", torch.float32, "step", 80, True),
    ("tiny-qwen3-moe", torch.bfloat16, "none", 400, False),
    ("tiny-deepseek-v3", torch.float32, "none", 80, True),
    ("tiny-gpt-oss", torch.bfloat16, "none", 80, False),
    ("tiny-olmo2", torch.float32, "none", 256, False),
]
SMALL = GeneratorConfig(max_num_seqs=5, page_size=16, max_num_batched_tokens=24, steps_per_sync=4)


def decoder(arch: str, dtype: torch.dtype) -> Decoder:
    """Two layers of random weights that make the tokens differ from one another, norms and biases among them."""
    model = initialize(Decoder(two_layers()[arch], dtype), 0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4) if p.dim() > 1 else p.add_(torch.empty(p.shape).normal_(0, 0.3, generator=draw))
    return model


def generated(
    model: Decoder, weights: Callable[[Callable[[], int]], SharedWeights], tokens: int, runtime: Runtime = EAGER
) -> list[Any]:
    """What two rounds make, of which the second is by other weights; at last how many samples were preempted."""
    version = [0]
    engine = Engine(weights(lambda: version[0]), SMALL, tokens, runtime=runtime)
    prompts = [[(7 * g + i) % 97 for i in range(3 + 17 * g)] for g in range(3)]
    prompts.append(prompts[-1])  # found again
    kinds = [SamplingParams(n=2, max_completion_length=11 + g, ignore_eos=True) for g in range(4)]
    kinds[1] = replace(kinds[1], temperature=0.0)
    kinds[2] = replace(kinds[2], temperature=0.8, top_p=0.9, top_k=20)
    found: list[Any] = []
    for version[0] in range(2):
        made = engine.generate(prompts, kinds, [SampleIdentity(0, 0, version[0], g) for g in range(4)])
        found += [asdict(trajectory) for group in made for trajectory in group]
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.02)
    return [*found, engine.scheduler.preemptions]


class Parts(SharedWeights):
    """A rank's part of a model, with the values that the whole has by now."""

    def __init__(self, whole: Decoder, world: World, version: Callable[[], int]) -> None:
        self._source = ResidentWeights(whole)
        model = load_part(self._source, whole.embed.dtype, "cpu", world.generator_mesh)
        super().__init__(model, version)

    @property
    def version(self) -> int:
        self._source.fill(ranges_of(self.model))
        return super().version


def alone(arch: str, dtype: torch.dtype, _: str, tokens: int, __: bool) -> list[Any]:
    """What one process makes in a case."""
    model = decoder(arch, dtype)
    return generated(model, lambda version: SharedWeights(model, version), tokens)


def differing(
    one: list[Any], world: World, arch: str, dtype: torch.dtype, capture: str, tokens: int, pushes: bool
) -> tuple[int, int]:
    """How many samples differ from those of one process, and how many were preempted."""
    world = replace(world, pushes=pushes)
    config = CompileConfig(capture, cudagraph_mode="none")  # type: ignore[arg-type]
    runtime = Runtime(config, torch.device("cpu"), mesh=world.sizes, peers=world)
    model, (*one, preempted) = decoder(arch, dtype), one
    *several, again = generated(model, partial(Parts, model, world), tokens, runtime)
    assert preempted == again
    return sum(a != b for a, b in zip(one, several, strict=True)), preempted


ENVIRONMENT = """
import random, time
from lockstep.environments import End, Environment

class Asks(Environment):
    "Two turns, whose answers come in any order."

    def step(self, turn):
        self.turns = getattr(self, "turns", 0) + 1
        time.sleep(random.random() / 50)
        return " and?" if self.turns == 1 else self.cut()

    def cut(self):
        return End({"own": float(self.turns)}, functions=True)
"""
REWARD = """
def low(completion_ids, **_):
    return [sum(t < 300 for t in ids) / len(ids) for ids in completion_ids]

def fails(completion_ids, **_):
    raise ValueError("no reward today")
"""


def of_a_run(folder: Path, turns: int, reward: str) -> RunConfig:
    several = {"environment": f"{folder / 'own.py'}:Asks", "max_turns": turns, "environment_timeout": 0.0}
    reward, data = f"{folder / 'own.py'}:{reward}", str(folder / "data.jsonl")
    return RunConfig(
        recipe="dataset",
        device="cpu",
        task=TaskConfig("dataset", data=data, reward=(reward,), validation_prompts=0, **(several if turns > 1 else {})),
        sampling=SamplingConfig(num_generations=4, max_completion_length=7, top_p=0.9),
        trainer=TrainerConfig(prompts_per_step=4, max_tokens_per_micro_batch=100),
        generator=GeneratorConfig(max_num_seqs=6, kv_cache_tokens=256, page_size=16),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        parallel=ParallelConfig(batch_shards=2, generator_tp=2),
        compile=CompileConfig("none"),
    )


def stepped(folder: Path, turns: int, world: World, reward: str = "low") -> list[Any]:
    """What two steps of a run sampled and found, and the weights after them."""
    config = of_a_run(folder, turns, reward)
    if world is ONE_PROCESS:
        config = replace(config, parallel=ParallelConfig(batch_shards=2))
    loop = Loop(config, build(config, world))
    found: list[Any] = []
    for step in range(2):
        metrics, groups = loop.step(step)
        assert metrics["parity/tokens_different"] == 0 and metrics["grad_norm"] > 0
        found += [metrics["loss"], metrics["grad_norm"], metrics["reward/mean"]]
        if world.is_first:  # it has all of them
            found += [
                (r.rewards, [(s.token_ids, s.logprobs, s.model_logprobs) for s in r.segments])
                for g in groups
                for r in g.rollouts
            ]
    run = loop.run
    of_plan = {name: round(size / 2**30, 3) for name, size in run.plan.terms.items()}
    of_run = measure_memory(run.trainer, run.engine.cache, run.runtime)
    assert of_run.keys() >= {"weights", "moments", "gradients", "KV cache"}
    assert {name: of_plan[name] for name in of_run} == of_run
    return [*found, world.gather(run.trainer.state()[0]["master"])[0]]


def warmed(folder: Path, world: World) -> list[str]:
    """The functions that have graphs before the first of several updates a batch, between which a head is gathered."""
    config = of_a_run(folder, 1, "low")
    config = replace(
        config, trainer=replace(config.trainer, num_iterations=2), compile=CompileConfig("step", verify="off")
    )
    run = build(config, world)
    warm_up(run)
    return sorted({program.name for program in run.runtime.programs if program.graphs})


def runs(folder: Path) -> dict[str, Any]:
    """Steps of one turn and of two, and of a reward that fails on the rank that scores."""
    world = join(ParallelConfig(generator_tp=2, timeout=PATIENCE), "cpu")
    torch.set_num_threads(1)
    ARCHITECTURES.update(two_layers())
    found: dict[str, Any] = {f"{turns} turns": stepped(folder, turns, world) for turns in (1, 2)}
    try:
        stepped(folder, 2, world, reward="fails")
    except LockstepError as error:
        found["fails"] = str(error)
    found["graphs"] = warmed(folder, world)
    world.close()
    return found


def assert_same(one: list[Any], other: list[Any]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.usefixtures("shallow_models")
def test_runs_on_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    prompts = [json.dumps({"prompt": "hello " * (1 + i % 4)}) for i in range(9)]
    (tmp_path / "own.py").write_text(REWARD + ENVIRONMENT)
    (tmp_path / "data.jsonl").write_text("\n".join(prompts))
    several = on_ranks(2, runs, tmp_path)
    for turns in (1, 2):
        one = stepped(tmp_path, turns, ONE_PROCESS)
        first, second = (found[f"{turns} turns"] for found in several)
        assert_same(one, first)
        assert_same([value for value in one if not isinstance(value, tuple)], second)
    assert all("no reward today" in found["fails"] for found in several)
    made = ["check", "decode", "forward_backward", "gather_weights", "mixed", "optim_step"]
    assert [found["graphs"] for found in several] == [made, made]


def every_case() -> dict[str, Any]:
    world = join(ParallelConfig(generator_tp=2, timeout=PATIENCE), "cpu")
    torch.set_num_threads(1)
    wrong, right = ("tiny", torch.float32, "none", 400, False), collectives._side_by_side
    *known, of_wrong = world.broadcast_from_first(lambda: [alone(*case) for case in (*CASES, wrong)])
    found: dict[str, Any] = {case[0]: differing(one, world, *case) for one, case in zip(known, CASES, strict=True)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_side_by_side", lambda parts: right(parts.flip(0)))
        found["by rank in reverse"] = differing(of_wrong, world, *wrong)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parts, "__init__", partialmethod(_then, Parts.__init__, patch, world))
        found["a sum over ranks"] = differing(of_wrong, world, *wrong)[0]
    world.require_same_in_group("a number", 5)
    try:
        world.require_same_in_group("the generator's schedule", world.rank)
    except LockstepError as error:
        found["agree"] = str(error)
    found["groups"] = []
    for together in (1, 2, 2, 1):
        world = join_generator_groups(world, together)
        world.require_same_in_group("a number", 5)
        found["groups"].append(len(dist.distributed_c10d._world.pg_map))
    world.close()
    return found


def _then(weights: Parts, made: Any, patch: pytest.MonkeyPatch, world: World, *about: Any) -> None:
    """From here on each rank has a part of what a product sums over, and the parts are added by an all-reduce."""
    made(weights, *about)
    axis = world.generator_mesh.tp

    def linear_add(x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor, bias_N: Tensor | None = None) -> Tensor:
        own = collectives.all_gather(weight_NK, axis).flatten(0, 1).chunk(axis.size, 1)[axis.rank]
        total = x_TK.chunk(axis.size, 1)[axis.rank] @ own.t()
        dist.all_reduce(total, group=world.generator_group)
        return residual_TN + total.chunk(axis.size, 1)[axis.rank]

    patch.setattr(ops, "linear_add", linear_add)


def test_two_ranks_generate_what_one_does() -> None:
    first, second = on_ranks(2, every_case)
    for found in (first, second):
        assert [found[arch][0] for arch, *_ in CASES] == [0] * len(CASES), found
        assert sum(found[arch][1] > 0 for arch, *_ in CASES) >= 2, found  # preempted
        assert found["by rank in reverse"] > 0 and found["a sum over ranks"] > 0
        assert "the generator's schedule is not the same on both" in found["agree"]
        assert found["groups"] == [2, 4, 4, 2], "groups of degrees that were tried are there still"


def test_a_degree_that_does_not_divide_is_refused() -> None:
    config: ModelConfig = architecture("qwen3-8b")
    require_divisible(config, 8, "parallel.generator_tp")
    with pytest.raises(InputError, match=r"parallel.generator_tp is 3, which does not divide .*_heads 8.*; use 1 or 2"):
        require_divisible(config, 3, "parallel.generator_tp")
