"""The plan of a run's GPU memory, term by term, before anything is loaded, and what to change if it does not fit."""

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
