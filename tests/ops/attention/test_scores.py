"""Windows, sinks, a scale and a soft cap on a CPU, in C and on the reference path: one word in each layout; right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from c_library import using
from flex_cases import LAYOUTS, same_bits
from scores_cases import SCORES, ScoresCase, check_gradients, dense, invariant

from lockstep import ops
from lockstep.ops.attention import reference as attention_reference
from lockstep.ops.native import library
from lockstep.ops.records import AttentionScores

BACKENDS = {"native": torch.float32, "reference": torch.float32, "reference bf16": torch.bfloat16}


@pytest.fixture(params=BACKENDS, autouse=True)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    if request.param == "native" and library.built is None:
        pytest.skip("the C library is not built")
    torch.manual_seed(0)
    with using(library.built if request.param == "native" else None):
        yield BACKENDS[request.param]


@pytest.mark.parametrize("name", SCORES)
def test_no_layout_changes_a_bit_and_it_is_dense_attention(name: str, dtype: torch.dtype) -> None:
    case = ScoresCase(200, 4, 2, 16, dtype)
    assert invariant(case, SCORES[name])
    if dtype == torch.float32:
        exact = case.exact(SCORES[name])
        torch.testing.assert_close(case.packed(SCORES[name]).double(), exact, atol=1e-5, rtol=1e-4)
        assert exact.abs().max() > 1


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 32), (6, 1, 24), (3, 3, 80)])
def test_no_layout_changes_a_bit_for_any_heads(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    scores = SCORES["all"]._replace(sinks_N=torch.randn(heads))
    assert invariant(ScoresCase(130, heads, kv_heads, head_dim, dtype), scores)


@pytest.mark.parametrize("name", ["window of 20", "window of a tile", "all"])
def test_pages_before_the_window_may_be_gone(name: str, dtype: torch.dtype) -> None:
    case, scores, page_size, rows = ScoresCase(200, 4, 2, 16, dtype), SCORES[name], 7, [100, 150, 191, 199]
    whole, (k, v, table) = case.packed(scores), case.cache(page_size, 200, torch.nan)
    tables = table.repeat(len(rows), 1)
    for pages, row in zip(tables, rows, strict=True):
        pages[: scores.first_key(row) // page_size] = -1
    steps, context = torch.arange(len(rows) + 1).int(), torch.tensor(rows).int() + 1
    by = ops.Paged(tables, steps, context, 1, 200)
    out = ops.attention_paged(case.q[rows], ops.KVPages(k, v), by, ops.NO_GROUPS, scores)
    assert same_bits(out, whole[rows])

    page = scores.first_key(150) // page_size
    table[0, :page] = -1
    by = ops.Paged(table, torch.tensor([0, 50]).int(), torch.tensor([200]).int(), 50, 200)
    out = ops.attention_paged(case.q[150:], ops.KVPages(k, v), by, ops.NO_GROUPS, scores)
    assert same_bits(out, whole[150:])


@pytest.mark.parametrize("window", [0, 100, 3000])
def test_windows_across_splits(window: int, dtype: torch.dtype) -> None:
    length = 2 * attention_reference.KEY_SPLIT + 70
    case, scores = ScoresCase(length, 2, 1, 16, dtype), AttentionScores(torch.tensor([1.0, -5.0]), window)
    rows = [4031, 4095, 4096, 4097, 4160, 7100, 8191, 8192, 8260, length - 1]
    q = case.q[rows]
    decoded, (k, v, table) = case.decoded(scores, 64, rows), case.cache(64, length, torch.nan)
    for start, end in ((4090, 4200), (8100, length)):
        lengths = (case.int32(0, end - start), case.int32(end), end - start, length)
        by = ops.Paged(table, *lengths)
        chunk = ops.attention_paged(case.q[start:end], ops.KVPages(k, v), by, ops.NO_GROUPS, scores)
        for i, row in enumerate(rows):
            if start <= row < end:
                assert same_bits(chunk[row - start], decoded[i])
    if dtype == torch.float32:
        for i, row in enumerate(rows):
            first = scores.first_key(row)
            exact = dense(q[i : i + 1].double(), case.k[first : row + 1].double(), case.v[first : row + 1].double(),
                          scores._replace(window=0), row - first)  # fmt: skip
            torch.testing.assert_close(decoded[i].double(), exact[0], atol=1e-5, rtol=1e-4)


def test_a_wrong_window_is_noticed(dtype: torch.dtype) -> None:
    """The control: with a key more each row is another."""
    case, rows, flat = ScoresCase(200, 4, 2, 16, dtype), [100, 150, 199], AttentionScores(scale=0.02)
    whole = case.packed(flat._replace(window=70))
    for row in rows:
        assert not same_bits(case.decoded(flat._replace(window=71), 16, [row]), whole[[row]])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["window of 20", "cap", "sinks", "all"])
def test_gradients_are_those_of_dense_attention(layout: str, name: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16:
        return
    check_gradients(LAYOUTS[layout], SCORES[name])
