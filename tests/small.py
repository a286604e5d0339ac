"""Small real models, and the two sides of the parity check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lockstep.config import CompileConfig, GeneratorConfig, LossConfig, OptimizerConfig
from lockstep.distributed import World
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import EAGER, Runtime
from lockstep.models import Decoder, FolderWeights, ModelConfig, load_part
from lockstep.models.blocks.rope import RopeScaling, YarnScaling
from lockstep.models.config import MLAConfig, MoEConfig
from lockstep.models.init import ARCHITECTURES, initialize
from lockstep.session.attention import round_page_size
from lockstep.trainer import AdamW, StepResult, Trainer, pack
from lockstep.types import RolloutGroup, SampleIdentity, SamplingParams, Segment, Trajectory

CONFIG = ModelConfig(
    260, 48, 80, 2, 6, 2, 16, max_position_embeddings=512, rope_theta=10000.0, eos_token_ids=(258,), family="qwen3"
)
LLAMA = replace(CONFIG, family="llama", tie_word_embeddings=False)
SCALING = RopeScaling("llama3", 8.0, original_max_position_embeddings=64)
DEEPSEEK = replace(
    CONFIG,
    family="deepseek_v3",
    num_kv_heads=1,
    head_dim=6,
    mla=MLAConfig(20, 10, 6, 14, 24),
    moe=MoEConfig(8, 2, 40, (0,), True, 4, 2, scale=2.5, shared_experts=2, router_bias=True),
    rope_scaling=YarnScaling(8.0, 64, mscale=0.7, mscale_all_dim=1.0),
)
FAMILIES = {
    "qwen3": CONFIG,
    "llama": LLAMA,
    "qwen3_moe": replace(CONFIG, family="qwen3_moe", moe=MoEConfig(6, 2, 40, dense_layers=(0,))),
    "llama, scaled positions, tied": replace(LLAMA, rope_scaling=SCALING, tie_word_embeddings=True),
    "deepseek_v3": DEEPSEEK,
}


class Apart(World):
    """Ranks that are not there, and would say what this one says."""

    def gather(self, value: Any, what: str = "") -> list[Any]:
        return [value] * self.size


def two_layers() -> dict[str, ModelConfig]:
    """The tiny architectures, cut to two layers; `ARCHITECTURES` is updated with them where runs need no more."""
    return {name: config.first_layers(2) for name, config in ARCHITECTURES.items() if name.startswith("tiny")}


def make_model(dtype: torch.dtype, seed: int = 0, config: ModelConfig = CONFIG, scale: float = 6.0) -> Decoder:
    """A random model with weights large enough that its distributions are far from flat."""
    model = initialize(Decoder(config, dtype), seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
        for buffer in model.buffers():  # router biases
            buffer.copy_(torch.linspace(-0.1, 0.1, len(buffer)))
    return model


def requests(count: int, seed: int = 0, length: int = 24) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 150 tokens with plain, truncated and greedy sampling in turn, 1 to 4 samples each."""
    generator = torch.Generator().manual_seed(seed)
    kinds = [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 20, "min_p": 0.01},
    ]
    prompts, sampling = [], []
    for i in range(count):
        size = int(torch.randint(1, 151, (1,), generator=generator))
        prompts.append(torch.randint(0, 256, (size,), generator=generator).tolist())
        kind = kinds[i % len(kinds)]
        sampling.append(
            SamplingParams(**kind, n=1 + i % 4, max_completion_length=length - i % 3, ignore_eos=i % 2 == 0)
        )
    return prompts, sampling


def generate(
    engine: Engine, prompts: list[list[int]], sampling: list[SamplingParams], groups: list[int] | None = None
) -> list[list[Trajectory]]:
    """Run requests; `groups` gives their identities (default: their index)."""
    identities = [SampleIdentity(11, 0, 0, g) for g in groups or range(len(prompts))]
    return engine.generate(prompts, sampling, identities)


def words(completions: list[list[Trajectory]]) -> list[list[tuple]]:
    """Everything that must be equal, log-probabilities exactly."""
    return [
        [
            (c.token_ids, [x.hex() for x in c.logprobs], [x.hex() for x in c.model_logprobs], c.route_digests)
            for c in group
        ]
        for group in completions
    ]


def train_groups(
    prompts: list[list[int]],
    sampling: list[SamplingParams],
    completions: list[list[Trajectory]],
    weight: float = 0.01,
) -> list[RolloutGroup]:
    """Completions as the trainer takes them, advantages alternating, each token of this weight."""
    return [
        RolloutGroup(
            [
                replace(c, name=f"group {g} sample {i}", advantage=(-1.0) ** i, loss_weight=weight)
                for i, c in enumerate(group)
            ],
            params,
        )
        for g, (params, group) in enumerate(zip(sampling, completions, strict=True))
    ]


