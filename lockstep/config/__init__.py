"""All configuration dataclasses and their validation.

`validate` is called once, on the resolved `RunConfig`, and raises `InputError` naming the field; each section also has
its own `validate`.
"""

from .algorithms import ALGORITHM_TABLE, LOSS_TYPES, READ_BY
from .run import (
    LEGACY_CONFIG,
    SINGLE_SAMPLES,
    Attention,
    RunConfig,
    idle_update_message,
    idle_warmup_message,
    ineffective_settings,
    newly_ineffective,
    reference_message,
    require_config,
    require_divisor,
    require_ranks,
    reset_to_defaults,
    resolve_parallel,
    validate,
)
from .sections.checkpoint import CheckpointConfig
from .sections.compile import (
    BACKENDS,
    CAPTURES,
    ELEMENTWISE,
    FULL,
    GENERATION_FIELDS,
    LOGITS,
    PASSES,
    RECORDINGS,
    CompileConfig,
    Plugin,
    check_generation,
    cudagraph_modes,
    recordings,
    resolve_compile,
    without_trainer_settings,
)
from .sections.generator import GeneratorConfig
from .sections.loss import LossConfig
from .sections.metrics import MetricsConfig
from .sections.optimizer import OptimizerConfig
from .sections.parallel import GENERATION_LAYOUT_FIELDS, PARITY_LAYOUT_FIELDS, ParallelConfig, check_layout
from .sections.sampling import MIN_TEMPERATURE, SamplingConfig
from .sections.section import MAX_SEED, check_range, given_or_default
from .sections.task import EVALUATION_FIELDS, TEMPLATE_ARGUMENTS, TaskConfig, template_variables
from .sections.trainer import TrainerConfig
