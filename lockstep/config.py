"""Every configuration dataclass and its validation, and nowhere else.

Names are the field's own (TRL, vLLM, Hugging Face). All are frozen; `validate` is called once, on the resolved
`RunConfig`, and raises `InputError` naming the field.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .errors import InputError

LossType = Literal["grpo", "dr_grpo", "dapo", "sft"]


@dataclass(frozen=True)
class TaskConfig:
    """Where prompts and rewards come from."""

    name: Literal["sum-digits", "word-arithmetic", "gsm8k", "dataset"] = "sum-digits"
    """Prompt source. `dataset` reads --data and needs at least one --reward."""
    data: str | None = None
    """JSON lines, parquet, a Hugging Face dataset folder or hub id."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    prompt_column: str = "prompt"
    """Column that holds the prompt: a text or chat messages."""
    system_prompt: str | None = None
    """System message for prompts without one; it makes a text prompt a chat of one user message."""
    chat_template_kwargs: tuple[str, ...] = ()
    """Variables of the model's chat template as NAME=VALUE, the value in JSON: enable_thinking=false."""
    shuffle: bool = True
    """Visit the data in a new seeded order every epoch; off: in its own order."""
    max_prompt_length: int = 0
    """Tokens a prompt may have; 0 allows what the model's context leaves beside max_completion_length."""
    filter_overlong_prompts: bool = False
    """Leave out rows whose prompt is longer than that, and say how many; otherwise they are refused."""
    reward: tuple[str, ...] = ()
    """Reward functions as module:function or path.py:function, or the ready ones math and gsm8k; empty for the task's
    own."""
    reward_weights: tuple[float, ...] = ()
    """One weight a reward function; empty for all ones."""
    reward_on_error: Literal["raise", "zero", "skip"] = "raise"
    """What a reward that raises, crashes, takes too long or returns no finite number does. raise: end the run. zero:
    count as 0. skip: count as None; a group with a completion that has no reward is left out of the step."""
    reward_workers: int = 0
    """Processes that call the rewards, a prompt's completions at a time; 0 calls them in this one, the whole batch."""
    reward_timeout: float = 0.0
    """Seconds a call may take (needs reward_workers); 0 is no limit."""
    easy: bool = False
    """sum-digits only: a short prompt with two numbers, for a tiny model."""
    seed: int = 42
    """Seed of the training problems or of the data's order."""
    validation_seed: int = 99
    """Seed of the validation problems (sum-digits, word-arithmetic)."""
    validation_data: str | None = None
    """Validation rows; without it a dataset's last `validation_prompts` rows are held out."""
    validation_prompts: int = 20
    """Prompts a validation generates greedily; 0 turns validation off."""
    validation_interval: int = 0
    """Validate every this many steps as well as before and after; 0 for only those two."""


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are sampled."""

    num_generations: int = 8
    """Samples a prompt (the group size)."""
    temperature: float = 1.0
    """Softmax temperature; 0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this mass; 1 is off."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely; 0 is off."""
    max_completion_length: int = 100
    """New tokens a sample, at most."""
    stop: tuple[str, ...] = ()
    """Stop strings."""
    ignore_eos: bool = False
    """Always generate max_completion_length tokens (benchmarks)."""


@dataclass(frozen=True)
class GeneratorConfig:
    """The generation engine."""

    page_size: int = 16
    """Tokens a KV-cache page."""
    kv_cache_tokens: int = 0
    """Capacity of the KV cache in tokens; 0 plans it from the workload and the memory at hand."""
    max_num_seqs: int = 256
    """Sequences running at once."""
    max_num_batched_tokens: int = 8192
    """Prefill tokens a forward pass; longer prompts are prefilled in chunks."""
    prefix_caching: bool = True
    """Reuse pages of equal prefixes computed with equal weights."""
    steps_per_sync: int = 8
    """Decode steps between two looks of the host at the results."""


