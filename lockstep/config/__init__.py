"""Every configuration dataclass and its validation, and nowhere else.

`validate` is called once, on the resolved `RunConfig`, and raises `InputError` naming the field.
"""

from .compile import CUDAGRAPH_MODES, check_generation, of_generation, resolve_compile
from .effect import unread
from .fields import (
    Attention,
    CheckpointConfig,
    CompileConfig,
    GeneratorConfig,
    LossConfig,
    LossType,
    MetricsConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
)
from .parallel import resolve_parallel
from .template import template_variables
from .validation import validate

__all__ = [
    "CUDAGRAPH_MODES",
    "Attention",
    "CheckpointConfig",
    "CompileConfig",
    "GeneratorConfig",
    "LossConfig",
    "LossType",
    "MetricsConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "SamplingConfig",
    "TaskConfig",
    "TrainerConfig",
    "check_generation",
    "of_generation",
    "resolve_compile",
    "resolve_parallel",
    "template_variables",
    "unread",
    "validate",
]
