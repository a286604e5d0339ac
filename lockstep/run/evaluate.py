"""`lockstep eval`: measures a model on a task, with a server for environments that connect over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

from ..config import RunConfig
from ..serve.rollouts import serve_rollouts
from ..session.evaluation import EvaluationSettings, run_evaluation


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
        config: supplies the model, task (`validation_data`, `validation_prompts`, `reward`), sampling, seed, device,
            dtype and `compile`, except what affects only the trainer's graphs.
        k: which pass@k to estimate, each at most `n`; empty for the powers of two up to `n`.
        temperature: None for 0 (greedy) if `n` is 1, else for `config.sampling.temperature`.
        pass_reward: name of the reward function that decides whether a completion passes; None for the task's first.
        pass_threshold: a completion passes if that function's value is at least this.
        progress: where to report progress, for example `sys.stderr`.

    Returns a dict: `reward/mean` and `pass@K`, each with its 95 % interval under `.../ci95`, the mean of each reward
    function, lengths, and `per_problem` counts, each with the problem's number. A problem with a completion whose
    `pass_reward` is None does not count for pass@k and has `passed` None; `pass_unknown` lists each k for which no
    problem has k scored completions. Under `torchrun` all processes call this with the same arguments; problems are
    dealt to groups of `config.parallel.generator_tp` processes, and each process returns the result for all problems.

    Raises `InputError` for settings that cannot work and for a task without validation problems, and `NonFiniteError`
    if a log-probability is not finite.
    """
    how = EvaluationSettings(n, (k,) if isinstance(k, int) else tuple(k), temperature, pass_reward, pass_threshold)
    return run_evaluation(config, how, serve_rollouts, progress)
