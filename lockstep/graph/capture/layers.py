"""Compiles a model's layers one by one where they are called, for models that cannot be captured whole. No CUDA graphs.

All layers are one function to the compiler: each kind of layer has one variant per use (training, checks, decode,
prefill), for any layer index and any sizes, except that a size of 1 broadcasts differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..ir.captured import GraphError
from ..torch_private import layers as torch_layers

MAX_VARIANTS = 24


def layer_compiler(
    compile_module: Callable[..., Any] | None = None, compiled: Callable[[], None] = lambda: None
) -> Callable[..., Tensor]:
    """Returns `call(layer, *args)`, which runs a layer through `torch.compile(fullgraph=True)`. A call raises
    `GraphError` if the layer cannot be compiled whole, or needs a variant too many.

    Args:
        compile_module: compiles a layer's forward and backward, except our own operators; None: its operators run as
            captured (through AOTAutograd if there are gradients), bitwise equal to eager.
        compiled: called before each variant is compiled.
    """
    return torch_layers.compiled_call(compile_module, MAX_VARIANTS, compiled, GraphError)
