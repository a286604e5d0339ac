"""The trainer's graphs held to eager's bits: every function, every shape, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from fake_recorder import FakeRecorder
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config import (
    CompileConfig,
    LossConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
    resolve_parallel,
)
from lockstep.distributed.mesh import Axis
from lockstep.graph import GraphError, Inputs, Pass, Runtime, check_against_eager, compile_report
from lockstep.graph.check import against_eager, comparison, snapshot
from lockstep.graph.ir.captured import is_backward, op_name
from lockstep.graph.passes.rewrite import rewritten
from lockstep.models import Decoder, ModelConfig
from lockstep.models.init import initialize
from lockstep.trainer import BatchShape, Trainer, check_cases
from lockstep.trainer.packing import blank_batch
from lockstep.trainer.shapes import train_shapes
from lockstep.types import SamplingParams

SHAPES = [BatchShape(96, 48, 8, 40), BatchShape(48, 32, 8, 40)]
TOP_P = SamplingParams(temperature=0.8, top_p=0.9, n=4, max_completion_length=20)


def make(mode: str, passes: tuple[Pass, ...] = (), beta: float = 0.0, dtype: torch.dtype = torch.float32):
    config = ModelConfig(97, 32, 48, 1, 2, 1, 16, rope_theta=1e4, max_position_embeddings=128, family="qwen3")
    model = initialize(Decoder(config, dtype), 0)
    runtime = Runtime(CompileConfig("step", mode), torch.device("cpu"), recorder=FakeRecorder())
    runtime.builder.passes += passes
    reference = initialize(Decoder(config, dtype), 1) if beta else None
    loss = LossConfig(beta=beta)
    return runtime, Trainer(model, OptimizerConfig(weight_decay=0.1), loss, reference=reference, runtime=runtime)


def everything(trainer: Trainer) -> list[torch.Tensor]:
    own = [
        *trainer.state()[0].values(),
        trainer.flat.data,
        trainer.flat.grad,
        trainer._statistics,
        trainer.programs.state.lr,
    ]
    return [tensor.clone() for tensor in own]


@pytest.mark.parametrize(
    ("mode", "options", "beta", "dtype"),
    [
        ("full", {}, 0.1, torch.float32),
        ("piecewise", {"num_iterations": 2}, 0.0, torch.bfloat16),
        ("none", {"num_iterations": 2, "with_checks": False}, 0.1, torch.float32),
        ("full", {"num_mini_batches": 2}, 0.0, torch.float32),
    ],
)
def test_every_function_passes_and_nothing_is_left_behind(mode: str, options: dict, beta: float, dtype) -> None:
    runtime, trainer = make(mode, beta=beta, dtype=dtype)
    trainer.warm_up(SHAPES, TOP_P, check_parity=True, **options)
    captures = runtime.captures
    runtime.end_warm_up()
    before = everything(trainer)
    verdicts = check_against_eager(runtime, trainer.check_cases(SHAPES, TOP_P, check_parity=True, **options), "strict")
    assert all(map(torch.equal, everything(trainer), before))
    assert (runtime.captures, runtime.recompiles) == (captures, 0)  # the very graphs of the warm-up
    cases = {v.function: v.cases for v in verdicts}
    batches, parts = len(SHAPES) + 2, options.get("num_mini_batches", 1)
    updates = options.get("num_iterations", 1) * parts
    assert cases.pop("optim_step") == 5 and cases.pop("forward_backward") == batches * updates
    assert cases.get("check", batches * parts) == batches * parts  # those whose support is kept, too
    assert ("check" in cases, "reference_logprobs" in cases) == (options.get("with_checks", True), beta > 0)
    assert set(cases.values()) <= {batches, batches * parts}


def test_what_is_copied_to_be_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, at first half of each word of the masters; later the moments, too. Gradients never, nor weights."""

    class Counted(comparison.Snapshot):
        def __init__(self, tensors: Iterable[torch.Tensor], *spare: Sequence[torch.Tensor]) -> None:
            super().__init__(tensors, *spare)
            copied.append(self.nbytes)

    for module in (comparison, against_eager):
        monkeypatch.setattr(module, "Snapshot", Counted)
    runtime, trainer = make("none", dtype=torch.bfloat16)
    shapes, found = SHAPES[1:], []
    for moments in (0.0, 1e-7):
        trainer.optimizer.exp_avg.fill_(moments)
        trainer.optimizer.exp_avg_sq.fill_(moments)
        for name in ("forward_backward", "optim_step"):
            copied = list[int]()
            work = [w for w in trainer.check_cases(shapes, TOP_P, check_parity=True) if w[0].name == name]
            check_against_eager(runtime, work, "strict")
            found.append(sum(copied) / trainer.flat.layout.size)
    assert found == pytest.approx([0, 2, 0, 10], abs=0.2)


