"""Builds what computes from a configuration: device, dtype, attention, model, runtime, cache plan, engine, trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ..algorithms import Algorithm, learns_from, make_algorithm
from ..config import (
    SINGLE_SAMPLES,
    CompileConfig,
    RunConfig,
    SamplingConfig,
    require_ranks,
    resolve_compile,
    resolve_parallel,
    template_variables,
)
from ..distributed import ONE_PROCESS, World
from ..distributed.mesh import ONE_RANK, Axis, Mesh
from ..environments import Environment, PromptLimit, Task, make_environment, make_task
from ..errors import InputError, refuse
from ..generator import Engine, SharedWeights, plan_cache_tokens
from ..graph import CudaRecorder, Runtime, Store, Verdict, compile_report, require_plugins
from ..machine import limit_cpu_threads
from ..models import (
    Decoder,
    FolderWeights,
    ModelConfig,
    Ranges,
    WeightSource,
    all_gather_shares,
    load_part,
    ranges_of,
    resolve_folder,
)
from ..models.checks import require_divisible, require_memory
from ..models.init import RandomWeights, architecture
from ..models.tokenizer import byte_tokenizer, check_vocabulary, load_tokenizer, require_same_tokens
from ..timings import PhaseObserver, Timings
from ..trainer import Trainer
from ..trainer.shapes import train_shapes
from ..types import SamplingParams
from .attention import round_page_size, set_attention
from .kernel_lists import kernel_list, preload_async
from .memory import (
    GIB,
    KEPT_STATE,
    STATE_ON_HOST,
    MemoryPlan,
    Workload,
    adapt_config,
    available_memory,
    fit_generator_groups,
    model_config,
    require_host_room,
    require_room,
    workload,
)
from .signals import SignalDelay
from .text.policy import Policy

ReadTask = Callable[[], tuple[Task, type[Environment]]]


def task_reader(config: RunConfig) -> ReadTask:
    """A function that returns the run's task, with its data read, and environment: made once, at the first call."""
    return cache(lambda: (make_task(config.task, config.trainer.prompts_per_step), make_environment(config.task)))


class Session:
    """A model on its device with the runtime that both roles use; the basis of every run, generation and check.
    `config` is resolved (`resolve`); `preloaded`: the list of the kernels that were loaded beside the weights."""

    def __init__(self, config: RunConfig, timings: Timings | None = None, world: World = ONE_PROCESS) -> None:
        """Raises `InputError` if the model cannot be used as `config` says."""
        self.config, self.timings, self.world = config, timings or Timings(), world
        with self.timings.measure("load"):
            self.policy = world.run_on_all(lambda: _load_checked_policy(config, world))
            with world.detect_lost_peers(), world.deadline("sharing the weights that each has read"):
                all_gather_shares(self.policy.model, world.replicas)
            if world.on_gpu:
                torch.cuda.empty_cache()  # the KV cache is planned from the free memory
        self.verdicts: list[Verdict] = []
        self.preloaded: Path | None = None
        self.reset_runtime()

    def reset_runtime(self, lends_cache: bool = False) -> None:
        """Make a new runtime, without the old one's graphs. `lends_cache`: the KV cache lies in the trainer's pool."""
        device = self.policy.model.embed.device
        self.runtime = make_runtime(self.config.compile, device, self.timings, self.world, lends_cache)

    def cache_tokens(self, sequences: int, tokens: int) -> int:
        """The capacity of a KV cache planned for `sequences` of `tokens` each, the same on every rank."""
        model = self.policy.model
        part = model.config.per_rank(self.world.generator_tp)

        def planned() -> int:
            placement = model.embed.dtype, model.embed.device
            return plan_cache_tokens(self.config.generator, part, *placement, sequences, tokens)

        return min(self.world.gather_results(planned))

    def new_engine(self, cache_tokens: int, version: Callable[[], int] = lambda: 0) -> Engine:
        """An engine that reads the model's own weights, whose version is `version()`."""
        weights = SharedWeights(self.policy.model, version)
        engine = Engine(weights, self.config.generator, cache_tokens, self.policy.decode, self.runtime)
        engine.special_token = self.policy.special_token
        if self.world.generator_group is not None:
            engine.check_agreement = partial(self.world.require_same_in_group, "the generator's schedule")
        return engine

    def kernel_list(self, *about: object) -> Path | None:
        """The path of the kernel list for `about`, the model and its placement on ranks; None on a CPU."""
        model, world = self.policy.model, self.world
        if not model.embed.is_cuda:
            return None
        layout = world.sizes, world.generator_mesh.tp.pushes, self.config.parallel.zero_stage
        return kernel_list(model.config, model.embed.dtype, *layout, *about)

    def compile_report(self) -> dict[str, Any]:
        """For the summary: every function's graphs and the results of checking them; empty if there are none."""
        return compile_report(self.runtime, self.verdicts)


