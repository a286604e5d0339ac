"""Training where ranks share the products, to be held against one process; run on each rank of `processes.on_ranks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from processes import PATIENCE
from small import FAMILIES, make_model, train_groups
from torch import Tensor

from lockstep import distributed
from lockstep.config import CompileConfig, GeneratorConfig, LossConfig, OptimizerConfig, ParallelConfig
from lockstep.distributed import ONE_PROCESS, World, join
from lockstep.distributed.mesh import ONE_RANK
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import EAGER, Runtime, check_against_eager
from lockstep.models import ResidentWeights, load_part, ranges_of
from lockstep.models.parts import meta_tensors, tensors_of
from lockstep.trainer import BatchShape, Packing, Trainer, pack_shards
from lockstep.types import RolloutGroup, SampleIdentity, SamplingParams

SAMPLED = SamplingParams(temperature=0.8, top_k=40, n=2, max_completion_length=7)
OPTIMIZER = OptimizerConfig(weight_decay=0.1)


def rollouts(trainer: Trainer, step: int) -> list[RolloutGroup]:
    """Of the trainer's weights as they are, the same on every rank."""
    engine = Engine(SharedWeights(trainer.model), GeneratorConfig(), cache_tokens=1024)
    prompts = [[(7 * g + i) % 97 for i in range(3 + 5 * g)] for g in range(4)]
    found = engine.generate(prompts, [SAMPLED] * 4, [SampleIdentity(0, 0, step, g) for g in range(4)])
    return train_groups(prompts, [SAMPLED] * 4, found, weight=0.02)


def trained(
    family: str,
    world: World = ONE_PROCESS,
    steps: int = 3,
    graphs: bool = False,
    parts: bool = False,
    groups: dict[str, tuple[str, ...]] | None = None,
    mutant: str = "",
    **loss: Any,
) -> dict[str, Any]:
    """Updates on two shards: the log-probabilities of the first one's micro-batches of this rank, what each found, then
    the weights and what a checkpoint holds.

    Args:
        parts: ranks have parts of what they generate with, too.
        groups: settings of parameters of their own.
        mutant: `reversed`, ranks are gathered last first; `flipped`, one rank alone has a bit of the generator's wrong.
    """
    runtime = EAGER
    if graphs:
        runtime = Runtime(CompileConfig("step"), torch.device("cpu"), mesh=world.sizes, peers=world)
    optimizer = replace(OPTIMIZER, **(groups or {}))
    source = ResidentWeights(make_model(torch.float32, config=FAMILIES[family]))
    model = load_part(source, torch.float32, "cpu", world.generator_mesh if parts else ONE_RANK)
    frozen = make_model(torch.float32, 1, FAMILIES[family]) if "beta" in loss else None
    settings: dict[str, Any] = {"world": world, "runtime": runtime, "source": source, "reference": frozen}
    trainer = Trainer(model, optimizer, LossConfig(**loss), **settings)
    assert len(trainer.optimizer.groups) > (1 if groups else 0)
    if graphs:  # held to eager's bits, in whose sparing way the model has its parameters for the call alone
        function, cases = trainer.check_cases([BatchShape(44, 32, 4, 32)], SAMPLED, check_parity=True)[0]
        check_against_eager(runtime, [(function, cases[:1])], "strict")
    seen, results = [], []
    for step in range(steps):
        groups = rollouts(trainer, step)
        with _Reversed(mutant == "reversed"):
            for batch in pack_shards(
                [groups[::2], groups[1::2]], world.mesh.fsdp.local_items(range(2)), Packing(44), True
            ):
                if trainer.algorithm.has_critic:
                    trainer.values(batch)
                    batch.return_C.copy_(batch.old_value_C + batch.advantage_C)
                if frozen is not None:
                    trainer.reference_logprobs(batch)
                    seen.append(batch.ref_logprob_C)
                if mutant == "flipped" and world.rank == 1:
                    batch.old_logprob_C.view(torch.int32)[0] ^= 1
                    mutant = ""
                trainer.forward_backward(batch)
        seen += trainer.checked_logprobs if step == 0 else []
        found = trainer.optim_step(1e-3)
        results.append((found.applied, found.loss, found.grad_norm, found.tokens_checked, found.tokens_different))
    weights = exported(trainer)
    for name, held in ranges_of(model).items():
        whole = weights["embed" if name not in weights else name].flatten()
        assert all(torch.equal(values, whole[first : first + len(values)]) for values, first in held), name
    by_first = trainer.gather_ranges_on_first()
    assert by_first.keys() == (weights.keys() if world.is_first else set())
    assert all(torch.equal(held.values, weights[name].flatten()) for name, (held,) in by_first.items())
    state, _ = trainer.state()
    other = make_model(torch.float32, 1, FAMILIES[family])
    reader = Trainer(other, optimizer, LossConfig(**loss), world=world, reference=frozen)
    reader.load_state(*by_rank(trainer))
    again = {name: tensors_of(reader.model)[name].clone() for name in trainer.flat.names}
    runtime.close()
    return {"logprobs": seen, "results": results, "weights": weights, "state": state, "again": again}


def exported(trainer: Trainer) -> dict[str, Tensor]:
    """The whole weights, of the ranges that all ranks have."""
    model = trainer.programs.model
    shapes = meta_tensors(model.config) | ({} if model.value_head is None else {"value_head": model.value_head})
    found = {name: torch.full((tensor.numel(),), torch.nan) for name, tensor in shapes.items()}
    own = {
        name: [(values.clone(), first) for values, first in held] for name, held in trainer.ranges_to_write().items()
    }
    for of_rank in trainer.world.gather(own):
        for name, held in of_rank.items():
            for values, first in held:
                found[name][first : first + len(values)] = values
    return {name: flat.view(shapes[name].shape) for name, flat in found.items()}


def by_rank(trainer: Trainer) -> tuple[dict[str, Any], dict[str, int]]:
    """What all ranks have of the trainer's state, as a checkpoint would give it."""
    own, alike, numbers = trainer.local_state()
    parts = trainer.world.gather({name: tensor.clone() for name, tensor in own.items()})
    return {**{name: [part[name] for part in parts] for name in own}, **alike}, numbers


class _Reversed:
    """Within it ranks are gathered last first, where it is on."""

    def __init__(self, on: bool) -> None:
        self._on, self._gather = on, distributed.collectives.all_gather

    def __enter__(self) -> None:
        if self._on:
            distributed.collectives.all_gather = lambda x, axis: self._gather(x, axis).flip(0)

    def __exit__(self, *_: object) -> None:
        distributed.collectives.all_gather = self._gather


def on_a_rank(tp: int, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`trained`, case by case."""
    torch.set_num_threads(1)
    world = join(ParallelConfig(tp=tp, generator_tp=2, timeout=PATIENCE), "cpu")
    found = [trained(world=world, **case) for case in cases]
    world.close()
    return found
