"""What makes a configuration usable; everything else is refused, by the name of the field."""

from __future__ import annotations

import math
from operator import attrgetter

from ..errors import InputError
from .compile import resolve_compile
from .effect import DATA_TASKS, without_effect
from .fields import RunConfig
from .template import template_variables


def validate(config: RunConfig) -> RunConfig:
    """Return `config` when every field is usable; raise `InputError` naming the first that is not."""
    for path, value, low, high in _ranges(config):
        if not isinstance(value, (int, float)):
            raise InputError(f"{path} is {value!r}, a {type(value).__name__}; it must be a number")
        if not math.isfinite(value) or not low <= value <= high:
            finite = "" if math.isfinite(value) else " and finite"
            bounds = f"at least {low}{finite}" if math.isinf(high) else f"between {low} and {high}"
            raise InputError(f"{path} is {value!r}; it must be {bounds}")
    _check_effects(config)
    _check_combinations(config)
    return config


def _check_effects(config: RunConfig) -> None:
    """Refuse a setting that nothing reads where it is not its default."""
    default = RunConfig()
    for path, why in without_effect(config):
        if attrgetter(path)(config) != attrgetter(path)(default):
            raise InputError(f"{path} has no effect {why}")


def _ranges(c: RunConfig) -> list[tuple[str, float, float, float]]:
    inf = math.inf
    s, g, t, o, lo = c.sampling, c.generator, c.trainer, c.optimizer, c.loss
    return [
        ("steps", c.steps, 0, inf),
        ("seed", c.seed, 0, 2**63 - 1),
        ("task.seed", c.task.seed, 0, 2**63 - 1),
        ("task.validation_seed", c.task.validation_seed, 0, 2**63 - 1),
        ("task.validation_prompts", c.task.validation_prompts, 0, 1 << 20),
        ("task.validation_interval", c.task.validation_interval, 0, inf),
        ("task.max_prompt_length", c.task.max_prompt_length, 0, inf),
        ("task.reward_workers", c.task.reward_workers, 0, 1024),
        ("task.reward_timeout", c.task.reward_timeout, 0, 86400),
        ("sampling.num_generations", s.num_generations, 1, 1 << 16),
        ("sampling.temperature", s.temperature, 0, 1e4),
        ("sampling.top_k", s.top_k, 0, 2**31 - 1),
        ("sampling.top_p", s.top_p, 1e-6, 1),
        ("sampling.min_p", s.min_p, 0, 1),
        ("sampling.max_completion_length", s.max_completion_length, 1, inf),
        ("generator.page_size", g.page_size, 1, 4096),
        ("generator.kv_cache_tokens", g.kv_cache_tokens, 0, inf),
        ("generator.max_num_seqs", g.max_num_seqs, 1, 1 << 16),
        ("generator.max_num_batched_tokens", g.max_num_batched_tokens, 1, inf),
        ("generator.steps_per_sync", g.steps_per_sync, 1, 4096),
        ("trainer.prompts_per_step", t.prompts_per_step, 1, 1 << 20),
        ("trainer.num_iterations", t.num_iterations, 1, inf),
        ("trainer.max_tokens_per_micro_batch", t.max_tokens_per_micro_batch, 2, inf),
        ("trainer.max_idle_steps", t.max_idle_steps, 1, inf),
        ("trainer.warmup_steps", t.warmup_steps, 0, inf),
        ("trainer.warmup_learning_rate", t.warmup_learning_rate, 0, inf),
        ("trainer.warmup_loss", t.warmup_loss, 0, inf),
        ("trainer.warmup_reward", t.warmup_reward, 0, inf),
        ("trainer.warmup_interval", t.warmup_interval, 1, inf),
        ("trainer.warmup_batch_size", t.warmup_batch_size, 1, inf),
        ("loss.epsilon", lo.epsilon, 0, inf),
        ("loss.epsilon_high", lo.epsilon if lo.epsilon_high is None else lo.epsilon_high, 0, inf),
        ("loss.beta", lo.beta, 0, inf),
        ("loss.router_aux_loss_coef", lo.router_aux_loss_coef, 0, inf),
        ("loss.overlong_buffer", lo.overlong_buffer, 0, inf),
        ("loss.overlong_penalty", lo.overlong_penalty, 0, 1e6),
        ("optimizer.learning_rate", o.learning_rate, 0, inf),
        ("optimizer.beta1", o.beta1, 0, 0.999999),
        ("optimizer.beta2", o.beta2, 0, 0.999999),
        ("optimizer.epsilon", o.epsilon, 1e-20, inf),
        ("optimizer.router_bias_rate", o.router_bias_rate, 0, 1),
        ("optimizer.weight_decay", o.weight_decay, 0, inf),
        ("optimizer.max_grad_norm", o.max_grad_norm, 0, inf),
        ("optimizer.warmup_steps", o.warmup_steps, 0, inf),
        ("compile.activation_memory_gib", c.compile.activation_memory_gib, 0, inf),
        ("parallel.fsdp", c.parallel.fsdp, 0, 4096),
        ("parallel.batch_shards", c.parallel.batch_shards, 0, 1 << 16),
        ("parallel.timeout", c.parallel.timeout, 1, 86400),
        ("checkpoint.interval", c.checkpoint.interval, 0, inf),
        ("checkpoint.keep_last", c.checkpoint.keep_last, 1, inf),
    ]