def _load_checked_policy(config: RunConfig, world: World) -> Policy:
    if world.size > 1:
        for name in ("tp", "generator_tp"):
            require_divisible(model_config(config), getattr(world, name), f"parallel.{name}")
    return load_policy(config, world.generator_mesh, copies=world.replicas)


class TrainingSession(Session):
    """Everything a training run needs on one rank of `world`; memory is planned and inputs are checked before the first
    step. `config` is resolved; `planned` is called with the memory plan before anything planned is allocated; `read` is
    of `task_reader`. `shapes`: what the trainer's batches are padded to, largest first; `delay`: the context in which
    signals that ask the run to end are deferred, if it is in one."""

    def __init__(
        self,
        config: RunConfig,
        world: World = ONE_PROCESS,
        observer: PhaseObserver | None = None,
        planned: Callable[[MemoryPlan], None] = lambda _: None,
        read: ReadTask | None = None,
    ) -> None:
        self.delay: SignalDelay | None = None
        device, groups = resolve_device(config.device), config.trainer.prompts_per_step
        event = partial(torch.cuda.Event, enable_timing=True) if device.type == "cuda" else None
        timings = Timings(keep_spans=True, event=event, observer=observer)
        finish_preload = preload_async(config, device.type, world.size, timings)
        with timings.measure("task"):
            self.task, self.environment = (read or task_reader(config))()
        require_divisible(model_config(config), world.tp, "parallel.tp")
        memory = min(world.gather(available_memory(device, world)))
        make_workload = partial(workload, config, world.size, device.type == "cuda", model_config(config))
        limit = prompt_limit(config, model_config(config))
        _require_plan(make_workload(prompt_limit=limit.tokens), memory, device)  # before anything is loaded
        super().__init__(config, timings, world)
        model = self.policy.model
        self.policy.set_variables(template_variables(config.task.chat_template_kwargs), "task.chat_template_kwargs")
        with timings.measure("load"):
            self.teacher = load_teacher(config, self.policy, world)
        self.prompt_limit = prompt_limit(config, model.config, None if self.teacher is None else self.teacher.model)
        with timings.measure("prompts"):
            prompts = self.task, self.environment, self.prompt_limit, groups
            longest = max(world.gather_results(lambda: self.policy.check_prompts(*prompts)))
        w = make_workload(longest_prompt=longest, prompt_limit=self.prompt_limit.tokens)
        self.plan = world.run_on_all(lambda: _require_plan(w, memory, device))
        planned(self.plan)
        if (config := adapt_config(w, self.plan)) is not self.config or self.plan.lends_cache:
            self.config = config
            self.reset_runtime(self.plan.lends_cache)
        if make_algorithm(config.loss).has_critic:
            model.add_value_head()
            if (source := self.policy.source) is not None:
                world.run_on_all(lambda: source.fill({"value_head": ranges_of(model)["value_head"]}))
        frozen = self.teacher
        if frozen is None and config.loss.beta > 0:
            frozen = load_reference(self.policy, world)
        with timings.measure("state"):
            self.trainer = Trainer(
                model,
                config.optimizer,
                config.loss,
                reference=None if frozen is None else frozen.model,
                reference_source=None if frozen is None else frozen.source,
                enforce_parity=config.parity == "strict",
                runtime=self.runtime,
                world=world,
                cells=w.cells,
                source=self.policy.source,
                zero_stage=self.plan.zero_stage or None,
            )
        self.trainer.optimizer.keep_on_device(self.plan.terms.get(KEPT_STATE, 0))
        world.require_same("the processes of this run", self.trainer.numerics)
        self.sampling = training_sampling(config.sampling, self.policy.tokenizer.eos_token_id)
        self.validation_sampling = validation_sampling(self.sampling, config.task.validation_samples)
        self.selection_sampling = validation_sampling(self.sampling, 1)  # of problems that end a warm-up
        self.runtime.reserve(self.plan.pool)
        self.engine = self.new_engine(self.plan.cache_tokens, lambda: self.trainer.weights_version)
        self.shapes = train_shapes(config, longest, self.prompt_limit.tokens)
        self.preloaded = finish_preload()

    def complete_state(self) -> None:
        """Wait for the memory of the optimizer's state, which a host allocates beside other work."""
        with self.timings.measure("state"):
            if state_bytes := self.plan.host.get(STATE_ON_HOST):
                self.timings.report_progress(f"{state_bytes / GIB:.0f} GiB of the host's memory")
            self.trainer.optimizer.complete_state()

    @property
    def max_prompt_tokens(self) -> int | None:
        """The most tokens a prompt may have; None: as many as there is room for."""
        return self.prompt_limit.tokens

    @property
    def context(self) -> int:
        """The most tokens a prompt and what follows it may have together."""
        return self.prompt_limit.tokens + self.config.max_response_length


