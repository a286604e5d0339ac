"""Functions found by name: `module:function` or `path.py:function`; a reward also by the name of a ready one."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import InputError
from .calls import RewardFunction, one_line
from .reward_set import OnError, Reward, RewardSet
from .verl import has_verl_signature, verl_reward
from .workers import RewardWorkers

# Rewards that come with the package, by the name they have on the command line.
READY = {
    "math": "lockstep.environments.rewards.mathematics:math_reward",
    "gsm8k": "lockstep.environments.tasks.gsm8k:gsm8k_reward",
}


def load_rewards(
    specs: Sequence[str],
    weights: Sequence[float] = (),
    on_error: OnError = "raise",
    workers: RewardWorkers | None = None,
) -> RewardSet:
    """The reward functions that `specs` name, with `weights` (all ones when empty).

    Each has its function's name, or the whole spec where two share that. Raises `InputError` for a spec given twice
    and whatever `load_reward` refuses.
    """
    for index, spec in enumerate(specs):
        if spec in specs[:index]:
            raise InputError(f"reward {spec!r} is given twice; give it once, with a weight")
    functions = [load_reward(spec) for spec in specs]
    names = [_name(spec, function) for function, spec in zip(functions, specs, strict=True)]
    names = [spec if names.count(name) > 1 else name for name, spec in zip(names, specs, strict=True)]
    rows = zip(names, functions, weights or [1.0] * len(specs), specs, strict=True)
    return RewardSet([Reward(*row) for row in rows], on_error, workers)


def load_reward(spec: str) -> RewardFunction:
    """The reward function that `spec` names; verl's signature is adapted.

    Raises `InputError` as `load_function` does.
    """
    function = load_function(READY.get(spec, spec), f"reward {spec!r}", f" or a ready one ({', '.join(READY)})")
    return verl_reward(function) if has_verl_signature(function) else function


def load_function(spec: str, what: str, other_forms: str = "") -> Callable[..., Any]:
    """The function that `spec` names, module:function or path.py:function; `what` names it in errors.

    A module may stand in the current folder, as for `python -m`. Raises `InputError` when the spec has another form,
    the file or module cannot be imported, or it has no such function.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name:
        separator = "," if other_forms else " or"
        raise InputError(f"{what} must be module:function{separator} path.py:function{other_forms}")
    try:
        module = _import_file(Path(source)) if source.endswith(".py") else _import_module(source)
    except FileNotFoundError as error:
        raise InputError(f"{what}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise InputError(f"{what}: importing {source} raised {type(error).__name__}: {one_line(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"{what}: {source} has no function {name!r}")
    try:
        inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what}: {name} does not say what it takes ({error}); wrap it in a def") from error
    return function


def _name(spec: str, function: RewardFunction) -> str:
    return spec if spec in READY else getattr(function, "__name__", spec)


MOVED = {  # modules of rewards, by the names that configurations of older versions have
    "lockstep.tasks.gsm8k": "lockstep.environments.tasks.gsm8k",
    "lockstep.tasks.mathematics": "lockstep.environments.rewards.mathematics",
    "lockstep.tasks.sum_digits": "lockstep.environments.tasks.sum_digits",
}


def _import_module(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # last, so that no file here hides an installed package
    return importlib.import_module(MOVED.get(name, name))


def _import_file(path: Path) -> ModuleType:
    """Import a file as a module of its own, once a path, so that two of its functions share its state."""
    if not path.is_file():
        raise FileNotFoundError(f"file {path} does not exist")
    name = f"_reward_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
