"""A whole run's configuration: all sections, and the checks between them."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from ..errors import InputError, refuse
from .sections.checkpoint import CheckpointConfig
from .sections.compile import RECORDINGS, CompileConfig, recordings, resolve_compile
from .sections.generator import GeneratorConfig
from .sections.loss import LossConfig
from .sections.metrics import MetricsConfig
from .sections.optimizer import OptimizerConfig
from .sections.parallel import ParallelConfig
from .sections.sampling import SamplingConfig
from .sections.section import MAX_SEED, Section, at_least, between, require_type
from .sections.task import DATA_TASKS, TaskConfig
from .sections.trainer import TrainerConfig

Attention = Literal["native", "flex"]

SINGLE_SAMPLES = (
    "sampling.num_generations is 1: every group's advantage would be zero, and with trainer.skip_zero_variance nothing "
    "is trained; use 2 or more"
)


@dataclass(frozen=True)
class RunConfig(Section):
    """A resolved run: what config.yaml holds and `--config` replays."""

    recipe: str = "custom"
    """Name of the recipe this came from; custom for none."""
    model: str | None = None
    """Hugging Face folder or hub id; without it a random model is made."""
    arch: str = "tiny"
    """Architecture of the random model, if `model` is not given."""
    steps: int = at_least(0, default=10)
    """Reinforcement-learning steps."""
    seed: int = between(0, MAX_SEED, default=0)
    """Seed of sampling and of a random model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto uses the GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; auto is bfloat16 on a GPU (the only one supported there) and float32 on a CPU."""
    parity: Literal["strict", "warn", "off"] = "strict"
    """On a difference between generator and trainer. strict: end the run. warn: count it. off: compare nothing."""
    attention: Attention = "native"
    """Attention in both roles. native: causal, with the model's sliding windows if it has them. flex: FlexAttention,
    for attention_mask."""
    attention_mask: str | None = None
    """flex only: which keys, up to its own position, a query attends to, as module:function or path.py:function of the
    positions of query and key."""
    task: TaskConfig = field(default_factory=TaskConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def sections(self) -> list[Section]:
        """The sections, then this configuration itself for the fields outside sections."""
        values = [getattr(self, item.name) for item in fields(self)]
        return [*(value for value in values if isinstance(value, Section)), self]

    def path(self, name: str) -> str:
        return name

    def validate(self) -> None:
        for section in self.sections()[:-1]:
            section.validate()
        super().validate()

    @property
    def max_response_length(self) -> int:
        return self.task.max_response_length or self.task.turns * self.sampling.max_completion_length

    @property
    def max_sampled_length(self) -> int:
        """The most tokens that a trajectory samples."""
        return min(self.task.turns * self.sampling.max_completion_length, self.max_response_length)

    @property
    def shard_groups(self) -> int:
        """The most groups of a mini-batch in one shard."""
        return -(-self.trainer.prompts_per_step // (self.trainer.num_mini_batches * max(1, self.parallel.batch_shards)))

    def check(self) -> None:
        """Raise `InputError` for sections that contradict each other."""
        t, lo, s, reads_rows = self.trainer, self.loss, self.sampling, self.task.name in DATA_TASKS
        refuse(s.temperature == 0, "sampling.temperature is 0: training needs samples that differ; use a value above 0")
        refuse(
            lo.overlong_buffer > self.max_sampled_length,
            f"loss.overlong_buffer is {lo.overlong_buffer}; it must be at most {self.max_sampled_length}, the tokens "
            f"that {'a trajectory' if self.task.turns > 1 else 'a completion'} may sample",
        )
        refuse(
            self.task.is_unrewarded and lo.needs_rewards,
            "task.reward is missing: a dataset task needs at least one --reward MODULE:FUNCTION",
        )
        refuse(
            t.warmup_steps > 0 and reads_rows and self.task.environment is None,
            f"trainer.warmup_steps needs worked examples, which task {self.task.name} does not have; set it to 0, or "
            "give an environment whose worked_turns make them of the rows",
        )
        refuse(
            t.warmup_steps > 0 and t.warmup_reward > 0 and reads_rows,
            f"trainer.warmup_reward needs problems that task {self.task.name} does not draw; use trainer.warmup_loss",
        )
        refuse(
            t.warmup_reward > 0 and self.task.validation_prompts == 0 and not reads_rows,
            "trainer.warmup_reward needs held-out problems; set task.validation_prompts above 0, or warmup_reward to 0",
        )
        refuse(
            s.num_generations == 1 and t.skip_zero_variance and lo.group_relative,
            SINGLE_SAMPLES,
        )
        refuse(
            lo.importance_sampling_mode is not None and t.updates == 1 and self.parity == "strict",
            "loss.importance_sampling_mode has no effect with trainer.num_iterations 1 and trainer.num_mini_batches 1: "
            "what samples is what trains, bit for bit, and every weight exactly 1; use more updates, or remove it",
        )
        refuse(
            s.ignore_eos and lo.mask_truncated_completions and not s.stop,
            "loss.mask_truncated_completions leaves out every completion where sampling.ignore_eos lets none end; "
            "remove one of the two",
        )
        refuse(
            0 < self.task.max_response_length < s.max_completion_length,
            f"task.max_response_length is {self.task.max_response_length}, less than one turn's "
            f"sampling.max_completion_length of {s.max_completion_length}; raise it, or set it to 0",
        )
        refuse(
            self.attention_mask == "", "attention_mask is empty; name a function as module:function, or leave it out"
        )
        refuse(
            self.attention == "flex" and self.compile.capture == "layer",
            "compile.capture is layer, and flex attention has a window a layer, so each is another; use step or joint",
        )
        if self.device != "auto" or None not in (self.compile.capture, self.compile.cudagraph_mode):
            resolve_compile(self.compile, on_gpu=self.device == "cuda")

    def ineffective_fields(self) -> Iterator[tuple[str, str]]:
        if self.model is not None:
            yield (
                "arch",
                f"with a model, which has an architecture of its own, {self.model} here: remove one of the two (with "
                f"model None it is random), or begin with lockstep init {self.arch} --out FOLDER",
            )
        if self.attention != "flex":
            yield "attention_mask", "on attention native; set attention to flex, or remove the mask"


# What runs did before a setting for it existed: the setting's default, except where that default is new behaviour.
LEGACY_CONFIG = RunConfig(
    loss=LossConfig(use_bias_correction_kl=False), parallel=ParallelConfig(cell=1 << 16, balance_batch=False)
)


def require_config(config: Any) -> None:
    """Raise `InputError` if `config` or one of its sections is of another type."""
    if not isinstance(config, RunConfig):
        raise InputError(f"config is of type {type(config).__name__}; it must be a RunConfig, as lockstep.recipes give")
    for name, own in vars(RunConfig()).items():
        if isinstance(own, Section):
            require_type(name, getattr(config, name), type(own))


def validate(config: RunConfig) -> RunConfig:
    """Return `config` if every field is valid; raise `InputError` naming the first that is not."""
    config.validate()
    return config


def ineffective_settings(c: RunConfig) -> Iterator[tuple[str, str]]:
    """(dotted field, why) of each setting without effect in `c`; recipes may set it, and users must not give it."""
    for section in c.sections():
        for name, why in section.ineffective_if_given():
            yield section.path(name), why


def newly_ineffective(c: RunConfig, base: RunConfig, given: Collection[str]) -> list[str]:
    """The dotted fields of `c` that had an effect in `base`, have none in `c`, and are not among those `given`: what a
    recipe chose for an algorithm or a task that has been replaced."""
    ineffective_before = _ineffective_paths(base)
    return [path for path in _ineffective_paths(c) if path not in ineffective_before and path not in given]


def reset_to_defaults(c: RunConfig, paths: Iterable[str]) -> RunConfig:
    """`c` with these dotted fields set to their defaults."""
    for path in paths:
        name, _, field_name = path.rpartition(".")
        section: Any = getattr(c, name) if name else c
        section = replace(section, **{field_name: getattr(type(section)(), field_name)})
        c = replace(c, **{name: section}) if name else section
    return c


def _ineffective_paths(c: RunConfig) -> list[str]:
    """The dotted fields that differ from their defaults and that nothing reads."""
    return [
        section.path(name)
        for section in c.sections()
        for name, _ in section.ineffective_fields()
        if getattr(section, name) != getattr(type(section)(), name)
    ]


def resolve_parallel(c: RunConfig, ranks: int) -> RunConfig:
    """`c`, whose `compile` is resolved, with the number of a batch's shards filled in for `ranks` processes
    (`parallel.generator_tp` may still be open). Raises `InputError` for what cannot work with them."""
    require_ranks(c, ranks)
    groups = ranks // c.parallel.tp
    shards = c.parallel.batch_shards or groups
    if shards % groups:
        raise InputError(
            f"parallel.batch_shards is {shards}, which {_describe_trainers(c, ranks)} cannot share evenly; use a "
            f"multiple of {groups}"
        )
    prompts = c.trainer.prompts_per_step
    if prompts % shards:
        below = prompts // shards * shards
        raise InputError(
            f"trainer.prompts_per_step is {prompts}, which {shards} shards (parallel.batch_shards, by default one a "
            f"process) cannot share evenly; use {f'{below} or ' if below else ''}{below + shards}"
        )
    cell = c.parallel.cell
    if groups < shards > cell and cell % groups and groups % cell:
        raise InputError(
            f"parallel.cell is {cell}: {groups} processes would begin a cell and not end it together; use a multiple "
            f"of {groups}, such as {shards}, which makes one cell of all shards, or a divisor"
        )
    generator_tp = 1 if ranks == 1 else c.parallel.generator_tp
    return replace(c, parallel=replace(c.parallel, batch_shards=shards, generator_tp=generator_tp))


def idle_update_message(c: RunConfig, ranks: int) -> str | None:
    """A line that tells the user that a mini-batch has too few prompts to give each process one, and what would have
    enough; None if it has enough. The shards of `c` are filled in."""
    mini_batches, prompts, shards = c.trainer.num_mini_batches, c.trainer.prompts_per_step, c.parallel.batch_shards
    groups, smallest_update = ranks // c.parallel.tp, prompts // mini_batches
    if smallest_update >= groups:
        return None
    enough = -(-mini_batches * groups // shards) * shards
    return (
        f"trainer.num_mini_batches is {mini_batches} and trainer.prompts_per_step {prompts}: updates of "
        f"{smallest_update} leave {groups - smallest_update} of {_describe_trainers(c, ranks)} nothing to do; "
        f"use {prompts // groups} mini-batches at most, or {enough} prompts"
    )


def idle_warmup_message(c: RunConfig, ranks: int) -> str | None:
    """The same for a supervised step with too few examples."""
    examples, groups = c.trainer.warmup_batch_size, ranks // c.parallel.tp
    if not c.trainer.warmup_steps or examples >= groups:
        return None
    return (
        f"trainer.warmup_batch_size is {examples}: supervised steps leave {groups - examples} of "
        f"{_describe_trainers(c, ranks)} nothing to do; use {groups} at least"
    )


def reference_message(c: RunConfig) -> str | None:
    """A line that tells the user that the KL divergence counts what supervised steps teach; None if it does not."""
    if c.loss.beta == 0 or not c.trainer.warmup_steps:
        return None
    return (
        "loss.beta: the reference is the model from before the supervised steps, so what these teach counts as "
        "divergence; to count from there, make them a run of their own (--steps 0), and give its model as --model"
    )


def _describe_trainers(c: RunConfig, ranks: int) -> str:
    """The processes, or groups of them, that shards are dealt to, in words."""
    tp = c.parallel.tp
    return f"{ranks} processes" if tp == 1 else f"{ranks // tp} groups of {tp} processes"


def require_ranks(c: RunConfig, ranks: int) -> None:
    """Raise `InputError` if `ranks` processes cannot work together as `c`, whose `compile` is resolved, says."""
    require_divisor(c.parallel, ranks)
    if ranks == 1:
        return
    refuse(
        not all(plugin.ranks for plugin in c.compile.plugins) or set(c.compile.inductor) != {"backward"},
        f"compile.capture is {c.compile.capture} and compile.inductor {list(c.compile.inductor)}: several processes "
        "need step, and regions of the backward pass alone",
    )
    refuse(
        not all(RECORDINGS[name].ranks for name in recordings(c.compile.cudagraph_mode or "none")),
        f"compile.cudagraph_mode is {c.compile.cudagraph_mode} with {ranks} processes: a collective may begin in one "
        "piece and end in another, which cannot be recorded; use full or none",
    )


def require_divisor(c: ParallelConfig, ranks: int) -> None:
    """Raise `InputError` if `ranks` is not a multiple of `tp` and `generator_tp`, or not as many as `fsdp` says."""
    there_are = "there is one process" if ranks == 1 else f"there are {ranks} processes"
    for name, degree in {"tp": c.tp, "generator_tp": c.generator_tp}.items():
        refuse(
            ranks % max(degree, 1) > 0,
            f"parallel.{name} is {degree}, and {there_are}: start a multiple of {degree}, such as torchrun "
            f"--nproc-per-node {degree} -m lockstep, or set it to a divisor of {ranks}",
        )
    and_tp = f" and parallel.tp {c.tp}" if c.tp > 1 else ""
    refuse(
        c.fsdp not in (0, ranks // c.tp),
        f"parallel.fsdp is {c.fsdp}{and_tp}, and {there_are}; start it with torchrun --nproc-per-node {c.fsdp * c.tp} "
        "-m lockstep, or leave parallel.fsdp at 0 for as many as there are",
    )