def _require_plan(w: Workload, memory: int, device: torch.device) -> MemoryPlan:
    """The memory plan of a workload. Raises `InputError` if it does not fit."""
    c, g, degree = w.config, w.config.generator, w.config.parallel.generator_tp
    require_divisible(w.model, degree, "parallel.generator_tp")
    where = f"arch {c.arch}" if c.model is None else str(resolve_folder(c.model))
    require_memory(w.model, w.dtype, device, where, w.generator_mesh)
    if not w.on_gpu or g.kv_cache_tokens:  # raises unless the cache holds a sequence
        plan_cache_tokens(g, w.model.per_rank(degree), w.dtype, device, w.sequences, w.sequence_tokens)
    plan = require_room(w, memory)
    require_host_room(plan)
    return plan


def build(config: RunConfig, world: World = ONE_PROCESS) -> TrainingSession:
    return TrainingSession(resolve(config, world.size), world)


def plan_memory(config: RunConfig, ranks: int, memory_gib: float = 0.0) -> MemoryPlan:
    """The memory plan of a run on `ranks` GPUs with `memory_gib` each, which need not be present; 0 means this
    machine's memory, which the processes share if it has no GPU. Raises `InputError` if the run does not fit, saying
    what would, or is invalid as configured."""
    device = torch.device("cuda") if memory_gib else resolve_device(config.device)
    config = resolve_for_device(config, ranks, device) if memory_gib else resolve(config, ranks)
    refuse(
        config.parallel.generator_tp == 0,
        "parallel.generator_tp is 0, which the processes of a run choose by what they measure; name a number to plan",
    )
    require_divisible(model_config(config), config.parallel.generator_tp, "parallel.generator_tp")
    memory = int(memory_gib * 2**30) or available_memory(device, local_ranks=ranks)
    w = planned_workload(config, ranks, device, task_reader(config))
    return require_room(fit_generator_groups(w, memory), memory)


def planned_workload(config: RunConfig, ranks: int, device: torch.device, read: ReadTask) -> Workload:
    """The workload planned for a run, from its tokenizer and first prompts, not weights. `config` is resolved for the
    device."""
    model = model_config(config)
    require_divisible(model, config.parallel.tp, "parallel.tp")
    tokenizer = byte_tokenizer() if config.model is None else load_tokenizer(resolve_folder(config.model))
    policy = Policy(Decoder(model, torch.bfloat16, "meta"), tokenizer)
    set_attention(policy.model, config.attention, config.attention_mask)
    policy.set_variables(template_variables(config.task.chat_template_kwargs), "task.chat_template_kwargs")
    limit = prompt_limit(config, model)
    longest = policy.longest_prompt(*read(), limit, config.trainer.prompts_per_step)
    return workload(config, ranks, device.type == "cuda", model, longest_prompt=longest, prompt_limit=limit.tokens)


def resolve_device(device: str) -> torch.device:
    refuse(device not in ("auto", "cpu", "cuda"), f"device is {device!r}; it must be auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device is cuda, and torch sees no GPU; use --device cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU, the only dtype for which the contract holds there, and float32 on a CPU."""
    refuse(dtype not in ("auto", "float32", "bfloat16"), f"dtype is {dtype!r}; it must be auto, float32 or bfloat16")
    if dtype == "float32" and device.type == "cuda":
        raise InputError("dtype is float32; on a GPU the compute dtype is bfloat16 (the masters are float32)")
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, dtype)


