"""Recipes: named functions that return a `RunConfig`. Flags of the command line override what they set."""

from __future__ import annotations

from collections.abc import Callable

from .config import OptimizerConfig, RunConfig, SamplingConfig, TaskConfig, TrainerConfig


def sum_digits() -> RunConfig:
    """A tiny random model learns to add the digits of two numbers: minutes on a laptop's CPU."""
    return RunConfig(
        recipe="sum-digits",
        steps=30,
        task=TaskConfig(name="sum-digits", easy=True),
        sampling=SamplingConfig(num_generations=8, max_completion_length=24),
        trainer=TrainerConfig(prompts_per_step=8, warmup_steps=200, warmup_learning_rate=3e-3),
        optimizer=OptimizerConfig(learning_rate=3e-4),
    )


def gsm8k() -> RunConfig:
    """Grade-school mathematics (`--data` FILE.jsonl with question and answer) with a small pretrained model."""
    return RunConfig(
        recipe="gsm8k",
        model="Qwen/Qwen3-0.6B",
        steps=200,
        task=TaskConfig(name="gsm8k", validation_prompts=100, validation_interval=50),
        sampling=SamplingConfig(num_generations=8, max_completion_length=512),
        trainer=TrainerConfig(prompts_per_step=16),
        optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
    )


def dataset() -> RunConfig:
    """Your own prompts (`--data`) and reward functions (`--reward`) with a small pretrained model."""
    return RunConfig(
        recipe="dataset",
        model="Qwen/Qwen3-0.6B",
        steps=100,
        task=TaskConfig(name="dataset"),
        sampling=SamplingConfig(num_generations=8, max_completion_length=256),
        trainer=TrainerConfig(prompts_per_step=8),
        optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
    )


RECIPES: dict[str, Callable[[], RunConfig]] = {"sum-digits": sum_digits, "gsm8k": gsm8k, "dataset": dataset}
DEFAULT = "sum-digits"
