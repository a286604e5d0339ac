"""The trainer's programs: the policy step, the check, the update, and what several ranks need in addition."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import graph
from ..algorithms import SUPERVISED, Algorithm, make_algorithm, supervised_algorithm
from ..config import LossConfig
from ..models import Decoder
from ..types import COMPARED_OUTPUTS, PackedBatch
from . import routing, step
from .gathered import Reference, gather_by_layer
from .optimizer import AdamW
from .parameters import ShardedParameters

# The dynamic sizes of the packed batch's tensors, from the suffixes of their names; one trace serves every size.
DYNAMIC_SIZES: graph.Dynamic = {
    **{f.name: (f.name[-1],) for f in fields(PackedBatch) if f.name[-2:] in ("_T", "_C", "_S")},
    **{"cu_seqlens": ("S1",), "cu_completions": ("S1",), "support_C": ("C", None)},
}
_WITHOUT_BATCH = "optim_step", "gather_weights", "end_cell", "end_cells"  # programs that take no batch


@dataclass(frozen=True)
class UpdateState:
    """What an update reads and writes besides weights, gradients and moments.

    Attributes:
        statistics: float64 (`step.statistics_by_name`). results: of updates (`step.push_results`). lr: float32, 0-dim.
        sampled: float64, 0-dim: the number of tokens that must have been found identical before the next update.
        enforce_parity: refuse the update if `sampled` is not met, or if a log-probability or expert choice differed.
        router_biases: the biases that an update balances, by name, layer by layer.
    """

    statistics: Tensor
    results: Tensor
    lr: Tensor
    sampled: Tensor
    enforce_parity: bool
    router_biases: dict[str, Tensor]


class TrainerPrograms:
    """The trainer's programs. Captured, each has a graph for every batch shape and way of scoring; eager and captured
    programs compute the same bits.

    Gradients and statistics accumulate in place. A graph's outputs are valid until the next call, except for those that
    were compared (`types.COMPARED_OUTPUTS`), which stay valid.

    Attributes:
        algorithm: the run's. algorithms: it and that of supervised steps, by `loss_type`.
        by_name: all programs. `forward_backward`, `check`, `values` and `reference_logprobs` take batches (`launch`);
            `optim_step` updates at the rate `lr` if the statistics allow it, and writes the results
            (`step.push_results`); with several ranks, `gather_weights` writes the generator's weights after an update;
            where cells span several rounds, `end_cell` and `end_cells` sum them.
    """

    def __init__(
        self,
        runtime: graph.Runtime,
        model: Decoder,
        reference: Reference | None,
        optimizer: AdamW,
        loss: LossConfig,
        state: UpdateState,
    ) -> None:
        self.model, self.reference, self.optimizer, self.state = model, reference, optimizer, state
        self.loss_type = loss.loss_type
        self.algorithm, self.supervised = make_algorithm(loss), supervised_algorithm(loss)
        self.algorithms: dict[str, Algorithm] = {SUPERVISED: self.supervised, loss.loss_type: self.algorithm}
        self.flat = flat = optimizer.flat
        moe = model.config.moe if model.config.moe_layers else None
        self.experts = moe.num_experts if moe else 0
        own = flat.inputs(model)
        scoring = replace(own, buffer={**own.buffer, "statistics": state.statistics})
        training = replace(scoring, grad=dict(zip(flat.names, flat.grads, strict=True)))
        self._differentiated = graph.Differentiated(self._train_forward, flat.accumulate)
        constants = self.constants()
        self.by_name: dict[str, graph.Program] = {}

        def add(name: str, body: graph.GraphBody, inputs: graph.Inputs, writes: Collection[graph.Role]) -> None:
            dynamic = None if name in _WITHOUT_BATCH else DYNAMIC_SIZES
            self.by_name[name] = runtime.program(name, body, inputs, writes, dynamic, constants.get(name))

        train: graph.GraphBody = self._differentiated
        if isinstance(flat, ShardedParameters):  # its body also reduces statistics, and may gather weights
            train = self._train_body
            add("gather_weights", flat.gather, flat.gathering, {"buffer"})
        add("forward_backward", train, training, {"grad", "buffer"})
        add("check", self._check_body, scoring, {"buffer"})
        if flat.cells is not None:
            sums = graph.Inputs(grad={"grad": flat.grad}, buffer={"cells": flat.cells})
            add("end_cell", flat.end_cell, sums, {"grad", "buffer"})
            add("end_cells", flat.end_cells, sums, {"grad", "buffer"})
        add("optim_step", self._optim_body, self._update_inputs(), {"param", "grad", "optimizer", "buffer"})
        if self.algorithm.has_critic:
            add("values", self._values_body, scoring, {"buffer"})
        if reference is not None:
            add("reference_logprobs", self._reference_body, reference.inputs(), ())
        for name in ("forward_backward", "check"):
            self.by_name[name].lasting = COMPARED_OUTPUTS
        self._in_less_memory: dict[str, graph.GraphBody] = {
            "forward_backward": self._train_in_less_memory,
            "check": self._score_in_less_memory(self._check_scores),
            "values": self._score_in_less_memory(self._critic_values),
            "reference_logprobs": self._reference_in_less_memory,
        }

    def _update_inputs(self) -> graph.Inputs:
        s, own = self.state, self.optimizer.inputs()
        shared = {"statistics": s.statistics, "results": s.results, "lr": s.lr, "sampled": s.sampled}
        return replace(own, buffer={**shared, **own.buffer, **s.router_biases})

    def constants(self) -> dict[str, graph.Constants]:
        """What each program's graphs depend on: the very objects that its body reads."""
        layout, names = self.flat.layout, self.flat.names
        sharding = {
            "sharding": {
                "ranks": layout.ranks,
                "parameters": type(self.flat).__name__,
                "shapes": dict(zip(names, layout.shapes, strict=True)),
                "placements": dict(zip(names, self.flat.placements, strict=True)),
            }
        }
        scoring = {**self.model.trace_constants(), **sharding}
        losses = {"loss": self.algorithm, "supervised": self.supervised, "reference": self.reference is not None}
        return {
            "forward_backward": {**scoring, **losses, "cell": self.flat.cell},
            **dict.fromkeys(("check", "values"), scoring),
            **dict.fromkeys(("gather_weights", "end_cell", "end_cells"), sharding),
            "optim_step": {
                "optimizer": self.optimizer.settings,
                "groups": {str(i): group for i, group in enumerate(self.optimizer.groups)},
                "enforce_parity": self.state.enforce_parity,
                "router_biases": tuple(self.state.router_biases),
                "experts": self.experts,
                "ranks": layout.ranks,
                "replicated": self.flat.replicated,
            },
            **({} if self.reference is None else {"reference_logprobs": self.reference.constants()}),
        }

    def case(
        self, program: str, name: str, batch: PackedBatch, load: Callable[[], object], **statics: graph.Static
    ) -> graph.Case:
        """A launch of a program on `batch`, to be checked against eager."""
        known = {**statics_of(batch), **statics}
        return graph.Case(name, batch.tensors(), known, load, eager=self._in_less_memory[program])

    def launch(self, name: str, batch: PackedBatch, **statics: Any) -> dict[str, Tensor]:
        return self.by_name[name](batch.tensors(), **statics_of(batch), **statics)

    def _train_body(self, inputs: graph.Inputs, **statics: Any) -> Mapping[str, Tensor]:
        with self.flat.micro_batch(inputs, step.MAXIMA) as own:
            return self._differentiated(own, **statics)

    def _train_forward(
        self, inputs: graph.Inputs, loss_type: str, with_support: bool, **statics: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        values, batch = inputs.buffer["statistics"], batch_of(inputs, **statics)
        algorithm = self.algorithms[loss_type]
        with_kl = self.reference is not None and algorithm.kl_in_loss
        with graph.substitute_inputs(self.model, inputs):
            loss, scored = step.forward(self.model, values, batch, algorithm, with_kl, with_support)
        return loss, scored.tensors()

    def _train_in_less_memory(self, inputs: graph.Inputs, **statics: Any) -> Mapping[str, Tensor]:
        """`forward_backward` called eagerly, with the same bits in less memory: layers are recomputed in the backward
        pass, each gradient is accumulated as soon as it is ready, and weights that the model does not hold are gathered
        layer by layer."""
        reducing = self.flat.reduce_statistics(inputs, step.MAXIMA)
        with torch.enable_grad(), reducing as own, self._gather_by_layer(True), _recompute_layers(self.model):
            loss, outputs = self._train_forward(replace(own, module=self.model), **statics)
            with self._accumulate_when_ready(inputs.grad):
                loss.backward(inputs=self.flat.parameters)
        return outputs

    def _score_in_less_memory(self, score: graph.GraphBody) -> graph.GraphBody:
        """`score` called eagerly in less memory."""

        def scored(inputs: graph.Inputs, **statics: Any) -> Mapping[str, Tensor]:
            with self.flat.reduce_statistics(inputs, step.MAXIMA) as own, self._gather_by_layer(False):
                return score(replace(own, module=self.model), **statics)

        return scored

    def _reference_in_less_memory(self, inputs: graph.Inputs, **statics: Any) -> Mapping[str, Tensor]:
        """`reference_logprobs` called eagerly in less memory."""
        assert self.reference is not None
        with self.reference.gather_by_layer():
            return self._reference_scores(replace(inputs, module=self.reference.model), **statics)

    def _gather_by_layer(self, differentiated: bool) -> AbstractContextManager[None]:
        """A context in which the model can be called, gathering weights layer by layer if it does not hold its own."""
        return nullcontext() if self.flat.reads_own else gather_by_layer(self.flat, self.model, differentiated)

    @contextmanager
    def _accumulate_when_ready(self, totals: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which each parameter's gradient is added to its total as soon as it is complete, and freed."""

        def take(name: str, parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.flat.accumulate([totals[name]], [parameter.grad], [name])
            parameter.grad = None

        with ExitStack() as stack:
            for name, parameter in zip(self.flat.names, self.flat.parameters, strict=True):
                stack.callback(parameter.register_post_accumulate_grad_hook(partial(take, name)).remove)
            yield

    def _check_body(self, inputs: graph.Inputs, **statics: Any) -> dict[str, Tensor]:
        with self.flat.micro_batch(inputs, step.MAXIMA, differentiated=False) as own:
            return self._check_scores(own, **statics)

    def _check_scores(self, inputs: graph.Inputs, with_support: bool = False, **statics: Any) -> dict[str, Tensor]:
        values = inputs.buffer["statistics"]
        with graph.substitute_inputs(self.model, inputs):
            return step.check(self.model, values, batch_of(inputs, **statics), with_support).tensors()

    def _values_body(self, inputs: graph.Inputs, **statics: Any) -> dict[str, Tensor]:
        with self.flat.micro_batch(inputs, step.MAXIMA, differentiated=False) as own:
            return self._critic_values(own, **statics)

    def _critic_values(self, inputs: graph.Inputs, **statics: Any) -> dict[str, Tensor]:
        with graph.substitute_inputs(self.model, inputs):
            rows_CD = step.predicting_rows(self.model, batch_of(inputs, **statics))
            return {"value_C": step.critic_values(self.model, rows_CD)}

    def _reference_body(self, inputs: graph.Inputs, **statics: Any) -> dict[str, Tensor]:
        assert self.reference is not None
        with self.reference.micro_batch(inputs) as own:
            return self._reference_scores(own, **statics)

    def _reference_scores(self, inputs: graph.Inputs, **statics: Any) -> dict[str, Tensor]:
        assert self.reference is not None
        model = self.reference.model
        with graph.substitute_inputs(model, inputs):
            _, scores, _ = step.score(model, batch_of(inputs, **statics), with_routing=False)
        return {"model_logprob_C": scores.model_logprob_C}

    def _optim_body(self, inputs: graph.Inputs) -> dict[str, Tensor]:
        b = inputs.buffer
        s = step.statistics_by_name(b["statistics"])
        ok = torch.isfinite(s["loss"])
        if self.state.enforce_parity:
            ok = ok & (s["different"] == 0) & (s["identical"] == b["sampled"])
            if self.experts:
                ok = ok & (s["prompt_routed_differently"] == 0)
        grad_norm, applied = self.optimizer.update(inputs, ok)
        if biases := [b[name] for name in self.state.router_biases]:
            routing.balance_biases(biases, s["loads"], self.optimizer.settings.router_bias_rate, applied)
        step.push_results(b["statistics"], b["results"], grad_norm, applied, self.experts)
        return {}


@contextmanager
def _recompute_layers(model: Decoder) -> Iterator[None]:
    """A context with activation checkpointing: layers keep only their inputs for the backward pass."""
    call_layer = model.call_layer

    def call_checkpointed(*arguments: Any) -> Tensor:
        return checkpoint(call_layer, *arguments, use_reentrant=False, preserve_rng_state=False)

    model.call_layer = call_checkpointed
    try:
        yield
    finally:
        model.call_layer = call_layer


def add_loss_tensors(batch: PackedBatch, algorithm: Algorithm) -> None:
    """Add the tensors that the algorithm's loss needs in addition to those of every batch."""
    if algorithm.indexes_sequences and batch.cu_completions is None:
        batch.index_sequences()
    if algorithm.has_critic and batch.return_C is None:
        batch.add_values()


def statics_of(batch: PackedBatch) -> dict[str, Any]:
    """The values of a batch that its graph holds as constants."""
    return {"max_len": batch.max_len, "check_parity": batch.check_parity, "truncated": batch.truncated}


def batch_of(inputs: graph.Inputs, **statics: Any) -> PackedBatch:
    values: dict[str, Any] = {**inputs.user, **statics}
    return PackedBatch(**values, sequence_C=torch.empty(0))
