"""The kernels that compute matrix products on a GPU: one file each, registered here by name.

`choice` says which of them computes a shape. Tiles and kernels change no bit (contract C1).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..activation.triton import silu_mul
from ..norm.triton import rms_norm
from ..records import PLAIN_EPILOGUE, SILU, Epilogue
from . import choice as linear_choice
from . import cublas, hopper_async, hopper_tma, triton
from .choice import Choice, Kind


class ProductKernel(Protocol):
    """What a kernel's file provides. Shape suffixes: M rows, N columns of the weight, K depth."""

    def supports(self, choice: Choice, weight_NK: Tensor) -> bool:
        """Whether the weight's GPU can run this choice, and the weight has the layout that it needs."""

    def run(
        self,
        kind: Kind,
        choice: Choice,
        x_MK: Tensor,
        weight_NK: Tensor,
        residual_MN: Tensor | None = None,
        epilogue: Epilogue = PLAIN_EPILOGUE,
    ) -> Tensor:
        """The product and what follows it in this kind: the bias, added to the float32 accumulator; the rounding to
        bfloat16; then the activated gate's product, or the sum with the residual. What precedes it, the norm, has been
        done. `epilogue` is passed only if it is not the plain one; kinds that gate or stay in float32 have no bias."""


KERNELS: dict[str, ProductKernel] = {
    "library": cublas,
    "pipelined": triton,
    "async": hopper_async,
    "tma": hopper_tma,
}
STORE_TO_PEERS = {"pipelined", "async", "tma"}  # whose kernels know `Epilogue.peers`


class RegisteredKernel(ProductKernel, Protocol):
    """A kernel from outside the package, which says what it computes."""

    def candidates(self, kind: Kind, rows: Sequence[int], columns: int, depth: int) -> list[Choice]:
        """Choices for these numbers of rows, ascending, the first of which is used; `columns` as in
        `linear_choice.choose`."""


def register(name: str, kernel: RegisteredKernel) -> None:
    """Add a kernel from outside the package, or replace one of this name. It computes every shape for which it has
    candidates. `ValueError`: the name is that of one of the package's."""
    if name in KERNELS.keys() - linear_choice.registered.keys():
        raise ValueError(f"{name!r} is a kernel of the package; register yours under another name")
    KERNELS[name] = kernel
    linear_choice.registered[name] = kernel.candidates


def choose(kind: Kind, rows: int, weight_NK: Tensor, biased: bool = False) -> Choice:
    """The choice of a registered kernel, the table or its rule; if that kernel cannot run, the portable one.
    `ValueError`: a registered kernel's candidate names a kernel that there is not."""
    choice = linear_choice.choose(kind, rows, *weight_NK.shape, biased=biased)
    if choice.kernel not in KERNELS:
        raise ValueError(f"{choice} names no kernel; there are {', '.join(KERNELS)}")
    if KERNELS[choice.kernel].supports(choice, weight_NK):
        return choice
    return linear_choice.choose_portable(kind, rows, weight_NK.shape[0])


def product(
    kind: Kind, x_MK: Tensor, weight_NK: Tensor, residual_MN: Tensor | None = None, epilogue: Epilogue = PLAIN_EPILOGUE
) -> Tensor:
    """The product, by the kernel that is chosen for its shape."""
    if x_MK.dtype != torch.bfloat16:
        raise TypeError(f"the GPU path computes in bfloat16, got {x_MK.dtype}")
    choice = choose(kind, x_MK.shape[0], weight_NK, epilogue.bias_N is not None)
    is_plain = epilogue.bias_N is None and epilogue.activation == SILU and epilogue.peers is None
    extra = () if is_plain else (epilogue,)  # kernels from outside may not take one
    return KERNELS[choice.kernel].run(kind, choice, x_MK, weight_NK, residual_MN, *extra)


def stores_to_peers(kind: Kind, rows: int, weight_NK: Tensor, biased: bool = False) -> bool:
    """Whether the kernel that is chosen for this shape stores its result for other ranks (`Epilogue.peers`)."""
    return choose(kind, rows, weight_NK, biased).kernel in STORE_TO_PEERS


linear_fp32 = partial(product, "linear_fp32")


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    return product("linear", x_TK, weight_NK, None, Epilogue(bias_N))


def linear_add(x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    return product("linear_add", x_TK, weight_NK, residual_TN, Epilogue(bias_N))


def norm_linear(
    x_TD: Tensor,
    norm_D: Tensor,
    weight_ED: Tensor,
    eps: float,
    bias_E: Tensor | None = None,
    weight_offset: float = 0.0,
) -> Tensor:
    return normed_linear(rms_norm(x_TD, norm_D, eps, weight_offset), weight_ED, bias_E)


def normed_linear(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    return product("norm_linear", x_TD, weight_ED, None, Epilogue(bias_E))


def norm_gate_up(
    x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float, weight_offset: float = 0.0, activation: str = SILU
) -> Tensor:
    normed_TD = rms_norm(x_TD, norm_D, eps, weight_offset)
    return product("norm_gate_up", normed_TD, weight_ED, None, Epilogue(activation=activation))


def gate_up(x_TD: Tensor, weight_ED: Tensor, activation: str = SILU) -> Tensor:
    if choose("norm_gate_up", x_TD.shape[0], weight_ED).kernel == "library":  # two kernels, the first from any file
        return silu_mul(linear(x_TD, weight_ED), activation)
    return product("norm_gate_up", x_TD, weight_ED, None, Epilogue(activation=activation))