@dataclass(frozen=True)
class TrainerConfig:
    """The training step."""

    prompts_per_step: int = 5
    """Groups a step."""
    num_iterations: int = 1
    """Optimizer updates on each rollout."""
    mode: Literal["packed", "per_sample"] = "packed"
    """packed: prompts once, many samples a micro-batch. per_sample: one sample's forward, then its backward."""
    max_tokens_per_micro_batch: int = 16384
    """Packed tokens a micro-batch; a step with more accumulates gradients over several."""
    skip_zero_variance: bool = True
    """Leave out groups whose advantages are all zero."""
    max_idle_steps: int = 10
    """Stop after this many steps in a row with nothing to train on."""
    warmup_steps: int = 0
    """Supervised steps on worked examples before reinforcement learning (tasks that have them)."""
    warmup_learning_rate: float = 1e-3
    """Learning rate of the first supervised step; it falls linearly to 0 over them."""
    warmup_loss: float = 0.0
    """End the supervised steps early, once the mean loss of the last ten is below this (nats a token)."""
    warmup_batch_size: int = 64
    """Worked examples a supervised step."""


@dataclass(frozen=True)
class LossConfig:
    """The policy loss and the advantage estimate."""

    loss_type: LossType = "grpo"
    """grpo: mean over each sequence, then over sequences. dr_grpo: sum over max_completion_length. dapo: mean over
    all tokens with an asymmetric clip."""
    epsilon: float = 0.2
    """Clip range below (and above unless epsilon_high is given)."""
    epsilon_high: float | None = None
    """Clip range above; 0.28 by default for dapo."""
    beta: float = 0.0
    """Weight of the KL divergence from the frozen initial model."""
    scale_rewards: Literal["none", "group", "batch"] = "none"
    """Divide advantages by the standard deviation of the group's or the batch's rewards."""
    overlong_buffer: int = 0
    """dapo: the last this many tokens before max_completion_length cost a linear penalty; 0 is off."""
    overlong_penalty: float = 1.0
    """dapo: the penalty at max_completion_length."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts; 0 is off."""
    mask_truncated_completions: bool = False
    """Leave completions that did not finish out of the loss."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW on fp32 masters."""

    learning_rate: float = 1e-6
    """Largest learning rate: after warm-up, before decay."""
    beta1: float = 0.9
    """Decay of the mean of the gradients."""
    beta2: float = 0.95
    """Decay of the mean of their squares."""
    epsilon: float = 1e-8
    """Added to the root of the mean square."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices, not of norm weights."""
    max_grad_norm: float = 1.0
    """Clip by global norm; 0 is off."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Decay over the run after warm-up."""
    router_bias_rate: float = 0.0
    """Balance experts that are chosen with a bias (DeepSeek-V3): with each update an expert's bias goes up by this when
    it had fewer tokens than the mean, and down when it had more; 0 leaves the biases as they are."""


@dataclass(frozen=True)
class CompileConfig:
    """Captured graphs, in both roles. They compute the same bits as without."""

    capture: Literal["none", "step"] | None = None
    """step: trace forward_backward, optim_step and decode into graphs. none: call the model. Left out: step on a GPU,
    none on a CPU."""
    cudagraph_mode: Literal["none", "piecewise", "full", "full_and_piecewise"] | None = None
    """Record captured graphs as CUDA graphs and replay them (GPU only). full: each whole. piecewise: in pieces around
    attention, which runs between them. full_and_piecewise: whole for the shapes of the warm-up, in pieces for others.
    Left out: full on a GPU where anything is captured."""
    canonicalize: bool = True
    """Drop what nothing depends on from captured graphs."""
    recompute: tuple[str, ...] = ()
    """What the backward pass computes again instead of keeping: `full`, module paths such as `layers.*`, or operators
    such as `silu_mul`."""
    activation_memory_gib: float = 0.0
    """Memory that the forward pass may keep for the backward pass: as many layers as it takes are computed again; 0 is
    no limit."""
    verify: Literal["strict", "warn", "off"] = "strict"
    """Before the first step every graph must give eager's bits, as captured and as replayed. strict: a difference ends
    the run. warn: the function runs one level further down: in pieces, without a CUDA graph, eagerly. off: no check."""
    backend: Literal["auto", "none", "eager"] = "auto"
    """What runs captured graphs. eager: their operators, as captured. none: nothing, the model is called. auto: eager
    where anything is captured."""
    dump: str | None = None
    """Folder to write every captured graph to, with what each pass changed."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints for resuming (the final model is always exported)."""

    interval: int = 0
    """Save every this many steps and at the end; 0 is off, and the run cannot be resumed."""
    keep_last: int = 2
    """Checkpoints kept."""


