"""The bitwise chain from one sequence alone to the trainer after updates, link by link, and mutants that break it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from c_library import using
from small import compare, generate, make_model, requests, train_groups, words

from lockstep.config import GeneratorConfig, LossConfig, OptimizerConfig
from lockstep.generator import Engine, SharedWeights, kv_cache
from lockstep.models import Decoder
from lockstep.ops.attention import reference as attention_reference
from lockstep.ops.linear.operator import linear
from lockstep.trainer import Trainer, pack
from lockstep.types import SamplingParams, Trajectory

DTYPES = [torch.float32, torch.bfloat16]
EngineOf = Callable[..., Engine]


@cache
def generated(dtype: torch.dtype, count: int) -> list[list[Trajectory]]:
    """Of so many `requests`, by an engine as it is by default; to be left as it is."""
    return generate(Engine(SharedWeights(make_model(dtype)), GeneratorConfig(), 16384), *requests(count))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_of_64_gives_each_sample_the_bits_it_has_alone(dtype: torch.dtype, engine_of: EngineOf) -> None:
    model = make_model(dtype)
    prompts, sampling = requests(26)
    sampling[0] = replace(sampling[0], n=2)
    together = words(generate(engine_of(model), prompts, sampling))
    assert sum(len(group) for group in together) == 64
    for i in (0, 1, 2, 3, 7, 12):
        alone = words(generate(engine_of(model), [prompts[i]], [sampling[i]], [i]))
        assert alone[0] == together[i]
    reversed_order = list(range(26))[::-1]
    backwards = generate(
        engine_of(model), [prompts[i] for i in reversed_order], [sampling[i] for i in reversed_order], reversed_order
    )
    assert words(backwards)[::-1] == together


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("page of 1", {"page_size": 1}),
        ("page of 7", {"page_size": 7}),
        ("page of 64", {"page_size": 64}),
        ("chunks of 5", {"max_num_batched_tokens": 5}),
        ("chunks of 64", {"max_num_batched_tokens": 64}),
        ("a look each step", {"steps_per_sync": 1}),
        ("three at a time", {"max_num_seqs": 3}),
        ("no prefix cache", {"prefix_caching": False}),
        ("preemption", {"page_size": 4, "cache_tokens": 360}),
        ("preemption without prefix cache", {"page_size": 4, "cache_tokens": 360, "prefix_caching": False}),
    ],
)
def test_no_schedule_changes_a_bit(dtype: torch.dtype, name: str, fields: dict, engine_of: EngineOf) -> None:
    model = make_model(dtype)
    prompts, sampling = requests(9)
    engine = engine_of(model, **fields)
    assert words(generate(engine, prompts, sampling)) == words(generated(dtype, 9))
    assert (engine.scheduler.preemptions > 0) == name.startswith("preemption")
    assert engine.cache.num_free == engine.cache.num_pages


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prefix_hit_gives_the_bits_of_a_miss(dtype: torch.dtype, engine_of: EngineOf) -> None:
    model = make_model(dtype)
    prompts, sampling = requests(6)
    engine = engine_of(model, page_size=8)
    miss = words(generate(engine, prompts, sampling))
    tokens = sum(map(len, prompts))
    ran: list[int] = []
    schedule = engine.scheduler.schedule_prefill

    def counting(version: int):
        chunks = schedule(version)
        ran.extend(chunk.count for chunk in chunks)
        return chunks

    engine.scheduler.schedule_prefill = counting  # type: ignore[method-assign]
    assert words(generate(engine, prompts, sampling)) == miss
    assert sum(ran) <= 8 * len(prompts) < tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("max_tokens", [4096, 200])
def test_the_trainer_finds_the_generators_bits(dtype: torch.dtype, share_prefix: bool, max_tokens: int) -> None:
    model = make_model(dtype)
    prompts, sampling = requests(12)
    completions = generated(dtype, 12)
    result = compare(model, train_groups(prompts, sampling, completions), share_prefix, max_tokens)
    assert result.mismatches == []
    assert result.tokens_different == 0
    assert result.tokens_checked == sum(len(c.token_ids) for group in completions for c in group)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parity_holds_after_every_update(dtype: torch.dtype) -> None:
    model = make_model(dtype)
    trainer = Trainer(model, OptimizerConfig(learning_rate=1e-2), LossConfig())
    engine = Engine(SharedWeights(model, lambda: trainer.weights_version), GeneratorConfig(page_size=4), 16384)
    prompts, sampling = requests(5)
    sampling = [s for s in sampling if s.temperature > 0]
    prompts = prompts[: len(sampling)]
    seen = []
    for step in range(3):
        completions = generate(engine, prompts, sampling)
        seen.append(words(completions))
        assert {v for g in completions for c in g for v in c.weight_versions} == {step}
        for batch in pack(train_groups(prompts, sampling, completions), max_tokens=4096, check_parity=True):
            trainer.forward_backward(batch)
        result = trainer.optim_step(1e-2)
        assert result.applied and result.tokens_different == 0 and result.tokens_checked > 0
    assert seen[0] != seen[1] != seen[2]


def test_a_stale_prefix_page_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache whose digests forget the weights' version serves pages of the weights before the update."""
    monkeypatch.setattr(kv_cache, "_root_digest", lambda version, root=kv_cache._root_digest: root(0))
    model = make_model(torch.float32)
    trainer = Trainer(model, OptimizerConfig(), LossConfig())
    engine = Engine(SharedWeights(model, lambda: trainer.weights_version), GeneratorConfig(page_size=4), 16384)
    prompts, sampling = [list(range(40))], [SamplingParams(n=2, max_completion_length=8, ignore_eos=True)]
    different = []
    for _ in range(2):
        completions = generate(engine, prompts, sampling)
        for batch in pack(train_groups(prompts, sampling, completions), max_tokens=4096, check_parity=True):
            trainer.forward_backward(batch)
        different.append(trainer.optim_step(1e-2).tokens_different)
    assert different[0] == 0 < different[1]


