"""AdamW on float32 masters over one flat buffer, predicated on the device.

In one process a model's parameters become views of one buffer in the compute dtype, so that an update writes the very
weights a colocated generator reads. On several ranks each has its shard of the buffer. Gradients are one float32 buffer
that micro-batches add into.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from .. import distributed, ops
from ..config import OptimizerConfig
from ..distributed import ONE, World
from .fsdp.layout import Layout


class FlatParameters:
    """One buffer for a model's weights, one float32 buffer for their gradients, on each rank its shard of both.

    In one process the model's parameters are re-pointed in place, as views of the buffer, and keep their values. On
    several ranks the model keeps parameters of its own, and the shards are cut from them.

    Attributes:
        names, parameters: the model's own, in buffer order: matrices, then vectors; a tied one stands once.
        layout: where each lies.
        parts, grads: views of `data` and `grad`, one a parameter: its shape in one process, flat where it is sharded.
        data, grad: [layout.size], compute dtype and float32; the gaps are zero and stay so.
        num_matrix_elements: where the vectors begin.
    """

    def __init__(self, model: nn.Module, world: World = ONE) -> None:
        named = sorted(model.named_parameters(), key=lambda item: item[1].dim() < 2)  # stable
        self.names, self.parameters = [name for name, _ in named], [parameter for _, parameter in named]
        first = self.parameters[0]
        assert all(p.dtype == first.dtype and p.device == first.device for p in self.parameters)
        self.world, self.layout = world, Layout.of([p.shape for p in self.parameters], world.size)
        self.num_matrix_elements = self.layout.offsets[sum(p.dim() >= 2 for p in self.parameters)]
        self.data = torch.zeros(self.layout.size, dtype=first.dtype, device=first.device)
        self.grad = torch.zeros(self.layout.size, dtype=torch.float32, device=first.device)
        self.parts, self.grads = self.layout.views(self.data), self.layout.views(self.grad)
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            if world.size == 1:
                part.copy_(parameter.data)
                parameter.data = part
            else:
                own = parameter.data.flatten()[part.numel() * world.rank :][: part.numel()]
                part[: own.numel()].copy_(own)

    def whole(self, local: Tensor) -> Tensor:
        """What all ranks have of a flat tensor, in the layout of one process. Every rank calls it; the first gets the
        result, on the host where it came from several ranks, and the others an empty tensor."""
        if self.world.size == 1:
            return local
        one = self.layout.one_rank
        whole = torch.zeros(one.size if self.world.first else 0, dtype=local.dtype)
        for part, size, at in zip(self.layout.views(local), one.sizes, one.offsets, strict=False):
            parts = distributed.gather(part, self.world.size).flatten()
            if self.world.first:
                whole[at : at + size] = parts[:size]
        return whole

    def local(self, whole: Tensor) -> Tensor:
        """This rank's part of what `whole` returned."""
        return whole if self.world.size == 1 else self.layout.cut(whole, self.world.rank)


def accumulate(totals: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Add each gradient to its total, such as `FlatParameters.grads`, in the total's precision."""
    for total, grad in zip(totals, grads, strict=True):
        total.add_(grad)


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
        self.norm_order = flat.layout.norm_order().to(self.master.device) if flat.world.size > 1 else None

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
        return AdamWTensors(flat.data, flat.grad, *state, self.norm_order)

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
    sums = ops.square_sums(t.grad)
    if flat.world.size > 1:
        assert t.norm_order is not None
        sums = distributed.gather(sums, flat.world.size).flatten().index_select(0, t.norm_order)
    grad_norm = sums.sum().sqrt()
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
