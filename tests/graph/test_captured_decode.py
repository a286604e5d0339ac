"""Decoding as graphs: the same tokens and log-probabilities as eager, in every bucket and on every schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lockstep.config import GeneratorConfig
from lockstep.generator import Engine, SharedWeights, SnapshotWeights
from lockstep.generator.decode_graphs import batch_buckets, context_bucket
from lockstep.graph import Compiler
from lockstep.models import Decoder
from lockstep.types import Completion, SampleIdentity, SamplingParams

KINDS = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.01},
)


def engine(model: Decoder, compiler: Compiler | None, cache_tokens: int = 4096, **fields) -> Engine:
    return Engine(SharedWeights(model), GeneratorConfig(**fields), cache_tokens, compiler=compiler)


def generate(engine: Engine, kinds=KINDS, count: int = 7, step: int = 0) -> list[list[Completion]]:
    """Prompts of many lengths, 1 to 3 samples each; some stop early, so that the batch shrinks."""
    prompts = [[(11 * g + i) % 97 for i in range(1 + 13 * g % 50)] for g in range(count)]
    sampling = [
        SamplingParams(**kinds[g % len(kinds)], n=1 + g % 3, max_completion_length=5 + 6 * g, stop_token_ids=(5, 50))
        for g in range(count)
    ]
    return engine.generate(prompts, sampling, [SampleIdentity(3, 0, step, g) for g in range(count)])


def words(completions: list[list[Completion]]) -> list:
    return [
        (c.token_ids, [x.hex() for x in (*c.logprobs, *c.model_logprobs)], c.finish_reason)
        for group in completions
        for c in group
    ]


@pytest.mark.parametrize(
    ("dtype", "recorded", "fields"),
    [
        (torch.float32, True, {}),
        (torch.bfloat16, True, {"steps_per_sync": 1}),
        (torch.float32, False, {"page_size": 4, "cache_tokens": 160}),
        (torch.bfloat16, False, {"page_size": 7, "max_num_seqs": 3}),
    ],
    ids=["plain", "a look each step", "preemption", "three at a time"],
)
def test_captured_decoding_is_eager_decoding(decoder, compiler_of, dtype, recorded: bool, fields: dict) -> None:
    model, compiler = decoder(dtype), compiler_of(recorded)
    eager, captured = engine(model, None, **fields), engine(model, compiler, **fields)
    for step in range(2):
        assert words(generate(captured, step=step)) == words(generate(eager, step=step))
    assert captured.scheduler.preemptions == eager.scheduler.preemptions
    assert (captured.scheduler.preemptions > 0) == ("cache_tokens" in fields)
    assert compiler.launches["decode"] > 20 and (compiler.replays["decode"] > 0) == recorded


@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[1:2], KINDS[2:3]], ids=["plain", "top-p", "greedy"])
def test_each_kind_of_sampling_alone(decoder, compiler_of, kinds) -> None:
    model = decoder()
    captured = words(generate(engine(model, compiler_of()), kinds, count=3))
    assert captured == words(generate(engine(model, None), kinds, count=3))


def test_rows_without_a_sequence_write_to_nobodys_page(decoder, compiler_of: Callable[..., Compiler]) -> None:
    model = decoder()
    eager, captured, mutant = (engine(model, c) for c in (None, compiler_of(), compiler_of()))
    mutant.cache.null_page = 0
    for e in (eager, captured, mutant):
        generate(e, count=5)  # 9 sequences at most, in rows for 16
    assert torch.equal(captured.cache.k[:, :-1], eager.cache.k[:, :-1])
    assert torch.equal(captured.cache.v[:, :-1], eager.cache.v[:, :-1])
    assert captured.cache.k[:, -1].any() and not eager.cache.k[:, -1].any()
    assert not torch.equal(mutant.cache.k[:, 0], eager.cache.k[:, 0])


def test_after_warm_up_nothing_is_captured(decoder, compiler_of: Callable[..., Compiler]) -> None:
    compiler = compiler_of(recorded=True)
    captured = engine(decoder(), compiler)
    sampling = SamplingParams(n=5, max_completion_length=20, stop_token_ids=(5, 50, 61))
    captured.warm_up(10, 60, sampling)
    assert compiler.captures == len(batch_buckets(10)) == 5
    before = captured.cache.k[:, :-1].clone()
    assert not before.any()
    compiler.end_warm_up()
    for step in range(3):
        prompts = [[1 + step] * 30, [2] * 40]
        captured.generate(prompts, [sampling] * 2, [SampleIdentity(0, 0, step, g) for g in range(2)])
    assert compiler.recompiles == 0 and compiler.replays["decode"] == compiler.launches["decode"] - 5 > 10


def test_updated_weights_are_seen_and_a_snapshot_is_another_model(decoder, compiler_of) -> None:
    model = decoder()
    captured = engine(model, compiler_of(recorded=True))
    first = words(generate(captured))
    snapshot = SnapshotWeights(model)
    with torch.no_grad():
        model.layers[0].down.mul_(1.5)
    expected = words(generate(engine(model, None)))
    captured.weights = SharedWeights(model, lambda: 1)  # a new version: no page of the old weights is found
    captured.runner.weights = captured.weights
    assert words(generate(captured)) == expected != first
    captured.weights = captured.runner.weights = snapshot
    snapshot.version = 2
    assert words(generate(captured)) == first


def test_buckets_grow_and_waste_little() -> None:
    assert batch_buckets(1) == [1] and batch_buckets(40) == [40, 32, 24, 16, 8, 4, 2, 1]
    assert batch_buckets(300)[:4] == [320, 256, 224, 192]
    for n in range(1, 1000):
        size, *smaller = batch_buckets(n)
        assert size >= n > max(smaller, default=0) and size - n <= max(7, size / 5)
    assert [context_bucket(n) for n in (1, 64, 65, 245, 256, 257)] == [64, 64, 128, 256, 256, 512]
