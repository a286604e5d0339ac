"""Captured graphs for both roles: trace, verify, rewrite and launch functions; on a GPU as CUDA graphs."""

from .. import ops as _ops  # the operators that stored graphs name
from ..ops.operator import NAMESPACE as _NAMESPACE
from .builder import require_plugins
from .capture.step import Differentiated, GraphBody, backward, capture, in_module, module_inputs, substitute_inputs
from .check.against_eager import PassedChecks, Verdict, Work, check_against_eager
from .check.comparison import Case
from .ir.captured import Captured, Dynamic, GraphError, Inputs, Role, Static
from .ir.text import diff, digest, dump
from .ir.verify import verify
from .launch.cudagraph import CudaRecorder
from .launch.launcher import GraphLauncher
from .parallel_build import build_in_parallel
from .passes import Pass, pipeline, run_passes
from .passes.backend import Backend
from .program import Program
from .report import compile_report
from .runtime import EAGER, Runtime
from .store.artifact import dumps, loads, register_region
from .store.baked_constants import Constants
from .store.folder import Store
from .torch_private import trace as _trace
from .torch_private.read_ahead import read_tracer_ahead
from .torch_private.trace import clear_matmul_workspaces

_trace.skip_dynamo_wrappers(_NAMESPACE)
