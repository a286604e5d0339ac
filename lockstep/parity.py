"""Bitwise parity between generator and trainer: the run's certificate, and a check of any model."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .errors import InputError, ParityError
from .types import SampleIdentity, SamplingParams, TrainGroup, TrainSequence

if TYPE_CHECKING:
    from .config import Attention
    from .trainer import StepResult

CHECK_DOMAIN = 4  # sampling domain of `check_model`


@dataclass
class Certificate:
    """What a run's parity check covered, written to `parity.json` after every step.

    Every completion token of every rollout is compared at the first update on it: the two log-probabilities that the
    generator recorded against those of the computation that trains, as 32-bit words; of a mixture of experts also
    which experts the token was drawn after, of every layer and slot in order, by a digest. `expert_choices_checked`
    counts those, `tokens_routed_differently` how many of `tokens_different` differ in them; both are None without
    experts.
    """

    mode: str
    steps_checked: int = 0
    tokens_checked: int = 0
    tokens_different: int = 0
    tokens_not_covered: int = 0
    logprob_diff_max: float = 0.0
    expert_choices_checked: int | None = None
    tokens_routed_differently: int | None = None
    first_difference: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def add(self, step: int, result: StepResult, completion_tokens: int) -> None:
        """Account for one step's check."""
        self.steps_checked += 1
        self.tokens_checked += result.tokens_checked
        self.tokens_different += result.tokens_different
        self.tokens_not_covered += completion_tokens - result.tokens_checked
        self.logprob_diff_max = max(self.logprob_diff_max, result.logprob_diff_max)
        if result.routing is not None:
            self.expert_choices_checked = (self.expert_choices_checked or 0) + result.routing.choices_checked
            self.tokens_routed_differently = (self.tokens_routed_differently or 0) + result.routing.tokens_different
        if self.first_difference is None and result.mismatches:
            self.first_difference = {"step": step, **asdict(result.mismatches[0])}

    def to_dict(self) -> dict[str, Any]:
        """The contents of `parity.json`; `identical` is None when nothing was checked."""
        identical = self.tokens_different == 0 and self.tokens_not_covered == 0
        return {"identical": identical if self.tokens_checked else None, **_without_experts(asdict(self))}


def _without_experts(record: dict[str, Any]) -> dict[str, Any]:
    """The record, without what only a mixture of experts has if it is not one."""
    absent = [name for name in ("expert_choices_checked", "tokens_routed_differently") if record[name] is None]
    return {name: value for name, value in record.items() if name not in absent}


def raise_mismatch(step: int, result: StepResult) -> None:
    """Stop a strict run: names the first differing tokens. The weights are those from before the step."""
    lines = [
        f"{m.request}, completion token {m.position}, {m.kind}: generator {m.generator!r}, trainer {m.trainer!r}"
        for m in result.mismatches
    ]
    found = f"{result.tokens_different} of {result.tokens_checked} tokens differ between generator and trainer"
    if result.routing is not None and result.routing.tokens_different:
        found += f", of which {result.routing.tokens_different} went to other experts (digests of the choices differ)"
    raise ParityError(f"step {step + 1}: {found}; the weights were not changed\n  " + "\n  ".join(lines))


@dataclass(frozen=True)
class Report:
    """The outcome of `check_model`."""

    generator_logprobs: list[float]
    trainer_logprobs: list[float]
    tokens_checked: int
    tokens_different: int
    max_delta: float
    prompts: int
    device: str
    dtype: str
    expert_choices_checked: int | None = None
    tokens_routed_differently: int | None = None

    @property
    def identical(self) -> bool:
        """Nothing differs, and there was something to compare."""
        return self.tokens_different == 0 and self.tokens_checked > 0

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"identical": self.identical, **_without_experts(asdict(self))}

    def render(self) -> str:
        """The report as text."""
        verdict = "PASS: generator and trainer log-probs are bitwise identical."
        if self.tokens_routed_differently:
            verdict = "FAIL: generator and trainer choose different experts."
        elif not self.identical:
            verdict = "FAIL: generator and trainer log-probs differ."
        experts = [
            f"  Expert choices    : {self.expert_choices_checked}",
            f"  Routed differently: {self.tokens_routed_differently}",
        ]
        return "\n".join(
            [
                f"  Generator log-probs[:5]: {self.generator_logprobs[:5]}",
                f"  Trainer   log-probs[:5]: {self.trainer_logprobs[:5]}",
                f"  Bitwise identical : {self.identical}",
                f"  Tokens checked    : {self.tokens_checked}",
                f"  Tokens different  : {self.tokens_different}",
                *(experts if self.expert_choices_checked is not None else ()),
                f"  Max delta         : {self.max_delta:.6e}",
                verdict,
            ]
        )


