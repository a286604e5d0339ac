"""Run by torchrun on GPUs, or on a CPU with `cpu`: a model whose products two share in the trainer and all share in the
generator, in graphs. The first prints what was found, a JSON object: whether they draw what one process draws, and what
two updates find of it, of a shard for each two ranks; and of models of other families whether a captured step's
gradients are an eager one's, and what both take. More ranks than heads have models of as many heads.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from small import DEEPSEEK, completed, requests, train_group, train_groups

from lockstep import machine
from lockstep.config import CompileConfig, GeneratorConfig, LossConfig, OptimizerConfig, ParallelConfig
from lockstep.distributed import ONE_PROCESS, World, join
from lockstep.distributed.mesh import ONE_RANK
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import EAGER, Runtime, check_against_eager
from lockstep.graph.check.fingerprints import fingerprint
from lockstep.models import Decoder, ModelConfig, load_part
from lockstep.models.config import MLAConfig, MoEConfig
from lockstep.models.init import RandomWeights
from lockstep.trainer import BatchShape, Packing, Trainer, pack_shards
from lockstep.types import RolloutGroup, SampleIdentity, SamplingParams

DEVICE = torch.device("cpu" if sys.argv[1:] == ["cpu"] else "cuda")
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
SIZES = (272, 64, 128, 2, 4, 4, 16) if DEVICE.type == "cpu" else (4096, 512, 1024, 2, 8, 4, 128)
DENSE = ModelConfig(*SIZES, rope_theta=1e4, max_position_embeddings=512, family="qwen3")
EXPERTS = ModelConfig(
    *SIZES[:2], SIZES[2] // 2, *SIZES[3:], rope_theta=1e4, max_position_embeddings=512, family="qwen3_moe",
    tie_word_embeddings=False, moe=MoEConfig(8, 2, SIZES[2] // 2),
)  # fmt: skip
assert DEEPSEEK.moe is not None
LATENT = replace(DEEPSEEK, num_heads=4, head_dim=8, mla=MLAConfig(24, 16, 8, 16, 32), max_position_embeddings=512)
if DEVICE.type == "cuda":
    LATENT = replace(
        LATENT, vocab_size=4096, hidden_size=512, intermediate_size=1024, num_heads=8, head_dim=64,
        mla=MLAConfig(512, 64, 64, 128, 256), moe=replace(DEEPSEEK.moe, intermediate_size=256),
    )  # fmt: skip
OTHERS = {"llama": replace(DENSE, family="llama", tie_word_embeddings=False), "deepseek_v3": LATENT}
SMALL = GeneratorConfig(max_num_seqs=16, page_size=16, max_num_batched_tokens=256)
SAMPLING = SamplingParams(temperature=1.0, n=3, max_completion_length=40)
SHAPE = BatchShape(1024, 512, 32, 256)
WAYS: dict[str, dict[str, Any]] = {"collectives": {"symmetric_memory": False}}
if DEVICE.type == "cuda":
    WAYS["pushes"] = {}


def for_ranks(config: ModelConfig, ranks: int) -> ModelConfig:
    """With a head for each of so many, at the least."""
    heads = {"num_heads": max(config.num_heads, ranks)}
    return replace(config, **heads | ({} if config.mla else {"num_kv_heads": max(config.num_kv_heads, ranks)}))


class Louder(RandomWeights):
    """Weights of matrices that make tokens differ from one another."""

    def fill(self, wanted: Any) -> None:
        super().fill(wanted)
        for held in (held for name, every in wanted.items() if not name.endswith("norm") for held in every):
            held.values.mul_(4)


def drawn(engine: Engine, step: int, shards: int) -> list[RolloutGroup]:
    prompts, sampling = requests(5, length=24)
    if shards > 1:  # which are computed alike, and so sampled alike
        sampling = [replace(sampling[1], n=3)] * len(prompts)
    identities = [SampleIdentity(0, 0, step, group) for group in range(len(prompts))]
    return train_groups(prompts, sampling, engine.generate(prompts, sampling, identities))


def words(groups: list[RolloutGroup]) -> list[Any]:
    """Tokens and both log-probabilities."""
    turns = [turn for group in groups for rollout in group.rollouts for turn in rollout.turns]
    return [[turn.token_ids, turn.logprobs, turn.model_logprobs] for turn in turns]


def roles(config: ModelConfig, world: World, shards: int) -> tuple[list[Any], list[Any], list[str]]:
    """What two steps drew, what their updates found, and the levels of the graphs after their check."""
    one = world.size == 1
    own = range(shards) if one else [world.mesh.fsdp.rank]
    recorded = CompileConfig("step", "full") if DEVICE.type == "cuda" else CompileConfig("step")
    runtime = EAGER if one else Runtime(recorded, DEVICE, mesh=world.sizes, peers=world)
    source = Louder(config, 0)
    model: Decoder = load_part(source, DTYPE, DEVICE, ONE_RANK if one else world.generator_mesh)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), world=world, runtime=runtime, source=source)
    engine = Engine(SharedWeights(model, lambda: trainer.weights_version), SMALL, 8192, runtime=runtime)
    levels: list[str] = []
    if not one:
        _, sampling = requests(5, length=24)
        trainer.warm_up([SHAPE], sampling[0], check_parity=True)
        engine.warm_up(16, 200, sampling[0])
        work = [*trainer.check_cases([SHAPE], sampling[0], check_parity=True), *engine.check_cases()]
        levels = sorted({f"{v.function} {v.level}" for v in check_against_eager(runtime, work, "strict")})
    found, results = [], []
    for step in range(2):
        groups = drawn(engine, step, shards)
        found.append(words(groups))
        dealt = [groups[i::shards] for i in range(shards)]
        for batch in pack_shards(dealt, own, Packing(1024, shapes=[SHAPE]), check_parity=True):
            trainer.forward_backward(batch.to(DEVICE))
        result = trainer.optim_step(1e-4)
        results.append([result.applied, result.tokens_checked, result.tokens_different, result.loss, result.grad_norm])
    runtime.close()
    return found, results, levels


def gradients(config: ModelConfig, world: World) -> dict[str, Any]:
    """Digests of a step's gradients, eager and captured, and seconds of it."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, config.vocab_size, (4, 4, 40), generator=generator).tolist()
    groups = [
        train_group(prompt, [completed(ids, (-1.0) ** i, 0.01) for i, ids in enumerate(samples)], SAMPLING)
        for prompt, *samples in words
    ]
    shards = world.mesh.fsdp
    dealt = [groups[i :: shards.size] for i in range(shards.size)]
    found: dict[str, Any] = {}
    for level in ("eager", "captured"):
        recorded = CompileConfig("step", "full") if DEVICE.type == "cuda" else CompileConfig("step")
        runtime = EAGER if level == "eager" else Runtime(recorded, DEVICE, mesh=world.sizes, peers=world)
        source = Louder(config, 0)
        model = load_part(source, DTYPE, DEVICE, world.generator_mesh)
        trainer = Trainer(model, OptimizerConfig(), LossConfig(), world=world, runtime=runtime, source=source)
        if runtime is not EAGER:
            trainer.warm_up([SHAPE], SAMPLING, check_parity=False)
        own = shards.local_items(range(shards.size))
        batches = [b.to(DEVICE) for b in pack_shards(dealt, own, Packing(1024, shapes=[SHAPE]), check_parity=False)]
        times = []
        for repeat in range(6):
            began = time.perf_counter()
            for batch in batches:
                trainer.forward_backward(batch)
            torch.get_device_module(DEVICE).synchronize()
            times.append(time.perf_counter() - began)
            if not repeat:
                digest = fingerprint(trainer.flat.grad).tolist()
                found[level] = {"gradients": digest, "not zero": bool(trainer.flat.grad.any())}
        found[level]["seconds"] = statistics.median(times[1:])
        trainer.finish_check(0)
        runtime.close()
    return found