def completed(
    token_ids: list[int],
    advantage: float = 0.0,
    loss_weight: float = 0.0,
    logprobs: list[float] | None = None,
    model_logprobs: list[float] | None = None,
    name: str = "",
    route_digests: list[int] | None = None,
) -> Trajectory:
    """What one sample completed its prompt with, for `train_group`."""
    turn = Segment(token_ids, True, logprobs, model_logprobs, route_digests=route_digests)
    return Trajectory([turn], name=name, advantage=advantage, loss_weight=loss_weight)


def train_group(prompt_ids: list[int], completions: list[Trajectory], sampling: SamplingParams) -> RolloutGroup:
    """Completions with the prompt before them."""
    prompt = Segment(prompt_ids)
    return RolloutGroup([replace(c, segments=[prompt, *c.segments]) for c in completions], sampling)


def finished(engine: Engine) -> dict[int, list[Trajectory]]:
    """Launch once; the requests that are finished by that, each with its completions."""
    before = dict(engine.requests)
    engine.advance()
    ended = {i: samples for i, samples in before.items() if i not in engine.requests}
    return {i: [s.completion for s in samples if s.completion is not None] for i, samples in ended.items()}


def compare(
    model: Decoder, groups: list[RolloutGroup], share_prefix: bool = True, max_tokens: int = 4096
) -> StepResult:
    """The trainer's view of what the generator recorded."""
    trainer = Trainer(model, OptimizerConfig(), LossConfig())
    for batch in pack(groups, max_tokens=max_tokens, check_parity=True, share_prefix=share_prefix):
        trainer.check(batch)
    return trainer.finish_check()


def shared_engine(model: Decoder, runtime: Runtime = EAGER, version: Callable[[], int] = lambda: 0) -> Engine:
    """Over the weights themselves, with the attention that the model needs."""
    kind = "native" if model.masks is None else "flex"
    weights, settings = SharedWeights(model, version), round_page_size(GeneratorConfig(), kind)
    return Engine(weights, settings, 16384, runtime=runtime)


def rounds(
    model: Decoder, capture: str, steps: int = 3, optimizer: OptimizerConfig | None = None
) -> tuple[list, list[int]]:
    """Updates on what was just sampled: everything that was generated, and how many tokens differed in each."""
    runtime = Runtime(CompileConfig("step"), torch.device("cpu")) if capture == "step" else EAGER
    trainer = Trainer(model, optimizer or OptimizerConfig(), LossConfig(), runtime=runtime)
    engine = shared_engine(model, runtime, lambda: trainer.weights_version)
    prompts, sampling = requests(4, length=12)
    prompts = [[token % model.config.vocab_size for token in prompt] for prompt in prompts]
    made, different = [], []
    for _ in range(steps):
        completions = generate(engine, prompts, sampling)
        for batch in pack(train_groups(prompts, sampling, completions), max_tokens=4096, check_parity=True):
            trainer.forward_backward(batch)
        result = trainer.optim_step(1e-2)
        assert result.tokens_checked and (result.applied or result.tokens_different)
        made.append(words(completions))
        different.append(result.tokens_different)
    assert made[0] != made[-1]
    return made, different


def assert_no_schedule_changes_a_bit(
    model: Decoder, engine_of: Callable[..., Engine], count: int, page_size: int
) -> None:
    """Pages, chunks of prompts, preemption, what a cache holds, and how the trainer packs, for `count` requests."""
    prompts, sampling = requests(count, length=12)
    completions = generate(engine_of(model), prompts, sampling)
    expected, groups = words(completions), train_groups(prompts, sampling, completions)
    for fields in (
        {"page_size": page_size},
        {"max_num_batched_tokens": 9, "prefix_caching": False},
        {"page_size": 4, "cache_tokens": 180},
    ):
        engine = engine_of(model, **fields)
        assert words(generate(engine, prompts, sampling)) == expected
        assert words(generate(engine, prompts, sampling)) == expected, "with what the first left in the cache"
        assert (engine.scheduler.preemptions > 0) == ("cache_tokens" in fields)
    for share_prefix, max_tokens in ((True, 4096), (False, 4096), (True, 200)):
        result = compare(model, groups, share_prefix, max_tokens)
        assert result.tokens_different == 0 < result.tokens_checked


def of_one_shape(trainer: Trainer) -> Trainer:
    """Whose graphs are traced with fixed sizes, in half the time: its batches have one shape."""
    for program in trainer.programs.by_name.values():
        program.one_shape = True
    return trainer


def stepped(optimizer: AdamW, lr: float, ok: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """An update, called: the gradient's norm, and whether it was applied."""
    inputs, device = optimizer.inputs(), optimizer.flat.data.device
    given = replace(inputs, buffer={**inputs.buffer, "lr": torch.tensor(lr, device=device)})
    found = optimizer.update(given, torch.tensor(ok, device=device))
    optimizer.update_offloaded()
    return found


def load_model(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    """The decoder of a Hugging Face folder, converted to `dtype` on `device`."""
    return load_part(FolderWeights(folder), dtype, device)