@dataclass(frozen=True)
class MetricsConfig:
    """What a run writes and shows."""

    progress: bool = True
    """Show the live display (plain lines where standard error is no terminal)."""
    rollouts: bool = True
    """Write rollouts.jsonl."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Trackers that get every step's metrics too; each is an extra to install. None by default: nothing phones home."""
    project: str = "lockstep"
    """Weights & Biases project (wandb)."""


@dataclass(frozen=True)
class RunConfig:
    """A resolved run: what config.yaml holds and `--config` replays."""

    recipe: str = "sum-digits"
    """Name of the recipe this came from."""
    model: str | None = None
    """Hugging Face folder or hub id; without it a tiny random model is made."""
    arch: str = "tiny"
    """Architecture of the random model when `model` is not given."""
    steps: int = 10
    """Reinforcement-learning steps."""
    seed: int = 0
    """Seed of sampling and of a random model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes the GPU when there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; auto is bfloat16 on a GPU (the only one there) and float32 on a CPU."""
    parity: Literal["strict", "warn", "off"] = "strict"
    """What a difference between generator and trainer does."""
    task: TaskConfig = field(default_factory=TaskConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)


def validate(config: RunConfig) -> RunConfig:
    """Return `config` when every field is usable; raise `InputError` naming the first that is not."""
    for path, value, low, high in _ranges(config):
        if not isinstance(value, (int, float)):
            raise InputError(f"{path} is {value!r}, a {type(value).__name__}; it must be a number")
        if not math.isfinite(value) or not low <= value <= high:
            bounds = f"at least {low}" if math.isinf(high) else f"between {low} and {high}"
            raise InputError(f"{path} is {value!r}; it must be {bounds}")
    _check_combinations(config)
    return config


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
        ("checkpoint.interval", c.checkpoint.interval, 0, inf),
        ("checkpoint.keep_last", c.checkpoint.keep_last, 1, inf),
    ]


_DATA_TASKS = ("gsm8k", "dataset")  # the tasks that read rows, and the fields of `task` that act on rows
_DATA_FIELDS = (
    *("data", "validation_data", "prompt_column", "system_prompt", "chat_template_kwargs"),
    *("shuffle", "filter_overlong_prompts"),
)


