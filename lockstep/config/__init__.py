"""Every configuration dataclass and its validation, and nowhere else.

`validate` is called once, on the resolved `RunConfig`, and raises `InputError` naming the field; a section alone has a
`validate` of its own.
"""

from .run import Attention as Attention
from .run import RunConfig as RunConfig
from .run import check_attention as check_attention
from .run import resolve_parallel as resolve_parallel
from .run import unread as unread
from .run import validate as validate
from .sections.checkpoint import CheckpointConfig as CheckpointConfig
from .sections.compile import BACKENDS as BACKENDS
from .sections.compile import CAPTURES as CAPTURES
from .sections.compile import PASSES as PASSES
from .sections.compile import RECORDINGS as RECORDINGS
from .sections.compile import CompileConfig as CompileConfig
from .sections.compile import Plugin as Plugin
from .sections.compile import check_generation as check_generation
from .sections.compile import cudagraph_modes as cudagraph_modes
from .sections.compile import of_generation as of_generation
from .sections.compile import recordings as recordings
from .sections.compile import resolve_compile as resolve_compile
from .sections.generator import GeneratorConfig as GeneratorConfig
from .sections.loss import LOSS_TYPES as LOSS_TYPES
from .sections.loss import READ_BY as READ_BY
from .sections.loss import LossConfig as LossConfig
from .sections.metrics import MetricsConfig as MetricsConfig
from .sections.optimizer import OptimizerConfig as OptimizerConfig
from .sections.parallel import ParallelConfig as ParallelConfig
from .sections.sampling import SamplingConfig as SamplingConfig
from .sections.section import MAX_SEED as MAX_SEED
from .sections.section import check_range as check_range
from .sections.task import TaskConfig as TaskConfig
from .sections.task import template_variables as template_variables
from .sections.trainer import TrainerConfig as TrainerConfig
