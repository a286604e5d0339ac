"""All configuration dataclasses and their validation.

`validate` is called once, on the resolved `RunConfig`, and raises `InputError` naming the field; each section also has
its own `validate`.
"""

from .algorithms import LOSS_TYPES, READ_BY, SHIPPED
from .run import (
    EARLIER,
    Attention,
    RunConfig,
    idle_in_updates,
    idle_in_warmup,
    left_behind,
    require_config,
    require_divisor,
    require_ranks,
    resolve_parallel,
    unread,
    validate,
    without,
)
from .sections.checkpoint import CheckpointConfig
from .sections.compile import (
    BACKENDS,
    CAPTURES,
    ELEMENTWISE,
    FULL,
    LOGITS,
    OF_GENERATION,
    PASSES,
    RECORDINGS,
    CompileConfig,
    Plugin,
    check_generation,
    cudagraph_modes,
    of_generation,
    recordings,
    resolve_compile,
)
from .sections.generator import GeneratorConfig
from .sections.loss import LossConfig
from .sections.metrics import MetricsConfig
from .sections.optimizer import OptimizerConfig
from .sections.parallel import LAYOUT_OF_GENERATION, LAYOUT_OF_PARITY, ParallelConfig, check_layout
from .sections.sampling import LEAST_TEMPERATURE, SamplingConfig
from .sections.section import MAX_SEED, check_range, given_or_default
from .sections.task import OF_EVALUATION, TEMPLATE_ARGUMENTS, TaskConfig, template_variables
from .sections.trainer import TrainerConfig
