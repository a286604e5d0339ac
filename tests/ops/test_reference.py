"""The reference path at odd sizes: a row's bits are its own, whatever stands beside it and wherever it lies."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from c_library import using
from latent_cases import same_bits
from torch import Tensor

from lockstep import ops
from lockstep.ops.attention import reference as attention_reference
from lockstep.ops.linear.operator import linear, linear_fp32
from lockstep.ops.logprobs import reference as logprobs_reference
from lockstep.ops.logprobs.philox import sample_key
from lockstep.ops.machine_check.inputs import make_products_cancel
from lockstep.session.parity_check import CHECK_DOMAIN
from lockstep.types import GENERATE_DOMAIN, TRAIN_DOMAIN, VALIDATION_DOMAIN, WARMUP_DOMAIN

DTYPES = [torch.float32, torch.bfloat16]


def wide(*shape: int) -> Tensor:
    return torch.randn(*shape) * torch.exp(2 * torch.randn(*shape))


def at(x: Tensor, offset: int) -> Tensor:
    """A copy that begins so many elements behind an aligned address."""
    moved = torch.empty(x.numel() + offset, dtype=x.dtype)[offset:].view(x.shape)
    return moved.copy_(x)


def changed_rows(
    product: Callable[[Tensor, Tensor], Tensor],
    dtype: torch.dtype,
    count: int,
    sizes: tuple[int, int, int] = (70, 300, 40),
) -> int:
    """In how many of so many random cases, of up to `sizes` rows, depth and columns, a row of `product` depends on the
    rows, their order or their addresses."""
    torch.manual_seed(0)
    draw, changed = random.Random(0), 0
    for _ in range(count):
        rows, depth, columns = (draw.randint(1, size) for size in sizes)
        x, weight = wide(rows, depth).to(dtype), wide(columns, depth).to(dtype)
        if depth > 1 and draw.random() < 0.5:
            make_products_cancel(x, weight)
        whole, order = product(x, weight), torch.randperm(rows)
        start = draw.randrange(rows)
        end, offset = draw.randint(start + 1, rows), draw.randint(1, 16)
        pairs = [
            (product(x[start:end], weight), whole[start:end]),
            (product(at(x[start : start + 1], offset), weight), whole[start : start + 1]),
            (product(at(x, offset), at(weight, offset + 1)), whole),
            (product(x[order], weight), whole[order]),
            (product(torch.cat((x, wide(37, depth).to(dtype))), weight)[:rows], whole),
        ]
        changed += not all(same_bits(a, b) for a, b in pairs)
    return changed


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_s_rows_are_their_own(dtype: torch.dtype) -> None:
    with using(None):
        assert changed_rows(ops.linear.__wrapped__, dtype, 150) == 0
        assert changed_rows(linear_fp32, dtype, 50) == 0


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_larger_products_are_their_own_on_any_number_of_threads(dtype: torch.dtype, threads: int) -> None:
    """Libraries split the depth among threads by the number of rows, and multiply by tiles where a CPU has them; where
    a thread has few columns, its sums depend on the place of a row."""
    torch.set_num_threads(threads)
    try:
        with using(None):
            assert changed_rows(ops.linear.__wrapped__, dtype, 12, (300, 3000, 500)) == 0
            assert changed_rows(ops.linear.__wrapped__, dtype, 40) == 0
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("threads", [1, 4])
def test_statistics_of_a_row_of_logits_alone_are_those_among_others(threads: int) -> None:
    """torch divides the sum of a single row of more than 32,768 elements among threads."""
    torch.manual_seed(0)
    logits, temperature = 3 * torch.randn(60, 50_257), torch.full((60,), 0.8)
    filters = ops.Filters(temperature, torch.zeros(60).int(), torch.ones(60), torch.zeros(60))
    torch.set_num_threads(threads)
    try:
        whole = logprobs_reference.statistics(logits, filters, None, False, False)
        for i in range(60):
            own = ops.Filters(*(x[i : i + 1] for x in filters))
            alone = logprobs_reference.statistics(logits[i : i + 1], own, None, False, False)
            assert all(same_bits(x, y[i : i + 1]) for x, y in zip(alone, whole, strict=True))
    finally:
        torch.set_num_threads(1)


def test_rows_of_torch_s_product_are_not() -> None:
    """The negative control."""
    assert changed_rows(F.linear, torch.float32, 50) > 0


@pytest.mark.parametrize("columns", [1, 3, 8, 15, 16, 17])
def test_columns_that_fill_up_change_no_others_and_are_not_seen(columns: int) -> None:
    x, weight = torch.randn(5, 33), torch.randn(columns, 33)
    out = ops.linear.__wrapped__(x, weight)
    assert out.shape == (5, columns) and out.is_contiguous()
    torch.testing.assert_close(out, (x.double() @ weight.double().t()).float())
    assert same_bits(out, ops.linear.__wrapped__(x, torch.cat((weight, torch.randn(20, 33))))[:, :columns])


@pytest.mark.parametrize("head_dim", [2, 6, 10, 15, 16, 18, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3])
def test_attention_of_a_query_alone_is_that_among_others(group: int, head_dim: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(150, 2 * group, head_dim), torch.randn(150, 2, head_dim), wide(150, 2, head_dim)
    none, steps = torch.zeros(1, dtype=torch.int32), torch.arange(151, dtype=torch.int32)
    packed = attention_reference.packed(q, k, v, ops.Packed(steps[[0, 150]], none, none, 0))
    table = torch.zeros(150, 1, dtype=torch.int32)
    alone = attention_reference.paged(
        q, ops.KVPages(k.unsqueeze(0), v.unsqueeze(0)), ops.Paged(table, steps, steps[1:], 1, 150)
    )
    assert same_bits(alone, packed)


@pytest.mark.parametrize("head_dim", [20, 40, 72, 100])
def test_attention_of_a_query_alone_is_that_among_others_on_several_threads(head_dim: int) -> None:
    """A product of one key head is divided by columns among threads, and of few columns the sums are other ones."""
    torch.manual_seed(0)
    q, k, v = torch.randn(90, 4, head_dim), torch.randn(90, 1, head_dim), wide(90, 1, head_dim)
    none, steps = torch.zeros(1, dtype=torch.int32), torch.arange(91, dtype=torch.int32)
    cache, table = ops.KVPages(k.unsqueeze(0), v.unsqueeze(0)), torch.zeros(90, 1, dtype=torch.int32)
    torch.set_num_threads(8)
    try:
        packed = attention_reference.packed(q, k, v, ops.Packed(steps[[0, 90]], none, none, 0))
        decoded = attention_reference.paged(q, cache, ops.Paged(table, steps, steps[1:], 1, 90))
        for i in range(90):
            one = ops.Paged(table[:1], steps[:2], steps[i + 1 : i + 2], 1, 90)
            alone = attention_reference.paged(q[i : i + 1], cache, one)
            assert same_bits(alone, packed[i : i + 1]) and same_bits(alone, decoded[i : i + 1])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_at_odd_sizes_are_the_same_every_time(dtype: torch.dtype) -> None:
    x, weight, grad = wide(37, 70).to(dtype), wide(3, 70).to(dtype), wide(37, 3).to(dtype)
    with using(None):
        found = []
        for _ in range(5):
            leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
            found.append(torch.autograd.grad(linear(*leaves), leaves, grad))
            torch.empty(random.randint(1, 1000))
    assert all(same_bits(a, b) for again in found for a, b in zip(again, found[0], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_reads_its_own_keys_alone(dtype: torch.dtype) -> None:
    """Behind a prefix that another one shares, and in pages of which it has a part; all else is NaN."""

    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    torch.manual_seed(0)
    q, k, v = (wide(30, heads, 16).to(dtype) for heads in (2, 1, 1))
    whole = attention_reference.packed(q, k, v, ops.Packed(int32(0, 30), int32(0), int32(0), 0))
    parts = [torch.cat((x[:20], torch.full_like(x[:7], torch.nan), x[20:])) for x in (q, k, v)]
    shared = attention_reference.packed(*parts, ops.Packed(int32(0, 20, 27, 37), int32(0, 0, 0), int32(0, 20, 20), 0))
    assert same_bits(shared[27:], whole[20:])
    caches = [torch.full((3, 16, 1, 16), torch.nan, dtype=dtype) for _ in range(2)]
    for cache, x in zip(caches, (k, v), strict=True):
        cache[2], cache[0, :14] = x[:16], x[16:]
    decoded = attention_reference.paged(
        q[29:], ops.KVPages(*caches), ops.Paged(int32(2, 0).unsqueeze(0), int32(0, 1), int32(30), 1, 30)
    )
    assert same_bits(decoded, whole[29:])


@pytest.mark.parametrize("field", ["seed", "domain", "step", "group", "sample"])
def test_every_bit_of_an_identity_counts(field: str) -> None:
    fields = dict.fromkeys(("seed", "domain", "step", "group", "sample"), 0)
    numbers = [0, *(1 << bit for bit in range(64 if field == "seed" else 32))]
    assert len({sample_key(**fields | {field: number}) for number in numbers}) == len(numbers)


def test_domains_are_apart() -> None:
    assert len({TRAIN_DOMAIN, VALIDATION_DOMAIN, GENERATE_DOMAIN, WARMUP_DOMAIN, CHECK_DOMAIN}) == 5
