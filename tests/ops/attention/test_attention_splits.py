"""Contexts of several splits on a CPU, in C and on the reference path: each layout gives the bits of every other, and a
context of one split those it had before there were any.
"""

import pytest
import torch
from c_library import using
from torch import Tensor

from lockstep import ops
from lockstep.ops.attention import reference as attention_reference
from lockstep.ops.attention.operator import KEY_SPLIT
from lockstep.ops.native import library

LENGTH, PAGE_SIZE = 2 * KEY_SPLIT + 70, 16
ROWS = [0, 63, KEY_SPLIT - 1, KEY_SPLIT, KEY_SPLIT + 1, 5000, 2 * KEY_SPLIT - 1, 2 * KEY_SPLIT, LENGTH - 1]
CUTS = [100, KEY_SPLIT - 3, KEY_SPLIT + 50, 2 * KEY_SPLIT + 1]


@pytest.fixture(params=["reference", "native"], autouse=True)
def backend(request: pytest.FixtureRequest):
    if request.param == "native" and library.built is None:
        pytest.skip("the C library is not built")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with using(library.built if request.param == "native" else None):
        yield
    torch.set_num_threads(threads)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.attention_packed(q, k, v, ops.Packed(int32(0, len(q)), int32(0), int32(0), len(q)))


def test_every_layout_has_the_same_splits():
    q, k, v = (torch.randn(LENGTH, heads, 16) * torch.randn(LENGTH, heads, 16).exp() for heads in (2, 1, 1))
    whole = packed(q, k, v)
    pages = torch.randperm(-(-LENGTH // PAGE_SIZE)).int()
    caches = [torch.full((len(pages), PAGE_SIZE, 1, 16), torch.nan) for _ in range(2)]
    position = torch.arange(LENGTH)
    ops.write_kv(k, v, ops.KVPages(*caches), pages[position // PAGE_SIZE].long() * PAGE_SIZE + position % PAGE_SIZE)

    count = len(ROWS)
    starts, context = torch.arange(count + 1).int(), int32(*ROWS) + 1
    table = pages.expand(count, -1).contiguous()
    assert same_bits(
        ops.attention_paged(q[ROWS], ops.KVPages(*caches), ops.Paged(table, starts, context, 1, LENGTH)), whole[ROWS]
    )
    for start, end in zip([0, *CUTS], [*CUTS, LENGTH], strict=True):
        lengths = (int32(0, end - start), int32(end), end - start, LENGTH)
        chunk = ops.attention_paged(q[start:end], ops.KVPages(*caches), ops.Paged(pages.unsqueeze(0), *lengths))
        assert same_bits(chunk, whole[start:end])

    assert same_bits(packed(*(x[:KEY_SPLIT] for x in (q, k, v))), whole[:KEY_SPLIT])
    for row in ROWS:
        scores = (k[: row + 1, 0].double() @ q[row].double().t()) / 4
        exact = scores.softmax(0).t() @ v[: row + 1, 0].double()
        torch.testing.assert_close(whole[row].double(), exact, atol=1e-5, rtol=1e-4)


def test_a_split_may_have_one_key():
    """Of equal scores the output is the mean of the values, of which the last one alone is not zero."""
    context, pages = KEY_SPLIT + 1, KEY_SPLIT // PAGE_SIZE + 1
    k_cache, v_cache = torch.zeros(2, pages, PAGE_SIZE, 1, 16).unbind()
    v_cache[-1, 0] = context
    table, lengths = torch.arange(pages).int().unsqueeze(0), (int32(0, 1), int32(context), 1, context)
    out = ops.attention_paged(torch.randn(1, 2, 16), ops.KVPages(k_cache, v_cache), ops.Paged(table, *lengths))
    torch.testing.assert_close(out, torch.ones(1, 2, 16))


def test_a_split_of_its_own_size_is_one_softmax(monkeypatch: pytest.MonkeyPatch):
    """The control: with other splits the same keys are another sum, in the rows that have several and in no other."""
    q, k, v = (torch.randn(300, heads, 16) for heads in (2, 1, 1))
    with using(None):
        whole = packed(q, k, v)
        monkeypatch.setattr(attention_reference, "KEY_SPLIT", 128)
        short = packed(q, k, v)
    assert same_bits(short[:128], whole[:128]) and not same_bits(short[128:], whole[128:])
    torch.testing.assert_close(short, whole)
