"""Reinforcement learning for language models: one model definition generates and trains, bitwise identical.

    import lockstep

    summary = lockstep.train(lockstep.recipes.sum_digits(None))
    llm = lockstep.LLM(f"{summary['run_dir']}/model")
    print(llm.generate("12 34=")[0][0].text)

Names are imported lazily, so `import lockstep` alone costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import evaluate as evaluate
    from .api import train as train
    from .config import CheckpointConfig as CheckpointConfig
    from .config import CompileConfig as CompileConfig
    from .config import GeneratorConfig as GeneratorConfig
    from .config import LossConfig as LossConfig
    from .config import MetricsConfig as MetricsConfig
    from .config import OptimizerConfig as OptimizerConfig
    from .config import ParallelConfig as ParallelConfig
    from .config import RunConfig as RunConfig
    from .config import SamplingConfig as SamplingConfig
    from .config import TaskConfig as TaskConfig
    from .config import TrainerConfig as TrainerConfig
    from .config import recipes
    from .errors import InputError as InputError
    from .errors import LockstepError as LockstepError
    from .errors import NonFiniteError as NonFiniteError
    from .errors import ParityError as ParityError
    from .run.report import write_comparison as write_comparison
    from .run.report import write_report as write_report
    from .session.generate import LLM as LLM
    from .session.parity_check import check_model as check_model
    from .types import Completion as Completion
    from .types import SamplingParams as SamplingParams

__version__ = "0.1.0"

from .cache import loaded_code as _  # it records modules imported from here on
from .machine import limit_openmp_spinning  # it reads the version

limit_openmp_spinning()

# Public names by the module that defines them.
_EXPORTS: dict[str, tuple[str, ...]] = {
    "api": ("evaluate", "train"),
    "config": (
        *("CheckpointConfig", "CompileConfig", "GeneratorConfig", "LossConfig", "MetricsConfig", "OptimizerConfig"),
        *("ParallelConfig", "RunConfig", "SamplingConfig", "TaskConfig", "TrainerConfig"),
    ),
    "errors": ("InputError", "LockstepError", "NonFiniteError", "ParityError"),
    "session.generate": ("LLM",),
    "session.parity_check": ("check_model",),
    "run.report": ("write_comparison", "write_report"),
    "types": ("Completion", "SamplingParams"),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = ["__version__", "recipes", *sorted(_MODULE_OF)]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name == "recipes":
        return importlib.import_module(".config.recipes", __name__)
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
