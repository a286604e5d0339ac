"""The optimizer's update over flat buffers, predicated on the device, and the sums of squares that it clips by."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from ..operator import operator
from ..records import AdamWSettings, AdamWState, AdamWStep

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
def adamw(state: AdamWState, step: AdamWStep, settings: AdamWSettings) -> None:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) where `applied`, else nothing; gradients are cleared always.
    `steps` are counted here."""
    found_inf, count = (~step.applied).float(), settings.num_matrix_elements
    for i, (span, decay) in enumerate(((slice(0, count), settings.weight_decay), (slice(count, None), 0.0))):
        torch_adamw(  # leaves at once where `found_inf` is 1
            [state.master[span]],
            [state.grad[span]],
            [state.exp_avg[span]],
            [state.exp_avg_sq[span]],
            [],
            [state.steps[i]],
            fused=True,
            grad_scale=step.grad_scale,
            found_inf=found_inf,
            amsgrad=False,
            maximize=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=step.lr,
            weight_decay=decay,
            eps=settings.epsilon,
        )
    if state.weights is not None:
        state.weights.copy_(state.master)  # the same bits again when nothing was applied
    state.grad.zero_()
