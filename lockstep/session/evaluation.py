"""Evaluation: mean reward and pass@k on a task's held-out problems, with confidence intervals."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import IO, Any, NamedTuple

from ..config import RunConfig, of_generation, template_variables, validate, yaml_file
from ..distributed import World
from ..environments import Collector, Environment, Limits, make_environment, make_task
from ..environments.environment import SingleTurn, metrics_of
from ..environments.episodes import NewTokens, Sampler
from ..environments.ranks.rollouts import Holders
from ..errors import InputError, refuse
from ..generator import Engine
from ..trainer.shapes import PROMPT_MARGIN
from ..types import VALIDATION_DOMAIN, RolloutGroup, SamplingParams
from .build import training_sampling
from .generate import LLM, check_sampling, require_numbers
from .text.policy import Policy

_SECONDS_A_REPORT = 5.0
Z95 = 1.959963984540054  # the standard normal's 97.5 % quantile


class Measure(NamedTuple):
    n: int = 1
    k: tuple[int, ...] = ()
    temperature: float | None = None
    pass_reward: str | None = None
    pass_threshold: float = 1.0


@dataclass(frozen=True)
class Played:
    """What an environment is played with, named as in `TrainingSession`; `sampling`: what its requests must match."""

    config: RunConfig
    world: World
    environment: type[Environment]
    policy: Policy
    engine: Engine
    sampling: SamplingParams
    context: int
    most_prompt_tokens: int | None


def measured(
    config: RunConfig, by: Measure, serving: Callable[[Played], AbstractContextManager[Any]], progress: IO[str] | None
) -> dict[str, Any]:
    """`run.evaluate.evaluate`; problems are played within `serving`, to which environments elsewhere may connect."""
    n, k, temperature, pass_reward, pass_threshold = by
    config = validate(yaml_file.checked(config))
    refuse(n < 1, f"n is {n}; it must be at least 1")
    ks = sorted(set(k)) or [2**i for i in range(n.bit_length())]
    named = ", ".join(map(str, ks))
    refuse(not 1 <= ks[0] <= ks[-1] <= n, f"k is {named}; each must be between 1 and n, which is {n}")
    refuse(not math.isfinite(pass_threshold), f"pass_threshold is {pass_threshold}; it must be a finite number")
    task = make_task(config.task, config.trainer.prompts_per_step)
    problems = list(enumerate(task.validation_problems()))
    name = config.task.name
    refuse(not problems, f"task {name} has no validation problems; give task.data or task.validation_prompts")
    environment = make_environment(config.task)
    names = [reward.name for reward in task.rewards.rewards]
    if pass_reward is not None and pass_reward not in names and config.task.turns == 1:
        raise InputError(f"pass_reward {pass_reward}: the task's reward functions are {', '.join(names)}")
    if temperature is None:
        temperature = 0.0 if n == 1 else config.sampling.temperature
    if n > 1 and temperature == 0:
        raise InputError(f"temperature is 0, which gives {n} equal completions; raise it, or leave n at 1")
    how = {name: getattr(config, name) for name in ("device", "dtype", "seed", "attention", "attention_mask")}
    llm = LLM(
        config.model or "",
        **how,
        config=config.generator,
        chat_template_kwargs=template_variables(config.task.chat_template_kwargs),
        compile=of_generation(config.compile),
        parallel=config.parallel,
    )
    with llm, llm.together():
        world, trained = llm.world, training_sampling(config.sampling, llm.policy.tokenizer.eos_token_id)
        sampling = replace(trained, n=n, temperature=temperature)
        check_sampling(sampling)
        longest, origin = world.run_on_all(lambda: llm.policy.longest_prompt(task, environment, 0))
        too_long = config.task.turns == 1 and longest + config.max_response_length > llm.context
        refuse(
            too_long,
            f"{origin + ': ' if origin else ''}prompt of {longest} tokens plus {config.max_response_length} new ones "
            f"exceeds the model's context of {llm.context}; shorten one of them (sampling.max_completion_length)",
        )
        sizes = {"problems": len(problems), "tokens of the longest prompt": longest}
        world.require_same("the processes of this evaluation", lambda: sizes)
        sequences = world.generator_mesh.fsdp.max_local_items(len(problems)) * n

        def engine(prompt: int) -> Engine:
            margin = 1 if config.task.turns == 1 else PROMPT_MARGIN  # later prompts may be longer
            tokens = min(margin * prompt + config.max_response_length, llm.context)
            return llm.engine_for(sequences, tokens, [sampling])

        def sampler(prompt_ids: list[list[int]], _: list[SamplingParams]) -> Sampler:
            alone = world.size == 1 and environment.begin_together
            begun = map(len, prompt_ids) if alone else ()  # the environment may begin with other prompts
            made = engine(max(longest, *begun, 0))
            return _Reporting(made, progress, sequences if config.task.turns == 1 else 0) if world.leads_group else made

        planned = world.run_on_all(lambda: engine(longest))
        parts = llm.policy.tokens, sampler, task.rewards, config.seed
        response = config.max_response_length, config.task.turns, config.task.environment_timeout
        limits = Limits(config.task.max_prompt_length or None, *response, context=llm.context)
        collector = Collector(*parts, environment, limits, world=world, needs_rewards=True)
        allowed = trained if by.temperature is None else sampling
        with serving(
            Played(config, world, environment, llm.policy, planned, allowed, llm.context, limits.prompt_tokens)
        ):
            groups, _, counts = collector.collect(problems, sampling, VALIDATION_DOMAIN, 0)
            if environment is not SingleTurn:  # its metrics may read the text of the turns
                Holders(world).bring_to_first(groups)()
            played = world.broadcast_from_first(
                lambda: metrics_of(environment, [r for group in groups for r in group.rollouts])
            )
    found = list(dict.fromkeys(name for group in groups for r in group.rollouts for name in r.rewards))
    decides = found[0] if pass_reward is None else pass_reward
    refuse(decides not in found, f"pass_reward {decides}: the rewards are {', '.join(found)}")
    settings = {"task": name, "prompts": len(problems), "n": n, "temperature": temperature}
    failed = {name: count for name in ("environment/errors", "groups_without_reward") if (count := counts.get(name))}
    return settings | _measures(groups, ks, decides, pass_threshold, found) | played | failed


class _Reporting:
    """An engine that reports the number of finished completions to `progress` now and then, with `total` if not 0."""

    def __init__(self, engine: Engine, progress: IO[str] | None, total: int) -> None:
        self._engine, self._progress, self._total = engine, progress, total
        self._finished, self._said = 0, time.monotonic()
        self.add_request, self.abort = engine.add_request, engine.abort

    def advance(self) -> Sequence[NewTokens]:
        """As `Engine.advance`. Raises `NonFiniteError` for log-probabilities that are not finite."""
        grown = self._engine.advance()
        for one in grown:
            if one.completion is not None:
                require_numbers(one.identity.group, one.completion)
                self._finished += 1
        if self._progress is not None and time.monotonic() - self._said > _SECONDS_A_REPORT:
            self._said = time.monotonic()
            of = f" of {self._total}" * bool(self._total)  # the number of turns is not known in advance
            print(f"{self._finished}{of} completions", file=self._progress, flush=True)
        return grown


def _measures(
    groups: list[RolloutGroup], ks: Sequence[int], decides: str, threshold: float, names: Sequence[str]
) -> dict[str, Any]:
    rewards = [mean(r.reward for r in group.rollouts) for group in groups]
    completions = [r for group in groups for r in group.rollouts]
    result: dict[str, Any] = {"reward/mean": mean(rewards), "reward/ci95": normal_interval(rewards)}
    for name in names:
        values = [v for g in groups for r in g.rollouts if (v := r.rewards.get(name)) is not None]
        if values:
            result[f"rewards/{name}/mean"] = mean(values)
    scored = [[r.rewards.get(decides) for r in group.rollouts] for group in groups]
    counts = [[v >= threshold for v in row if v is not None] for row in scored if None not in row]
    if left_out := len(scored) - len(counts):
        result["pass_left_out"] = left_out
    for k in ks:  # a problem whose environment failed for some samples may have fewer
        if estimates := [pass_at_k(len(row), sum(row), k) for row in counts if len(row) >= k]:
            result[f"pass@{k}"] = mean(estimates)
            result[f"pass@{k}/ci95"] = wilson_interval(mean(estimates), len(estimates))
    if unknown := [k for k in ks if f"pass@{k}" not in result]:
        result["pass_unknown"] = unknown
    return result | {
        "pass_reward": decides,
        "pass_threshold": threshold,
        "response_length/mean": mean(c.length for c in completions),
        "response_length/clip_ratio": mean(float(c.cut_off) for c in completions),
        "per_problem": [  # the counts behind pass@k, in the order of the data
            {"problem": g.group, "n": len(row), "passed": None if None in row else passed}
            for g, row in zip(groups, scored, strict=True)
            for passed in [sum(v is not None and v >= threshold for v in row)]
        ],
    }


def pass_at_k(n: int, passed: int, k: int) -> float:
    """An unbiased estimate, from c = `passed` of `n` completions, of the probability that at least one of k passes:
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, Evaluating Large Language Models Trained on Code, equation 1)."""
    assert 0 <= passed <= n and 1 <= k <= n
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def wilson_interval(rate: float, problems: int) -> tuple[float, float]:
    """The 95 % score interval (Wilson 1927) for a mean over problems of values between 0 and 1. Such values vary at
    most as much as binary ones with the same mean. It covers both the choice of problems and the sampling."""
    z2 = Z95**2 / problems
    centre = (rate + z2 / 2) / (1 + z2)
    half = Z95 / (1 + z2) * math.sqrt(max(0.0, rate * (1 - rate)) / problems + z2 / (4 * problems))
    return max(0.0, centre - half), min(1.0, centre + half)


def normal_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean plus and minus 1.96 standard errors over problems; infinitely wide for a single problem."""
    half = Z95 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return mean(values) - half, mean(values) + half


