"""The launches on which the trainer's graphs must have eager's bits before the first step (`check.against_eager`).

Every shape is filled completely. The largest is also tried almost empty, and with ragged sequences next to the longest
one that it can hold, or with each separately where it has no room for both. Data-parallel ranks run these variants of
the largest shape side by side, a different one on each; every rank runs every shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .. import graph
from ..distributed.mesh import Axis
from ..types import PackedBatch, RolloutGroup, SamplingParams, Segment, Trajectory
from .packing import pack
from .parameters import ALIGNMENT
from .programs import TrainerPrograms, add_loss_tensors
from .shapes import BatchShape
from .step import statistics_by_name


def check_cases(
    programs: TrainerPrograms,
    shapes: Sequence[BatchShape],
    sampling: SamplingParams,
    *,
    check_parity: bool,
    num_iterations: int = 1,
    num_mini_batches: int = 1,
) -> graph.Work:
    """Cases for each of the trainer's programs; the arguments are those of `Trainer.warm_up`."""
    functions, values = programs.by_name, programs.state.statistics
    vocabulary = programs.model.config.vocab_size
    routed = check_parity and programs.model.config.moe_layers > 0
    drafts = list(
        _batches(shapes, _nearly_untruncated(sampling, vocabulary), vocabulary, routed, programs.flat.mesh.fsdp)
    )
    for _, batch in drafts:
        add_loss_tensors(batch, programs.algorithm)
    batches = [(name, batch.to(programs.flat.data.device)) for name, batch in drafts]
    for _, batch in batches:
        batch.check_parity = check_parity
    statistics, both = partial(values.fill_, 1), partial(_fill_sums, programs)
    updates = num_iterations, num_mini_batches
    work = [
        (functions["forward_backward"], [c for b in batches for c in _train_cases(programs, *b, both, *updates)]),
        (functions["optim_step"], _optim_cases(programs)),
    ]
    sums = [function for name, function in functions.items() if name in ("end_cell", "end_cells")]
    work += [(function, [graph.Case("all", load=partial(_fill_cells, function.inputs))]) for function in sums]
    if "gather_weights" in functions:
        gather = functions["gather_weights"]
        recompute = partial(gather.body, gather.inputs)
        work.append((gather, [graph.Case("all", load=partial(_zero_weights, gather.inputs), recompute=recompute)]))
    work.append((functions["check"], [programs.case("check", *b, statistics) for b in batches]))
    if num_mini_batches > 1 and sampling.truncated:
        kept = [programs.case("check", *b, statistics, with_support=True) for b in batches]
        work.append((functions["check"], kept))
    for name in [name for name in ("reference_logprobs", "values") if name in functions]:  # in one order on all ranks
        work.append((functions[name], [programs.case(name, *b, lambda: None) for b in batches]))
    return work


