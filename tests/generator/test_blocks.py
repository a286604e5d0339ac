"""Blocks of steps launched ahead of the host: the bits, finish reasons and versions of decoding step by step."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from small import finished, make_model, words

from lockstep.config import GeneratorConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.generator import running_batch as rows_module
from lockstep.generator.scheduler import ADMISSION_STEPS, SLOT_STEPS
from lockstep.models import Decoder
from lockstep.types import SampleIdentity, SamplingParams, Trajectory

Request = tuple[list[int], SamplingParams, SampleIdentity]
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.01},
)


def text(token_ids: list[int]) -> str:
    return "".join(chr(33 + t % 90) for t in token_ids)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return make_model(torch.float32)


def engine(model: Decoder, ahead: int = 0, cache_tokens: int = 16384, **fields: Any) -> Engine:
    return Engine(SharedWeights(model), GeneratorConfig(**fields), cache_tokens, text, ahead=ahead)


def requests(seed: int, count: int = 10) -> list[Request]:
    """All kinds of sampling and of stops (none, few enough for the device, too many, strings), many lengths."""
    draw = random.Random(seed)
    found = []
    for group in range(count):
        prompt = [draw.randrange(256) for _ in range(draw.choice([1, 3, 17, 40, 90, 150]))]
        params = SamplingParams(
            **KINDS[group % len(KINDS)],
            n=draw.choice([1, 1, 2, 5]),
            max_completion_length=draw.choice([1, 2, 16, 17, 33, 60]),
            stop_token_ids=tuple(draw.sample(range(256), draw.choice([0, 4, 5, 40]))),
            stop=(text([draw.randrange(90)]),) if draw.random() < 0.3 else (),
            ignore_eos=draw.random() < 0.5,
        )
        found.append((prompt, params, SampleIdentity(5, 0, 0, group)))
    return found


def run(engine: Engine, requests: list[Request], arrivals: random.Random | None = None) -> list[list[Trajectory]]:
    """All requests to their end, added at once or, with `arrivals`, over time. Nothing may be left behind."""
    waiting, ids, done = list(requests), [], {}
    while waiting or engine.scheduler.busy:
        while waiting and (arrivals is None or arrivals.random() < 0.4 or not engine.scheduler.busy):
            ids.append(engine.add_request(*waiting.pop(0)))
        done |= finished(engine)
    rows = engine.scheduler.rows
    assert engine.cache.num_free == engine.cache.num_pages
    assert rows.used == rows.truncated == rows.greedy == 0
    return [done[i] for i in ids]


def evidence(completions: list[list[Trajectory]]) -> list[Any]:
    return [words(completions), [[(c.finish_reason, c.text, c.weight_versions) for c in g] for g in completions]]


@pytest.fixture(scope="module")
def single_steps(model: Decoder) -> list[list[Any]]:
    """`evidence` of the requests of each seed, decoded step by step."""
    return [evidence(run(engine(model, steps_per_sync=1), requests(seed))) for seed in range(3)]


@pytest.mark.parametrize(
    ("ahead", "arriving", "fields"),
    [
        (1, False, {}),
        (2, True, {"steps_per_sync": 3}),
        (1, True, {"max_num_seqs": 7, "page_size": 4, "max_num_batched_tokens": 64}),
        (1, False, {"page_size": 4, "cache_tokens": 300}),
        (1, True, {"page_size": 1, "cache_tokens": 256, "prefix_caching": False}),
        (0, True, {"steps_per_sync": 13, "max_num_seqs": 3, "max_num_batched_tokens": 5}),
    ],
    ids=[
        "one ahead",
        "two ahead",
        "few slots",
        "preemption",
        "preemption, no prefix cache",
        "one prompt token at a time",
    ],
)
def test_blocks_give_the_bits_of_single_steps(
    model: Decoder, single_steps: list[list[Any]], ahead: int, arriving: bool, fields: dict
) -> None:
    reasons, preemptions = set(), 0
    for seed, expected in enumerate(single_steps):
        blocks = engine(model, ahead, **fields)
        found = run(blocks, requests(seed), random.Random(seed) if arriving else None)
        assert evidence(found) == expected
        assert evidence(run(blocks, requests(seed)[::-1])[::-1]) == expected  # prefix hits, other rows
        reasons |= {c.finish_reason for group in found for c in group}
        preemptions += blocks.scheduler.preemptions
    assert reasons == {"stop", "length"}
    assert (preemptions > 0) == ("cache_tokens" in fields)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_cancelled_request_leaves_the_others_alone_while_a_block_is_under_way(model: Decoder, ahead: int) -> None:
    wanted = requests(7, count=8)
    expected = run(engine(model, steps_per_sync=1), wanted)
    blocks = engine(model, ahead, steps_per_sync=4)
    ids = [blocks.add_request(*request) for request in wanted]
    done = finished(blocks) | finished(blocks) | finished(blocks)
    for victim in (0, 5):
        partial = blocks.abort(ids[victim])
        for c in partial:
            assert c.token_ids == expected[victim][c.identity.sample].token_ids[: len(c.token_ids)]
    while blocks.scheduler.busy:
        done |= finished(blocks)
    kept = [i for i in range(8) if i not in (0, 5)]
    assert evidence([done[ids[i]] for i in kept]) == evidence([expected[i] for i in kept])
    assert blocks.cache.num_free == blocks.cache.num_pages and blocks.scheduler.rows.used == 0


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_tokens_carry_the_version_that_drew_them_and_pages_of_two_are_not_shared(ahead: int) -> None:
    model, version = make_model(torch.float32), 3
    blocks = Engine(SharedWeights(model, lambda: version), GeneratorConfig(steps_per_sync=4), 4096, ahead=ahead)
    params = SamplingParams(max_completion_length=40, ignore_eos=True)
    prompt = list(range(40))
    request = blocks.add_request(prompt, params, SampleIdentity(0, 0, 0, 0))
    blocks.advance()
    blocks.advance()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        model.layers[0].down.mul_(1.5)
    version, done = 4, {}
    while request not in done:
        done |= finished(blocks)
    (completion,) = done[request]
    assert completion.weight_versions == [3] * 5 + [4] * 35  # a mixed step, and a block
    assert blocks.cache.match((prompt + completion.token_ids)[:64], 4) == ([], 0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])
    fresh = Engine(SharedWeights(model), GeneratorConfig(), 4096)
    (unchanged,) = fresh.generate([prompt], [params], [SampleIdentity(0, 0, 0, 0)])[0]
    assert unchanged.token_ids[:5] == completion.token_ids[:5]
    assert unchanged.model_logprobs[:5] == completion.model_logprobs[:5]
    assert unchanged.model_logprobs[5:] != completion.model_logprobs[5:]


def test_a_stopped_sequence_is_idle_on_the_device_and_marks_what_follows(model: Decoder) -> None:
    params = SamplingParams(max_completion_length=30, ignore_eos=True)
    whole = run(engine(model), [([5] * 20, params, SampleIdentity(0, 0, 0, 0))])[0][0]
    stop = whole.token_ids[9]
    at = whole.token_ids.index(stop)
    blocks = engine(model, ahead=1, steps_per_sync=16)
    blocks.add_request([5] * 20, replace(params, stop_token_ids=(stop,)), SampleIdentity(0, 0, 0, 0))
    blocks.advance()
    blocks.advance()  # the block is launched, its results are not read
    rows = blocks.scheduler.rows.tensors(1)
    assert rows["remaining"].tolist() == rows["position"].tolist() == [0]
    assert rows["results"][0, 0].tolist() == whole.token_ids[1 : at + 1] + [-1] * (16 - at)
    assert len(blocks.scheduler.running[0].token_ids) == 1
    ((completion,),) = finished(blocks).values()
    assert completion.token_ids == whole.token_ids[: at + 1] and completion.finish_reason == "stop"


@pytest.mark.parametrize("ahead", [0, 1])
def test_wherever_it_is_interrupted_nothing_is_left_behind(
    model: Decoder, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [list(column) for column in zip(*requests(2, count=6), strict=True)]
    expected = evidence(engine(model, steps_per_sync=1).generate(*wanted))
    blocks = engine(model, ahead, steps_per_sync=4, max_num_batched_tokens=64)
    forward, left = Decoder.forward, 0

    def failing(self, *arguments):
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return forward(self, *arguments)

    monkeypatch.setattr(Decoder, "forward", failing)
    for calls in (1, 2, 5, 6, 9, 14, 20):  # in prompts and in blocks
        left = calls
        with pytest.raises(KeyboardInterrupt):
            blocks.generate(*wanted)
        assert blocks.cache.num_free == blocks.cache.num_pages and not blocks.scheduler.busy
        assert blocks.scheduler.rows.used == 0
    assert evidence(blocks.generate(*wanted)) == expected


def test_a_stop_string_across_blocks_and_characters_of_several_tokens_is_found() -> None:
    """Texts of tokens that are parts of characters: a token alone has none."""

    def pairs(token_ids: list[int]) -> str:
        return "".join(chr(33 + (a + b) % 90) for a, b in zip(token_ids[::2], token_ids[1::2], strict=False))

    model = make_model(torch.float32)
    params = SamplingParams(max_completion_length=60, ignore_eos=True)
    one = Engine(SharedWeights(model), GeneratorConfig(), 4096, pairs)
    (whole,) = one.generate([[3] * 5], [params], [SampleIdentity(0, 0, 0, 0)])[0]
    for first in (2, 8, 20):
        string = whole.text[first : first + 3]
        stop = replace(params, stop=("no such text", string))
        found = []
        for steps in (1, 3, 8):
            blocks = Engine(SharedWeights(model), GeneratorConfig(steps_per_sync=steps), 4096, pairs, ahead=1)
            found += blocks.generate([[3] * 5], [stop], [SampleIdentity(0, 0, 0, 0)])[0]
        at = whole.text.index(string)
        assert {c.finish_reason for c in found} == {"stop"}
        assert all(c.token_ids == whole.token_ids[: 2 * (at + 3)] for c in found)


def test_a_stop_string_is_found_however_many_tokens_without_a_text_are_in_it() -> None:
    def few(token_ids: list[int]) -> str:
        return "".join(chr(97 + token // 32) for token in token_ids if token % 32 == 0)

    params = SamplingParams(max_completion_length=500, ignore_eos=True)
    one = Engine(SharedWeights(make_model(torch.float32)), GeneratorConfig(), 4096, few)
    (whole,) = one.generate([[3] * 5], [params], [SampleIdentity(0, 0, 0, 0)])[0]
    shown = [i for i, token in enumerate(whole.token_ids) if token % 32 == 0]
    text = whole.text
    pairs = {text[k - 1 : k + 1]: (shown[k] - shown[k - 1], shown[k]) for k in range(len(text) - 1, 0, -1)}
    stop, (gap, last) = max(pairs.items(), key=lambda pair: pair[1])
    assert gap > 8 + 4 * 2 + 8, "more tokens than are read again at each look"
    (found,) = one.generate([[3] * 5], [replace(params, stop=(stop,))], [SampleIdentity(0, 0, 0, 0)])[0]
    assert found.finish_reason == "stop" and found.token_ids == whole.token_ids[: last + 1]


def test_nothing_is_launched_for_sequences_that_are_known_to_end(model: Decoder) -> None:
    blocks = engine(model, ahead=1, steps_per_sync=8)
    params = SamplingParams(n=3, max_completion_length=20, ignore_eos=True)
    blocks.add_request([5] * 20, params, SampleIdentity(0, 0, 0, 0))
    run(blocks, [([6] * 9, params, SampleIdentity(0, 0, 0, 1))])
    assert blocks.scheduler.clock == 20


def test_a_block_without_news_uploads_nothing(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: list[int] = []
    upload = rows_module.upload

    def counting(values, device):
        uploaded.append(torch.tensor(values).numel())
        return upload(values, device)

    monkeypatch.setattr(rows_module, "upload", counting)
    blocks = engine(model, ahead=1, steps_per_sync=4, page_size=64)
    for group, length in enumerate((100, 100, 60)):
        params = SamplingParams(n=8, max_completion_length=length, ignore_eos=True)
        blocks.add_request([group] * 30, params, SampleIdentity(0, 0, 0, group))
    blocks.advance()
    blocks.advance()
    first = sum(uploaded)
    uploaded.clear()
    counts = []
    while blocks.scheduler.busy:
        blocks.advance()
        counts.append(sum(uploaded))
        uploaded.clear()
    changes = [count for count in counts if count]
    assert len(counts) > 20 and len(changes) <= 4  # pages once for each, and eight that leave together
    assert max(changes) < first


def test_prompts_wait_for_a_share_of_the_slots_when_all_are_taken(model: Decoder) -> None:
    blocks = engine(model, max_num_seqs=32, steps_per_sync=1)
    for group in range(41):
        params = SamplingParams(max_completion_length=10 + group, ignore_eos=True)
        blocks.add_request([group] * 8, params, SampleIdentity(0, 0, 0, group))
    waiting = []
    while blocks.scheduler.waiting:
        blocks.advance()
        waiting.append(len(blocks.scheduler.waiting))
    assert waiting[:9] == [9] * 9  # all slots are taken
    admitted = [before - after for before, after in zip(waiting, waiting[1:], strict=False) if before != after]
    assert admitted == [2, 2, 2, 2, 1]  # a sixteenth of 32 at a time, then what is left


def test_a_free_slot_is_not_waited_beside_for_long(model: Decoder) -> None:
    """Where those that run go on for long, so that no second slot comes free."""
    blocks = engine(model, max_num_seqs=32, steps_per_sync=1)
    for group in range(34):
        params = SamplingParams(max_completion_length=10 if group == 0 else 200, ignore_eos=True)
        blocks.add_request([group] * 8, params, SampleIdentity(0, 0, 0, group))
    steps = 0
    while len(blocks.scheduler.waiting) > 1:
        blocks.advance()
        steps += 1
    assert 10 < steps <= SLOT_STEPS + 2


def test_short_requests_do_not_starve_beside_a_few_free_slots(model: Decoder) -> None:
    """Nobody who runs ends soon, so there is no share of the slots to wait for."""
    blocks = engine(model, max_num_seqs=64, steps_per_sync=1)
    params = SamplingParams(n=61, max_completion_length=400, ignore_eos=True)
    blocks.add_request([1] * 8, params, SampleIdentity(0, 0, 0, 0))
    blocks.advance()
    for group in range(1, 10):
        params = SamplingParams(max_completion_length=4, ignore_eos=True)
        blocks.add_request([group] * 8, params, SampleIdentity(0, 0, 0, group))
    steps = 0
    while blocks.scheduler.waiting:
        blocks.advance()
        steps += 1
    assert steps < SLOT_STEPS


def test_late_comers_are_read_together(model: Decoder) -> None:
    """A third of those that run need not wait; fewer wait for company where a prompt was read just before."""
    blocks = engine(model, max_num_seqs=64, steps_per_sync=1)

    def waiting(group: int, samples: int = 1, length: int = 1) -> int:
        """That request comes, and a step is run."""
        params = SamplingParams(n=samples, max_completion_length=length, ignore_eos=True)
        blocks.add_request([group] * 8, params, SampleIdentity(0, 0, 0, group))
        blocks.advance()
        return len(blocks.scheduler.waiting)

    assert waiting(0, samples=10, length=90) == 0
    assert [waiting(group) for group in range(1, 13)] == [1, 2, 0] * 4  # three are a third of 10
    assert waiting(13) == 1
    steps = 1
    while blocks.scheduler.waiting:
        blocks.advance()
        steps += 1
    assert steps == ADMISSION_STEPS + 1
    for _ in range(ADMISSION_STEPS):
        blocks.advance()
    assert waiting(14) == 0  # it was quiet before


def test_requests_longer_than_the_block_tables_make_them_wider_while_others_run(model: Decoder) -> None:
    params = SamplingParams(max_completion_length=30, ignore_eos=True)
    wanted = [([g] * size, params, SampleIdentity(0, 0, 0, g)) for g, size in enumerate((10, 200, 400))]
    expected = run(engine(model, steps_per_sync=1), wanted)
    blocks = engine(model, ahead=1)
    ids = []
    for request in wanted:
        ids.append(blocks.add_request(*request))
        blocks.advance()
        blocks.advance()
    done = {}
    while blocks.scheduler.busy:
        done |= finished(blocks)
    assert evidence([done[i] for i in ids]) == evidence(expected)
    assert blocks.scheduler.rows.width == 512 // 16
