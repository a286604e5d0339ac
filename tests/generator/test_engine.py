"""What a user of the engine sees: stops, cancellation, versions, limits, errors."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from small import CONFIG, finished, generate, make_model, requests, words

from lockstep.config import GeneratorConfig
from lockstep.errors import InputError
from lockstep.generator import Engine, SharedWeights, plan_cache_tokens
from lockstep.generator.kv_cache import KVCache
from lockstep.timings import Timings
from lockstep.types import SampleIdentity, SamplingParams

EngineOf = Callable[..., Engine]
PROMPT = list(range(30))


def text(token_ids: list[int]) -> str:
    return "".join(chr(33 + t % 90) for t in token_ids)


@pytest.fixture(scope="module")
def model():
    return make_model(torch.float32)


def run(engine: Engine, **fields) -> list:
    return generate(engine, [PROMPT], [SamplingParams(**({"max_completion_length": 20} | fields))])[0]


def test_greedy_is_the_argmax_and_its_sampled_log_prob_is_zero(model, engine_of: EngineOf) -> None:
    one, two = run(engine_of(model), temperature=0.0, n=2)
    assert one.token_ids == two.token_ids
    assert one.logprobs == [0.0] * len(one.token_ids)
    assert all(-6 < p < 0 for p in one.model_logprobs)
    sampled = run(engine_of(model), n=2, ignore_eos=True)
    assert sampled[0].token_ids != sampled[1].token_ids
    for filters in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        alone = run(engine_of(model), **filters)[0]
        assert (alone.token_ids, alone.logprobs) == (one.token_ids, one.logprobs)


def test_it_tells_how_many_samples_are_finished(model) -> None:
    told: list[str] = []
    observer = SimpleNamespace(
        phase_began=lambda phase: None, phase_progressed=told.append, phase_ended=lambda phase, seconds: None
    )
    weights, config = SharedWeights(model), GeneratorConfig(steps_per_sync=4, max_num_seqs=2)
    engine = Engine(weights, config, 16384)
    engine.timings = Timings(observer=observer)
    run(engine, n=4, ignore_eos=True)
    assert list(dict.fromkeys(told)) == ["0 of 4", "2 of 4", "4 of 4"]


def test_a_sample_depends_on_its_identity_alone(model, engine_of: EngineOf) -> None:
    params = [SamplingParams(max_completion_length=12, ignore_eos=True)]
    outcomes = []
    for identity in [(1, 0, 0, 0), (1, 0, 0, 0), (2, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1)]:
        outcomes.append(engine_of(model).generate([PROMPT], params, [SampleIdentity(*identity)])[0][0].token_ids)
    assert outcomes[0] == outcomes[1]
    assert len({tuple(tokens) for tokens in outcomes}) == 5


@pytest.mark.parametrize("page_size", [4, 16])
def test_a_prompt_that_continues_a_completion_gives_what_it_gives_alone(
    model, engine_of: EngineOf, page_size: int
) -> None:
    """A completion that fills its last page leaves that page unfinished: its last token's keys are never made."""
    engine = engine_of(model, page_size=page_size)
    first = run(engine, max_completion_length=2 + page_size, ignore_eos=True)[0]
    longer = PROMPT + first.token_ids
    assert len(longer) % page_size == 0
    longer += [7, 8, 9]
    sampling = [SamplingParams(max_completion_length=6, ignore_eos=True)]
    assert words(generate(engine, [longer], sampling)) == words(generate(engine_of(model), [longer], sampling))


def test_truncated_log_probs_are_of_the_distribution_that_was_sampled(model, engine_of: EngineOf) -> None:
    """top-k 2 leaves two tokens: their sampled probabilities add up to 1, and have the ratio of the model's own."""
    completion = run(engine_of(model), top_k=2, temperature=0.5, n=1)[0]
    for sampled, own in zip(completion.logprobs, completion.model_logprobs, strict=True):
        p = torch.tensor(sampled).exp()
        assert 0 < p <= 1 and sampled > own
        if p < 1:
            other = (1 - p).log()
            assert torch.isfinite(other)


