"""Evaluation: mean reward and pass@k on a task's held-out problems, with confidence intervals."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import IO, Any, NamedTuple, SupportsIndex

from ..config import RunConfig, check_range, template_variables, validate, without_trainer_settings, yaml_file
from ..distributed import World
from ..environments import Collector, Environment, Failures, Limits, PromptLimit, Task, make_environment, make_task
from ..environments.collect import LOGGED_PREFIX
from ..environments.environment import SingleTurn, environment_metrics
from ..environments.episodes import SampleOutput, Sampler
from ..environments.ranks.rollouts import RolloutHolders
from ..environments.rewards.calls import check_value
from ..errors import refuse
from ..generator import Engine
from ..trainer.shapes import PROMPT_MARGIN
from ..types import VALIDATION_DOMAIN, RolloutGroup, SamplingParams
from ..user_functions import one_line
from .build import training_sampling
from .generate import LLM, check_sampling, require_finite_logprobs
from .text.policy import Policy

_REPORT_INTERVAL = 5.0  # seconds
_REWARD_ERRORS = "reward_errors/"  # before a function's name: the completions that it failed on
Z95 = 1.959963984540054  # the standard normal's 97.5 % quantile


class EvaluationSettings(NamedTuple):
    """How problems are sampled and which completions pass, as in `lockstep.evaluate`."""

    n: int = 1
    k: tuple[int, ...] = ()
    temperature: float | None = None
    pass_reward: str | None = None
    pass_threshold: float = 1.0


@dataclass(frozen=True)
class EvaluationContext:
    """What an environment is played with, named as in `TrainingSession`; `sampling`: what its requests must match."""

    config: RunConfig
    world: World
    environment: type[Environment]
    policy: Policy
    engine: Engine
    sampling: SamplingParams
    context: int
    max_prompt_tokens: int | None


Serving = Callable[[EvaluationContext], AbstractContextManager[Any]]
Describe = Callable[[RunConfig], dict[str, Any]]


def run_evaluation(
    config: RunConfig, settings: EvaluationSettings, serving: Serving, describe: Describe, progress: IO[str] | None
) -> dict[str, Any]:
    """`lockstep.evaluate`; problems are played within `serving`, to which environments elsewhere may connect. Several
    processes must `describe` the configuration alike."""
    config = validate(yaml_file.check_types(config))
    n, ks = settings.n, _require_ks(settings)
    is_file = progress is None or hasattr(progress, "write")
    refuse(not is_file, f"progress is {progress!r}; give a file to write to, such as sys.stderr")
    task, environment = _load_task(config, settings)
    temperature = settings.temperature
    if temperature is None:
        temperature = 0.0 if n == 1 else config.sampling.temperature
    refuse(
        n > 1 and temperature == 0, f"temperature is 0, which gives {n} equal completions; raise it, or leave n at 1"
    )
    with _load_model(config) as llm, llm.join_processes():
        world, trained = llm.world, training_sampling(config.sampling, llm.policy.tokenizer.eos_token_id)
        world.require_same("the processes of this evaluation", lambda: describe(config) | settings._asdict())
        sampling = replace(trained, n=n, temperature=temperature)
        check_sampling(sampling)
        limit = _prompt_limit(config, llm.context)
        longest = world.run_on_all(lambda: llm.policy.check_prompts(task, environment, limit))
        problems = list(enumerate(task.validation_problems()))
        sizes = {"problems": len(problems), "tokens of the longest prompt": longest}
        world.require_same("the processes of this evaluation", lambda: sizes)
        sequences = world.generator_mesh.fsdp.max_local_items(len(problems)) * n

        def engine_for(prompt_tokens: int) -> Engine:
            margin = 1 if config.task.turns == 1 else PROMPT_MARGIN  # later prompts may be longer
            tokens = min(margin * prompt_tokens + config.max_response_length, llm.context)
            return llm.engine_for(sequences, tokens, [sampling])

        def sampler(prompt_ids: list[list[int]], _: list[SamplingParams]) -> Sampler:
            most = longest
            if world.size == 1 and environment.begin_together:  # the environment may begin with other prompts
                most = max(longest, *map(len, prompt_ids), 0)
            engine = engine_for(most)
            total = sequences if config.task.turns == 1 else 0
            return _ReportingEngine(engine, progress, total) if world.leads_group else engine

        planned_engine = world.run_on_all(lambda: engine_for(longest))
        limits = Limits(
            config.task.max_prompt_length or None,
            config.max_response_length,
            config.task.turns,
            config.task.environment_timeout,
            context=llm.context,
        )
        parts = llm.policy.tokens, sampler, task.rewards, config.seed
        failures = Failures(config.task.max_environment_failures - 1)
        collector = Collector(*parts, environment, limits, failures, world=world, needs_rewards=True)
        context = EvaluationContext(
            config=config,
            world=world,
            environment=environment,
            policy=llm.policy,
            engine=planned_engine,
            sampling=trained if settings.temperature is None else sampling,
            context=llm.context,
            max_prompt_tokens=limits.prompt_tokens,
        )
        with serving(context):
            groups, _, counts, _ = collector.collect(problems, sampling, VALIDATION_DOMAIN, 0)
            if environment is not SingleTurn:  # its metrics may read the text of the turns
                RolloutHolders(world).send_to_first(groups)()
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            metrics = world.broadcast_from_first(lambda: environment_metrics(environment, rollouts))
    names = list(dict.fromkeys(name for rollout in rollouts for name in rollout.rewards))
    decides = names[0] if settings.pass_reward is None else settings.pass_reward
    refuse(decides not in names, f"pass_reward {decides}: the rewards are {', '.join(names)}")
    result = {"task": config.task.name, "prompts": len(problems), "n": n, "temperature": temperature}
    result |= _summarize(groups, ks, decides, float(settings.pass_threshold), names)
    result |= {name: value for name, value in metrics.items() if name not in result}
    counts["groups_without_reward"] = len(problems) - len(groups)  # with those whose environment failed
    told = ("environment/errors", "groups_without_reward", *(f"{_REWARD_ERRORS}{reward}" for reward in names))
    logged = {name: value for name, value in counts.items() if name.startswith(LOGGED_PREFIX)}
    return result | logged | {name: counts[name] for name in told if counts.get(name)}


def _require_ks(settings: EvaluationSettings) -> list[int]:
    """The values of k, ascending; by default the powers of two up to n. `InputError` for what is no number in range."""
    n, threshold = settings.n, settings.pass_threshold
    check_range("n", n, 1, math.inf, whole=True)
    listed = ", ".join(map(str, settings.k))
    refuse(not all(isinstance(k, SupportsIndex) for k in settings.k), f"k is {listed}; each must be a whole number")
    ks = sorted(set(settings.k)) or [2**i for i in range(n.bit_length())]
    listed = ", ".join(map(str, ks))
    refuse(not 1 <= ks[0] <= ks[-1] <= n, f"k is {listed}; each must be between 1 and n, which is {n}")
    is_reward = isinstance(check_value(threshold), float)
    refuse(not is_reward, f"pass_threshold is {one_line(threshold, repr)}; it must be a finite number")
    return ks


def _load_task(config: RunConfig, settings: EvaluationSettings) -> tuple[Task, type[Environment]]:
    """The task and its environment. `InputError`: it has no problems, or not this `pass_reward`."""
    task = make_task(config.task, config.trainer.prompts_per_step)
    name, decides = config.task.name, settings.pass_reward
    refuse(
        not task.validation_problems(),
        f"task {name} has no validation problems; give task.data or task.validation_prompts",
    )
    environment = make_environment(config.task)
    names = [reward.name for reward in task.rewards.rewards]
    refuse(
        decides is not None and decides not in names and config.task.turns == 1,
        f"pass_reward {decides}: the task's reward functions are {', '.join(names)}",
    )
    return task, environment


def _prompt_limit(config: RunConfig, context: int) -> PromptLimit:
    """The most tokens of a prompt, which leave room for a first turn. Raises `InputError` if none do."""
    completion, configured = config.sampling.max_completion_length, config.task.max_prompt_length
    what = f"the model's context of {context}"
    refuse(
        context <= completion,
        f"sampling.max_completion_length is {completion}; {what} must hold it and a prompt, so make it smaller",
    )
    if 0 < configured <= context - completion:
        return PromptLimit(configured, "task.max_prompt_length")
    return PromptLimit(context - completion, f"{what} less sampling.max_completion_length of {completion}")


def _load_model(config: RunConfig) -> LLM:
    shared = {name: getattr(config, name) for name in ("device", "dtype", "seed", "attention", "attention_mask")}
    return LLM(
        config.model or "",
        **shared,
        config=config.generator,
        chat_template_kwargs=template_variables(config.task.chat_template_kwargs),
        compile=without_trainer_settings(config.compile),
        parallel=config.parallel,
    )


class _ReportingEngine:
    """An engine that reports the number of finished completions to `progress` now and then, with `total` if not 0."""

    def __init__(self, engine: Engine, progress: IO[str] | None, total: int) -> None:
        self._engine, self._progress, self._total = engine, progress, total
        self._finished, self._reported_at = 0, time.monotonic()
        self.add_request, self.abort = engine.add_request, engine.abort

    def advance(self) -> Sequence[SampleOutput]:
        """As `Engine.advance`. Raises `NonFiniteError` for log-probabilities that are not finite."""
        new_tokens = self._engine.advance()
        for item in new_tokens:
            if item.completion is not None:
                require_finite_logprobs(item.identity.group, item.completion)
                self._finished += 1
        if self._progress is not None and time.monotonic() - self._reported_at > _REPORT_INTERVAL:
            self._reported_at = time.monotonic()
            of_total = f" of {self._total}" if self._total else ""  # the number of turns is not known in advance
            print(f"{self._finished}{of_total} completions", file=self._progress, flush=True)
        return new_tokens


def _summarize(
    groups: list[RolloutGroup], ks: Sequence[int], decides: str, threshold: float, names: Sequence[str]
) -> dict[str, Any]:
    rewards = [mean(r.reward for r in group.rollouts) for group in groups]
    completions = [r for group in groups for r in group.rollouts]
    result: dict[str, Any] = {"reward/mean": mean(rewards), "reward/ci95": normal_interval(rewards)}
    for name in names:
        values = [value for r in completions if (value := r.rewards.get(name)) is not None]
        if values:
            result[f"rewards/{name}/mean"] = mean(values)
    per_problem = []  # the counts behind pass@k, in the order of the data
    counts = []  # (completions, those that pass) of each problem with a value for every completion
    for group in groups:
        n, passed = len(group.rollouts), group.count_passed(decides, threshold)
        per_problem.append({"problem": group.group, "n": n, "passed": passed})
        if passed is not None:
            counts.append((n, passed))
    if len(counts) < len(groups):
        result["pass_left_out"] = len(groups) - len(counts)
    unknown = []
    for k in ks:
        # A problem whose environment failed for some samples may have fewer than k.
        estimates = [pass_at_k(n, passed, k) for n, passed in counts if n >= k]
        if estimates:
            result[f"pass@{k}"] = mean(estimates)
            result[f"pass@{k}/ci95"] = wilson_interval(mean(estimates), len(estimates))
        else:
            unknown.append(k)
    if unknown:
        result["pass_unknown"] = unknown
    return result | {
        "pass_reward": decides,
        "pass_threshold": threshold,
        "response_length/mean": mean(c.length for c in completions),
        "response_length/clip_ratio": mean(float(c.cut_off) for c in completions),
        "per_problem": per_problem,
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
    kinds = "rewards/", LOGGED_PREFIX, _REWARD_ERRORS, "response_length/", "environment/"
    others = [name for name in result if name.startswith(kinds)]
    width = max(map(len, names + others))
    for name in names:
        low, high = result[f"{name.removesuffix('/mean')}/ci95"]
        lines.append(f"  {name:<{width}} {result[name]:.4f}   95 % interval {low:.4f} to {high:.4f}")
    lines += [f"  pass@{k}: no problem has {k} scored completions" for k in result.get("pass_unknown", ())]
    lines += [f"  {name:<{width}} {result[name]:.4f}" for name in others]
    if "pass_left_out" in result:
        decides, left_out = result["pass_reward"], f"{result['pass_left_out']} of the problems"
        failed = " or on which it failed" if f"{_REWARD_ERRORS}{decides}" in result else ""
        lines.append(f"  pass@k is without {left_out}, to which {decides} does not apply{failed}")
    lines.append(f"  passes when {result['pass_reward']} is at least {result['pass_threshold']:g}")
    return "\n".join(lines)
