"""Recipes: named functions from the model that was asked for (or None) to a `RunConfig`. `width` is the `hidden_size`
of a random model other than the recipe's own.

Command-line flags override what recipes set.
"""

from __future__ import annotations

from collections.abc import Callable

from . import CheckpointConfig, LossConfig, OptimizerConfig, RunConfig, SamplingConfig, TaskConfig, TrainerConfig
from .random_weights import random_width

_TINY_WIDTH, _WIDTH_100M = 128, 768  # `hidden_size` of the random models that learning rates were tuned on


def sum_digits(model: str | None, width: int | None = None) -> RunConfig:
    """Add up digits. Without a model, a tiny random one learns an easy form in minutes on a laptop's CPU, after a short
    supervised warm-up. A folder with random weights from `lockstep init` does the same, at learning rates that decrease
    with its width. Other models get the full form: 5 prompts of 8 samples and 100 tokens."""
    width = width or (_TINY_WIDTH if model is None else random_width(model))  # None: not a random model
    if width is None:
        return RunConfig(
            recipe="sum-digits",
            model=model,
            steps=10,
            sampling=SamplingConfig(temperature=0.8, top_p=0.95),
            optimizer=OptimizerConfig(learning_rate=2e-6, weight_decay=0.1, warmup_steps=2),
        )
    narrower, own = _TINY_WIDTH / width, model is None and width == _TINY_WIDTH
    return RunConfig(
        recipe="sum-digits",
        model=model,
        steps=120,
        task=TaskConfig(easy=True, validation_prompts=200),
        # At temperature 1 and twice the learning rate, unlucky samples make the model unlearn rare sums for good.
        sampling=SamplingConfig(temperature=0.8, max_completion_length=24),
        trainer=TrainerConfig(
            prompts_per_step=24, warmup_steps=400, warmup_learning_rate=2e-3 * narrower, warmup_loss=0.02
        ),
        # A correct answer takes 20 tokens including its end. Without a penalty on more, the model rambles on.
        loss=LossConfig(loss_type="dapo", overlong_buffer=4, scale_rewards="group"),
        optimizer=OptimizerConfig(learning_rate=1.5e-4 * narrower, beta2=0.99, warmup_steps=10, lr_scheduler="linear"),
        checkpoint=CheckpointConfig(interval=25 if own else 0),  # a larger model's checkpoints take gigabytes
    )


def word_arithmetic(model: str | None, width: int | None = None) -> RunConfig:
    """Short stories of additions and subtractions, meant for a GPU. Without a model, a random one of 100 million
    parameters trains on them, after a supervised warm-up. A folder with random weights from `lockstep init` does the
    same, at learning rates that decrease with its width."""
    width = width or (_WIDTH_100M if model is None else random_width(model))  # None: not a random model
    arch = "qwen3-100m" if model is None else RunConfig.arch
    warm_up, rate, narrower = (0, 2e-5, 1.0) if width is None else (2000, 5e-5, _WIDTH_100M / width)
    return RunConfig(
        recipe="word-arithmetic",
        model=model,
        arch=arch,
        steps=300,
        task=TaskConfig(name="word-arithmetic", validation_prompts=200, validation_interval=25),
        sampling=SamplingConfig(max_completion_length=64),
        trainer=TrainerConfig(
            prompts_per_step=64, warmup_steps=warm_up, warmup_learning_rate=4e-4 * narrower, warmup_reward=0.6
        ),
        loss=LossConfig(scale_rewards="group"),
        optimizer=OptimizerConfig(learning_rate=rate * narrower, beta2=0.99, warmup_steps=10, lr_scheduler="linear"),
    )


def gsm8k(model: str | None, width: int | None = None) -> RunConfig:
    """Grade-school mathematics (`--data` FILE.jsonl with question and answer) with a small pretrained model."""
    return RunConfig(
        recipe="gsm8k",
        model=model or (None if width else "Qwen/Qwen3-0.6B"),
        steps=200,
        task=TaskConfig(name="gsm8k", validation_prompts=100, validation_interval=50),
        sampling=SamplingConfig(num_generations=8, max_completion_length=512),
        trainer=TrainerConfig(prompts_per_step=16),
        optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
    )


def dataset(model: str | None, width: int | None = None) -> RunConfig:
    """Your own prompts (`--data`) and reward functions (`--reward`) with a small pretrained model."""
    return RunConfig(
        recipe="dataset",
        model=model or (None if width else "Qwen/Qwen3-0.6B"),
        steps=100,
        task=TaskConfig(name="dataset"),
        sampling=SamplingConfig(num_generations=8, max_completion_length=256),
        trainer=TrainerConfig(prompts_per_step=8),
        optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
    )


RECIPES: dict[str, Callable[..., RunConfig]] = {
    "sum-digits": sum_digits,
    "word-arithmetic": word_arithmetic,
    "gsm8k": gsm8k,
    "dataset": dataset,
}
DEFAULT = "sum-digits"


def random_weights_notice(name: str, model: str | None) -> str | None:
    """A line for the user if the recipe `name` treats the folder `model` as untrained, saying why; otherwise None."""
    if model is None or random_width(model) is None or not RECIPES[name](model).trainer.warmup_steps:
        return None
    return (
        f"model {model} has random weights, as lockstep init made them: {name} takes its settings for a random model, "
        "a supervised warm-up first; flags override them"
    )
