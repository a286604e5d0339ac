"""Captured graphs for both roles: trace once a shape, verify, rewrite, launch; on a GPU as CUDA graphs."""

from .. import ops as _ops  # noqa: F401  the operators that stored graphs name
from . import compat as _compat
from .artifact import dumps, loads, register_region
from .bound import BoundGraph
from .capture import Differentiated, backward, capture, in_module, module_inputs, substituted
from .compat_inductor import missing_compiler
from .compiler import Compiler
from .constants import Constants
from .cudagraph import CudaRecorder, FakeRecorder
from .function import GraphFunction
from .ir import Captured, Dynamic, GraphError, Inputs, Static
from .layers import LayerCompiler
from .origin import origin
from .passes import Pass, pipeline, run_passes
from .rehearsal import NAMESPACE as _NAMESPACE
from .report import compile_report, refusals, replay_metrics
from .store import Store
from .text import diff, digest, dump
from .trial import Case
from .trust import Verdict, Work, trust
from .verdicts import Verdicts
from .verify import NOT_GRAPH_SAFE, verify

_compat.spare_dynamo(_NAMESPACE)

__all__ = [
    "NOT_GRAPH_SAFE",
    "BoundGraph",
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
    "LayerCompiler",
    "Pass",
    "Static",
    "Store",
    "Verdict",
    "Verdicts",
    "Work",
    "backward",
    "capture",
    "compile_report",
    "diff",
    "digest",
    "dump",
    "dumps",
    "in_module",
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
    "trust",
    "verify",
]
