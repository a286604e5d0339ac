"""AdamW on float32 masters over flat buffers (`parameters`), predicated on the device: in one process an update writes
the very weights that a colocated generator reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from .. import ops
from ..config import OptimizerConfig
from ..errors import refuse
from ..models import Decoder, by_pattern
from .parameters import Buffer, FlatParameters


class AdamWTensors(NamedTuple):
    """What an update reads and writes: weights in the compute dtype; float32 gradients, masters and moments, all flat;
    the updates applied to matrices and to vectors, float32 [2]. In float32 `weights` and `master` are one tensor.
    Where ranks have some gradients alike also which blocks this one counts (`FlatParameters.counted`)."""

    weights: Tensor
    grad: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: Tensor
    counted: Tensor | None = None


@dataclass(frozen=True)
class UpdateSettings:
    """What an update may read of an `OptimizerConfig`: not the rate, which is a tensor. Stored graphs of the update are
    found by this object: a setting that it needs becomes a field here, and so part of their key."""

    beta1: float
    beta2: float
    epsilon: float
    max_grad_norm: float
    router_bias_rate: float

    @classmethod
    def of(cls, config: OptimizerConfig) -> Self:
        """Those of a configuration."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class ParameterGroup:
    """Elements `begin` to `end` of the flat buffers, updated alike: at the step's learning rate times `scale`, and the
    first `decayed` of them with this weight decay."""

    begin: int
    end: int
    decayed: int
    scale: float
    weight_decay: float

    def of(self, state: ops.AdamWState, steps: Tensor) -> ops.AdamWState:
        """Its part of the buffers."""
        if self.end - self.begin == state.grad.numel():
            return state
        flat = [None if x is None else x[self.begin : self.end] for x in state[:-1]]
        return ops.AdamWState._make([*flat, steps])


def frozen_parameters(model: Decoder, config: OptimizerConfig) -> set[str]:
    """The model's own names of those that `optimizer.freeze` names; `InputError` where it leaves nothing to train."""
    frozen = set(by_pattern(model, [(pattern, True) for pattern in config.freeze], "optimizer.freeze"))
    every = {name for name, _ in model.named_parameters()}
    refuse(frozen == every, "optimizer.freeze names every parameter of the model; leave some to train")
    return frozen


def parameter_groups(model: Decoder, flat: FlatParameters, config: OptimizerConfig) -> tuple[ParameterGroup, ...]:
    """The parts of the flat buffers with settings of their own, in order: one where no pattern gives any.

    Raises:
        InputError: a pattern matches no parameter that is trained.
    """
    whole = one_group(flat, config)
    if not config.lr_scales and not config.weight_decays:
        return (whole,)
    frozen = {name for name, _ in model.named_parameters()} - set(flat.names)
    scales, decays = (
        by_pattern(model, config.of_patterns(name), f"optimizer.{name}", frozen)
        for name in ("lr_scales", "weight_decays")
    )
    offsets, groups = flat.layout.offsets, list[ParameterGroup]()
    for i, name in enumerate(flat.names):
        begin, end = offsets[i], offsets[i + 1]
        decay = decays.get(name, config.weight_decay if begin < flat.num_matrix_elements else 0.0)
        group = ParameterGroup(begin, end, end - begin, scales.get(name, 1.0), decay)
        if groups and (groups[-1].scale, groups[-1].weight_decay) == (group.scale, group.weight_decay):
            group = replace(group, begin=groups[-1].begin, decayed=end - groups.pop().begin)
        groups.append(group)
    return tuple(groups)


def one_group(flat: FlatParameters, config: OptimizerConfig) -> ParameterGroup:
    """All of the flat buffers: weight decay of matrices alone."""
    return ParameterGroup(0, flat.layout.size, flat.num_matrix_elements, 1.0, config.weight_decay)


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with global-norm clipping; torch's, but able to do nothing.

    Weight decay applies to matrices alone. Nothing here waits for the device: `step` and `lr` are tensors.

    Args:
        groups: what is updated with settings of its own (`parameter_groups`); by default nothing is.
    """

    def __init__(self, flat: FlatParameters, config: OptimizerConfig, groups: Sequence[ParameterGroup] = ()) -> None:
        self.flat, self.settings = flat, UpdateSettings.of(config)
        self.groups = tuple(groups) or (one_group(flat, config),)
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
        return adamw_step(self.tensors(), self, lr, ok)

    def tensors(self) -> AdamWTensors:
        """The live tensors."""
        state = self.master, self.exp_avg, self.exp_avg_sq, self.steps
        return AdamWTensors(self.flat.data, self.flat.grad, *state, self.flat.counted)

    def reset(self) -> None:
        """Forget moments and step counts; the masters stay."""
        for tensor in (self.exp_avg, self.exp_avg_sq, self.steps):
            tensor.zero_()

    def state(self) -> dict[str, Tensor]:
        """Masters, moments and step counts: what an exact resumption needs, on any number of ranks. In one process the
        live tensors. Every rank calls it, and the first gets them whole (`FlatParameters.whole`)."""
        return {name: x if name == "steps" else self.flat.whole(x) for name, x in self.local_state().items()}

    def local_state(self) -> dict[str, Tensor]:
        """What this rank has of it: the live tensors."""
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "steps": self.steps}

    def load_state(self, state: Mapping[str, Tensor | Sequence[Buffer]]) -> None:
        """Take over what `state` returned, or the ranks' `local_state`, bit for bit, compute weights included.

        Raises:
            ValueError: a tensor is missing or of another size (another model).
        """
        for name, own in self.local_state().items():
            try:
                self._take_over(own, state[name])
            except (KeyError, ValueError) as error:
                size = [2] if name == "steps" else [self.flat.whole_layout.size]
                found = error if isinstance(error, ValueError) else f"expected shape {size}, found nothing"
                raise ValueError(f"optimizer state {name!r}: {found}") from error
        self.flat.data.copy_(self.master)

    def _take_over(self, own: Tensor, given: Tensor | Sequence[Buffer]) -> None:
        parts = [given] if isinstance(given, Tensor) else given
        if own is not self.steps:
            self.flat.fill(own, parts)
        elif list(parts[0].shape) != list(own.shape):
            raise ValueError(f"expected shape {list(own.shape)}, found {list(parts[0].shape)}")
        else:
            own.copy_(parts[0][:])


def adamw_step(t: AdamWTensors, by: AdamW, lr: Tensor, ok: Tensor) -> tuple[Tensor, Tensor]:
    """`AdamW.step` as a function of its tensors; of `by` it reads the layout, the settings and the groups.

    The norm is the root of the exact sum of the same blocks' squares on any number of ranks.
    """
    settings = by.settings
    squares = ops.square_sums(t.grad)
    if t.counted is not None:
        squares = torch.where(t.counted, squares, 0.0)
    grad_norm = ops.root_of_sum(by.flat.summed_words(ops.exact_sum(squares)))
    applied = ok & torch.isfinite(grad_norm)
    max_norm = settings.max_grad_norm
    grad_scale = ((grad_norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm > 0 else torch.ones_like(grad_norm)
    betas = settings.beta1, settings.beta2
    state = ops.AdamWState(None if t.master is t.weights else t.weights, *t[1:6])
    for group in by.groups:
        last = group is by.groups[-1]
        ops.adamw(
            group.of(state, t.steps if last else t.steps.clone()),  # the last counts the update
            ops.AdamWStep(lr if group.scale == 1 else lr * group.scale, grad_scale, applied),
            ops.AdamWSettings(group.decayed, *betas, settings.epsilon, group.weight_decay),
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
