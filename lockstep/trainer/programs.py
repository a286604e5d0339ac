"""How the trainer runs the policy step: eagerly, or as captured graphs. Both compute the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .. import graph
from ..algorithms.losses import LOSSES, LossSettings
from ..config import LossType
from ..models import Decoder
from ..types import PackedBatch
from . import routing, step
from .fsdp.sharding import Sharding
from .graph_inputs import OPEN_SIZES, batch_of, statics_of
from .optimizer import AdamW, AdamWTensors, FlatParameters, accumulate, adamw_step


@dataclass
class EagerRuns:
    """Calls the step's functions on the live tensors.

    Attributes:
        values: the statistics, float64 (`step.named`). results: of updates (`step.take`). lr: float32, 0-dim.
        sampled: float64, 0-dim: tokens that the next update must have found identical.
        enforce_parity: no update when it did not, or when a log-probability or a choice of experts differed.
        router_biases: those that an update balances, by name, layer by layer.
    """

    model: Decoder
    reference: Decoder | None
    flat: FlatParameters
    optimizer: AdamW
    loss: LossSettings
    values: Tensor
    results: Tensor
    lr: Tensor
    sampled: Tensor
    enforce_parity: bool
    router_biases: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        moe = self.model.config.moe if self.model.config.moe_layers else None
        self.experts = moe.num_experts if moe else 0
        flat, own = self.flat, graph.module_inputs(self.model)
        self.sharding = Sharding.of(flat)
        buffers = {**own.buffer, "statistics": self.values}
        weights = own.param if flat.world.size == 1 else dict(zip(flat.names, flat.parts, strict=True))
        self.scoring = graph.Inputs(param=weights, buffer=buffers)
        self.training = replace(self.scoring, grad=dict(zip(flat.names, flat.grads, strict=True)))

    def constants(self) -> dict[str, graph.Constants]:
        """For each function what its graphs depend on: the very objects that its body reads."""
        model = {"model": self.model.config, "masks": self.model.masks}
        return {
            "forward_backward": {
                **model,
                "loss": self.loss,
                "reference": self.reference is not None,
                "sharding": self.sharding,
            },
            "check": {**model, "sharding": self.sharding},
            "optim_step": {
                "optimizer": self.optimizer.settings,
                "matrix_elements": self.flat.num_matrix_elements,
                "enforce_parity": self.enforce_parity,
                "router_biases": tuple(self.router_biases),
                "experts": self.experts,
                "ranks": self.sharding.ranks,
            },
            "gather_weights": {"sharding": self.sharding},
            "reference_logprobs": model,  # the reference is a copy
        }

    def with_kl(self, loss_type: LossType) -> bool:
        """Whether the loss has the KL term."""
        return self.reference is not None and loss_type != "sft"

    def forward_backward(self, batch: PackedBatch, loss_type: LossType, with_support: bool) -> dict[str, Tensor]:
        """See `step.forward_backward`; what it returns, by name."""
        how = batch, loss_type, with_support
        if self.sharding.ranks == 1:
            own = self.flat.parameters, self.flat.grads, self.values
            return self._forward_backward(*own, *how).tensors()
        return self.forward_backward_on(self.training, *how).tensors()

    def forward_backward_on(
        self, inputs: graph.Inputs, batch: PackedBatch, loss_type: LossType, with_support: bool
    ) -> step.Scored:
        """`forward_backward` as a function of tensors like those of `training`."""
        grads, values = list(inputs.grad.values()), inputs.buffer["statistics"]
        with self.sharding.substituted(self.model, inputs) as parameters:
            return self._forward_backward(parameters, grads, values, batch, loss_type, with_support)

    def _forward_backward(
        self,
        parameters: Sequence[Tensor],
        grads: Sequence[Tensor],
        values: Tensor,
        batch: PackedBatch,
        loss_type: LossType,
        with_support: bool,
    ) -> step.Scored:
        settings = self.loss, loss_type, self.with_kl(loss_type), with_support, self.sharding
        return step.forward_backward(self.model, parameters, grads, values, batch, *settings)

    def check(self, batch: PackedBatch) -> dict[str, Tensor]:
        """See `step.check`; what it returns, by name."""
        if self.sharding.ranks == 1:
            return step.check(self.model, self.values, batch, self.sharding).tensors()
        return self.check_on(self.scoring, batch).tensors()

    def check_on(self, inputs: graph.Inputs, batch: PackedBatch) -> step.Scored:
        """`check` as a function of tensors like those of `scoring`."""
        with self.sharding.substituted(self.model, inputs, differentiated=False):
            return step.check(self.model, inputs.buffer["statistics"], batch, self.sharding)

    def gather_weights(self) -> None:
        """Bring the model's own weights up to date with the shards of them; in one process they are the same."""
        if self.sharding.ranks > 1:
            self.gather_weights_on(self.gathering)

    @property
    def gathering(self) -> graph.Inputs:
        """What `gather_weights` reads and writes."""
        return graph.Inputs(
            param=self.scoring.param,
            buffer={name: p.data for name, p in zip(self.flat.names, self.flat.parameters, strict=True)},
        )

    @torch.no_grad()
    def gather_weights_on(self, inputs: graph.Inputs) -> None:
        """`gather_weights` as a function of tensors like those of `gathering`."""
        for name, part in inputs.param.items():
            inputs.buffer[name].copy_(self.sharding.gathered(name, part))

    @torch.no_grad()
    def reference_logprobs(self, batch: PackedBatch) -> Tensor:
        """The reference's log-probs of the tokens (temperature 1, untruncated), [C]."""
        assert self.reference is not None
        return step.score(self.reference, batch)[1].model_logprob_C

    def optim_step(self) -> None:
        """Update at the rate `lr` if the statistics allow it, and write what was found (`step.take`)."""
        own = self.values, self.results, self.lr, self.sampled, self.router_biases
        self.update(self.optimizer.tensors(), *own)

    def update(
        self,
        tensors: AdamWTensors,
        values: Tensor,
        results: Tensor,
        lr: Tensor,
        sampled: Tensor,
        router_biases: Mapping[str, Tensor],
    ) -> None:
        """`optim_step` on these tensors."""
        s = step.named(values)
        ok = torch.isfinite(s["loss"])
        if self.enforce_parity:
            ok = ok & (s["different"] == 0) & (s["identical"] == sampled)
            if self.experts:
                ok = ok & (s["prompt_routed_differently"] == 0)
        settings = self.optimizer.settings
        grad_norm, applied = adamw_step(tensors, self.flat, settings, lr, ok)
        if router_biases:
            routing.balance(list(router_biases.values()), s["loads"], settings.router_bias_rate, applied)
        step.take(values, results, grad_norm, applied, self.experts)