def _train_cases(
    programs: TrainerPrograms,
    name: str,
    batch: PackedBatch,
    load: Callable[[], object],
    num_iterations: int,
    num_mini_batches: int,
) -> Iterator[graph.Case]:
    with_support = num_iterations > 1 and batch.truncated
    case = partial(programs.case, "forward_backward", load=load, loss_type=programs.loss_type)
    yield case(name, batch, with_support=with_support)
    if num_iterations * num_mini_batches > 1:
        later = replace(batch, check_parity=False)
        if batch.truncated:
            words = -(-programs.model.config.vocab_size // 8)
            rows = len(batch.targets_C)
            later.support_C = torch.full((rows, words), 255, dtype=torch.uint8, device=batch.targets_C.device)
        yield case(f"{name}, later update", later, with_support=False)


def _nearly_untruncated(sampling: SamplingParams, vocabulary: int) -> SamplingParams:
    """The same kind of sampling, with random tokens in its support: tokens outside have no gradient to compare."""
    if not sampling.truncated:
        return replace(sampling, stop_token_ids=(), stop=())
    return SamplingParams(sampling.temperature, top_k=vocabulary - 1)


def _batches(
    shapes: Sequence[BatchShape], sampling: SamplingParams, vocabulary: int, routed: bool, axis: Axis
) -> Iterator[tuple[str, PackedBatch]]:
    draw = torch.Generator().manual_seed(0)
    for name, shape, (prompt, completions) in _drafts(shapes, draw, axis):
        group = _group(prompt, completions, sampling, vocabulary, draw)
        if routed:
            for segment in {id(s): s for r in group.rollouts for s in r.segments}.values():
                segment.route_digests = list(range(len(segment.token_ids)))
        (batch,) = pack([group], max_tokens=shape.tokens, check_parity=True, shapes=[shape])
        made = BatchShape(len(batch.tokens_T), len(batch.targets_C), len(batch.prefix_len_S), batch.max_len)
        assert made == shape, f"{name}: {made} is not {shape}"  # and needs another graph, perhaps on this rank alone
        yield f"{name}, {shape.tokens} tokens", batch


_Lengths = tuple[int, list[int]]  # of a prompt and its completions


def _drafts(
    shapes: Sequence[BatchShape], draw: torch.Generator, axis: Axis
) -> Iterator[tuple[str, BatchShape, _Lengths]]:
    """This rank's variants of the largest shape, then the other shapes filled; with the same names on all ranks."""
    largest, *others = shapes
    variants = [("filled", _filled_lengths(largest)), *_edge_drafts(largest, draw), ("one token", (1, [1]))]
    for begin in range(0, len(variants), axis.size):
        side_by_side = variants[begin : begin + axis.size]
        _, lengths = side_by_side[axis.rank % len(side_by_side)]
        yield " | ".join(name for name, _ in side_by_side), largest, lengths
    for shape in others:
        yield "filled", shape, _filled_lengths(shape)


def _filled_lengths(shape: BatchShape) -> _Lengths:
    """The prompt length and completion lengths that fill a shape; a completion's last token takes no row."""
    sequences = max(1, min(shape.segments - 1, shape.completion_tokens, shape.tokens))
    completion = max(1, min(shape.completion_tokens // sequences, shape.max_len - 1, shape.tokens // sequences))
    prompt = min(shape.tokens - sequences * (completion - 1), shape.max_len - completion)
    return max(1, prompt), [completion] * sequences


def _edge_drafts(shape: BatchShape, draw: torch.Generator) -> list[tuple[str, _Lengths]]:
    """Ragged completions and the longest sequence, in one batch if both fit."""
    prompt, filled = _filled_lengths(shape)
    ragged = [int(torch.randint(1, length + 1, (), generator=draw)) for length in filled]
    longest_prompt, longest = _longest_lengths(shape)
    both = longest + [min(length, shape.max_len - longest_prompt) for length in ragged[1:]]
    tokens, completion_tokens = longest_prompt + sum(both) - len(both), sum(both)
    if len(ragged) > 1 and tokens <= shape.tokens and completion_tokens <= shape.completion_tokens:
        return [("ragged beside the longest sequence", (longest_prompt, both))]
    return [("ragged", (prompt, ragged)), ("longest sequence", (longest_prompt, longest))]


def _longest_lengths(shape: BatchShape) -> _Lengths:
    length = min(shape.max_len, shape.tokens)
    completion = max(1, min(shape.completion_tokens, length // 2))
    return max(1, length - completion), [completion]


def _group(
    prompt: int, completions: list[int], sampling: SamplingParams, vocabulary: int, draw: torch.Generator
) -> RolloutGroup:
    def tokens(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=draw).tolist()

    def logprobs(count: int) -> list[float]:
        """Log-probabilities around those of a uniform distribution, so that ratios are clipped on both sides."""
        return (torch.randn(count, generator=draw) * 0.3 - math.log(vocabulary)).tolist()

    turns = [Segment(tokens(n), True, logprobs(n), logprobs(n)) for n in completions]
    first, weight = Segment(tokens(prompt)), 1 / sum(completions)
    rollouts = [
        Trajectory([first, turn], advantage=(-1.0) ** i * (1 + i % 3), loss_weight=weight)
        for i, turn in enumerate(turns)
    ]
    return RolloutGroup(rollouts, sampling)


def _fill_sums(programs: TrainerPrograms) -> None:
    """Set gradients and statistics to nonzero values, which the launch must add to."""
    programs.state.statistics.fill_(1)
    for grad in programs.flat.grads:
        grad.fill_(0.5)


def _optim_cases(programs: TrainerPrograms) -> list[graph.Case]:
    """Updates that are clipped, not clipped, and refused for each reason, on made-up weights. State is saved once for
    all cases, and what can be recomputed from other state is not saved at all."""

    def load(kind: int) -> None:
        grad, state = programs.flat.grad, programs.state
        own = programs.by_name["optim_step"].inputs.optimizer  # empty with offloading: AdamW is not in the graph then
        state.statistics.fill_(1)
        state.sampled.fill_(2 if kind == 4 else 1)
        statistics_by_name(state.statistics)["different"].fill_(float(kind == 3))
        state.lr.fill_(1e-3)
        _fill_waves(grad, 1e-9 if kind == 1 else 1.0)
        if own:
            weights, master = programs.flat.data, programs.optimizer.master
            draw = torch.Generator(master.device).manual_seed(0)
            weights.copy_(master.normal_(0, 0.02, generator=draw))  # different at every place
            _fill_waves(own["exp_avg"], 1e-3)
            _fill_waves(own["exp_avg_sq"], 1e-6)
            own["exp_avg_sq"].abs_()
            own["steps"].fill_(kind)
        if kind == 2:
            grad[-1] = math.inf

    kinds = ("first", "tiny", "not finite", "mismatch", "not covered")
    made: tuple[graph.Role, ...] = ("param", "grad", "optimizer")
    flat, derived = programs.flat, dict[str, Callable[[], object]]()
    own = programs.by_name["optim_step"].inputs.optimizer
    if "master" in own:  # masters are separate from the weights
        derived = {"param": programs.optimizer.round_masters}
    elif own and flat.equals_model():
        derived = {"param": flat.copy_from_model}
    return [
        graph.Case(name, load=partial(load, kind), filled_roles=made, derived=derived)
        for kind, name in enumerate(kinds)
    ]


def _fill_cells(inputs: graph.Inputs) -> None:
    _fill_waves(inputs.grad["grad"], 1.0)
    _fill_waves(inputs.buffer["cells"], 1e3)


def _zero_weights(inputs: graph.Inputs) -> None:
    for name in inputs.param:
        inputs.buffer[name].zero_()


def _fill_waves(target: Tensor, scale: float) -> None:
    """Fill `target` with values of both signs and many magnitudes, without a temporary of its size."""
    angle = torch.arange(1.0, ALIGNMENT + 1, device=target.device)
    target.view(-1, ALIGNMENT).copy_(torch.sin(angle) * torch.exp(torch.cos(3 * angle) * 4) * scale)