def main() -> None:
    machine.restrict_to_local_gpu()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    ranks = machine.torchrun_launch().processes
    dense, experts, *others = (for_ranks(config, ranks) for config in (DENSE, EXPERTS, *OTHERS.values()))
    for way, options in WAYS.items():
        world = join(ParallelConfig(tp=2, generator_tp=ranks, timeout=120, **options), DEVICE.type)
        for name, config in {"dense": dense, "experts": experts}.items():
            shared, updates, levels = roles(config, world, ranks // 2)
            alone, own, _ = roles(config, ONE_PROCESS, ranks // 2) if world.is_first else ([], [], [])
            of_ranks = world.gather((shared, updates))
            found[f"{name}, {way}"] = {
                "as one process draws": shared[0] == alone[0] if world.is_first else None,
                "alike on all ranks": all(of_rank == of_ranks[0] for of_rank in of_ranks),
                "tokens": sum(len(tokens) for tokens, *_ in shared[0]),
                "different tokens": len({token for tokens, *_ in shared[0] for token in tokens}),
                "updates": updates,
                "of one process": own,
                "levels": levels,
                "drawn": shared[1],
            }
        for name, config in zip(OTHERS, others, strict=True) if way == "collectives" else ():
            of_ranks = world.gather(gradients(config, world))
            found[f"gradients, {name}"] = {"of ranks": of_ranks, "axes": world.sizes}
        world.close()
    if world.is_first:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
