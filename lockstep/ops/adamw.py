"""The optimizer's update over flat buffers, predicated on the device, and the norm that it clips by."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from .operator import operator

BLOCK = 64  # elements whose squares are added first


@operator("lockstep::global_norm")
def global_norm(x: Tensor) -> Tensor:
    """Euclidean norm of a flat float32 tensor, 0-dim. Squares are added in blocks: over 10^8 elements at once, torch's
    norm is off by a percent on a CPU."""
    whole = x.numel() // BLOCK * BLOCK
    blocks = torch.linalg.vector_norm(x[:whole].view(-1, BLOCK), dim=1).square().sum()
    return (blocks + torch.linalg.vector_norm(x[whole:]).square()).sqrt()


@global_norm.register_kernel("cuda")
def _(x: Tensor) -> Tensor:
    from .kernels import adamw as kernels

    return kernels.global_norm(x)


@global_norm.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(())


@torch.library.custom_op(
    "lockstep::adamw",
    mutates_args=("weights", "grad", "master", "exp_avg", "exp_avg_sq", "steps"),
    device_types="cpu",
)
def adamw(
    weights: Tensor | None,
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    steps: Tensor,
    lr: Tensor,
    grad_scale: Tensor,
    applied: Tensor,
    num_matrix_elements: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
) -> None:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) where `applied`, else nothing; gradients are cleared always.

    Args:
        weights: the masters rounded to the compute dtype, written; None when they are the masters.
        grad, master, exp_avg, exp_avg_sq: float32 [size]. Gradients are divided by `grad_scale` first.
        steps: float32 [2], updates applied to matrices and to vectors, counted here.
        lr, grad_scale: float32, 0-dim. applied: bool, 0-dim.
        num_matrix_elements: the elements before this one are matrices', to which alone weight decay applies.
    """
    found_inf = (~applied).float()
    spans = ((slice(0, num_matrix_elements), weight_decay), (slice(num_matrix_elements, None), 0.0))
    for i, (span, decay) in enumerate(spans):
        torch_adamw(  # leaves at once where `found_inf` is 1
            [master[span]],
            [grad[span]],
            [exp_avg[span]],
            [exp_avg_sq[span]],
            [],
            [steps[i]],
            fused=True,
            grad_scale=grad_scale,
            found_inf=found_inf,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=decay,
            eps=epsilon,
        )
    if weights is not None:
        weights.copy_(master)  # the same bits again when nothing was applied
    grad.zero_()


@adamw.register_kernel("cuda")
def _(weights, grad, master, exp_avg, exp_avg_sq, steps, lr, grad_scale, applied, *settings) -> None:
    from .kernels import adamw as kernels

    kernels.adamw(weights, grad, master, exp_avg, exp_avg_sq, steps, lr, grad_scale, applied, *settings)


@adamw.register_fake
def _(*_: object) -> None:
    return None
