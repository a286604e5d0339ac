"""Training on shards in cells, to be held against one process; run on each rank of `processes.on_ranks`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from processes import PATIENCE
from small import FAMILIES, make_model, train_groups

from lockstep.config import CompileConfig, GeneratorConfig, LossConfig, OptimizerConfig, ParallelConfig
from lockstep.distributed import ONE_PROCESS, World, join
from lockstep.distributed.cells import Cells
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import EAGER, Runtime
from lockstep.trainer import Packing, Trainer, pack_shards
from lockstep.types import RolloutGroup, SampleIdentity, SamplingParams

SHARDS, CELL, SMALL_CELL = 8, 4, 2
KINDS = {"dense": "qwen3", "experts": "qwen3_moe"}
SAMPLED = SamplingParams(temperature=0.8, top_k=40, n=2, max_completion_length=7)


def trainer_of(kind: str, world: World = ONE_PROCESS, cell: int = CELL, runtime: Runtime = EAGER) -> Trainer:
    model, cells = make_model(torch.float32, config=FAMILIES[KINDS[kind]]), Cells(SHARDS, cell, world.size)
    return Trainer(model, OptimizerConfig(), LossConfig(), world=world, cells=cells, runtime=runtime)


def rollouts(trainer: Trainer, step: int) -> list[RolloutGroup]:
    """Two groups a shard, of the trainer's weights as they are."""
    engine = Engine(SharedWeights(trainer.model), GeneratorConfig(), cache_tokens=1024)
    prompts = [[(7 * g + i) % 97 for i in range(3 + 3 * g)] for g in range(2 * SHARDS)]
    identities = [SampleIdentity(0, 0, step, g) for g in range(len(prompts))]
    found = engine.generate(prompts, [SAMPLED] * len(prompts), identities)
    return train_groups(prompts, [SAMPLED] * len(prompts), found, weight=0.02)


def steps(trainer: Trainer, numbers: Sequence[int], order: Sequence[int] = range(SHARDS)) -> list[str]:
    """Steps of two updates on a rollout: of each what was sampled and found, and the weights, as a hash. Shards have
    several micro-batches, and are dealt to the ranks in this order."""
    axis, said = trainer.world.mesh.fsdp, []
    cells, own = trainer.cells, axis.local_items(order)
    for step in numbers:
        groups = trainer.world.broadcast_from_first(lambda step=step: rollouts(trainer, step))
        seen: list[Any] = [asdict(group) for group in groups]
        batches = pack_shards([groups[shard::SHARDS] for shard in range(SHARDS)], own, Packing(64), check_parity=True)
        assert len(batches) >= 2 * len(own)
        for update in range(2):
            for i, batch in enumerate(batches):
                batch.check_parity, batch.ends_cell = update == 0, cells.ends_cell(i % len(own))
                trainer.forward_backward(batch, keep_support=update == 0)
            seen.append(trainer.optim_step(1e-2))
            assert seen[-1].applied and seen[-1].tokens_different == 0, seen[-1]
        data = b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in trainer.model.parameters())
        said.append(hashlib.sha256(repr(seen).encode() + data).hexdigest()[:16])
    return said


def on_a_rank(folder: Path, saved_by: int) -> dict[str, list[str]]:
    """Two steps of each kind, between which a state is left in the folder; then the second from the state that as many
    ranks as `saved_by` have left, if any have. Then a step in small cells, of graphs, and what these exchange."""
    torch.set_num_threads(1)
    world, found = join(ParallelConfig(timeout=PATIENCE, batch_shards=SHARDS, cell=SMALL_CELL), "cpu"), {}
    for kind in KINDS:
        trainer = trainer_of(kind, world)
        found[kind] = steps(trainer, [0])
        own, alike, numbers = trainer.local_state()
        parts = world.gather(own)
        if world.is_first:
            state = {name: [part[name] for part in parts] for name in own} | alike
            torch.save((state, numbers), folder / f"{kind}.{world.size}")
        found[kind] += steps(trainer, [1])
        if saved_by:
            other = trainer_of(kind, world)
            other.load_state(*torch.load(folder / f"{kind}.{saved_by}"))
            found[f"{kind}, resumed"] = steps(other, [1])
    if world.ranks_per_cell > 1:
        runtime = Runtime(CompileConfig("step"), torch.device("cpu"), mesh=world.sizes, peers=world)
        found["small cells"] = steps(trainer_of("dense", world, SMALL_CELL, runtime), [0])
        logs = (line for title, log in runtime.builder.logs.items() if "forward_backward" in title for line in log)
        found["exchanges"] = [line.partition("; ")[2] for line in logs if line.startswith(("bucket", "reorder"))]
        runtime.close()
    world.close()
    return found