def load_policy(config: RunConfig, mesh: Mesh = ONE_RANK, memory: bool = True, copies: Axis = ONE_RANK.fsdp) -> Policy:
    """Load a Hugging Face folder or hub id, or make the named random model with a byte-level tokenizer, with the
    attention of `config`. Along the mesh's `tp` each rank loads its part; ranks along `copies`, which hold the same
    part, each read a share of it until `all_gather_shares` exchanges them. Without `memory` no weights are allocated
    or read."""
    device = resolve_device(config.device)
    limit_cpu_threads(device)
    dtype = resolve_dtype(config.dtype, device)

    def load_decoder(source: WeightSource, where: str) -> Decoder:
        if not memory:
            return Decoder(source.config, dtype, device, mesh, memory=False)
        require_memory(source.config, dtype, device, where, mesh)
        return load_part(source, dtype, device, mesh, copies)

    if config.model is not None:
        folder = resolve_folder(config.model)
        with ThreadPoolExecutor(1) as pool:  # importing the tokenizer's library takes as long as reading the weights
            loading = pool.submit(load_tokenizer, folder)
            source: WeightSource = FolderWeights(folder, dtype)
            decoder = load_decoder(source, str(folder))
            tokenizer = loading.result()
        check_vocabulary(tokenizer, decoder.config.vocab_size, str(folder))
    else:
        tokenizer, where = byte_tokenizer(), f"arch {config.arch}"
        special = {"eos_token_ids": (tokenizer.eos_token_id,), "pad_token_id": tokenizer.pad_token_id}
        model = replace(architecture(config.arch), **special)
        check_vocabulary(tokenizer, model.vocab_size, where)
        source = RandomWeights(model, config.seed)
        decoder = load_decoder(source, where)
    set_attention(decoder, config.attention, config.attention_mask)
    return Policy(decoder, tokenizer, source)


def load_reference(policy: Policy, world: World) -> Policy:
    """The initial policy, frozen. A single process copies it; each of several reads a part of it, from the model itself
    unless the generator has only a part of the weights, then from its source."""
    if world.size == 1:
        return replace(policy, model=copy.deepcopy(policy.model))
    return policy if policy.model.spread.axis.size > 1 else replace(policy, source=None)


def load_teacher(config: RunConfig, policy: Policy, world: World = ONE_PROCESS) -> Policy | None:
    """The frozen model of `loss.teacher`, or None; with several processes its parameters are not allocated, and each
    process reads a part later. Raises `InputError` if it cannot be loaded or its tokens are not the policy's."""
    if config.loss.teacher is None:
        return None
    try:
        teacher = load_policy(replace(config, model=config.loss.teacher), memory=world.size == 1)
    except InputError as error:
        raise InputError(f"loss.teacher: {error}") from error
    sizes = policy.model.config.vocab_size, teacher.model.config.vocab_size
    require_same_tokens(policy.tokenizer, teacher.tokenizer, sizes, f"loss.teacher {config.loss.teacher}")
    return teacher


def resolve(config: RunConfig, ranks: int = 1, steps: bool = True) -> RunConfig:
    """`config` with the settings that depend on the device and the number of ranks filled in. `steps`: the ranks train,
    so that a step's prompts are dealt to them. Raises `InputError` if `config` cannot work with these."""
    device = resolve_device(config.device)
    config = resolve_for_device(config, ranks, device, steps)
    require_plugins(config.compile, device)
    return config


def resolve_for_device(config: RunConfig, ranks: int, device: torch.device, steps: bool = True) -> RunConfig:
    """`resolve` for a device that need not be present."""
    algorithm = make_algorithm(config.loss)  # load and try a user's algorithm before anything slow
    if config.trainer.skip_zero_variance:
        _require_advantages(algorithm, config)
    resolve_dtype(config.dtype, device)
    compile = resolve_compile(config.compile, device.type == "cuda")
    refuse(
        compile.cudagraph_mode != "none" and device.type != "cuda",
        f"compile.cudagraph_mode is {compile.cudagraph_mode}; CUDA graphs need a GPU, use none",
    )
    refuse(
        config.optimizer.offload and device.type == "cpu",
        "optimizer.offload is on, and the device is a CPU, whose memory is the host's: it would save nothing; leave it "
        "off, or use a GPU",
    )
    generator = round_page_size(config.generator, config.attention)
    config = replace(config, compile=compile, generator=generator)
    if steps:
        return resolve_parallel(config, ranks)
    require_ranks(config, ranks)
    return config


