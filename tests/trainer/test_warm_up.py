"""Shapes that a run is padded to, and graphs made before its first step."""

from __future__ import annotations

import random

import pytest
import torch
from fake_recorder import FakeRecorder
from small import completed, train_group

from lockstep.config import CompileConfig, LossConfig, OptimizerConfig
from lockstep.graph import Runtime
from lockstep.trainer import BatchShape, Trainer, batch_shapes, count_slots, pack
from lockstep.trainer.packing import blank_batch
from lockstep.trainer.shapes import fit_shape, shapes_holding
from lockstep.types import RolloutGroup, SamplingParams

FILTERED = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, n=2)
CPU = torch.device("cpu")


def test_the_largest_shape_holds_a_whole_step_and_the_others_shrink():
    shapes = batch_shapes(5, 8, 145, 100, max_len=245, max_tokens=16384)
    assert shapes[0] == BatchShape(4688, 4000, 45, 245)  # 5 x 145 + 40 x 99 tokens
    assert len(shapes) == 7 and {s[2:] for s in shapes} == {(45, 245)}
    for larger, smaller in zip(shapes, shapes[1:], strict=False):
        assert 0.78 < smaller.tokens / larger.tokens < 0.81
    assert [s.tokens for s in batch_shapes(5, 8, 145, 100, max_len=245, max_tokens=2000)][:2] == [2000, 1600]
    assert shapes_holding(shapes, 4000) == shapes[:1] and shapes_holding(shapes, 0) == shapes
    assert batch_shapes(1, 1, 145, 100, max_len=245, max_tokens=999)[0] == (256, 112, 2, 245)


def test_a_batch_takes_the_smallest_shape_that_holds_it_and_a_larger_one_buckets():
    shapes = [BatchShape(128, 100, 9, 60), BatchShape(64, 50, 9, 60)]
    assert fit_shape(BatchShape(64, 50, 9, 60), shapes, 1000) == shapes[1]
    assert fit_shape(BatchShape(64, 51, 9, 60), shapes, 1000) == shapes[0]
    assert fit_shape(BatchShape(129, 10, 1, 10), shapes, 1000) == (160, 16, 16, 16)
    assert fit_shape(BatchShape(129, 10, 1, 10), shapes, 130) == (130, 16, 16, 16)


def group(rng: random.Random, prompt: int, lengths: list[int]) -> RolloutGroup:
    def tokens(n: int) -> list[int]:
        return rng.choices(range(97), k=n)

    sequences = [completed(tokens(n), (-1.0) ** i, 0.01, [0.0] * n, [0.0] * n) for i, n in enumerate(lengths)]
    return train_group(tokens(prompt), sequences, FILTERED)


@pytest.mark.parametrize("max_tokens", [16384, 1200])
def test_batches_of_any_lengths_take_few_shapes_and_waste_little(max_tokens: int):
    rng = random.Random(0)
    shapes = batch_shapes(5, 8, 145, 100, max_len=245, max_tokens=max_tokens)
    batches = []
    for _ in range(30):
        groups = [group(rng, rng.randint(100, 145), [rng.randint(1, 100) for _ in range(8)]) for _ in range(5)]
        batches += pack(groups, max_tokens=max_tokens, check_parity=True, shapes=shapes)
    assert {shape_of(b) for b in batches} <= set(shapes)
    slots, used = count_slots(batches)
    assert used > 0.8 * slots


def shape_of(batch) -> BatchShape:
    return BatchShape(len(batch.tokens_T), len(batch.valid_C), len(batch.prefix_len_S), batch.max_len)


def test_a_sequence_beyond_every_shape_is_packed_alone():
    rng = random.Random(0)
    shapes = batch_shapes(2, 2, 10, 10, max_len=20, max_tokens=500)
    batches = pack(
        [group(rng, 10, [10, 10]), group(rng, 90, [10]), group(rng, 5, [3])],
        max_tokens=500,
        check_parity=True,
        shapes=shapes,
    )
    assert [shape_of(b) in shapes for b in batches] == [True, False, True]
    assert shape_of(batches[1]) == (112, 16, 16, 112)


def test_more_groups_than_a_shape_has_room_for_take_several_batches():
    """Of short completions, such as those that are only checked: a shape's segments bound a batch as its tokens do."""
    shapes = batch_shapes(2, 2, 12, 30, max_len=42, max_tokens=512)
    groups = [group(random.Random(i), 3, [2, 2]) for i in range(7)]
    batches = pack(groups, max_tokens=512, check_parity=True, shapes=shapes)
    assert {shape_of(b) for b in batches} <= set(shapes) and sum(len(b.sequences) for b in batches) == 14


def make_trainer(make_model, dtype=torch.float32, recorded=True, enforce_parity=True) -> tuple[Trainer, Runtime]:
    config = CompileConfig("step", "full" if recorded else "none")
    runtime = Runtime(config, CPU, recorder=FakeRecorder())
    optimizer = OptimizerConfig(weight_decay=0.1)
    return Trainer(make_model(dtype), optimizer, LossConfig(), enforce_parity=enforce_parity, runtime=runtime), runtime


