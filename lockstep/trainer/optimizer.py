"""AdamW on float32 masters over flat buffers (`parameters`), predicated on the device: in one process an update writes
the very weights that a colocated generator reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import torch
from torch import Tensor

from .. import ops
from ..config import OptimizerConfig
from .parameters import FlatParameters


class AdamWTensors(NamedTuple):
    """What an update reads and writes: weights in the compute dtype; float32 gradients, masters and moments, all flat;
    the updates applied to matrices and to vectors, float32 [2]. In float32 `weights` and `master` are one tensor.
    On several ranks also the order of the norm's sums (`Layout.norm_order`)."""

    weights: Tensor
    grad: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: Tensor
    norm_order: Tensor | None = None


@dataclass(frozen=True)
class UpdateSettings:
    """What an update may read of an `OptimizerConfig`: not the rate, which is a tensor. Stored graphs of the update are
    found by this object: a setting that it needs becomes a field here, and so part of their key."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float
    router_bias_rate: float

    @classmethod
    def of(cls, config: OptimizerConfig) -> Self:
        """Those of a configuration."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with global-norm clipping; torch's, but able to do nothing.

    Weight decay applies to matrices alone. Nothing here waits for the device: `step` and `lr` are tensors.
    """

    def __init__(self, flat: FlatParameters, config: OptimizerConfig) -> None:
        self.flat, self.settings = flat, UpdateSettings.of(config)
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
        return adamw_step(self.tensors(), self.flat, self.settings, lr, ok)

    def tensors(self) -> AdamWTensors:
        """The live tensors."""
        flat = self.flat
        state = self.master, self.exp_avg, self.exp_avg_sq, self.steps
        return AdamWTensors(flat.data, flat.grad, *state, flat.norm_order)

    def reset(self) -> None:
        """Forget moments and step counts; the masters stay."""
        for tensor in (self.exp_avg, self.exp_avg_sq, self.steps):
            tensor.zero_()

    def state(self) -> dict[str, Tensor]:
        """Masters, moments and step counts: what an exact resumption needs, on any number of ranks. In one process the
        live tensors. Every rank calls it, and the first gets them whole (`FlatParameters.whole`)."""
        return {name: x if name == "steps" else self.flat.whole(x) for name, x in self._local().items()}

    def _local(self) -> dict[str, Tensor]:
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "steps": self.steps}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` returned, bit for bit, compute weights included.

        Raises:
            ValueError: a tensor is missing or of another size (another model).
        """
        size = self.flat.layout.one_rank.size
        for name, own in self._local().items():
            expected = [2] if name == "steps" else [size]
            if name not in state or list(state[name].shape) != expected:
                found = list(state[name].shape) if name in state else "nothing"
                raise ValueError(f"optimizer state {name!r}: expected shape {expected}, found {found}")
            own.copy_(state[name] if name == "steps" else self.flat.local(state[name]))
        self.flat.data.copy_(self.master)


def adamw_step(
    t: AdamWTensors, flat: FlatParameters, settings: UpdateSettings, lr: Tensor, ok: Tensor
) -> tuple[Tensor, Tensor]:
    """`AdamW.step` as a function of its tensors; `flat` says how they are laid out.

    The norm is the root of the sum of the same blocks' squares in the same order on any number of ranks.
    """
    grad_norm = flat.square_sums(ops.square_sums(t.grad), t.norm_order).sum().sqrt()
    applied = ok & torch.isfinite(grad_norm)
    max_norm = settings.max_grad_norm
    grad_scale = ((grad_norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm > 0 else torch.ones_like(grad_norm)
    betas = settings.beta1, settings.beta2
    ops.adamw(
        ops.AdamWState(None if t.master is t.weights else t.weights, *t[1:6]),
        ops.AdamWStep(lr, grad_scale, applied),
        ops.AdamWSettings(flat.num_matrix_elements, *betas, settings.epsilon, settings.weight_decay),
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
