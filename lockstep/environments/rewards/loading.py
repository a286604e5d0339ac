"""Reward functions by name: `module:function`, `path.py:function`, or a built-in one."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import InputError, refuse
from ...user_functions import load_function
from .calls import RewardFunction
from .reward_set import OnError, Reward, RewardSet
from .verl import has_verl_signature, verl_reward
from .workers import RewardWorkers

# Built-in rewards, by their names on the command line.
BUILT_IN_REWARDS = {
    "math": "lockstep.environments.rewards.mathematics:math_reward",
    "gsm8k": "lockstep.environments.tasks.gsm8k:gsm8k_reward",
    "reasoning_gym": "lockstep.environments.rewards.reasoning_gym:reasoning_gym",
}


def load_rewards(
    specs: Sequence[str],
    weights: Sequence[float] = (),
    on_error: OnError = "raise",
    workers: RewardWorkers | None = None,
) -> RewardSet:
    """The reward functions that `specs` name, with `weights` (all 1 if empty). Each is named by its function's name
    (for an object without one, its name in the module), or by the whole spec if several have that name. `InputError`: a
    spec is given twice, or `load_reward` refuses it."""
    for index, spec in enumerate(specs):
        refuse(spec in specs[:index], f"reward {spec!r} is given twice; give it once, with a weight")
    functions = [load_reward(spec) for spec in specs]
    names = [_name(spec, function) for function, spec in zip(functions, specs, strict=True)]
    names = [spec if names.count(name) > 1 else name for name, spec in zip(names, specs, strict=True)]
    rows = zip(names, functions, weights or [1.0] * len(specs), specs, strict=True)
    return RewardSet([Reward(*row) for row in rows], on_error, workers)


def load_reward(spec: str) -> RewardFunction:
    """The reward function that `spec` names; verl's signature is adapted. `InputError` as from
    `user_functions.load_function`, or if the function has an attribute `require` that raises it."""
    built_in = f" or a ready one ({', '.join(BUILT_IN_REWARDS)})"
    function = load_function(BUILT_IN_REWARDS.get(spec, spec), f"reward {spec!r}", built_in)
    try:
        getattr(function, "require", lambda: None)()
    except InputError as error:
        raise InputError(f"reward {spec} {error}") from error
    return verl_reward(function) if has_verl_signature(function) else function


def _name(spec: str, function: RewardFunction) -> str:
    return spec if spec in BUILT_IN_REWARDS else getattr(function, "__name__", spec.rpartition(":")[2])