class GraphRuns:
    """The same as captured graphs: one a bucket of the batch for each way to score it, and one for the update.

    Gradients and statistics grow inside the graphs. What a batch's call returns lies in the graphs' memory, to be used
    before the next call; what was compared (`step.COMPARED`) stays right where it is returned.
    """

    def __init__(self, eager: EagerRuns, compiler: graph.Compiler) -> None:
        self.eager = eager
        t = {name: tensor for name, tensor in eager.optimizer.tensors()._asdict().items() if tensor is not None}
        weights, grad = t.pop("weights"), t.pop("grad")
        if t["master"] is weights:
            del t["master"]
        order = {"norm_order": t.pop("norm_order")} if "norm_order" in t else {}
        own = {"statistics": eager.values, "results": eager.results, "lr": eager.lr, "sampled": eager.sampled}
        updating = graph.Inputs(
            param={"weights": weights},
            grad={"grad": grad},
            buffer={**own, **order, **eager.router_biases},
            optimizer=t,
        )
        baked = eager.constants()
        covered = all(map(graph.in_package, LOSSES.values()))  # a loss from elsewhere is traced at every start
        # Of several ranks each differentiates by weights that it gathers, which are no inputs.
        one = eager.sharding.ranks == 1
        self._train = compiler.function(
            "forward_backward",
            graph.Differentiated(self._train_forward, accumulate) if one else self._train_body,
            eager.training,
            {"grad", "buffer"},
            OPEN_SIZES,
            baked["forward_backward"] if covered else None,
            step.COMPARED,
        )
        self._check = compiler.function(
            "check", self._check_body, eager.scoring, {"buffer"}, OPEN_SIZES, baked["check"], step.COMPARED
        )
        self._optim = compiler.function(
            "optim_step",
            self._optim_body,
            updating,
            {"param", "grad", "optimizer", "buffer"},
            constants=baked["optim_step"],
        )
        self._gather = None
        if eager.sharding.ranks > 1:
            self._gather = compiler.function(
                "gather_weights", self._gather_body, eager.gathering, {"buffer"}, constants=baked["gather_weights"]
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
        if self._gather is not None:
            made.append(self._gather)
        return {function.name: function for function in made}

    def case(self, name: str, batch: PackedBatch, load: Callable[[], object], **statics: graph.Static) -> graph.Case:
        """A launch on `batch`, to be checked."""
        return graph.Case(name, batch.tensors(), {**statics_of(batch), **statics}, load)

    def forward_backward(self, batch: PackedBatch, loss_type: LossType, with_support: bool) -> dict[str, Tensor]:
        """See `EagerRuns.forward_backward`."""
        statics = {**statics_of(batch), "loss_type": loss_type, "with_support": with_support}
        return self._train(batch.tensors(), **statics)

    def check(self, batch: PackedBatch) -> dict[str, Tensor]:
        """See `EagerRuns.check`."""
        return self._check(batch.tensors(), **statics_of(batch))

    def reference_logprobs(self, batch: PackedBatch) -> Tensor:
        """See `EagerRuns.reference_logprobs`."""
        return self._reference(batch.tensors(), **statics_of(batch))["model_logprob_C"]

    def optim_step(self) -> None:
        """See `EagerRuns.optim_step`."""
        self._optim()

    def gather_weights(self) -> None:
        """See `EagerRuns.gather_weights`."""
        if self._gather is not None:
            self._gather()

    def _train_body(
        self, inputs: graph.Inputs, loss_type: LossType, with_support: bool, **statics: Any
    ) -> dict[str, Tensor]:
        batch = batch_of(inputs, **statics)
        return self.eager.forward_backward_on(inputs, batch, loss_type, with_support).tensors()

    def _train_forward(
        self, inputs: graph.Inputs, loss_type: LossType, with_support: bool, **statics: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        e, values, batch = self.eager, inputs.buffer["statistics"], batch_of(inputs, **statics)
        with graph.substituted(e.model, inputs):
            loss, scored = step.forward(e.model, values, batch, e.loss, loss_type, e.with_kl(loss_type), with_support)
        return loss, scored.tensors()

    def _check_body(self, inputs: graph.Inputs, **statics: Any) -> dict[str, Tensor]:
        return self.eager.check_on(inputs, batch_of(inputs, **statics)).tensors()

    def _gather_body(self, inputs: graph.Inputs) -> dict[str, Tensor]:
        self.eager.gather_weights_on(inputs)
        return {}

    def _reference_body(self, inputs: graph.Inputs, **statics: Any) -> dict[str, Tensor]:
        model = self.eager.reference
        assert model is not None
        with graph.substituted(model, inputs):
            return {"model_logprob_C": step.score(model, batch_of(inputs, **statics))[1].model_logprob_C}

    def _optim_body(self, inputs: graph.Inputs) -> dict[str, Tensor]:
        weights = inputs.param["weights"]
        state = {"master": weights, **inputs.optimizer}
        order = inputs.buffer.get("norm_order")
        tensors = AdamWTensors(**state, weights=weights, grad=inputs.grad["grad"], norm_order=order)
        biases = {name: inputs.buffer[name] for name in self.eager.router_biases}
        b = inputs.buffer
        self.eager.update(tensors, b["statistics"], b["results"], b["lr"], b["sampled"], biases)
        return {}
