"""AdamW with float32 master weights on flat buffers (`parameters`), predicated on the device. In one process an update
writes the very weights that the colocated generator reads. The state is in device or host memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from .. import graph, ops
from ..config import OptimizerConfig
from ..errors import refuse
from ..machine import HostBuffer
from ..models import Decoder, select_by_pattern
from .parameters import Buffer, FlatParameters


@dataclass(frozen=True)
class UpdateSettings:
    """The settings that an update's graph depends on, part of its key in the store. The learning rate is a tensor."""

    beta1: float
    beta2: float
    epsilon: float
    max_grad_norm: float
    router_bias_rate: float
    offload: bool


@dataclass(frozen=True)
class ParameterGroup:
    """Elements `begin` to `end` of the flat buffers, which share settings: the learning rate is the step's times
    `scale`, and `weight_decay` applies to the first `decayed` elements."""

    begin: int
    end: int
    decayed: int
    scale: float
    weight_decay: float

    def slice_state(self, state: ops.AdamWState, steps: Tensor) -> ops.AdamWState:
        if self.end - self.begin == state.grad.numel():
            return state
        flat = [None if x is None else x[self.begin : self.end] for x in state[:-1]]
        return ops.AdamWState._make([*flat, steps])


def frozen_parameters(model: Decoder, config: OptimizerConfig) -> set[str]:
    """The names of the parameters that match `optimizer.freeze`. Raises `InputError` if nothing is left to train."""
    if not config.freeze:
        return set()
    frozen = set(select_by_pattern(model, [(pattern, True) for pattern in config.freeze], "optimizer.freeze"))
    every = {name for name, _ in model.named_parameters()}
    refuse(frozen == every, "optimizer.freeze names every parameter of the model; leave some to train")
    return frozen


