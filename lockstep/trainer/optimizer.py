"""AdamW on float32 masters over one flat buffer, predicated on the device.

A model's parameters become views of one buffer in the compute dtype, so that an update writes the very weights a
colocated generator reads. Gradients are one float32 buffer that micro-batches add into.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from ..config import OptimizerConfig

ALIGNMENT = 64  # elements; keeps every parameter aligned for vector loads and tensor cores


class FlatParameters:
    """One buffer for a model's weights, one float32 buffer for their gradients.

    Matrices come first, then vectors; each parameter starts at a multiple of `ALIGNMENT`, a tied one stands once, and
    the gaps are zero and stay so. The model's parameters are re-pointed in place and keep their values.

    Attributes:
        parameters, grads: the leaves to differentiate by, in buffer order, and the views that their gradients add into.
        data, grad: [size], compute dtype and float32.
        num_matrix_elements: where the vectors begin.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = sorted(model.parameters(), key=lambda p: p.dim() < 2)  # stable
        first = self.parameters[0]
        offsets = [0]
        for parameter in self.parameters:
            assert parameter.dtype == first.dtype and parameter.device == first.device
            offsets.append(offsets[-1] + -(-parameter.numel() // ALIGNMENT) * ALIGNMENT)
        self.num_matrix_elements = offsets[sum(p.dim() >= 2 for p in self.parameters)]
        self.data = torch.zeros(offsets[-1], dtype=first.dtype, device=first.device)
        self.grad = torch.zeros(offsets[-1], dtype=torch.float32, device=first.device)
        self.grads = []
        for parameter, offset in zip(self.parameters, offsets, strict=False):
            span = slice(offset, offset + parameter.numel())
            view = self.data[span].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            self.grads.append(self.grad[span].view(parameter.shape))


def accumulate(totals: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Add each gradient to its total, such as `FlatParameters.grads`, in the total's precision."""
    for total, grad in zip(totals, grads, strict=True):
        total.add_(grad)


class AdamWTensors(NamedTuple):
    """What an update reads and writes: weights in the compute dtype; float32 gradients, masters and moments, all flat;
    the updates applied to matrices and to vectors, float32 [2]. In float32 `weights` and `master` are one tensor."""

    weights: Tensor
    grad: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: Tensor


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with global-norm clipping; torch's, but able to do nothing.

    Weight decay applies to matrices alone. Nothing here waits for the device: `step` and `lr` are tensors.
    """

    def __init__(self, flat: FlatParameters, config: OptimizerConfig) -> None:
        self.flat, self.config = flat, config
        # In float32 the compute weights are the masters.
        self.master = flat.data if flat.data.dtype == torch.float32 else flat.data.float()
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        self.steps = torch.zeros(2, device=self.master.device)  # updates applied: the matrices', the vectors'

    def step(self, lr: Tensor, ok: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the accumulated gradients if `ok` and their norm is finite; clear them in any case.

        When not applied, no bit of weights, moments or step count changes, whatever the gradients hold.

        Args:
            lr: float32, 0-dim. ok: bool, 0-dim.

        Returns:
            Global gradient norm before clipping (float32) and whether the update was applied (bool), 0-dim.
        """
        return adamw_step(self.tensors(), self.flat.num_matrix_elements, self.config, lr, ok)

    def tensors(self) -> AdamWTensors:
        """The live tensors."""
        flat = self.flat
        return AdamWTensors(flat.data, flat.grad, self.master, self.exp_avg, self.exp_avg_sq, self.steps)

    def reset(self) -> None:
        """Forget moments and step counts; the masters stay."""
        for tensor in (self.exp_avg, self.exp_avg_sq, self.steps):
            tensor.zero_()

    def state(self) -> dict[str, Tensor]:
        """Masters, moments and step counts: what an exact resumption needs. The live tensors, not copies."""
        return {
            "master": self.master,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
            "steps": self.steps,
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` returned, bit for bit, compute weights included.

        Raises:
            ValueError: a tensor is missing or of another size (another model).
        """
        for name, own in self.state().items():
            if name not in state or state[name].shape != own.shape:
                found = list(state[name].shape) if name in state else "nothing"
                raise ValueError(f"optimizer state {name!r}: expected shape {list(own.shape)}, found {found}")
            own.copy_(state[name])
        self.flat.data.copy_(self.master)


def adamw_step(
    t: AdamWTensors, num_matrix_elements: int, config: OptimizerConfig, lr: Tensor, ok: Tensor
) -> tuple[Tensor, Tensor]:
    """`AdamW.step` as a function of its tensors."""
    grad_norm = ops.global_norm(t.grad)
    applied = ok & torch.isfinite(grad_norm)
    c, max_norm = config, config.max_grad_norm
    grad_scale = ((grad_norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm > 0 else torch.ones_like(grad_norm)
    ops.adamw(
        None if t.master is t.weights else t.weights,
        *t[1:],
        lr,
        grad_scale,
        applied,
        num_matrix_elements,
        c.beta1,
        c.beta2,
        c.epsilon,
        c.weight_decay,
    )
    return grad_norm, applied


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of update `step` (from 0): linear warm-up that reaches the full rate at update `warmup_steps - 1`,
    then constant, or down to 0 at `total_steps` linearly or along half a cosine."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    factor = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return config.learning_rate * factor[config.lr_scheduler]
