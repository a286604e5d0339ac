"""What a run needs of a GPU's memory, term by term, before anything is loaded; what fits, and what would."""

from .plan import MemoryPlan, plan
from .remedies import adapted, as_run, in_larger_groups, refusal, remedies
from .terms import GIB, STATE_ON_HOST
from .usage import (
    holds_copy,
    memory_at_hand,
    model_config,
    require_host_room,
    require_room,
    running_out_named,
    used,
    workload,
)
from .workload import Workload