def test_prompts_that_are_worth_a_step_are_all_read_before_another_token_is_drawn(model, engine_of: EngineOf) -> None:
    """A few that a step has no room for do not wait for company again."""
    engine, read = engine_of(model, max_num_batched_tokens=64, max_num_seqs=64), list[int]()
    schedule = engine.scheduler.schedule_prefill
    engine.scheduler.schedule_prefill = lambda version: [*map(lambda c: read.append(c.count) or c, schedule(version))]
    sampling, identity = SamplingParams(max_completion_length=40, ignore_eos=True), SampleIdentity(0, 0, 0, 0)
    engine.add_request(PROMPT, SamplingParams(n=10, max_completion_length=40, ignore_eos=True), identity)
    engine.advance()
    for token in range(5):
        engine.add_request([token] * 30, sampling, identity)
    for _ in range(3):
        engine.advance()
    assert read == [30, 30, 30, 4, 26, 30, 8, 22]
    assert engine.scheduler.clock == 4


@pytest.mark.parametrize("dropped", [False, True])
def test_a_mixed_step_fills_its_graph_and_leaves_the_rest_to_the_next(
    model, engine_of: EngineOf, dropped: bool
) -> None:
    engine, read = engine_of(model, max_num_seqs=64), list[int]()
    free, schedule = engine.cache.num_free, engine.scheduler.schedule_prefill

    def counted(version: int) -> list:
        chunks = schedule(version)
        read.append(sum(chunk.count for chunk in chunks))
        return chunks

    engine.scheduler.schedule_prefill, engine.scheduler.sizes = counted, [2048, 1024, 512]
    sampling = SamplingParams(max_completion_length=4, ignore_eos=True)
    prompts = [[token] * 30 for token in range(41)]
    ids = [engine.add_request(prompts[0], sampling, SampleIdentity(0, 0, 0, 0))]
    found = finished(engine)
    ids += [engine.add_request(p, sampling, SampleIdentity(0, 0, 0, i + 1)) for i, p in enumerate(prompts[1:])]
    found |= finished(engine)
    assert read == [30, 1024]
    for i in ids[-6:] if dropped else []:  # the first of them read in part, the others started
        engine.abort(i)
    while engine.scheduler.busy:
        found |= finished(engine)
    assert read[:3] == [30, 1024, 0 if dropped else 176]
    assert engine.cache.num_free == free
    identities = [SampleIdentity(0, 0, 0, i) for i in range(41)]
    alone = engine_of(model).generate(prompts, [sampling] * 41, identities)
    assert len(found) == (35 if dropped else 41)
    assert all(words([found[i]]) == words([alone[n]]) for n, i in enumerate(ids) if i in found)


def test_stop_tokens_and_strings_end_a_sample_where_they_occur(model) -> None:
    engine = Engine(SharedWeights(model), GeneratorConfig(steps_per_sync=8), 16384, text)
    whole = run(engine, ignore_eos=True)[0]
    assert whole.finish_reason == "length" and len(whole.token_ids) == 20
    token = whole.token_ids[11]
    first = whole.token_ids.index(token)
    stopped = run(engine, ignore_eos=True, stop_token_ids=(token,))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == whole.token_ids[: first + 1]
    assert stopped.logprobs == whole.logprobs[: first + 1]
    string = text(whole.token_ids[5:8])
    cut = run(engine, ignore_eos=True, stop=("never", string))[0]
    assert cut.finish_reason == "stop" and string in cut.text
    assert string not in text(cut.token_ids[:-1])
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.model_logprobs) == len(cut.weight_versions) == len(cut.token_ids)


def test_the_end_of_sequence_token_stops_unless_ignored(model, engine_of: EngineOf) -> None:
    many = run(engine_of(model), n=64, max_completion_length=60, temperature=3.0)
    stopped = [c for c in many if c.finish_reason == "stop"]
    assert stopped and all(c.token_ids[-1] == CONFIG.eos_token_ids[0] for c in stopped)
    assert all(CONFIG.eos_token_ids[0] not in c.token_ids[:-1] for c in many)
    ignoring = run(engine_of(model), n=64, max_completion_length=60, temperature=3.0, ignore_eos=True)
    assert all(len(c.token_ids) == 60 for c in ignoring)


