"""The optimizer's update over flat buffers, predicated on the device."""

from __future__ import annotations

from torch.optim.adamw import adamw as torch_adamw

from ..operator import operator
from ..records import AdamWSettings, AdamWState, AdamWStep


@operator(mutates=("weights", "grad", "master", "exp_avg", "exp_avg_sq", "steps"), cuda="triton:adamw")
def adamw(state: AdamWState, step: AdamWStep, settings: AdamWSettings) -> None:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) if `applied`, else no update; gradients are cleared either
    way. `steps` is incremented here."""
    found_inf, count = (~step.applied).float(), settings.num_matrix_elements
    for i, (span, decay) in enumerate(((slice(0, count), settings.weight_decay), (slice(count, None), 0.0))):
        torch_adamw(  # returns at once if `found_inf` is 1
            [state.master[span]], [state.grad[span]], [state.exp_avg[span]], [state.exp_avg_sq[span]],
            [], [state.steps[i]],
            fused=True, grad_scale=step.grad_scale, found_inf=found_inf, amsgrad=False, maximize=False,
            beta1=settings.beta1, beta2=settings.beta2, lr=step.lr, weight_decay=decay, eps=settings.epsilon,
        )  # fmt: skip
    if state.weights is not None:
        state.weights.copy_(state.master)  # the same bits again when nothing was applied
    state.grad.zero_()
