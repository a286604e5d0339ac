"""Captured graphs for both roles: trace once a shape, verify, rewrite, launch; on a GPU as CUDA graphs."""

from .. import ops as _ops  # noqa: F401  the operators that stored graphs name
from ..cache.fingerprint import origin
from .capture.step import Differentiated, backward, capture, in_module, module_inputs, substituted
from .check.against_eager import Verdict, Work, check_against_eager
from .check.comparison import Case
from .check.passed_checks import PassedChecks
from .compiler import Compiler
from .function import GraphFunction
from .ir.captured import Captured, Dynamic, GraphError, Inputs, Static
from .ir.text import diff, digest, dump
from .ir.verify import NOT_GRAPH_SAFE, verify
from .launch.cudagraph import CudaRecorder, FakeRecorder
from .launch.dry_run import NAMESPACE as _NAMESPACE
from .launch.launcher import GraphLauncher
from .passes import Pass, pipeline, run_passes
from .report import compile_report, refusals, replay_metrics
from .store.artifact import dumps, loads, register_region
from .store.baked_constants import Constants
from .store.folder import Store
from .store.key import in_package
from .torch_private import trace as _trace
from .torch_private.inductor import missing_compiler

_trace.spare_dynamo(_NAMESPACE)

__all__ = [
    "NOT_GRAPH_SAFE",
    "GraphLauncher",
    "Captured",
    "Case",
    "Compiler",
    "Constants",
    "CudaRecorder",
    "Differentiated",
    "Dynamic",
    "FakeRecorder",
    "GraphError",
    "GraphFunction",
    "Inputs",
    "Pass",
    "Static",
    "Store",
    "Verdict",
    "PassedChecks",
    "Work",
    "backward",
    "capture",
    "compile_report",
    "diff",
    "digest",
    "dump",
    "dumps",
    "in_module",
    "in_package",
    "loads",
    "missing_compiler",
    "module_inputs",
    "origin",
    "pipeline",
    "refusals",
    "register_region",
    "replay_metrics",
    "run_passes",
    "substituted",
    "check_against_eager",
    "verify",
]
