"""The optimizer's update over flat buffers, predicated on the device, and the sums of squares that it clips by."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from ..operator import operator

BLOCK = 1024  # elements whose squares are added first


@operator(
    "lockstep::square_sums",
    cuda="triton:square_sums",
    fake=lambda x: x.new_empty(-(-x.numel() // BLOCK)),
)
def square_sums(x: Tensor) -> Tensor:
    """The sum of the squares of each `BLOCK` elements of a flat float32 tensor, the last ones being fewer perhaps.

    The bits of a block's sum depend on its elements alone, so a tensor may be cut between blocks. Few elements are
    added at once: over 10^8 of them, torch's norm is off by a percent on a CPU.
    """
    padded = x if x.numel() % BLOCK == 0 else torch.nn.functional.pad(x, (0, -x.numel() % BLOCK))
    return torch.linalg.vector_norm(padded.view(-1, BLOCK // 64, 64), dim=2).square().sum(1)


@operator(
    "lockstep::adamw",
    mutates=("weights", "grad", "master", "exp_avg", "exp_avg_sq", "steps"),
    cuda="triton:adamw",
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
