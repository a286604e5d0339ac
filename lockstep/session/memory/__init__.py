"""The plan of a run's GPU memory, term by term, before anything is loaded, and what to change if it does not fit."""

from .plan import KEPT_STATE, MemoryPlan, plan
from .remedies import adapt_config, fit_generator_groups
from .terms import GIB, STATE_ON_HOST
from .usage import (
    available_memory,
    explain_out_of_memory,
    has_room_for_copy,
    measure_memory,
    model_config,
    require_host_room,
    require_room,
    workload,
)
from .workload import Workload
