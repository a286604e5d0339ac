"""Decode and mixed steps as graphs: the same tokens and log-probabilities as eager, in every bucket and schedule."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable

import pytest
import torch
from small import finished

from lockstep.config import GeneratorConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.generator import sizes as graphs_module
from lockstep.generator.sizes import row_buckets, token_buckets
from lockstep.graph import EAGER, Runtime
from lockstep.models import Decoder
from lockstep.types import SampleIdentity, SamplingParams, Trajectory

KINDS = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.01},
)


def engine(model: Decoder, runtime: Runtime, cache_tokens: int = 4096, ahead: int = 0, **fields) -> Engine:
    return Engine(SharedWeights(model), GeneratorConfig(**fields), cache_tokens, runtime=runtime, ahead=ahead)


def graphs(runtime: Runtime) -> dict[str, int]:
    """How many graphs there are of each function."""
    found = dict.fromkeys((f.name for f in runtime.programs), 0)
    for function in runtime.programs:
        found[function.name] += len(function.graphs)
    return found


def generate(engine: Engine, kinds=KINDS, count: int = 7, step: int = 0) -> list[list[Trajectory]]:
    """Prompts of many lengths, 1 to 3 samples each; some stop early, so that the batch shrinks."""
    prompts = [[(11 * g + i) % 97 for i in range(1 + 13 * g % 50)] for g in range(count)]
    sampling = [
        SamplingParams(**kinds[g % len(kinds)], n=1 + g % 3, max_completion_length=5 + 6 * g, stop_token_ids=(5, 50))
        for g in range(count)
    ]
    return engine.generate(prompts, sampling, [SampleIdentity(3, 0, step, g) for g in range(count)])


def words(completions: list[list[Trajectory]]) -> list:
    return [
        (c.token_ids, [x.hex() for x in (*c.logprobs, *c.model_logprobs)], c.finish_reason)
        for group in completions
        for c in group
    ]


@pytest.mark.parametrize(
    ("dtype", "recorded", "fields"),
    [
        (torch.float32, True, {"ahead": 1}),
        (torch.bfloat16, True, {"steps_per_sync": 1}),
        (torch.float32, False, {"page_size": 4, "cache_tokens": 160, "ahead": 1}),
        (torch.bfloat16, False, {"page_size": 7, "max_num_seqs": 3, "max_num_batched_tokens": 40}),
    ],
    ids=["one block ahead", "a look each step", "preemption", "three at a time, prompts in chunks"],
)
def test_captured_decoding_is_eager_decoding(decoder, runtime_of, dtype, recorded: bool, fields: dict) -> None:
    model, runtime = decoder(dtype), runtime_of(recorded)
    eager, captured = engine(model, EAGER, **fields), engine(model, runtime, **fields)
    for step in range(2):
        assert words(generate(captured, step=step)) == words(generate(eager, step=step))
    assert captured.scheduler.preemptions == eager.scheduler.preemptions
    assert (captured.scheduler.preemptions > 0) == ("cache_tokens" in fields)
    assert runtime.launches["decode"] > 20 and runtime.launches["mixed"] > 1
    assert (runtime.replays["decode"] > 0) == recorded


@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[1:2], KINDS[2:3]], ids=["plain", "top-p", "greedy"])
def test_each_kind_of_sampling_alone(decoder, runtime_of, kinds) -> None:
    model = decoder()
    captured = words(generate(engine(model, runtime_of()), kinds, count=3))
    assert captured == words(generate(engine(model, EAGER), kinds, count=3))


def test_rows_without_a_sequence_write_to_nobodys_page(decoder, runtime_of: Callable[..., Runtime]) -> None:
    model = decoder()
    eager, captured, mutant = (engine(model, c) for c in (EAGER, runtime_of(), runtime_of()))
    mutant.cache.null_page = 0
    mutant.runner.set_weights(mutant.runner.weights)  # the page is a constant of its graphs
    for e in (eager, captured, mutant):
        generate(e, count=5)  # 9 sequences at most, in rows for 16
    assert torch.equal(captured.cache.k[:, :-1], eager.cache.k[:, :-1])
    assert torch.equal(captured.cache.v[:, :-1], eager.cache.v[:, :-1])
    assert captured.cache.k[:, -1].any()
    assert not torch.equal(mutant.cache.k[:, 0], eager.cache.k[:, 0])


def test_after_warm_up_nothing_is_captured(decoder, runtime_of: Callable[..., Runtime]) -> None:
    """Requests of any lengths and arrivals within what was warmed up for, training's and validation's."""
    model, runtime = decoder(), runtime_of(recorded=True)
    captured = engine(model, runtime, ahead=1, max_num_batched_tokens=512)
    training = SamplingParams(n=5, top_p=0.9, max_completion_length=20, stop_token_ids=(5, 50, 61))
    validation = SamplingParams(temperature=0.0, max_completion_length=20)
    captured.warm_up(10, 130, training)
    assert graphs(runtime) == {"mixed": 2, "decode": 5}  # 256 and 128 prompt tokens; 16, 8, 4, 2 and 1 rows
    captured.warm_up(3, 130, validation)
    assert graphs(runtime) == {"mixed": 3, "decode": 8}  # 512 too; the greedy ones up to 4 rows
    assert not captured.cache.k[:, :-1].any()
    runtime.end_warm_up()
    draw = random.Random(0)
    for step in range(4):
        params = validation if step == 2 else training
        sizes = [draw.randint(1, 110) for _ in range(3 if params is validation else 2)]
        prompts = [[draw.randrange(97) for _ in range(size)] for size in sizes]
        identities = [SampleIdentity(0, 0, step, g) for g in range(len(prompts))]
        found = captured.generate(prompts, [params] * len(prompts), identities)
        expected = engine(model, EAGER).generate(prompts, [params] * len(prompts), identities)
        assert words(found) == words(expected)
    assert runtime.recompiles == 0
    assert runtime.replays.total() == runtime.launches.total() - 11 > 20  # each is recorded at its first launch


def test_prefixes_are_read_by_group_where_that_is_worth_a_kernel(decoder, runtime_of, monkeypatch) -> None:
    monkeypatch.setattr(graphs_module, "MIN_SAVED", 300)
    monkeypatch.setattr(graphs_module, "LEAST_SAVED", ())
    model, runtime = decoder(), runtime_of(recorded=True)
    captured = engine(model, runtime)
    params = SamplingParams(n=4, max_completion_length=20, ignore_eos=True)
    captured.warm_up(8, 120, params)
    runtime.end_warm_up()
    made = [g.captured for f in runtime.programs if f.name == "decode" for g in f.graphs.values()]
    assert [captured.statics["grouped"] for captured in made] == [True, True, False, False]  # 8, 4, 2 and 1 rows
    arguments = [[3] * 90, [4] * 70], [params] * 2, [SampleIdentity(0, 0, 0, g) for g in range(2)]
    assert words(captured.generate(*arguments)) == words(engine(model, EAGER).generate(*arguments))
    assert runtime.recompiles == 0 and captured.scheduler.rows.saved == 3 * 80 + 3 * 64


def test_requests_that_arrive_over_time(decoder, runtime_of: Callable[..., Runtime]) -> None:
    model, runtime = decoder(), runtime_of(recorded=True)
    captured = engine(model, runtime, ahead=1, max_num_seqs=8, steps_per_sync=4, max_num_batched_tokens=128)
    params = SamplingParams(n=2, top_k=30)
    captured.warm_up(8, 120, params)
    runtime.end_warm_up()
    draw, ids, done = random.Random(3), [], {}
    prompts = [[draw.randrange(97) for _ in range(draw.randint(1, 80))] for _ in range(14)]
    wanted = [SamplingParams(n=2, top_k=30, max_completion_length=draw.randint(1, 40)) for _ in prompts]
    while len(done) < len(prompts):
        if len(ids) < len(prompts) and (draw.random() < 0.5 or not captured.scheduler.busy):
            g = len(ids)
            ids.append(captured.add_request(prompts[g], wanted[g], SampleIdentity(0, 0, 0, g)))
        done |= finished(captured)
    identities = [SampleIdentity(0, 0, 0, g) for g in range(len(prompts))]
    expected = engine(model, EAGER, steps_per_sync=1).generate(prompts, wanted, identities)
    assert words([done[i] for i in ids]) == words(expected)
    assert runtime.recompiles == 0 and min(runtime.replays["mixed"], runtime.replays["decode"]) > 10


def test_updated_weights_are_seen_and_others_can_be_used(decoder, runtime_of) -> None:
    model = decoder()
    captured = engine(model, runtime_of(recorded=True))
    first = words(generate(captured))
    apart = copy.deepcopy(model)
    with torch.no_grad():
        model.layers[0].down.mul_(1.5)
    expected = words(generate(engine(model, EAGER)))
    captured.runner.set_weights(SharedWeights(model, lambda: 1))  # a new version: no page of the old weights is found
    assert words(generate(captured)) == expected != first
    captured.runner.set_weights(SharedWeights(apart, lambda: 2))
    assert words(generate(captured)) == first


def test_buckets_are_few_and_waste_little() -> None:
    assert row_buckets(40) == [40, 32, 16, 8, 4, 2, 1]
    assert row_buckets(256) == [256, 192, 128, 96, 64, 48, 32, 16, 8, 4, 2, 1]
    assert token_buckets(8192) == [8192, 4096, 2048, 1024, 512, 256, 128]
    assert token_buckets(200) == [200] and token_buckets(1) == row_buckets(1) == [1]
    for n in range(1, 1000):
        size, *smaller = row_buckets(n)
        assert size >= n > max(smaller, default=0) and size - n <= 7
        for above, below in zip(row_buckets(n), smaller, strict=False):
            assert above - below <= (below / 2 if below >= 32 else below)


def test_longer_requests_than_before_are_captured_anew(decoder, runtime_of: Callable[..., Runtime]) -> None:
    model, runtime = decoder(), runtime_of(recorded=True)
    captured, eager = engine(model, runtime), engine(model, EAGER)
    for size in (20, 100):
        arguments = [[3] * size], [SamplingParams(max_completion_length=6)], [SampleIdentity(0, 0, 0, 0)]
        assert words(captured.generate(*arguments)) == words(eager.generate(*arguments))
    assert captured.scheduler.rows.width == 128 // 16


def test_nothing_is_kept_of_programs_of_narrower_tables(decoder, runtime_of: Callable[..., Runtime]) -> None:
    runtime = runtime_of(recorded=True)
    small, sampling = engine(decoder(layers=1), runtime), SamplingParams(temperature=0.0, max_completion_length=3)
    for length in (8, 100):
        small.generate([[1] * length], [sampling], [SampleIdentity(3, 0, 0, 0)])
        if length == 8:
            table = weakref.ref(small.scheduler.rows.table)
            first = list(map(weakref.ref, runtime.programs))
    gc.collect()
    assert table() is None and not any(program() for program in first)
    assert sorted(program.name for program in runtime.programs) == ["decode", "mixed"]
