"""`lockstep parity`: whether a model's log-probabilities have the same bits in the generator and in the trainer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..config import (
    MAX_SEED,
    PARITY_LAYOUT_FIELDS,
    Attention,
    CompileConfig,
    LossConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    check_layout,
    given_or_default,
    validate,
)
from ..errors import InputError, refuse
from ..graph import Runtime, Work
from ..trainer import BatchShape, Packing, Trainer, pack_shards
from ..types import RolloutGroup, SampleIdentity, SamplingParams, Segment, Trajectory
from .build import Session, resolve
from .certificate import omit_absent_expert_counts
from .degree import choose_generator_tp_by_memory
from .processes import GENERATING, Requests, gather_completions, join_processes
from .warm_up import make_ready, prepare_machine

T = TypeVar("T")
CHECK_DOMAIN = 4  # sampling domain of `check_model`


@dataclass(frozen=True)
class ParityReport:
    """The outcome of `check_model`. `max_delta` is the largest difference of either log-probability. The other
    statistics are of the model's own log-probability: `average_delta` is the mean of trainer minus generator, and
    `logprob_diff_*` are of its absolute value."""

    generator_logprobs: list[float]
    trainer_logprobs: list[float]
    tokens_checked: int
    tokens_different: int
    tokens_not_covered: int
    max_delta: float
    average_delta: float
    logprob_diff_mean: float
    logprob_diff_max: float
    prompts: int
    device: str
    dtype: str
    compared: str
    tokens_asked: int
    processes: int
    generator_tp: int
    trainer_tp: int
    expert_choices_checked: int | None = None
    tokens_routed_differently: int | None = None
    prompt_tokens_checked: int | None = None
    prompt_tokens_routed_differently: int | None = None

    @property
    def identical(self) -> bool:
        """Whether there were sampled tokens, all of them were compared, and none differs."""
        different = self.tokens_different, self.tokens_not_covered, self.prompt_tokens_routed_differently
        return not any(different) and self.tokens_checked > 0

    def to_dict(self) -> dict[str, Any]:
        return {"identical": self.identical, **omit_absent_expert_counts(asdict(self))}

    def render(self) -> str:
        verdict = "PASS: generator and trainer log-probs are bitwise identical."
        if self.tokens_routed_differently or self.prompt_tokens_routed_differently:
            verdict = "FAIL: generator and trainer choose different experts."
        elif not math.isfinite(self.max_delta):
            verdict = "FAIL: log-probs are no finite numbers: the model's outputs overflow in this dtype."
        elif self.tokens_different:
            verdict = "FAIL: generator and trainer log-probs differ."
        elif not self.identical:
            verdict = "FAIL: not every sampled token was compared."
        note = ""
        if self.tokens_checked > self.tokens_asked:
            note = f" ({self.tokens_asked} were asked for; the completions of a prompt are whole)"
        lines = [f"  Compared          : {self.compared}"]
        if self.processes > 1:
            generator = f"generator {self.processes // self.generator_tp} x {self.generator_tp}"
            trainer = f"trainer {self.processes // self.trainer_tp} x {self.trainer_tp}"
            lines.append(f"  Processes         : {self.processes}; {generator}, {trainer}")
        lines += [
            f"  Generator log-probs[:5]: {self.generator_logprobs[:5]}",
            f"  Trainer   log-probs[:5]: {self.trainer_logprobs[:5]}",
            f"  Bitwise identical : {self.identical}",
            f"  Tokens checked    : {self.tokens_checked}{note}",
            f"  Tokens different  : {self.tokens_different}",
        ]
        if self.tokens_not_covered:
            lines.append(f"  Not compared      : {self.tokens_not_covered}")
        if self.expert_choices_checked is not None:
            lines += [
                f"  Expert choices    : {self.expert_choices_checked}",
                f"  Routed differently: {self.tokens_routed_differently}",
                f"  Of prompts        : {self.prompt_tokens_routed_differently} of {self.prompt_tokens_checked} tokens",
            ]
        lines += [
            f"  Max delta         : {self.max_delta:.6e}",
            f"  Average delta     : {self.average_delta:.6e}",
            f"  Log-prob diff     : mean {self.logprob_diff_mean:.6e}, max {self.logprob_diff_max:.6e}",
            verdict,
        ]
        return "\n".join(lines)


# With and without filters, and greedy; prompts take these kinds of sampling in turn.
_SAMPLING_KINDS = (
    SamplingParams(temperature=1.0, n=8, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.95, n=8, ignore_eos=True),
    SamplingParams(temperature=1.2, top_k=50, min_p=0.02, n=4, ignore_eos=True),
    SamplingParams(temperature=0.0, n=1, ignore_eos=True),
)
_MAX_PROMPT_LENGTH, _COMPLETION_LENGTH = 300, 64
_MAX_TOKENS = 10_000_000  # takes days on a CPU; all completions are held in memory at once


def check_model(
    model: str | Path,
    tokens: int = 4000,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    attention: Attention = "native",
    attention_mask: str | None = None,
    compile: CompileConfig | None = None,
    parallel: ParallelConfig | None = None,
) -> ParityReport:
    """Generate at least `tokens` tokens from random prompts and score them with the trainer's computation.

    Prompts vary in length; sampling is plain, truncated and greedy in turn, with several samples per prompt unless
    greedy. Where `compile` captures graphs (by default on a GPU), the generator's graphs are compared with the one that
    trains; elsewhere both roles call the model. Raises `InputError` for a number out of range, contradictory settings,
    and a model that cannot be loaded.

    Under `torchrun` every process calls this with the same arguments and returns the report on all of them: prompts are
    dealt to groups of `parallel.generator_tp` processes, and their completions to groups of `parallel.tp`.
    """
    for name, value, low, high in (("tokens", tokens, 1, _MAX_TOKENS), ("seed", seed, 0, MAX_SEED)):
        if type(value) is not int or not low <= value <= high:
            raise InputError(f"{name} is {value!r}; it must be a whole number between {low} and {high}")
    compile = given_or_default("compile", compile, CompileConfig)
    parallel = given_or_default("parallel", parallel, ParallelConfig)
    check_layout(parallel, *PARITY_LAYOUT_FIELDS)
    how = {"device": device, "dtype": dtype, "attention": attention, "attention_mask": attention_mask}
    config = validate(RunConfig(model=str(model), seed=seed, compile=compile, parallel=parallel, **how))  # type: ignore[arg-type]
    with join_processes(config, tokens=tokens) as world:
        config, world = choose_generator_tp_by_memory(config, world)
        session = Session(world.run_on_all(lambda: resolve(config, world.size, steps=False)), world=world)
        try:
            prepare_machine(session)
            return _check(session, tokens)
        finally:
            session.runtime.close()


def _check(session: Session, tokens: int) -> ParityReport:
    decoder, runtime, world = session.policy.model, session.runtime, session.world
    device, context = decoder.embed.device, decoder.config.max_position_embeddings
    refuse(context < 2, f"the model's context is {context}; a prompt and a completion need one token each")
    length = min(_COMPLETION_LENGTH, context // 2)
    vocabulary, max_prompt = decoder.config.vocab_size, min(_MAX_PROMPT_LENGTH, context - length)
    prompts, sampling = _random_prompts(tokens, session.config.seed, vocabulary, max_prompt, length)
    max_tokens = max(8192, 2 * (max(map(len, prompts)) + length))
    shards = world.mesh.fsdp
    shape, kinds = _expected_batches(prompts, sampling, max_tokens, shards.size)
    trainer = Trainer(
        decoder, OptimizerConfig(), LossConfig(), runtime=runtime, world=world, source=session.policy.source
    )
    completions = _generate(session, prompts, sampling, trainer, shape, kinds)
    groups = [RolloutGroup(*group) for group in zip(completions, sampling, strict=True)]
    packing = Packing(max_tokens, shapes=[shape])
    score = trainer.forward_backward if runtime.compiles else trainer.check
    for batch in pack_shards(
        _deal(groups, shards.size), shards.local_items(range(shards.size)), packing, check_parity=True
    ):
        with world.deadline("scoring what was generated"):
            score(batch.to(device))
    deltas = trainer.logprob_deltas
    scored = world.broadcast_from_first(lambda: trainer.checked_logprobs[0][:5].tolist())
    result = trainer.finish_check(sum(len(c.token_ids) for samples in completions for c in samples))
    return ParityReport(
        completions[0][0].model_logprobs[:5],
        scored,
        result.tokens_checked,
        result.tokens_different,
        result.tokens_not_covered,
        result.logprob_diff_max,
        *deltas,
        len(prompts),
        device.type,
        str(decoder.embed.dtype).removeprefix("torch."),
        _describe_compared(runtime),
        tokens,
        *(world.size, world.generator_tp, world.tp),
        *(result.routing.compared if result.routing else ()),
    )


def _generate(
    session: Session,
    prompts: list[list[int]],
    sampling: list[SamplingParams],
    trainer: Trainer,
    shape: BatchShape,
    trained: list[SamplingParams],
) -> list[list[Trajectory]]:
    """The prompts' completions, from an engine that is freed on return. First the graphs of both roles are made (the
    trainer's for `shape` and the kinds of sampling `trained`) and checked against eager."""
    config, runtime, world = session.config, session.runtime, session.world
    shares = world.generator_mesh.fsdp
    longest = max(map(len, prompts)) + sampling[0].max_completion_length
    sequences = max(sum(params.n for params in share) for share in _deal(sampling, shares.size))
    engine = session.new_engine(session.cache_tokens(sequences, longest))

    def make_trainer_graphs() -> None:
        for params in trained:
            trainer.warm_up([shape], params, check_parity=True, with_checks=False)

    def make_generator_graphs() -> None:
        for params in dict.fromkeys(sampling):
            engine.warm_up(sequences, longest, params)

    def trust_cases() -> Work:
        cases = [trainer.check_cases([shape], params, check_parity=True, with_checks=False) for params in trained]
        return [*itertools.chain(*cases), *engine.check_cases()]

    if runtime.compiles:
        about = config.generator, config.compile, sequences, longest, shape, trained, sampling
        with world.deadline("making and checking graphs", timeouts=10):
            parts = [make_trainer_graphs, make_generator_graphs]
            make_ready(session, parts, trust_cases, session.kernel_list(*about))
    identities = [SampleIdentity(config.seed, CHECK_DOMAIN, 0, g) for g in range(len(prompts))]
    own = Requests(prompts, sampling, identities).share(world)
    with world.rolling_deadline(GENERATING) as engine.on_launch:
        return gather_completions(world, lambda: engine.generate(*own))


