"""How the trainer runs the policy step: eagerly, or as captured graphs. Both compute the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from .. import graph
from ..config import LossConfig, LossType
from ..models import Decoder
from ..types import PackedBatch
from . import routing, step
from .optimizer import AdamW, AdamWTensors, FlatParameters, adamw_step


@dataclass
class EagerRuns:
    """Calls the step's functions on the live tensors.

    Attributes:
        values: the statistics, float64 (`step.named`). lr: float32, 0-dim.
        enforce_parity: no update when a log-probability or a choice of experts differed.
        router_biases: those that an update balances, by name, layer by layer.
    """

    model: Decoder
    reference: Decoder | None
    flat: FlatParameters
    optimizer: AdamW
    loss: LossConfig
    values: Tensor
    lr: Tensor
    enforce_parity: bool
    router_biases: dict[str, Tensor] = field(default_factory=dict)

    def constants(self) -> dict[str, graph.Constants]:
        """For each function the numbers that a graph of it holds: of the model, the loss, and the optimizer but for
        its rate."""
        model, loss, optimizer = self.model.config, self.loss, self.optimizer.config
        used = {name: getattr(loss, name) for name in ("epsilon", "epsilon_high", "beta", "router_aux_loss_coef")}
        adamw = ("beta1", "beta2", "epsilon", "weight_decay", "max_grad_norm", "router_bias_rate")
        return {
            "forward_backward": {"model": model, "loss": used, "reference": self.reference is not None},
            "check": {"model": model},
            "optim_step": {
                "optimizer": {name: getattr(optimizer, name) for name in adamw},
                "matrix_elements": self.flat.num_matrix_elements,
                "enforce_parity": self.enforce_parity,
                "router_biases": tuple(self.router_biases),
            },
            "reference_logprobs": {"model": self.reference.config if self.reference else None},
        }

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
        return self.update(self.optimizer.tensors(), self.values, self.lr, self.router_biases)

    def update(
        self, tensors: AdamWTensors, values: Tensor, lr: Tensor, router_biases: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """`optim_step` on these tensors."""
        s = step.named(values)
        ok = torch.isfinite(s["loss"])
        if self.enforce_parity:
            ok = ok & (s["different"] == 0)
        config = self.optimizer.config
        grad_norm, applied = adamw_step(tensors, self.flat.num_matrix_elements, config, lr, ok)
        if router_biases:
            routing.balance(list(router_biases.values()), s["loads"], config.router_bias_rate, applied)
        return grad_norm, applied


class GraphRuns:
    """The same four as captured graphs: one a bucket of the batch for each way to score it, and one for the update.

    Gradients and statistics grow inside the graphs. What a call returns is copied out of the graphs' memory.
    """

    def __init__(self, eager: EagerRuns, compiler: graph.Compiler) -> None:
        self.eager = eager
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
            param={"weights": weights},
            grad={"grad": grad},
            buffer={**state, "lr": eager.lr, **eager.router_biases},
            optimizer=t,
        )
        baked = eager.constants()
        self._train = compiler.function(
            "forward_backward", self._train_body, training, {"grad", "buffer"}, OPEN_SIZES, baked["forward_backward"]
        )
        self._check = compiler.function("check", self._check_body, scoring, {"buffer"}, OPEN_SIZES, baked["check"])
        self._optim = compiler.function(
            "optim_step",
            self._optim_body,
            updating,
            {"param", "grad", "optimizer", "buffer"} if eager.router_biases else {"param", "grad", "optimizer"},
            constants=baked["optim_step"],
        )
        if eager.reference is not None:
            frozen = graph.module_inputs(eager.reference)
            self._reference = compiler.function(
                "reference_logprobs", self._reference_body, frozen, (), OPEN_SIZES, baked["reference_logprobs"]
            )

    @property
    def functions(self) -> dict[str, graph.GraphFunction]:
        """What is captured, by name."""
        made = [self._train, self._check, self._optim]
        if self.eager.reference is not None:
            made.append(self._reference)
        return {function.name: function for function in made}

    def case(self, name: str, batch: PackedBatch, load: Callable[[], object], **statics: graph.Static) -> graph.Case:
        """A launch on `batch`, to be checked."""
        return graph.Case(name, _tensors(batch), {**_statics(batch), **statics}, load)

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
        e = self.eager
        parameters, grads = [inputs.param[name] for name in inputs.grad], list(inputs.grad.values())
        values, batch, with_kl = inputs.buffer["statistics"], _batch(inputs, **statics), e.with_kl(loss_type)
        with graph.substituted(e.model, inputs):
            return _outputs(
                step.forward_backward(
                    e.model, parameters, grads, values, batch, e.loss, loss_type, with_kl, with_support
                )
            )

    def _check_body(self, inputs: graph.Inputs, **statics: Any) -> dict[str, Tensor]:
        with graph.substituted(self.eager.model, inputs):
            return _outputs(step.check(self.eager.model, inputs.buffer["statistics"], _batch(inputs, **statics)))

    def _reference_body(self, inputs: graph.Inputs, **statics: Any) -> dict[str, Tensor]:
        model = self.eager.reference
        assert model is not None
        with graph.substituted(model, inputs):
            return {"model_logprob_C": step.score(model, _batch(inputs, **statics))[1].model_logprob_C}

    def _optim_body(self, inputs: graph.Inputs) -> dict[str, Tensor]:
        weights = inputs.param["weights"]
        tensors = AdamWTensors(**{"master": weights, **inputs.optimizer}, weights=weights, grad=inputs.grad["grad"])
        biases = {name: inputs.buffer[name] for name in self.eager.router_biases}
        grad_norm, applied = self.eager.update(tensors, inputs.buffer["statistics"], inputs.buffer["lr"], biases)
        return {"grad_norm": grad_norm, "applied": applied}


def _open_sizes() -> graph.Dynamic:
    """The packed batch's tensors by what their names end in; one trace serves every size."""
    ends = {"T": ("T",), "C": ("C",), "S": ("S",)}
    sizes = {f.name: ends[f.name[-1]] for f in fields(PackedBatch) if f.name[-2:-1] == "_" and f.name[-1] in ends}
    return {**sizes, "cu_seqlens": ("S1",), "support_C": ("C", None)}


OPEN_SIZES = _open_sizes()


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