# Sampled with and without filters, and greedy; token `tokens` are spread over them in turn.
_KINDS = (
    SamplingParams(temperature=1.0, n=8, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.95, n=8, ignore_eos=True),
    SamplingParams(temperature=1.2, top_k=50, min_p=0.02, n=4, ignore_eos=True),
    SamplingParams(temperature=0.0, n=1, ignore_eos=True),
)
_COMPLETION = 64
_MOST_TOKENS = 10_000_000  # days on a CPU; all completions are held at once


def check_model(
    model: str,
    tokens: int,
    seed: int,
    device: str,
    dtype: str,
    attention: Attention = "native",
    attention_mask: str | None = None,
) -> Report:
    """Generate at least `tokens` tokens from random prompts and score them with the trainer's computation.

    Prompts have many lengths; sampling is plain, truncated and greedy in turn, several samples a prompt. Raises
    `InputError` for a number out of range and a model that cannot be loaded.
    """
    for name, value, low, high in (("tokens", tokens, 1, _MOST_TOKENS), ("seed", seed, 0, 2**63 - 1)):
        if type(value) is not int or not low <= value <= high:
            raise InputError(f"{name} is {value!r}; it must be a whole number between {low} and {high}")
    from .attention import whole_tiles
    from .build import load_policy
    from .config import GeneratorConfig, LossConfig, OptimizerConfig
    from .generator import Engine, SharedWeights, plan_cache_tokens
    from .trainer import Trainer, pack

    decoder = load_policy(model, "tiny", seed, device, dtype, attention, attention_mask).model
    where, context = decoder.embed.device, decoder.config.max_position_embeddings
    length = min(_COMPLETION, context // 2)
    prompts, sampling = _requests(tokens, seed, decoder.config.vocab_size, min(300, context - length), length)
    generator = whole_tiles(GeneratorConfig(), attention)
    longest = max(map(len, prompts)) + length
    cache_tokens = plan_cache_tokens(
        generator, decoder.config, decoder.embed.dtype, where, sum(s.n for s in sampling), longest
    )
    engine = Engine(SharedWeights(decoder), generator, cache_tokens)
    identities = [SampleIdentity(seed, CHECK_DOMAIN, 0, g) for g in range(len(prompts))]
    completions = engine.generate(prompts, sampling, identities)
    del engine
    groups = [
        TrainGroup(
            prompt,
            [
                TrainSequence(
                    *(c.token_ids, 0.0, 0.0, c.logprobs, c.model_logprobs),
                    *(f"prompt {g} sample {i}", c.route_digests),
                )
                for i, c in enumerate(samples)
            ],
            params,
        )
        for g, (prompt, samples, params) in enumerate(zip(prompts, completions, sampling, strict=True))
    ]
    trainer = Trainer(decoder, OptimizerConfig(), LossConfig())
    batches = [b.to(where) for b in pack(groups, max_tokens=max(8192, 2 * longest), check_parity=True)]
    scored = trainer.score(batches[0])
    for batch in batches:
        trainer.check(batch)
    result = trainer.finish_check()
    return Report(
        completions[0][0].model_logprobs[:5],
        scored.model_logprob_C[:5].tolist(),
        result.tokens_checked,
        result.tokens_different,
        result.logprob_diff_max,
        len(prompts),
        where.type,
        str(decoder.embed.dtype).removeprefix("torch."),
        result.routing.choices_checked if result.routing else None,
        result.routing.tokens_different if result.routing else None,
    )


def _requests(
    tokens: int, seed: int, vocabulary: int, max_prompt: int, length: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = []
    sampling: list[SamplingParams] = []
    planned = 0
    for kind in itertools.cycle(_KINDS):
        if planned >= tokens:
            return prompts, sampling
        size = int(torch.randint(1, max_prompt + 1, (1,), generator=generator))
        prompts.append(torch.randint(0, vocabulary, (size,), generator=generator).tolist())
        sampling.append(SamplingParams(**{**asdict(kind), "max_completion_length": length}))
        planned += kind.n * length
    raise AssertionError("unreachable")