def _flip(tensor: torch.Tensor, index: int, bit: int = 0) -> None:
    """Flip one bit of one element in place."""
    integers = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).flatten()
    integers[index] ^= 1 << bit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["embed", "layers.1.qkv", "layers.0.down", "norm"])
def test_one_flipped_bit_in_a_weight_is_caught(dtype: torch.dtype, name: str) -> None:
    model = make_model(dtype)
    weights = SharedWeights(copy.deepcopy(model))
    # A bit that every token's arithmetic sees: the lowest would drown in bfloat16's own rounding.
    _flip(dict(weights.model.named_parameters())[name].data, 48 * 17 if name == "embed" else 5, bit=3)
    prompts, sampling = [[17, 18, 19] * 20], [SamplingParams(n=4, max_completion_length=20, ignore_eos=True)]
    engine = Engine(weights, GeneratorConfig(), 16384)
    completions = generate(engine, prompts, sampling)
    assert compare(model, train_groups(prompts, sampling, completions)).tokens_different > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_flipped_bit_in_a_cached_key_is_caught(dtype: torch.dtype, engine_of: EngineOf) -> None:
    model = make_model(dtype)
    engine = engine_of(model, steps_per_sync=1)
    prompts, sampling = [[17, 18, 19] * 20], [SamplingParams(n=1, max_completion_length=40, ignore_eos=True)]
    advance = engine.advance

    def corrupting():
        if engine.scheduler.running and len(engine.scheduler.running[0].token_ids) == 10:
            _flip(engine.cache.k[0, engine.scheduler.running[0].pages[0]], 3, bit=6 if dtype == torch.bfloat16 else 18)
        return advance()

    engine.advance = corrupting  # type: ignore[method-assign]
    completions = generate(engine, prompts, sampling)
    result = compare(model, train_groups(prompts, sampling, completions))
    assert result.tokens_different > 0
    assert min(m.position for m in result.mismatches) >= 10


def _against_the_trainer(model: Decoder, engine: Engine) -> int:
    prompts, sampling = requests(8)
    completions = generate(engine, prompts, sampling)
    return compare(model, train_groups(prompts, sampling, completions)).tokens_different


def test_stock_matrix_products_are_caught(engine_of: EngineOf) -> None:
    """The negative control: without blocks of rows, one row's product is another sum than a batch's."""
    model = make_model(torch.float32)
    with using(None):
        assert _against_the_trainer(model, engine_of(model)) == 0
        linear.on_cpu[torch.float32] = torch.nn.functional.linear  # until the library is another again
        assert _against_the_trainer(model, engine_of(model, max_num_seqs=1)) > 0


def test_stock_attention_is_caught(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: torch's own attention adds in an order that depends on the sequence's length."""

    def stock(q_TNH, of, queries):
        out = torch.zeros_like(q_TNH)
        for sequence, (row, length, position) in enumerate(queries):
            if length:
                keys = of.rows(torch.tensor([sequence]), torch.arange(position + length).unsqueeze(0))[0]
                q = q_TNH[row : row + length].transpose(0, 1).unsqueeze(0)
                k, v = (x[keys].transpose(0, 1).unsqueeze(0) for x in (of.k_RKH, of.v_RKH))
                mask = torch.ones(length, position + length, dtype=torch.bool).tril(position)
                attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
                out[row : row + length] = attended[0].transpose(0, 1)
        return out

    model = make_model(torch.float32)
    with using(None):
        monkeypatch.setattr(attention_reference, "_attend", stock)
        assert _against_the_trainer(model, engine_of(model)) > 0


def test_a_wrong_plan_is_caught(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator whose decode takes smaller key tiles than its prefill and the trainer."""
    attend = attention_reference._softmax_attention

    def halved(q_BWNH, *others):
        with monkeypatch.context() as patch:
            if q_BWNH.shape[1] == 1:
                patch.setattr(attention_reference, "KEY_TILE", 32)
            return attend(q_BWNH, *others)

    model = make_model(torch.float32)
    with using(None):
        monkeypatch.setattr(attention_reference, "_softmax_attention", halved)
        assert _against_the_trainer(model, engine_of(model)) > 0