def _require_advantages(algorithm: Algorithm, config: RunConfig) -> None:
    """Raise `InputError` if every advantage would be 0: of a prompt's only sample, or without rewards."""
    single = config.sampling.num_generations == 1
    refuse(single and not learns_from(algorithm, config.loss, [[0.0], [1.0]]), SINGLE_SAMPLES)
    if config.task.is_unrewarded:
        most = config.max_sampled_length
        penalties = [algorithm.penalty(config.loss, length, most) for length in (1, most)]
        refuse(
            not learns_from(algorithm, config.loss, [penalties]),
            f"task.reward is missing: without rewards every advantage of {config.loss.loss_type} is zero, and with "
            "trainer.skip_zero_variance nothing is trained; give --reward MODULE:FUNCTION, or the class other "
            "advantages",
        )


def make_runtime(
    config: CompileConfig, device: torch.device, timings: Timings, world: World, lends_cache: bool = False
) -> Runtime:
    """The runtime of both roles' functions; `config` is resolved. `lends_cache` as in `Session.reset_runtime`."""
    recorder = CudaRecorder(device) if lends_cache else None
    return Runtime(config, device, kv_recorder=recorder, timings=timings, store=Store(), mesh=world.sizes, peers=world)


def training_sampling(config: SamplingConfig, eos_token_id: int | None) -> SamplingParams:
    """The sampling parameters of the run, which stops at the tokenizer's end-of-sequence token unless `ignore_eos`."""
    stop_ids = () if config.ignore_eos or eos_token_id is None else (eos_token_id,)
    shared = {name: value for name, value in vars(config).items() if name != "num_generations"}
    return SamplingParams(n=config.num_generations, stop_token_ids=stop_ids, **shared)


def validation_sampling(training: SamplingParams, samples: int) -> SamplingParams:
    """The sampling parameters of a validation: greedy if it has one sample of a prompt, else those of training."""
    if samples > 1:
        return replace(training, n=samples)
    return replace(training, n=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


def prompt_limit(config: RunConfig, model: ModelConfig, teacher: Decoder | None = None) -> PromptLimit:
    """The most tokens a prompt may have. Prompt and completion together must fit the context of the model and of a
    teacher, a micro-batch and the KV cache; `task.max_prompt_length` may set a lower limit."""
    completion, page = config.max_response_length, config.generator.page_size
    what = "sampling.max_completion_length" if config.task.turns == 1 else "task.max_response_length"
    budget = config.trainer.max_tokens_per_micro_batch
    capacities = [
        (model.max_position_embeddings, f"the model's context of {model.max_position_embeddings}"),
        (budget + 1, f"trainer.max_tokens_per_micro_batch of {budget}, and the last token, which is not packed,"),
    ]
    if teacher is not None:
        context = teacher.config.max_position_embeddings
        capacities.append((context, f"the teacher's context of {context}"))
    if config.generator.kv_cache_tokens:
        given = config.generator.kv_cache_tokens
        whole = given // page * page
        rounded = f" (whole pages of {page}), {whole} tokens," if given % page else ""
        capacities.append((whole, f"generator.kv_cache_tokens of {given}{rounded}"))
    size, holder = min(capacities)
    refuse(size <= completion, f"{what} is {completion}; {holder} must hold it and a prompt, so make it smaller")
    configured = config.task.max_prompt_length
    if 0 < configured <= size - completion:
        return PromptLimit(configured, "task.max_prompt_length")
    note = f" (task.max_prompt_length of {configured} is more)" if configured else ""
    return PromptLimit(size - completion, f"{holder} less {what} of {completion}{note}")


def save_policy(policy: Policy, folder: Path, held: Ranges | None = None, world: World = ONE_PROCESS) -> None:
    """Write a Hugging Face folder that `transformers` loads: weights, configuration, tokenizer, chat template, and what
    the folder that the model comes from says of generation. An existing folder is replaced only once the new one is
    complete. Every rank of `world` calls this and writes the weights that it has `held`; by default those of the
    model."""
    from ..models.hf.export import Export, replace_folder, staging_folder
    from ..models.tokenizer import save_tokenizer

    def begin() -> None:
        export.create_files()
        save_tokenizer(policy.tokenizer, staging)

    with staging_folder(folder, world.is_first) as staging:
        generation = policy.source.generation_config if isinstance(policy.source, FolderWeights) else None
        export = Export(policy.model, staging, generation=generation)
        world.broadcast_from_first(begin)
        world.gather_results(lambda: export.write(held or ranges_of(policy.model)))
        world.gather_results(export.convert_layouts)
    world.broadcast_from_first(lambda: replace_folder(staging, folder))