def parameter_groups(model: Decoder, flat: FlatParameters, config: OptimizerConfig) -> tuple[ParameterGroup, ...]:
    """The groups of the flat buffers, in order; a single one unless patterns give parameters settings of their own.
    Raises `InputError` if a pattern matches no trained parameter."""
    whole = one_group(flat, config)
    if not config.lr_scales and not config.weight_decays:
        return (whole,)
    frozen = {name for name, _ in model.named_parameters()} - set(flat.names)
    scales, decays = (
        select_by_pattern(model, config.of_patterns(name), f"optimizer.{name}", frozen)
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
    """The whole flat buffers as one group, with weight decay for matrices only."""
    return ParameterGroup(0, flat.layout.size, flat.num_matrix_elements, 1.0, config.weight_decay)


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with global-norm clipping, as in torch but predicated.

    By default weight decay applies to matrices only. Nothing here waits for the device: steps and `lr` are tensors.

    Args:
        groups: parameter groups with their settings (`parameter_groups`); by default a single one.
    """

    def __init__(self, flat: FlatParameters, config: OptimizerConfig, groups: Sequence[ParameterGroup] = ()) -> None:
        self.flat = flat
        self.settings = UpdateSettings(*(getattr(config, field.name) for field in fields(UpdateSettings)))
        self.groups = tuple(groups) or (one_group(flat, config),)
        self._make_state()
        self.steps = torch.zeros(2, device=flat.data.device)  # updates applied: to matrices, to vectors

    def _make_state(self) -> None:
        weights = self.flat.data  # if float32, these are the masters
        self.master = weights if weights.dtype == torch.float32 else weights.float()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)

    def inputs(self) -> graph.Inputs:
        """What `update` reads and writes, except for the buffer `lr`, which the caller adds."""
        weights, grad, own = {"weights": self.flat.data}, {"grad": self.flat.grad}, self.local_state()
        if self.master is self.flat.data:
            del own["master"]
        return graph.Inputs(param=weights, grad=grad, buffer=self.flat.counted, optimizer=own)

    def update(self, inputs: graph.Inputs, ok: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the accumulated gradients if `ok` and their norm is finite; clear them in any case. `update_offloaded`
        must follow, which does any part of the update outside the graph.

        When not applied, no bit of weights, moments or step counts changes, whatever the gradients hold.

        Args:
            inputs: those of `inputs`, and the buffer `lr`: float32, 0-dim. ok: bool, 0-dim.

        Returns:
            The global gradient norm before clipping (float32) and whether the update was applied (bool), both 0-dim.
        """
        weights, grad, own = inputs.param["weights"], inputs.grad["grad"], inputs.optimizer
        rounded, master = (weights, own["master"]) if "master" in own else (None, weights)
        grad_norm, step = self._clip(inputs, ok)
        state = ops.AdamWState(rounded, grad, master, own["exp_avg"], own["exp_avg_sq"], own["steps"])
        for group in self.groups:
            steps = state.steps if group is self.groups[-1] else state.steps.clone()  # the last group counts the step
            self._apply(group.slice_state(state, steps), step, group)
        return grad_norm, step.applied

    def _clip(self, inputs: graph.Inputs, ok: Tensor) -> tuple[Tensor, ops.AdamWStep]:
        """The gradient norm, and the rate, gradient scale and predicate of the update. The norm is the root of an exact
        sum over blocks that are the same for any number of ranks."""
        b, grad, max_norm = inputs.buffer, inputs.grad["grad"], self.settings.max_grad_norm
        self.flat.sum_replicated(grad)
        squares = ops.square_sums(grad)
        counted = torch.where(b["counted"], squares, 0.0) if self.flat.counted else squares
        grad_norm = ops.root_of_sum(self.flat.sum_words(ops.exact_sum(counted)))
        applied = ok & torch.isfinite(grad_norm)
        grad_scale = ((grad_norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm > 0 else torch.ones_like(grad_norm)
        return grad_norm, ops.AdamWStep(b["lr"], grad_scale, applied)

    def _apply(self, state: ops.AdamWState, step: ops.AdamWStep, group: ParameterGroup) -> None:
        s = self.settings
        if group.scale != 1:
            step = step._replace(lr=step.lr * group.scale)
        ops.adamw(state, step, ops.AdamWSettings(group.decayed, s.beta1, s.beta2, s.epsilon, group.weight_decay))

    def update_offloaded(self) -> None:
        """Do the part of an update that is outside the graph: nothing in this class."""

    def warm_up_offloaded(self) -> None:
        """Launch the kernels of `update_offloaded` once, for an update that is not applied, and clear gradients as it
        does; nothing is copied from or to the host."""

    def keep_on_device(self, size: int) -> None:
        """Before the first update: keep as much as `size` bytes hold of a state that is otherwise on the host on the
        device between updates, which need not copy it then."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of masters and moments that are on the device though the others are not (`keep_on_device`)."""
        return 0

    def complete_state(self) -> None:
        """Wait until all memory of the state is allocated."""

    def reset(self) -> None:
        """Zero the moments and step counts; the masters stay."""
        for tensor in (self.exp_avg, self.exp_avg_sq, self.steps):
            tensor.zero_()

    def state(self) -> dict[str, Tensor]:
        """Masters, moments and step counts, to resume exactly on any number of ranks. Every rank calls it, and rank 0
        gets them whole (`FlatParameters.gather_whole`); in one process they are the live tensors."""
        return {name: x if name == "steps" else self.flat.gather_whole(x) for name, x in self.local_state().items()}

    def local_state(self) -> dict[str, Tensor]:
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "steps": self.steps}

    def load_state(self, state: Mapping[str, Tensor | Sequence[Buffer]], tp: int = 1) -> None:
        """Load what `state` returned, or the `local_state` of all ranks of a run with tensor-parallel size `tp`, by
        rank. Raises `ValueError` if a tensor is missing or has another size (of another model)."""
        for name, own in self.local_state().items():
            try:
                self._load(own, state[name], tp)
            except (KeyError, ValueError) as error:
                size = [2] if name == "steps" else [self.flat.whole_layout.size]
                reason = error if isinstance(error, ValueError) else f"expected shape {size}, found nothing"
                raise ValueError(f"optimizer state {name!r}: {reason}") from error
        self.round_masters()

    def round_masters(self) -> None:
        """Round the masters to the weights, as every update does."""
        self.flat.data.copy_(self.master)

    def _load(self, own: Tensor, given: Tensor | Sequence[Buffer], tp: int) -> None:
        parts = [given] if isinstance(given, Tensor) else given
        if own is not self.steps:
            self.flat.load_parts(own, parts, tp)
        elif list(parts[0].shape) != list(own.shape):
            raise ValueError(f"expected shape {list(own.shape)}, found {list(parts[0].shape)}")
        else:
            own.copy_(parts[0][:])


CHUNK = 1 << 24  # elements in a chunk of the state; two chunks are on the device at a time


class OffloadedAdamW(AdamW):
    """`AdamW` with moments and masters in host memory, pinned if the device is a GPU, and the same bits. The update's
    graph decides whether and how to update; `update_offloaded` then does so chunk by chunk. Each chunk of the state is
    copied to the device, updated, and copied back, overlapping the copies of its neighbours. What is kept on the device
    (`keep_on_device`) is copied to its place on the host for whoever reads the state. The host's memory is allocated
    beside the work that follows, until something needs the state (`complete_state`).

    Attributes:
        decided: float32 [3]: learning rate, gradient scale, and whether the update is applied.
    """

    def _make_state(self) -> None:
        weights, size = self.flat.data, self.flat.layout.size
        on_gpu, masters = weights.is_cuda, weights.dtype != torch.float32
        self._memory: HostBuffer | None = HostBuffer((2 + masters) * size * 4, on_gpu)  # until the state is complete
        host = self._memory.tensor.view(torch.float32).view(-1, size)
        self.exp_avg, self.exp_avg_sq = host[:2]
        self.master = host[2] if masters else weights
        self._host = list(host)
        self.decided = torch.zeros(3, device=weights.device)
        self._pieces = self._copied = list(_split_groups(self.groups, CHUNK))
        self._kept = torch.empty(len(host), 0, device=weights.device)  # the state of the first elements
        largest = max(piece.end - piece.begin for piece in self._pieces)
        self._device = torch.get_device_module(weights.device)
        self._chunks = [torch.empty(len(host), largest, device=weights.device) for _ in range(2)]
        self._copied_back = [self._device.Event() for _ in self._chunks]  # recorded when a chunk's buffer is free again
        self._to_device, self._to_host = self._device.Stream(), self._device.Stream()

    def keep_on_device(self, size: int) -> None:
        assert self._memory is not None, "keep_on_device after the state was used"
        most = size // (self._kept.element_size() * len(self._host))
        end = max((piece.end for piece in self._pieces if piece.end <= most), default=0)
        self._copied = [piece for piece in self._pieces if piece.begin >= end]
        self._kept = torch.zeros(len(self._host), end, device=self.flat.data.device)
        for master in self._kept[2:]:
            master.copy_(self.flat.data[:end])

    @property
    def kept_bytes(self) -> int:
        return self._kept.nbytes

    def complete_state(self) -> None:
        if self._memory is None:
            return
        self._memory.wait()
        self._memory = None
        for piece in self._copied if self.master is not self.flat.data else ():
            chunk = self._chunks[0][0, : piece.end - piece.begin]
            chunk.copy_(self.flat.data[piece.begin : piece.end])  # the host would convert them slowly
            self.master[piece.begin : piece.end].copy_(chunk)

    def inputs(self) -> graph.Inputs:
        return graph.Inputs(grad={"grad": self.flat.grad}, buffer={"decided": self.decided, **self.flat.counted})

    def update(self, inputs: graph.Inputs, ok: Tensor) -> tuple[Tensor, Tensor]:
        b = inputs.buffer
        grad_norm, step = self._clip(inputs, ok)
        b["decided"].copy_(torch.stack([step.lr, step.grad_scale, step.applied.float()]))
        return grad_norm, step.applied

    def update_offloaded(self) -> None:
        """Do the update that `update` decided, without waiting for the device. Copies to the host may still be under
        way on return (`synchronize`)."""
        self.complete_state()
        step, computing = self._decided_step(), self._device.current_stream()
        self._to_device.wait_stream(self._to_host)
        for piece in self._pieces[: len(self._pieces) - len(self._copied)]:
            self._apply(self._state(piece, self._kept[:, piece.begin : piece.end]), step, piece)
        for i, piece in enumerate(self._copied):
            on_device, copied_back = self._chunks[i % 2][:, : piece.end - piece.begin], self._copied_back[i % 2]
            on_host = [x[piece.begin : piece.end] for x in self._host]
            copied_back.wait(self._to_device)
            with self._device.stream(self._to_device):
                for chunk, host in zip(on_device, on_host, strict=True):
                    chunk.copy_(host, non_blocking=True)
            computing.wait_stream(self._to_device)
            self._apply(self._state(piece, on_device), step, piece)
            self._to_host.wait_stream(computing)
            with self._device.stream(self._to_host):
                for chunk, host in zip(on_device, on_host, strict=True):
                    host.copy_(chunk, non_blocking=True)
            copied_back.record(self._to_host)

    def warm_up_offloaded(self) -> None:
        self.decided.zero_()  # a graph that was only recorded has left what the last update decided
        self.flat.grad.zero_()
        for piece in {piece.end - piece.begin: piece for piece in self._pieces}.values():
            state = self._state(piece, self._chunks[0][:, : piece.end - piece.begin])
            state.master.copy_(self.flat.data[piece.begin : piece.end])  # which is rounded to the weights in any case
            self._apply(state, self._decided_step(), piece)

    def _decided_step(self) -> ops.AdamWStep:
        lr, grad_scale, applied = self.decided.unbind()
        return ops.AdamWStep(lr, grad_scale, applied != 0)

    def _state(self, piece: ParameterGroup, chunk: Tensor) -> ops.AdamWState:
        weights, grad = (x[piece.begin : piece.end] for x in (self.flat.data, self.flat.grad))
        exp_avg, exp_avg_sq = chunk[:2]
        rounded, master = (weights, chunk[2]) if len(chunk) > 2 else (None, weights)
        steps = self.steps if piece is self._pieces[-1] else self.steps.clone()  # the last piece counts the step
        return ops.AdamWState(rounded, grad, master, exp_avg, exp_avg_sq, steps)

    def synchronize(self) -> None:
        """Wait until the host may read the whole state. If it writes any, `round_masters` must follow."""
        self.complete_state()
        for host, kept in zip(self._host, self._kept, strict=True):
            host[: len(kept)].copy_(kept, non_blocking=True)
        self._device.synchronize()

    def reset(self) -> None:
        self.synchronize()
        super().reset()
        self._kept[:2] = 0

    def local_state(self) -> dict[str, Tensor]:
        self.synchronize()
        return super().local_state()

    def round_masters(self) -> None:
        for host, kept in zip(self._host, self._kept, strict=True):
            kept.copy_(host[: len(kept)])
        for piece in self._pieces:
            begin, end = piece.begin, piece.end
            self.flat.data[begin:end].copy_(self.master[begin:end].to(self.flat.data.device))


def _split_groups(groups: Sequence[ParameterGroup], most: int) -> Iterator[ParameterGroup]:
    """The groups, cut into pieces of at most `most` elements."""
    for group in groups:
        for begin in range(group.begin, group.end, most):
            end = min(begin + most, group.end)
            decayed = min(max(group.begin + group.decayed - begin, 0), end - begin)
            yield replace(group, begin=begin, end=end, decayed=decayed)


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The learning rate of update `step` (from 0): linear warm-up to the full rate at update `warmup_steps - 1`, then
    constant, or decaying to 0 at `total_steps` linearly or along half a cosine."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    factor = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return config.learning_rate * factor[config.lr_scheduler]
