"""The policy step: `forward_backward` on each micro-batch, then `optim_step`. Gradients, statistics, the parity
comparison and the decision to update stay on the device; the host reads one result per update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..algorithms import make_algorithm
from ..config import LossConfig, OptimizerConfig
from ..distributed import ONE_PROCESS, World
from ..distributed.cells import ONE_CELL, Cells
from ..errors import refuse
from ..graph import EAGER, Runtime, Work
from ..models import Decoder, ResidentWeights, TensorRange, WeightSource, ranges_of
from ..types import PackedBatch, SamplingParams
from .check_cases import check_cases
from .gathered import allocate_parameters, flat_parameters, make_reference, make_trained_model
from .mismatches import MAX_MISMATCHES, Deltas, Mismatch, ScoredBatches, find_mismatches, sum_deltas
from .optimizer import AdamW, OffloadedAdamW, frozen_parameters, parameter_groups
from .packing import blank_batch
from .parameters import Buffer
from .programs import TrainerPrograms, UpdateState, add_loss_tensors
from .result import PendingResult, Results, StepResult
from .routing import RoutingResult, num_statistics
from .shapes import BatchShape
from .step import STATISTICS, push_results, result_names


class Trainer:
    """Trains `model` in place with gradients accumulated over micro-batches.

    Args:
        reference: the frozen model for the KL term, or the teacher; required when `loss.beta` is above 0 or the
            algorithm has a teacher.
        enforce_parity: do not update when a log-probability or an expert choice is not the generator's, bit for bit, or
            when not every sampled token was compared.
        runtime: runs the trainer's programs; by default eagerly.
        world: the processes that weights, gradients and moments are sharded over. All call the same methods in the same
            order, each on its own batches, of which all have the same number.
        cells: how gradients of a step's shards are summed; a batch with `PackedBatch.ends_cell` ends a cell.
        source: where weights come from that this rank trains but does not generate with; by default a whole `model`.
        zero_stage: with several ranks; see `flat_parameters`.
        reference_source: with several ranks, where each takes its part of the reference from; by default a whole
            `reference`.

    Attributes:
        weights_version: updates applied so far, of those whose results the host has read.

    Raises:
        InputError: `loss.router_aux_loss_coef` is set for a model without experts chosen by a softmax,
            `optimizer.router_bias_rate` for one without router biases, or a pattern of `optimizer` matches nothing.
    """

    def __init__(
        self,
        model: Decoder,
        optimizer: OptimizerConfig,
        loss: LossConfig,
        *,
        reference: Decoder | None = None,
        enforce_parity: bool = True,
        runtime: Runtime = EAGER,
        world: World = ONE_PROCESS,
        cells: Cells = ONE_CELL,
        source: WeightSource | None = None,
        zero_stage: int | None = None,
        reference_source: WeightSource | None = None,
    ) -> None:
        algorithm = make_algorithm(loss)
        if loss.beta > 0 and reference is None:
            raise ValueError(f"loss.beta is {loss.beta}: the KL term needs a reference model")
        if algorithm.has_teacher and reference is None:
            raise ValueError(f"loss.loss_type is {loss.loss_type}: it needs a teacher as the reference model")
        self._moe = model.config.moe if model.config.moe_layers else None
        refuse(
            loss.router_aux_loss_coef > 0 and (self._moe is None or self._moe.sigmoid),
            f"loss.router_aux_loss_coef is {loss.router_aux_loss_coef}: it balances experts that are chosen by a "
            "softmax, which this model does not have; set it to 0",
        )
        self._biases = {name: b for name, b in model.named_buffers() if name.endswith("router_bias")}
        refuse(
            optimizer.router_bias_rate > 0 and not self._biases,
            f"optimizer.router_bias_rate is {optimizer.router_bias_rate}: it moves the biases that experts are "
            "chosen with, which this model does not have; set it to 0",
        )
        self.model, self.loss, self.world, self.cells = model, loss, world, cells
        self.reference = None if reference is None else make_reference(reference, world, reference_source)
        if algorithm.has_critic and model.value_head is None:
            model.add_value_head()
        trained = make_trained_model(model, world.mesh)
        reader, frozen = None if trained is model else model, frozen_parameters(trained, optimizer)
        self.flat = flat_parameters(trained, world.mesh, frozen, reader, zero_stage, float32=not optimizer.offload)
        if reader is not None:
            allocate_parameters(trained, frozen)
            kept = {name: held for name, held in ranges_of(trained).items() if name in frozen}
            world.run_on_all(lambda: (source or ResidentWeights(model)).fill({**kept, **self.flat.own_ranges()}))
            self.flat.round_to_dtype()
        self.flat.set_cells(cells)
        self._cells_begun, self._cell_ended = False, False  # in this update: `flat.cells` is in use, a cell just ended
        groups, kind = parameter_groups(trained, self.flat, optimizer), OffloadedAdamW if optimizer.offload else AdamW
        self.optimizer = kind(self.flat, optimizer, groups)
        self.weights_version = 0
        device = self.flat.data.device
        lr, sampled = torch.zeros((), device=device), torch.zeros((), dtype=torch.float64, device=device)
        self._written_lr: float | None = None  # what `lr` holds; None: unknown
        self._written_sampled: int | None = None  # what `sampled` holds; None: unknown
        num_values = len(STATISTICS) + num_statistics(model.config)
        self._statistics = torch.zeros(num_values, dtype=torch.float64, device=device)
        self._result_names = result_names(self._statistics)
        self._results = Results(len(self._result_names), device)
        balanced = self._biases if optimizer.router_bias_rate > 0 else {}
        state = UpdateState(self._statistics, self._results.rows, lr, sampled, enforce_parity, balanced)
        self._runtime = runtime
        runtime.compile_layers_of(trained, *([] if self.reference is None else [self.reference.model]))
        self.programs = TrainerPrograms(self._runtime, trained, self.reference, self.optimizer, loss, state)
        self.algorithm = self.programs.algorithm
        self._scored: ScoredBatches = []  # checked batches and their log-probs

    def forward_backward(self, batch: PackedBatch, loss_type: str | None = None, keep_support: bool = False) -> None:
        """Accumulate the gradients of `sum(weight * loss)` over the batch's completion tokens.

        Args:
            loss_type: overrides the configured one (supervised steps).
            keep_support: store the sampled support in `batch.support_C` for later updates on the same batch, which
                run with `batch.check_parity` off, as the weights are no longer the generator's.
        """
        if self._cell_ended:
            self.programs.by_name["end_cell"]()
        self._cells_begun, self._cell_ended = self._cells_begun or self._cell_ended, batch.ends_cell
        add_loss_tensors(batch, self.algorithm)
        with_support = keep_support and batch.truncated and batch.support_C is None
        loss_type = loss_type or self.loss.loss_type
        scored = self.programs.launch("forward_backward", batch, loss_type=loss_type, with_support=with_support)
        if with_support:
            self._keep_support(batch, scored)
        if batch.check_parity:
            self._scored.append((batch, scored))

    def _keep_support(self, batch: PackedBatch, scored: dict[str, Tensor]) -> None:
        rows_CD, threshold_C = scored.pop("rows_CD"), scored.pop("threshold_C")
        trained = self.programs.model
        head_VD = self.flat.whole_weight(trained, "embed" if trained.lm_head is trained.embed else "lm_head")
        batch.support_C = ops.support_mask(rows_CD, head_VD, batch.temperature_C, threshold_C)

    def warm_up(
        self,
        shapes: Sequence[BatchShape],
        sampling: SamplingParams,
        *,
        check_parity: bool,
        num_iterations: int = 1,
        num_mini_batches: int = 1,
        with_checks: bool = True,
    ) -> None:
        """Make the graphs for batches of these shapes, largest first, and for the update, or compile the layers.

        Call it between two updates. Each graph runs once, on a batch of one token with weight 0. No state changes;
        gradients, which must be zero, stay so.

        Args:
            check_parity, num_iterations, num_mini_batches: as the run's steps will have them.
            with_checks: whether batches may also be checked without training on them, or before an update that does not
                train on them.
        """
        for function in self.programs.by_name.values():
            function.one_shape = len(shapes) == 1
        assert not self.flat.grad.any() and not self._statistics.any(), "warm_up in the middle of a step"
        for shape in shapes:
            batch = blank_batch(shape, sampling, check_parity, self._moe is not None).to(self.flat.data.device)
            self.forward_backward(batch, keep_support=num_iterations > 1)
            if num_mini_batches > 1 and with_checks:
                batch.support_C = None
                self.check(batch, keep_support=True)
            if num_iterations * num_mini_batches > 1:  # all later updates run the same graph
                batch.check_parity = False
                self.forward_backward(batch)
            batch.check_parity, batch.support_C = check_parity, None
            if self.reference is not None:
                self.reference_logprobs(batch)
            if self.algorithm.has_critic:
                self.values(batch)
            if with_checks:
                self.check(batch)
        for name in [name for name in ("end_cell", "end_cells") if name in self.programs.by_name]:
            self.programs.by_name[name]()
        self._gather_weights()
        self._results.make_room()
        self._statistics.fill_(math.nan)  # the loss is not finite, so the update is refused
        try:
            self.programs.by_name["optim_step"]()  # clears the gradients
            self.optimizer.warm_up_offloaded()
        finally:
            self._results.reset()
            self._statistics.zero_()
            self._scored = []

    def check_cases(
        self, shapes: Sequence[BatchShape], sampling: SamplingParams, with_checks: bool = True, **options: Any
    ) -> Work:
        """Launches on which to check the graphs against eager; the arguments are those of `warm_up`."""
        self._written_lr = self._written_sampled = None  # cases write their own `lr` and `sampled`
        work = check_cases(self.programs, shapes, sampling, **options)
        return [cases for cases in work if with_checks or cases[0].name != "check"]

    def check(self, batch: PackedBatch, keep_support: bool = False) -> None:
        """Compare a batch without training on it; `keep_support` as in `forward_backward`."""
        with_support = {"with_support": True} if keep_support and batch.truncated else {}
        scored = self.programs.launch("check", batch, **with_support)
        if with_support:
            self._keep_support(batch, scored)
        if batch.check_parity:
            self._scored.append((batch, scored))

    def reference_logprobs(self, batch: PackedBatch) -> None:
        """Fill `batch.ref_logprob_C` with the reference model's log-probs (temperature 1, untruncated)."""
        batch.ref_logprob_C.copy_(self.programs.launch("reference_logprobs", batch)["model_logprob_C"])

    def values(self, batch: PackedBatch) -> None:
        """Fill `batch.old_value_C` with the critic's values at the positions that predict the completion tokens."""
        add_loss_tensors(batch, self.algorithm)
        assert batch.old_value_C is not None
        batch.old_value_C.copy_(self.programs.launch("values", batch)["value_C"])

    def optim_step(self, lr: float, sampled: int | None = None) -> StepResult:
        """Update the weights with the accumulated gradients and clear them; the host waits for the result.

        Nothing is written when the loss or the gradient norm is not finite or, under `enforce_parity`, when any
        log-probability or expert choice differed since the last call, or when not exactly `sampled` tokens were found
        identical.

        Args:
            sampled: tokens that were sampled for this update, on all ranks; by default those of the batches that were
                compared.
        """
        return self.launch_optim_step(lr, sampled).get()

    def launch_optim_step(self, lr: float, sampled: int | None = None) -> PendingResult:
        """`optim_step` without waiting for the result: up to `result.MAX_PENDING` results may be pending. Work launched
        after it sees the new weights, on every rank."""
        self._results.make_room()
        sampled = self._count_compared() if sampled is None else sampled
        if lr != self._written_lr:
            self.programs.state.lr.fill_(lr)
        if sampled != self._written_sampled:
            self.programs.state.sampled.fill_(sampled)
        self._written_lr, self._written_sampled = lr, sampled
        with self._runtime.timings.measure("optim_step", on_device=True):
            if self._cells_begun:
                self.programs.by_name["end_cells"]()
            self._cells_begun = self._cell_ended = False
            self.programs.by_name["optim_step"]()
            self.optimizer.update_offloaded()
        pending = self._add_pending(lr, sampled)
        self._gather_weights()
        return pending

    def _count_compared(self) -> int:
        own = sum(s.length for batch, _ in self._scored for s in batch.sequences)
        return sum(self.world.gather(own)) // self.world.mesh.tp.size

    def _gather_weights(self) -> None:
        """Gather the updated weights into the generator's model; in one process it has them already."""
        if gather := self.programs.by_name.get("gather_weights"):
            with self._runtime.timings.measure("sync", on_device=True):
                gather()

    def finish_check(self, sampled: int | None = None) -> StepResult:
        """The result of a step in which batches were only checked. Clears the gradients without an update. `sampled` as
        in `optim_step`."""
        self.flat.grad.zero_()
        if self._cells_begun and self.flat.cells is not None:
            self.flat.cells.zero_()
        self._cells_begun = self._cell_ended = False
        self._results.make_room()
        zero = torch.zeros((), device=self.flat.grad.device)
        push_results(self._statistics, self._results.rows, zero, zero.bool(), self.programs.experts)
        return self._add_pending(0.0, self._count_compared() if sampled is None else sampled).get()

    @property
    def checked_logprobs(self) -> list[Tensor]:
        """The model's log-probabilities, float32 [C], of each batch that was compared since the last update."""
        return [scored["model_logprob_C"].clone() for _, scored in self._scored]

    @property
    def logprob_deltas(self) -> Deltas:
        """How the model's log-probabilities differ from the generator's, over all ranks' tokens that were compared
        since the last update."""
        by_rank = self.world.gather(sum_deltas(self._scored))[:: self.world.tp]  # tensor-parallel ranks have equal
        return Deltas.of([sums for of_rank in by_rank for sums in of_rank])

    def numerics(self) -> dict[str, Any]:
        """What a run's bits depend on besides its configuration."""
        on_cpu = self.flat.data.device.type == "cpu"
        return {
            "torch": torch.__version__,
            "dtype": str(self.flat.dtype),
            "device": torch.backends.cpu.get_cpu_capability() if on_cpu else torch.cuda.get_device_name(),
            "operators": ops.cpu_backend() if on_cpu else "cuda",
            "threads": torch.get_num_threads() if on_cpu else 0,
            "tp": self.world.tp,
            **({"balanced_by": "sequences"} if self.programs.state.router_biases else {}),
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What a checkpoint keeps: tensors and numbers. Every rank calls it, and rank 0 gets the tensors whole; in one
        process they are the live ones."""
        return {**self.optimizer.state(), **self._biases}, {"weights_version": self.weights_version}

    def local_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, int]]:
        """`state` as this rank has it: the live tensors of its parts of what is sharded, the live tensors that are
        replicated, and the numbers."""
        own, numbers = self.optimizer.local_state(), {"weights_version": self.weights_version, "tp": self.world.tp}
        return own, {"steps": own.pop("steps"), **self._biases}, numbers

    def load_state(self, tensors: Mapping[str, Tensor | Sequence[Buffer]], numbers: dict[str, int]) -> None:
        """Load what `state` returned, or the `local_state` of any number of ranks, by rank. Raises `ValueError` if it
        belongs to another model."""
        self.optimizer.load_state(tensors, numbers.get("tp", 1))
        for name, bias in self._biases.items():
            saved = tensors.get(name)
            first = saved if saved is None or isinstance(saved, Tensor) else saved[0]  # all ranks saved the same
            if first is None or list(first.shape) != list(bias.shape):
                raise ValueError(f"trainer state: {name!r} is missing or of another shape than {list(bias.shape)}")
            bias.copy_(first[:])
        self.weights_version = numbers["weights_version"]
        self._gather_weights()

    def ranges_to_write(self) -> dict[str, list[TensorRange]]:
        """The ranges of the model's weights that this rank writes to a file; every element is written by one rank."""
        return self.flat.ranges_to_write(self.programs.model)

    def gather_ranges_on_first(self) -> dict[str, list[TensorRange]]:
        """The same where rank 0 writes everything. Every rank calls it; the others get an empty dictionary."""
        trained, first = self.programs.model, self.world.is_first
        wholes = ((name, self.flat.whole_weight(trained, name)) for name, _ in trained.named_parameters())
        found = {name: [TensorRange(whole.detach().cpu().flatten(), 0)] for name, whole in wholes if first}
        return found | {name: [TensorRange(buffer.flatten(), 0)] for name, buffer in trained.named_buffers() if first}

    def _add_pending(self, lr: float, sampled: int) -> PendingResult:
        scored, self._scored = self._scored, []
        return self._results.add(lambda row: self._result(lr, sampled, row, scored))

    def _result(self, lr: float, sampled: int, row: Sequence[float], scored: ScoredBatches) -> StepResult:
        s = dict(zip(self._result_names, row, strict=True))
        mismatches = self._mismatches(scored) if s["different"] else []  # may raise: the update is not counted yet
        self.weights_version += int(s["applied"])
        tokens = max(s["tokens"], 1.0)
        return StepResult(
            loss=s["loss"],
            grad_norm=s["grad_norm"],
            lr=lr,
            applied=bool(s["applied"]),
            finite=math.isfinite(s["loss"]) and math.isfinite(s["grad_norm"]),
            clip_ratio=s["clipped"] / tokens,
            kl=s["kl"] / tokens if self.reference is not None and self.algorithm.has_kl else None,
            entropy=s["entropy"] / max(s["scored"], 1.0),
            tokens=int(s["tokens"]),
            tokens_sampled=sampled,
            tokens_checked=int(s["identical"] + s["different"]),
            tokens_different=int(s["different"]),
            logprob_diff_max=s["diff_max"],
            mismatches=mismatches,
            routing=self._routing(s) if self._moe is not None else None,
        )

    def _mismatches(self, scored: ScoredBatches) -> list[Mismatch]:
        """The first mismatches of all ranks. Collective: the reduced statistics tell every rank that there are some."""
        by_rank = self.world.gather(find_mismatches(scored))
        return list(dict.fromkeys(mismatch for of_rank in by_rank for mismatch in of_rank))[:MAX_MISMATCHES]

    def _routing(self, s: dict[str, float]) -> RoutingResult:
        assert self._moe is not None
        choices = self.model.config.moe_layers * self._moe.num_experts_per_token
        return RoutingResult(
            choices_checked=int(s["identical"] + s["different"]) * choices,
            tokens_different=int(s["routed_differently"]),
            prompt_tokens_checked=int(s["prompt_tokens"]),
            prompt_tokens_different=int(s["prompt_routed_differently"]),
            load_imbalance=s["load_imbalance"],
            min_expert_tokens=int(s["min_expert_tokens"]),
            max_expert_tokens=int(s["max_expert_tokens"]),
            aux_loss=s["aux_loss"] if self.loss.router_aux_loss_coef > 0 else None,
        )
