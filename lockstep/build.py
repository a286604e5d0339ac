"""From a configuration to the parts of a run: device, model, tokenizer, task, generator, trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .config import CompileConfig, RunConfig, SamplingConfig
from .errors import InputError
from .generator import Engine, SharedWeights, plan_cache_tokens
from .graph import Compiler
from .models import Decoder, load_model, resolve_folder
from .models.init import architecture, initialize
from .tasks import make_task
from .tasks.base import Task
from .tokenizer import byte_tokenizer, check_vocabulary, encode_prompt, load_tokenizer
from .trainer import Trainer
from .types import SamplingParams

PROMPT_MARGIN = 2  # the cache is planned for prompts this many times as long as the ones probed


@dataclass
class Policy:
    """A model with its tokenizer, in its compute dtype on its device."""

    model: Decoder
    tokenizer: Any

    def encode(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """Token ids of a prompt (text, or chat messages through the model's template)."""
        return encode_prompt(self.tokenizer, prompt)

    def encode_completion(self, text: str) -> list[int]:
        """Token ids of a completion, end-of-sequence token included."""
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]

    def decode(self, token_ids: list[int]) -> str:
        """Text of a completion, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


@dataclass
class Run:
    """Everything a training run works with."""

    policy: Policy
    task: Task
    trainer: Trainer
    engine: Engine
    sampling: SamplingParams
    validation_sampling: SamplingParams
    compiler: Compiler | None = None


def resolve_device(device: str) -> torch.device:
    """`auto` is the GPU when there is one."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device is cuda, and torch sees no GPU; use --device cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU, where the contract holds for nothing else, and float32 on a CPU."""
    if dtype == "float32" and device.type == "cuda":
        raise InputError("dtype is float32; on a GPU the compute dtype is bfloat16 (the masters are float32)")
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, dtype)


def load_policy(model: str | None, arch: str, seed: int, device: str, dtype: str) -> Policy:
    """Load a Hugging Face folder or hub id, or make the named random model with a byte-level tokenizer."""
    place = resolve_device(device)
    kind = resolve_dtype(dtype, place)
    if model is not None:
        folder = resolve_folder(model)
        decoder = load_model(folder, kind, place)
        tokenizer = load_tokenizer(folder)
        check_vocabulary(tokenizer, decoder.config.vocab_size, str(folder))
    else:
        tokenizer = byte_tokenizer()
        config = replace(
            architecture(arch), eos_token_ids=(tokenizer.eos_token_id,), pad_token_id=tokenizer.pad_token_id
        )
        check_vocabulary(tokenizer, config.vocab_size, f"arch {arch}")
        decoder = initialize(Decoder(config, kind, place), seed)
    return Policy(decoder, tokenizer)


def build(config: RunConfig) -> Run:
    """All parts of a run, with memory planned and inputs checked before the first step."""
    task = make_task(config.task, config.trainer.prompts_per_step)
    policy = load_policy(config.model, config.arch, config.seed, config.device, config.dtype)
    reference = copy.deepcopy(policy.model) if config.loss.beta > 0 else None
    compiler = make_compiler(config.compile, policy.model.embed.device)
    trainer = Trainer(
        policy.model,
        config.optimizer,
        config.loss,
        reference=reference,
        enforce_parity=config.parity == "strict",
        compiler=compiler,
    )
    sampling = training_sampling(config.sampling, policy.tokenizer.eos_token_id)
    validation = replace(sampling, n=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    weights = SharedWeights(policy.model, lambda: trainer.weights_version)
    engine = Engine(weights, config.generator, _cache_tokens(config, policy, task), policy.decode, compiler)
    if compiler:
        longest = longest_prompt(policy.encode, task, config.trainer.prompts_per_step) + sampling.max_completion_length
        engine.warm_up(config.trainer.prompts_per_step * sampling.n, longest, sampling)
        engine.warm_up(config.task.validation_prompts, longest, validation)
    return Run(policy, task, trainer, engine, sampling, validation, compiler)


def make_compiler(config: CompileConfig, device: torch.device) -> Compiler | None:
    """What both roles compile with; None when nothing is captured."""
    if config.cudagraph_mode != "none" and device.type != "cuda":
        raise InputError(f"compile.cudagraph_mode is {config.cudagraph_mode}; CUDA graphs need a GPU, use none")
    return Compiler(config, device) if config.capture != "none" else None


def training_sampling(config: SamplingConfig, eos_token_id: int | None) -> SamplingParams:
    """The sampling parameters of the run; the tokenizer's end-of-sequence token stops unless `ignore_eos`."""
    stop_ids = () if config.ignore_eos or eos_token_id is None else (eos_token_id,)
    return SamplingParams(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        max_completion_length=config.max_completion_length,
        n=config.num_generations,
        stop_token_ids=stop_ids,
        stop=config.stop,
        ignore_eos=config.ignore_eos,
    )


def _cache_tokens(config: RunConfig, policy: Policy, task: Task) -> int:
    groups, samples = config.trainer.prompts_per_step, config.sampling.num_generations
    room = policy.model.config.max_position_embeddings - config.sampling.max_completion_length
    if room < 1:
        raise InputError(
            f"sampling.max_completion_length is {config.sampling.max_completion_length}; the model's context of "
            f"{policy.model.config.max_position_embeddings} tokens must hold it and a prompt"
        )
    prompt = config.task.prompt_length or longest_prompt(policy.encode, task, groups) * PROMPT_MARGIN
    sequences = max(groups * samples, config.task.validation_prompts)
    model = policy.model
    return plan_cache_tokens(
        config.generator,
        model.config,
        model.embed.dtype,
        model.embed.device,
        sequences,
        min(prompt, room) + config.sampling.max_completion_length,
    )


def longest_prompt(encode: Callable[[Any], list[int]], task: Task, groups: int) -> int:
    """Tokens of the longest prompt among the first step's and the validation problems."""
    problems = [task.train_problem(0, g) for g in range(groups)] + task.validation_problems()
    return max(len(encode(problem.prompt)) for problem in problems)


def save_policy(policy: Policy, folder: Path) -> None:
    """Write a Hugging Face folder that `transformers` loads: weights, configuration, tokenizer, chat template."""
    from .models import save_model
    from .tokenizer import save_tokenizer

    save_model(policy.model, folder)
    save_tokenizer(policy.tokenizer, folder)
