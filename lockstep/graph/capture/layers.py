"""A model's layers compiled one by one where they are called, for what cannot be captured whole; no CUDA graphs.

All layers are one function to the compiler: a variant serves each kind of layer in each use (training, checking,
decoding, prompts), whatever its index and whatever the sizes, but that a size of 1 is another thing to broadcasting.
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
    """What calls a layer through `torch.compile(fullgraph=True)`: `call(layer, *args)`. `GraphError`, when called: it
    cannot be compiled whole, or would be one variant too many.

    Args:
        compile_module: compiles a layer, forward and backward, but for our own operators; None: its operators are run
            as captured (as AOTAutograd's, where there are gradients), and so have eager's bits.
        compiled: called before each variant is compiled.
    """
    return torch_layers.compiled_call(compile_module, MAX_VARIANTS, compiled, GraphError)
