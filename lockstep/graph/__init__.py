"""Captured graphs for both roles: trace once a shape, verify, rewrite, launch; on a GPU as CUDA graphs."""

from .bound import BoundGraph
from .capture import backward, capture, module_inputs, substituted
from .compiler import Compiler, GraphFunction
from .cudagraph import CudaRecorder, FakeRecorder
from .ir import Captured, GraphError, Inputs
from .passes import Pass, pipeline, run_passes
from .text import diff, digest, dump
from .verify import NOT_GRAPH_SAFE, verify

__all__ = [
    "NOT_GRAPH_SAFE",
    "BoundGraph",
    "Captured",
    "Compiler",
    "CudaRecorder",
    "FakeRecorder",
    "GraphError",
    "GraphFunction",
    "Inputs",
    "Pass",
    "backward",
    "capture",
    "diff",
    "digest",
    "dump",
    "module_inputs",
    "pipeline",
    "run_passes",
    "substituted",
    "verify",
]
