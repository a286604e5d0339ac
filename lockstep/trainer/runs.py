"""How the trainer runs the policy step: eagerly, or as captured graphs. Both compute the same bits."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .. import graph
from ..config import LossConfig, LossType
from ..models import Decoder
from ..types import PackedBatch
from . import step
from .optimizer import AdamW, AdamWTensors, FlatParameters, adamw_step


@dataclass
class EagerRuns:
    """Calls the step's functions on the live tensors.

    Attributes:
        values: the statistics, float64, one element each. lr: float32, 0-dim.
        enforce_parity: no update when a log-probability differed.
    """

    model: Decoder
    reference: Decoder | None
    flat: FlatParameters
    optimizer: AdamW
    loss: LossConfig
    values: Tensor
    lr: Tensor
    enforce_parity: bool

    def with_kl(self, loss_type: LossType) -> bool:
        """Whether the loss has the KL term."""
        return self.reference is not None and loss_type != "sft"

    def forward_backward(self, batch: PackedBatch, loss_type: LossType, with_support: bool) -> step.Scored:
        """See `step.forward_backward`."""
        parameters, grads, with_kl = self.flat.parameters, self.flat.grads, self.with_kl(loss_type)
        return step.forward_backward(
            self.model, parameters, grads, self.values, batch, self.loss, loss_type, with_kl, with_support
        )

    def check(self, batch: PackedBatch) -> step.Scored:
        """See `step.check`."""
        return step.check(self.model, self.values, batch)

    @torch.no_grad()
    def reference_logprobs(self, batch: PackedBatch) -> Tensor:
        """The reference's log-probs of the tokens (temperature 1, untruncated), [C]."""
        assert self.reference is not None
        return step.score(self.reference, batch)[1].model_logprob_C

    def optim_step(self) -> tuple[Tensor, Tensor]:
        """Update at the rate `lr` if the statistics allow it; the gradient norm and whether it was applied, 0-dim."""
        return self.update(self.optimizer.tensors(), self.values, self.lr)

    def update(self, tensors: AdamWTensors, values: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
        """`optim_step` on these tensors."""
        s = step.named(values)
        ok = torch.isfinite(s["loss"])
        if self.enforce_parity:
            ok = ok & (s["different"] == 0)
        return adamw_step(tensors, self.flat.num_matrix_elements, self.optimizer.config, lr, ok)


class GraphRuns:
    """The same four as captured graphs: one a bucket of the batch for each way to score it, and one for the update.

    Gradients and statistics grow inside the graphs. What a call returns is copied out of the graphs' memory.
    """

    def __init__(self, eager: EagerRuns, compiler: graph.Compiler) -> None:
        self._eager = eager
        model, state = graph.module_inputs(eager.model), {"statistics": eager.values}
        name_of = {id(parameter): name for name, parameter in model.param.items()}
        grads = {name_of[id(p)]: grad for p, grad in zip(eager.flat.parameters, eager.flat.grads, strict=True)}
        scoring = replace(model, buffer={**model.buffer, **state})
        training = replace(scoring, grad=grads)
        t = eager.optimizer.tensors()._asdict()
        weights, grad = t.pop("weights"), t.pop("grad")
        if t["master"] is weights:
            del t["master"]
        updating = graph.Inputs(
            param={"weights": weights}, grad={"grad": grad}, buffer={**state, "lr": eager.lr}, optimizer=t
        )
        self._train = compiler.function("forward_backward", self._train_body, training, {"grad", "buffer"})
        self._check = compiler.function("check", self._check_body, scoring, {"buffer"})
        self._optim = compiler.function("optim_step", self._optim_body, updating, {"param", "grad", "optimizer"})
        if eager.reference is not None:
            frozen = graph.module_inputs(eager.reference)
            self._reference = compiler.function("reference_logprobs", self._reference_body, frozen)

    def forward_backward(self, batch: PackedBatch, loss_type: LossType, with_support: bool) -> step.Scored:
        """See `step.forward_backward`."""
        statics = {**_statics(batch), "loss_type": loss_type, "with_support": with_support}
        return _scored(self._train(_tensors(batch), **statics))

    def check(self, batch: PackedBatch) -> step.Scored:
        """See `step.check`."""
        return _scored(self._check(_tensors(batch), **_statics(batch)))

    def reference_logprobs(self, batch: PackedBatch) -> Tensor:
        """See `EagerRuns.reference_logprobs`."""
        return self._reference(_tensors(batch), **_statics(batch))["model_logprob_C"].clone()

    def optim_step(self) -> tuple[Tensor, Tensor]:
        """See `EagerRuns.optim_step`."""
        outputs = self._optim()
        return outputs["grad_norm"].clone(), outputs["applied"].clone()

    def _train_body(
        self, inputs: graph.Inputs, loss_type: LossType, with_support: bool, **statics: Any
    ) -> dict[str, Tensor]:
        e = self._eager
        parameters, grads = [inputs.param[name] for name in inputs.grad], list(inputs.grad.values())
        values, batch, with_kl = inputs.buffer["statistics"], _batch(inputs, **statics), e.with_kl(loss_type)
        with graph.substituted(e.model, inputs):
            return _outputs(
                step.forward_backward(
                    e.model, parameters, grads, values, batch, e.loss, loss_type, with_kl, with_support
                )
            )

    def _check_body(self, inputs: graph.Inputs, **statics: Any) -> dict[str, Tensor]:
        with graph.substituted(self._eager.model, inputs):
            return _outputs(step.check(self._eager.model, inputs.buffer["statistics"], _batch(inputs, **statics)))

    def _reference_body(self, inputs: graph.Inputs, **statics: Any) -> dict[str, Tensor]:
        model = self._eager.reference
        assert model is not None
        with graph.substituted(model, inputs):
            return {"model_logprob_C": step.score(model, _batch(inputs, **statics))[1].model_logprob_C}

    def _optim_body(self, inputs: graph.Inputs) -> dict[str, Tensor]:
        weights = inputs.param["weights"]
        tensors = AdamWTensors(**{"master": weights, **inputs.optimizer}, weights=weights, grad=inputs.grad["grad"])
        grad_norm, applied = self._eager.update(tensors, inputs.buffer["statistics"], inputs.buffer["lr"])
        return {"grad_norm": grad_norm, "applied": applied}


def _tensors(batch: PackedBatch) -> dict[str, Tensor]:
    """What a graph takes of a batch; `sequence_C` is for messages."""
    values = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name != "sequence_C"}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _statics(batch: PackedBatch) -> dict[str, Any]:
    return {"max_len": batch.max_len, "check_parity": batch.check_parity, "truncated": batch.truncated}


def _batch(inputs: graph.Inputs, **statics: Any) -> PackedBatch:
    """The batch of traced tensors."""
    values: dict[str, Any] = {**inputs.user, **statics}
    return PackedBatch(**values, sequence_C=torch.empty(0))


def _outputs(scored: step.Scored) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in scored._asdict().items() if tensor is not None}


def _scored(outputs: dict[str, Tensor]) -> step.Scored:
    return step.Scored(**{name: tensor.clone() for name, tensor in outputs.items()})
