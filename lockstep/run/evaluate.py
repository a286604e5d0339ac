"""`lockstep eval`: a model measured on a task, with the server for environments that are played over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

from ..config import RunConfig
from ..serve.rollouts import serving
from ..session.evaluation import Measure, measured


def evaluate(
    config: RunConfig,
    *,
    n: int = 1,
    k: int | Sequence[int] = (),
    temperature: float | None = None,
    pass_reward: str | None = None,
    pass_threshold: float = 1.0,
    progress: IO[str] | None = None,
) -> dict[str, Any]:
    """Complete each of the task's validation problems `n` times and score the completions.

    Args:
        config: its model, task (`validation_data`, `validation_prompts`, `reward`), sampling, seed, device and dtype,
            and `compile` but for what acts on the trainer's graphs alone.
        k: which pass@k to estimate, each at most `n`; empty for the powers of two up to `n`.
        temperature: None for 0 (greedy) when `n` is 1 and otherwise for `config.sampling.temperature`.
        pass_reward: name of the reward function that decides whether a completion passes; None for the task's first.
        pass_threshold: a completion passes when that function's value is at least this.
        progress: where to say how far it is, for example `sys.stderr`.

    Returns a dict: `reward/mean` and `pass@K`, each with its 95 % interval under `.../ci95`, the mean of each reward
    function, lengths, and `per_problem` counts, each with the problem's number. A problem on some of whose completions
    `pass_reward` is None does not count for pass@k, and has `passed` None there; `pass_unknown` are the k that no
    problem has as many scored completions for. Under `torchrun` all processes call it, with the same arguments;
    problems are dealt to groups of `config.parallel.generator_tp` of them, and each returns the result of all.

    Raises `InputError` for settings that cannot work and for a task without validation problems, and `NonFiniteError`
    when the model's outputs are no numbers.
    """
    how = Measure(n, (k,) if isinstance(k, int) else tuple(k), temperature, pass_reward, pass_threshold)
    return measured(config, how, serving, progress)