SHAPES = batch_shapes(2, 2, 12, 30, max_len=42, max_tokens=512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_warm_up_changes_no_bit_of_any_state(make_model, dtype):
    trainer, runtime = make_trainer(make_model, dtype, enforce_parity=False)
    groups = [group(random.Random(0), 5, [4, 3])]
    trainer.forward_backward(pack(groups, max_tokens=512, check_parity=True, shapes=SHAPES)[0])
    assert trainer.optim_step(1e-2).applied  # moments and step counts that are not zero
    state = {**trainer.state()[0], "weights": trainer.flat.data, "grad": trainer.flat.grad, "sums": trainer._statistics}
    before = {name: t.clone() for name, t in state.items()}
    trainer.warm_up(SHAPES[-3:], FILTERED, check_parity=True)
    for name, t in state.items():
        assert torch.equal(t.view(torch.uint8), before[name].view(torch.uint8)), name
    assert trainer.weights_version == 1 and runtime.launches["optim_step"] == 2


def test_nothing_is_made_after_warm_up_whatever_the_lengths(make_model):
    trainer, runtime = make_trainer(make_model, enforce_parity=False)
    trainer.warm_up(SHAPES, FILTERED, check_parity=True)
    assert runtime.captures == 3  # forward_backward, check, optim_step: one trace each
    assert sum(len(f.graphs) for f in runtime.programs) == 2 * len(SHAPES) + 1
    runtime.end_warm_up()
    rng, seen = random.Random(1), set()
    for _ in range(30):
        groups = [group(rng, rng.randint(1, 12), [rng.randint(1, 30) for _ in range(2)]) for _ in range(2)]
        trained = pack(groups[: rng.randint(1, 2)], max_tokens=512, check_parity=True, shapes=SHAPES)
        for batch in trained:
            trainer.forward_backward(batch)
        for batch in pack(groups[len(trained) :], max_tokens=512, check_parity=True, shapes=SHAPES):
            trainer.check(batch)
        assert trainer.optim_step(1e-3).applied
        seen |= {shape_of(b) for b in trained}
    assert len(seen) > 4 and (runtime.captures, runtime.recompiles) == (3, 0)
    launches, replays = runtime.launches, runtime.replays
    assert launches.total() - replays.total() == 2 * len(SHAPES) + 1  # those that recorded

    trainer.forward_backward(blank_batch(BatchShape(600, 48, 16, 42), FILTERED, True))
    assert (runtime.captures, runtime.recompiles) == (3, 1)  # another shape: bound to the trace, and counted


def test_later_updates_and_a_reference_are_warmed_up_too(make_model):
    runtime = Runtime(CompileConfig("step", "full"), CPU, recorder=FakeRecorder())
    loss, reference = LossConfig(beta=0.1), make_model(seed=1)
    trainer = Trainer(make_model(), OptimizerConfig(), loss, reference=reference, enforce_parity=False, runtime=runtime)
    trainer.warm_up(SHAPES[:2], FILTERED, check_parity=True, num_iterations=3, with_checks=False)
    runtime.end_warm_up()
    for seed, size in ((0, 25), (1, 12)):
        rng = random.Random(seed)
        groups = [group(rng, 12, [size, size]) for _ in range(2)]
        (batch,) = pack(groups, max_tokens=512, check_parity=True, shapes=SHAPES[:2])
        for update in range(3):
            if update == 0:
                trainer.reference_logprobs(batch)
            trainer.forward_backward(batch, keep_support=update == 0)
            batch.check_parity = False
            assert trainer.optim_step(1e-3).applied
    assert (runtime.captures, runtime.recompiles) == (4, 0)  # the first update, later ones, reference, optim_step


def test_warm_up_in_the_middle_of_a_step_is_refused(make_model):
    trainer, _ = make_trainer(make_model)
    trainer.forward_backward(pack([group(random.Random(0), 5, [4, 3])], max_tokens=64, check_parity=True)[0])
    with pytest.raises(AssertionError, match="in the middle of a step"):
        trainer.warm_up(SHAPES, FILTERED, check_parity=True)


def test_one_trace_serves_several_shapes_with_the_bits_of_eager(make_model):
    def run(trainer: Trainer) -> list[torch.Tensor]:
        rng, seen = random.Random(2), []
        for lengths in ([30, 30], [3, 1], [30, 18], [30, 30]):
            (batch,) = pack([group(rng, 12, lengths)], max_tokens=512, check_parity=True, shapes=SHAPES)
            trainer.forward_backward(batch)
            seen += [trainer.flat.grad.clone(), torch.tensor(trainer.optim_step(1e-2).loss), trainer.flat.data.clone()]
        return seen

    for recorded in (False, True):
        trainer, runtime = make_trainer(make_model, torch.bfloat16, recorded, enforce_parity=False)
        eager = Trainer(
            make_model(torch.bfloat16), OptimizerConfig(weight_decay=0.1), LossConfig(), enforce_parity=False
        )
        assert all(map(torch.equal, run(trainer), run(eager)))
        assert runtime.captures == 2 and len(runtime.programs[0].graphs) == 3