def render(result: dict[str, Any]) -> str:
    n, problems = result["n"], result["prompts"]
    sampled = "greedy" if result["temperature"] == 0 else f"temperature {result['temperature']:g}"
    without = result.get("groups_without_reward")
    left_out = f" ({without} left out, without a reward)" if without else ""
    each = f"{n} {'completion' if n == 1 else 'completions'} each"
    lines = [f"{result['task']}: {problems} problems{left_out}, {each}, {sampled}"]
    names = [name for name in result if name == "reward/mean" or (name.startswith("pass@") and "/" not in name)]
    others = [name for name in result if name.startswith(("rewards/", "response_length/", "environment/"))]
    width = max(map(len, names + others))
    for name in names:
        low, high = result[f"{name.removesuffix('/mean')}/ci95"]
        lines.append(f"  {name:<{width}} {result[name]:.4f}   95 % interval {low:.4f} to {high:.4f}")
    lines += [f"  pass@{k}: no problem has {k} scored completions" for k in result.get("pass_unknown", ())]
    lines += [f"  {name:<{width}} {result[name]:.4f}" for name in others]
    if "pass_left_out" in result:
        left_out = f"{result['pass_left_out']} of the problems, to which {result['pass_reward']} does not apply"
        lines.append(f"  pass@k is without {left_out}")
    lines.append(f"  passes when {result['pass_reward']} is at least {result['pass_threshold']:g}")
    return "\n".join(lines)