def test_what_is_put_back_is_kept_in_spare_memory_meanwhile() -> None:
    runtime, trainer = make("none", dtype=torch.bfloat16)
    before, spare, kept = everything(trainer), torch.zeros(2 * trainer.flat.layout.size, dtype=torch.uint8), []
    [(program, cases)] = [w for w in trainer.check_cases(SHAPES[1:], TOP_P, check_parity=True) if len(w[1]) == 5]

    def loading(load: Callable[[], object]) -> Callable[[], None]:
        def loads() -> None:
            kept.append(bool(spare.any()))
            load()

        return loads

    work = [(program, [replace(case, load=loading(case.load)) for case in cases])]
    check_against_eager(runtime, work, "strict", None, [spare])
    assert program.name == "optim_step" and len(kept) > 5 and all(kept) and not spare.any()
    assert all(map(torch.equal, everything(trainer), before))


@pytest.mark.parametrize("fault", ["first", "middle", "last", "swapped"])
def test_an_update_that_leaves_out_a_slice_is_found_and_all_is_put_back(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Slices of which most are copied to the host; or two that are taken for one another."""
    monkeypatch.setattr(snapshot, "PART", 1 << 12)
    monkeypatch.setattr(snapshot, "MAX_DEVICE_BYTES", 1 << 14)
    runtime, trainer = make("full", dtype=torch.bfloat16)
    trainer.warm_up(SHAPES[1:], TOP_P, check_parity=True)
    program, before = trainer.programs.by_name["optim_step"], everything(trainer)
    body, master = program.body, trainer.optimizer.master
    begin = {"first": 0, "last": len(master) - 1024}.get(fault, len(master) // 2048 * 1024)
    place, next_to_it = slice(begin, begin + 1024), slice(begin - 1024, begin)

    def wrong(inputs: Inputs) -> object:
        kept, found = master[place].clone(), body(inputs)
        if fault == "swapped":
            kept = master[next_to_it].clone()
            master[next_to_it] = master[place]
        master[place] = kept
        return found

    program.body = wrong  # type: ignore[assignment]
    work = [w for w in trainer.check_cases(SHAPES[1:], TOP_P, check_parity=True) if w[0] is program]
    with pytest.raises(GraphError, match=r"optim_step\(\), case 'first': .*optimizer master"):
        check_against_eager(runtime, work, "strict")
    assert all(map(torch.equal, everything(trainer), before))


def drops_a_gradient(captured):
    """A pass with a fault: the first gradient that is added up is scaled."""
    result = rewritten(captured)
    for node in result.graph.nodes:
        if op_name(node) == "aten.add_" and is_backward(node.args[1]):
            with result.graph.inserting_before(node):
                half = result.graph.call_function(torch.ops.aten.mul.Tensor, (node.args[1], 0.5))
                half.meta.update(node.args[1].meta)
            node.update_arg(1, half)
            break
    result.module.recompile()
    return result, ""


def test_a_wrong_gradient_is_found_before_the_first_step() -> None:
    runtime, trainer = make("full", (Pass("scale", True, drops_a_gradient),))
    before = everything(trainer)
    cases = trainer.check_cases(SHAPES, TOP_P, check_parity=True)
    with pytest.raises(
        GraphError, match=r"forward_backward\(.*case 'filled, 96 tokens': scale differs .* in grad .*add_"
    ):
        check_against_eager(runtime, cases, "strict")
    assert all(map(torch.equal, everything(trainer), before))


def test_batches_fill_their_shapes_and_have_gradients_to_compare() -> None:
    _, trainer = make("none")
    (function, cases), *_ = trainer.check_cases(SHAPES, TOP_P, check_parity=True)
    assert function.name == "forward_backward"
    by_name = {case.name: case for case in cases}
    assert set(by_name) == {
        *("filled, 96 tokens", "filled, 48 tokens", "ragged beside the longest sequence, 96 tokens"),
        "one token, 96 tokens",
    }
    for shape in SHAPES:
        user = by_name[f"filled, {shape.tokens} tokens"].user
        assert len(user["tokens_T"]) == shape.tokens and user["cu_seqlens"][-1] > 0.7 * shape.tokens
        assert user["valid_C"].sum() > 0.8 * shape.completion_tokens
    ragged = by_name["ragged beside the longest sequence, 96 tokens"].user
    lengths = ragged["prefix_len_S"] + ragged["cu_seqlens"].diff()
    assert lengths.max() == SHAPES[0].max_len - 1 and len(lengths[lengths > 0].unique()) > 3
    assert by_name["one token, 96 tokens"].user["valid_C"].sum() == 1
    for name in by_name:
        trainer.flat.grad.zero_()
        function(by_name[name].user, **by_name[name].statics)
        assert trainer.flat.grad.isfinite().all() and trainer.flat.grad.count_nonzero() > 1000, name


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 8), st.integers(1, 6), st.sampled_from([1, 2, 3]))
def test_what_is_tried_of_a_run_has_its_shapes(prompt: int, completion: int, n: int, groups: int, ranks: int) -> None:
    """Also where completions are longer than prompts."""
    sampling = SamplingConfig(num_generations=n, max_completion_length=completion)
    room = max(16, groups * (prompt + n * completion))
    trainer = TrainerConfig(prompts_per_step=groups, max_tokens_per_micro_batch=room)
    shapes = train_shapes(resolve_parallel(RunConfig(sampling=sampling, trainer=trainer), 1), prompt, prompt)
    for rank in range(ranks):
        tried = [*check_cases._batches(shapes, SamplingParams(), 50, False, Axis("fsdp", ranks, rank))]
        assert len(tried) >= len(shapes)  # each held to its shape as it is made


def test_without_room_for_both_the_longest_sequence_is_alone() -> None:
    _, trainer = make("none")
    (_, cases), *_ = trainer.check_cases([BatchShape(40, 24, 4, 40)], TOP_P, check_parity=True)
    names = ["filled, 40 tokens", "ragged, 40 tokens", "longest sequence, 40 tokens", "one token, 40 tokens"]
    assert [case.name for case in cases] == names


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_share_out_what_is_tried_of_the_largest_shape_and_each_runs_every_shape(ranks: int) -> None:
    def cases(axis: Axis) -> list[tuple[str, tuple[int, list[int]]]]:
        drafts = check_cases._drafts(SHAPES, torch.Generator().manual_seed(0), axis)
        return [(f"{name}, {shape.tokens} tokens", lengths) for name, shape, lengths in drafts]

    alone = cases(Axis("fsdp"))
    of_ranks = [cases(Axis("fsdp", ranks, rank)) for rank in range(ranks)]
    names = [[name for name, _ in of_rank] for of_rank in of_ranks]
    assert all(of_rank == names[0] for of_rank in names) and len(names[0]) == {2: 3, 3: 2, 8: 2}[ranks]
    tried = [lengths for of_rank in of_ranks for _, lengths in of_rank]
    assert all(lengths in tried for _, lengths in alone)
    for of_rank in of_ranks:
        assert of_rank[-1] == alone[-1] and {name.rpartition(", ")[2] for name, _ in of_rank} == {
            "96 tokens",
            "48 tokens",
        }


def test_shapes_beyond_the_warm_up_run_in_pieces() -> None:
    def one_step(mode: str, compiled: bool) -> tuple[Runtime, Trainer]:
        runtime, trainer = make(mode)
        trainer.warm_up(SHAPES, TOP_P, check_parity=False, with_checks=False)
        if compiled:
            runtime.end_warm_up()
        beyond = BatchShape(64, 40, 8, 40)
        for shape in (SHAPES[1], beyond, beyond):
            batch = blank_batch(shape, TOP_P, check_parity=False)
            batch.weight_C.fill_(1)
            batch.advantage_C.fill_(1)
            trainer.forward_backward(batch)
        trainer.optim_step(1e-2)
        return runtime, trainer

    runtime, trainer = one_step("full_and_piecewise", True)
    _, reference = one_step("none", False)
    assert all(map(torch.equal, everything(trainer), everything(reference)))
    split = {g.captured.split_at for f in runtime.programs if f.name == "forward_backward" for g in f.graphs.values()}
    attention = frozenset({"lockstep.attention_packed", "lockstep.attention_packed_backward"})
    assert split == {frozenset(), attention}
    assert runtime.recompiles == 1 and runtime.captures == 2  # the trace of the warm-up serves it
    report = compile_report(runtime)
    assert report["functions"]["forward_backward"]["graphs"] == 3 and report["pool_gib"] > 0
    assert report["passes"].keys() == runtime.builder.logs.keys() and report["traces"] == 2
    metrics = runtime.metrics()
    assert metrics["graph_replays"] == metrics["graph_replays/forward_backward"] + metrics["graph_replays/optim_step"]