def _check_combinations(c: RunConfig) -> None:
    def refuse(when: bool, message: str) -> None:
        if when:
            raise InputError(message)

    t, lo, s = c.task, c.loss, c.sampling
    refuse(t.name == "gsm8k" and not t.data, "task.data is missing: gsm8k needs --data FILE.jsonl")
    refuse(t.name == "dataset" and not t.data, "task.data is missing: a dataset task needs --data PATH or hub id")
    refuse(
        t.name == "dataset" and not t.reward,
        "task.reward is missing: a dataset task needs at least one --reward MODULE:FUNCTION",
    )
    template_variables(t.chat_template_kwargs)
    refuse(t.prompt_column == "", "task.prompt_column is empty; name the column that holds the prompt")
    refuse(t.system_prompt == "", "task.system_prompt is empty; give a text, or leave it out")
    refuse(
        t.reward_timeout > 0 and t.reward_workers == 0,
        "task.reward_timeout needs task.reward_workers of at least 1: a call can only be ended with its process",
    )
    refuse(
        bool(t.reward_weights) and len(t.reward_weights) != len(t.reward),
        f"task.reward_weights has {len(t.reward_weights)} values for {len(t.reward)} reward functions; give one each",
    )
    refuse(
        c.sampling.temperature == 0,
        "sampling.temperature is 0: training needs samples that differ; use a value above 0",
    )
    refuse("" in s.stop, "sampling.stop holds an empty string, which would end every completion at once; remove it")
    refuse(
        lo.overlong_buffer > s.max_completion_length,
        "loss.overlong_buffer is longer than sampling.max_completion_length",
    )
    refuse(lo.loss_type == "sft", "loss.loss_type sft is for the supervised warm-up only; use grpo, dr_grpo or dapo")
    refuse(
        lo.epsilon_high is not None and lo.epsilon_high < lo.epsilon,
        "loss.epsilon_high is below loss.epsilon; it must be at least as large",
    )
    refuse(
        c.trainer.warmup_steps > 0 and t.name in DATA_TASKS,
        f"trainer.warmup_steps needs worked examples, which task {t.name} does not have; set it to 0",
    )
    refuse(
        c.trainer.warmup_reward > 0 and t.validation_prompts == 0 and t.name not in DATA_TASKS,
        "trainer.warmup_reward needs held-out problems; set task.validation_prompts above 0, or warmup_reward to 0",
    )
    refuse(
        s.num_generations == 1 and c.trainer.skip_zero_variance,
        "sampling.num_generations is 1: every group's advantage would be zero, and with "
        "trainer.skip_zero_variance nothing is trained; use 2 or more",
    )
    refuse(c.attention_mask == "", "attention_mask is empty; name a function as module:function, or leave it out")
    m = c.metrics
    refuse(len(set(m.trackers)) < len(m.trackers), "metrics.trackers names one twice; give each once")
    refuse(
        c.attention == "flex" and c.compile.capture == "layer",
        "compile.capture is layer, and flex attention has a window a layer, so each is another; use step or joint",
    )
    refuse("" in c.compile.recompute, "compile.recompute holds an empty pattern; name a module, an operator or full")
    if c.device != "auto" or None not in (c.compile.capture, c.compile.cudagraph_mode):
        resolve_compile(c.compile, on_gpu=c.device == "cuda")
