"""What the checks of `ranks.py` are made with: models, groups that all ranks sample alike, and steps on them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from small import train_groups
from torch import Tensor

from lockstep.config import GeneratorConfig, OptimizerConfig
from lockstep.distributed import ONE_PROCESS, World
from lockstep.generator import Engine, SharedWeights
from lockstep.models import Decoder, ModelConfig
from lockstep.models.config import MoEConfig
from lockstep.models.init import initialize
from lockstep.trainer import BatchShape, Packing, Trainer, pack_shards
from lockstep.types import PackedBatch, RolloutGroup, SampleIdentity, SamplingParams

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
        groups = world.broadcast_from_first(lambda step=step: rollout(trainer.model, step))
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
    return world.broadcast_from_first(lambda: run(trainer(), ONE_PROCESS, **options))


def whole(trainer: Trainer, local: Tensor) -> Tensor:
    return trainer.world.gather(trainer.flat.gather_whole(local).cpu().clone())[0]


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