# What rendering a prompt sets itself.
_TEMPLATE_ARGUMENTS = (
    *("messages", "conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    "tokenizer_kwargs",
)


def template_variables(assignments: tuple[str, ...]) -> dict[str, Any]:
    """`task.chat_template_kwargs` as a dict. `InputError` for another form, or a name that the call itself sets."""
    variables: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name.isidentifier() or name in variables:
            raise InputError(
                f"task.chat_template_kwargs holds {assignment!r}; each must be NAME=VALUE, a name once, such as "
                "enable_thinking=false"
            )
        if name in _TEMPLATE_ARGUMENTS:
            raise InputError(f"task.chat_template_kwargs sets {name}, which is set for every prompt; remove it")
        try:
            variables[name] = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"task.chat_template_kwargs: the value of {assignment!r} is not JSON; write true, false, a number, or "
                "a text in quotes, as in 'name=\"text\"'"
            ) from error
    return variables


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
    for name in _DATA_FIELDS if t.name not in _DATA_TASKS else ():
        refuse(
            getattr(t, name) != getattr(TaskConfig, name),
            f"task.{name} has no effect on {t.name}; remove it, or name a recipe: gsm8k or dataset",
        )
    template_variables(t.chat_template_kwargs)
    refuse(t.prompt_column == "", "task.prompt_column is empty; name the column that holds the prompt")
    refuse(t.system_prompt == "", "task.system_prompt is empty; give a text, or leave it out")
    refuse(
        t.reward_timeout > 0 and t.reward_workers == 0,
        "task.reward_timeout needs task.reward_workers of at least 1: a call can only be ended with its process",
    )
    refuse(t.easy and t.name != "sum-digits", f"task.easy has no effect on {t.name}; remove it")
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
        lo.overlong_buffer > 0 and lo.loss_type != "dapo",
        f"loss.overlong_buffer has no effect on loss_type {lo.loss_type}; use dapo or remove it",
    )
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
        c.trainer.warmup_steps > 0 and t.name in _DATA_TASKS,
        f"trainer.warmup_steps needs worked examples, which task {t.name} does not have; set it to 0",
    )
    refuse(
        s.num_generations == 1 and c.trainer.skip_zero_variance,
        "sampling.num_generations is 1: every group's advantage would be zero, and with "
        "trainer.skip_zero_variance nothing is trained; use 2 or more",
    )
    m = c.metrics
    refuse(len(set(m.trackers)) < len(m.trackers), "metrics.trackers names one twice; give each once")
    refuse(
        m.project != MetricsConfig().project and "wandb" not in m.trackers,
        "metrics.project has no effect without wandb among metrics.trackers; add it or remove the project",
    )
    refuse("" in c.compile.recompute, "compile.recompute holds an empty pattern; name a module, an operator or full")
    if c.device != "auto" or None not in (c.compile.capture, c.compile.cudagraph_mode):
        resolve_compile(c.compile, on_gpu=c.device == "cuda")


# The CUDA graph modes that work under (capture, backend), or why nothing does; docs/compile.md shows this table.
CUDAGRAPH_MODES: dict[tuple[str, str], tuple[str, ...] | str] = {
    ("none", "none"): ("none",),
    ("none", "eager"): "it has no graph to run; set compile.capture to step, or compile.backend to none",
    ("step", "none"): "nothing would run the captured graphs; set compile.backend to eager, or compile.capture to none",
    ("step", "eager"): ("none", "piecewise", "full", "full_and_piecewise"),
}


def resolve_compile(c: CompileConfig, on_gpu: bool) -> CompileConfig:
    """`c` with what was left to the device filled in; `InputError` for a combination that cannot work."""
    capture = c.capture or ("step" if on_gpu and c.backend != "none" else "none")
    mode = c.cudagraph_mode or ("full" if on_gpu and capture != "none" else "none")
    c = replace(c, capture=capture, cudagraph_mode=mode)
    _check_compile(c, capture)
    return c


def _check_compile(c: CompileConfig, capture: str) -> None:
    backend = ("none" if c.capture == "none" else "eager") if c.backend == "auto" else c.backend
    modes = CUDAGRAPH_MODES[capture, backend]
    if isinstance(modes, str):
        raise InputError(f"compile.backend is {backend} with compile.capture {c.capture}: {modes}")
    if c.cudagraph_mode not in modes:
        raise InputError(
            f"compile.cudagraph_mode is {c.cudagraph_mode}: CUDA graphs are recorded from captured graphs; set "
            f"compile.capture to step, or use {' or '.join(modes)}"
        )
    if c.capture == "none" and replace(c, backend="auto") != CompileConfig("none", "none"):
        raise InputError(
            "compile: canonicalize, recompute, activation_memory_gib and verify act on captured graphs; set "
            "compile.capture to step"
        )