def _deal(items: Sequence[T], shares: int) -> list[list[T]]:
    return [list(items[i::shares]) for i in range(shares)]


def _expected_batches(
    prompts: list[list[int]], sampling: list[SamplingParams], max_tokens: int, shards: int
) -> tuple[BatchShape, list[SamplingParams]]:
    """The shape that all batches will be padded to, and one kind of sampling for each way that they are scored. Both
    are known in advance, since every completion has the full length."""
    groups = []
    for prompt, params in zip(prompts, sampling, strict=True):
        segments = [Segment(prompt), Segment([0] * params.max_completion_length, sampled=True)]
        groups.append(RolloutGroup([Trajectory(segments)] * params.n, params))
    packing = Packing(max_tokens)
    while True:
        batches = pack_shards(_deal(groups, shards), range(shards), packing, check_parity=False)
        sizes = [(len(b.tokens_T), len(b.targets_C), len(b.prefix_len_S), b.max_len) for b in batches]
        shape = BatchShape(*map(max, zip(*sizes, strict=True)))
        if packing.shapes == [shape]:
            break
        packing = packing._replace(shapes=[shape])  # it limits a micro-batch, so groups may be packed differently
    kinds = [next(p for p in sampling if p.truncated == kind) for kind in sorted({b.truncated for b in batches})]
    return shape, kinds


def _describe_compared(runtime: Runtime) -> str:
    """What the two roles' log-probabilities were computed by."""
    if runtime.eager:
        model = "the model's compiled layers" if runtime.layers else "the model"
        return f"{model}, called by both roles"
    levels = {program.name: program.level for program in runtime.programs}
    decode, mixed, train = (f"{name} ({levels[name]})" for name in ("decode", "mixed", "forward_backward"))
    return f"the graphs {decode} and {mixed} with {train}"


def _random_prompts(
    tokens: int, seed: int, vocabulary: int, max_prompt: int, length: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of random tokens and lengths, and their sampling, which together give at least `tokens` tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = []
    sampling: list[SamplingParams] = []
    kinds, planned = itertools.cycle(_SAMPLING_KINDS), 0
    while planned < tokens:
        kind = next(kinds)
        size = int(torch.randint(1, max_prompt + 1, (1,), generator=generator))
        prompts.append(torch.randint(0, vocabulary, (size,), generator=generator).tolist())
        sampling.append(replace(kind, max_completion_length=length))
        planned += kind.n * length
    return prompts, sampling