def test_cancelling_gives_what_was_there_and_leaves_the_others_alone(model, engine_of: EngineOf) -> None:
    prompts, sampling = requests(4, seed=3)
    expected = words(generate(engine_of(model, steps_per_sync=2), prompts, sampling))
    engine = engine_of(model, steps_per_sync=2)
    ids = [
        engine.add_request(p, s, SampleIdentity(11, 0, 0, g))
        for g, (p, s) in enumerate(zip(prompts, sampling, strict=True))
    ]
    victim = ids[3]
    done = finished(engine) | finished(engine)
    partial = engine.abort(victim)
    assert len(partial) == sampling[3].n and {c.finish_reason for c in partial} == {"abort"}
    assert [c.token_ids for c in partial] == [
        tokens[: len(c.token_ids)] for c, (tokens, *_) in zip(partial, expected[3], strict=True)
    ]
    assert engine.abort(victim) == [] == engine.abort(999)
    while engine.scheduler.busy:
        done |= finished(engine)
    assert words([done[i] for i in ids[:3]]) == expected[:3]
    assert engine.cache.num_free == engine.cache.num_pages


def test_an_interrupted_generate_leaves_nothing_behind(
    model, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, sampling = requests(6)
    expected = words(generate(engine_of(model), prompts, sampling))
    engine = engine_of(model, max_num_batched_tokens=64)
    calls = 0
    forward = type(model).forward

    def failing(self, *arguments):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return forward(self, *arguments)

    monkeypatch.setattr(type(model), "forward", failing)
    with pytest.raises(KeyboardInterrupt):
        generate(engine, prompts, sampling)
    assert engine.cache.num_free == engine.cache.num_pages and not engine.scheduler.busy
    assert words(generate(engine, prompts, sampling)) == expected


def test_every_token_carries_the_version_of_its_weights(model, engine_of: EngineOf) -> None:
    version = 3
    engine = Engine(SharedWeights(model, lambda: version), GeneratorConfig(steps_per_sync=4), 16384)
    request = engine.add_request(
        PROMPT, SamplingParams(max_completion_length=12, ignore_eos=True), SampleIdentity(0, 0, 0, 0)
    )
    engine.advance()
    version = 4
    done: dict = {}
    while request not in done:
        done |= finished(engine)
    assert done[request][0].weight_versions == [3] + [4] * 11


@pytest.mark.parametrize(("versions", "found"), [((3, 3), 4), ((3, 4), 0)])
def test_a_prompt_that_two_versions_ran_is_not_found_again(model, versions: tuple[int, int], found: int) -> None:
    version, prompt = versions[0], [7] * 65
    config = GeneratorConfig(page_size=16, max_num_batched_tokens=32)
    engine = Engine(SharedWeights(model, lambda: version), config, 4096)
    engine.add_request(prompt, SamplingParams(max_completion_length=2, ignore_eos=True), SampleIdentity(0, 0, 0, 0))
    engine.advance()
    version = versions[1]
    while engine.scheduler.busy:
        engine.advance()
    assert len(engine.cache.match(prompt, version)[0]) == found


def test_a_page_is_found_behind_the_tokens_before_it_alone() -> None:
    cache = KVCache(CONFIG, 8, 4, torch.empty(0))
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    pages = cache.allocate(2)
    assert pages is not None
    cache.register(first + second, pages, 0)
    assert cache.match(first + second, 0) == (pages, 8) and cache.match(first + first, 0) == (pages[:1], 4)
    assert cache.match(second, 0) == cache.match(second + first, 0) == cache.match(first + second, 1) == ([], 0)


def test_a_page_with_room_is_taken_over_by_one_that_goes_on_from_it() -> None:
    cache = KVCache(CONFIG, 8, 4, torch.empty(0))
    tokens, pages = [1, 2, 3, 4, 5, 6], cache.allocate(2)
    assert pages is not None
    cache.register(tokens, pages, 0)
    longer = [*tokens, 7, 8, 9]
    assert cache.match(longer, 0) == (pages[:1], 4), "who made it still has it"
    cache.release(pages[:1])
    cache.release(pages)
    assert cache.match([1, 2, 3, 4, 5, 7], 0) == (pages[:1], 4), "of other tokens"
    assert cache.match([1, 2, 3, 4, 5], 0) == (pages[:1], 4), "it has more"
    assert cache.match(longer, 1) == ([], 0)
    assert cache.match(longer, 0) == (pages, 6)
    assert cache.match(longer, 0) == (pages[:1], 4), "another has it"
    cache.register(longer, [*pages, *(cache.allocate(1) or [])], 0)
    for _ in range(4):
        cache.release(pages[:1])
    cache.release(pages[1:])
    assert cache.match(longer[:8], 0) == (pages, 8), "it is full now"
    assert cache.match([*tokens, 9], 0) == (pages[:1], 4), "and has no room"


def test_a_page_with_room_is_forgotten_when_it_is_handed_out_or_another_is_found_in_its_place() -> None:
    cache = KVCache(CONFIG, 3, 4, torch.empty(0), zeroes_values=True)
    for page in (0, 1):
        assert cache.allocate(1) == [page]
        cache.v[:, page] = float("inf")
        cache.register([1, 2], [page], 0)
    cache.release([0])
    cache.release([1])
    assert cache.match([1, 2, 3], 0) == ([1], 2), "the later one"
    assert cache.v[:, 1, :2].isinf().all() and not cache.v[:, 1, 2:].any(), "what is not finite is gone"
    cache.release([1])
    assert cache.allocate(3) == [2, 0, 1]
    cache.release([1])
    assert cache.match([1, 2, 3], 0) == ([], 0)


def test_memory_that_no_request_holds_is_lent_zero_and_what_was_in_it_forgotten() -> None:
    cache = KVCache(CONFIG, 3, 4, torch.empty(0))
    for values in (cache.k, cache.v):
        values.fill_(1.0)
    pages = cache.allocate(2)
    assert pages is not None and cache.lend() == []
    cache.register([1, 2, 3, 4, 5, 6], pages, 0)
    cache.release(pages)
    lent = cache.lend()
    assert cache.match([1, 2, 3, 4, 5, 6], 0) == ([], 0) and cache.num_free == 3
    assert sum(memory.nbytes for memory in lent) == 3 * (cache.k.nbytes + cache.v.nbytes) // 4
    assert all(memory.is_contiguous() and not memory.any() for memory in lent)
    assert cache.k[:, cache.null_page].eq(1).all()  # nobody's page stays as it is


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "the prompt has no tokens"),
        ([260], {}, "token id 260 is outside the model's vocabulary of 260"),
        (PROMPT, {"n": 0}, "n and max_completion_length must be at least 1"),
        (PROMPT, {"max_completion_length": 500}, "exceeds the model's context of 512"),
        (PROMPT, {"max_completion_length": 400}, "do not fit the KV cache of 320; raise generator.kv_cache_tokens"),
        (PROMPT, {"stop": ("x",)}, "stop strings need a tokenizer"),
    ],
)
def test_a_request_that_cannot_run_is_refused(model, prompt, fields, message, engine_of: EngineOf) -> None:
    engine = engine_of(model, cache_tokens=320)
    with pytest.raises(InputError, match=message):
        engine.generate([prompt], [SamplingParams(**fields)], [SampleIdentity(0, 0, 0, 7)])
    assert len(run(engine)[0].token_ids) > 0


def test_steps_of_more_sequences_than_attention_takes_are_refused(model, engine_of: EngineOf) -> None:
    """Of 65,535 programs one is the padding's, and 8,192 tokens of prompts are at most 192 pieces."""
    engine_of(model, max_num_seqs=65_336)
    for fields, rows in (({"max_num_seqs": 65_337}, 65_344), ({"max_num_batched_tokens": 1 << 22}, 256)):
        with pytest.raises(InputError, match=f"steps of up to {rows} sequences .* at most 65534 together"):
            engine_of(model, **fields)


def test_the_cache_is_planned_and_refused_before_it_is_too_small() -> None:
    cpu, config = torch.device("cpu"), GeneratorConfig(page_size=16, max_num_seqs=4)
    assert plan_cache_tokens(config, CONFIG, torch.float32, cpu, sequences=100, tokens_per_sequence=40) == 4 * 64
    small = GeneratorConfig(kv_cache_tokens=32)
    with pytest.raises(
        InputError, match=r"generator\.kv_cache_tokens: the cache holds 32 tokens, one sequence may need 48"
    ):
        plan_cache_tokens(small, CONFIG, torch.float32, cpu, sequences=1, tokens_per_sequence=40)
