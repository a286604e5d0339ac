"""Windows, sinks, a scale and a soft cap in native kernels on a GPU: the same bits in every layout, and gradients."""

import pytest
import torch
from flex_cases import LAYOUTS, edges
from scores_cases import SCORES, ScoresCase, check_gradients
from torch import Tensor

from lockstep import ops
from lockstep.ops.attention import reference
from lockstep.ops.attention.operator import attention_packed_backward, attention_sinks_packed_backward
from lockstep.ops.records import AttentionGradient, AttentionScores

DEVICE = torch.device("cuda")
CHOSEN = ["window of 1", "window of 20", "window of a tile", "window of 65", "window beyond the context", "all"]


def scores_of(name: str, heads: int) -> AttentionScores:
    scores = SCORES[name]
    return (
        scores if scores.sinks_N is None else scores._replace(sinks_N=3 * torch.randn(heads, device=DEVICE).bfloat16())
    )


def case_of(length: int, heads: int = 16, kv_heads: int = 8, head_dim: int = 128) -> ScoresCase:
    return ScoresCase(length, heads, kv_heads, head_dim, torch.bfloat16, DEVICE)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("length", [300, 700])
@pytest.mark.parametrize("name", CHOSEN)
def test_no_layout_changes_a_bit(census, name, length):
    case, scores = case_of(length), scores_of(name, 16)
    whole, rows = case.packed(scores), edges(length) * 5
    assert error(whole, case.exact(scores)) < 1e-2
    for before, after in ((3, 40), (1000, 129)):
        assert census("scores: a segment among others = alone", case.among(scores, before, after), whole) == 0
    for page_size in (16, 64, 100):
        for cuts in ([], [1, 2], [63, 64, 65], [100, 256], list(range(50, length, 50))):
            assert census("scores: chunked prefill = packed", case.prefilled(scores, page_size, cuts), whole) == 0
        assert census("scores: decode = packed", case.decoded(scores, page_size, rows), whole[rows]) == 0
        for row in (0, 64, length - 1):
            assert census("scores: decode alone = packed", case.decoded(scores, page_size, [row]), whole[[row]]) == 0
    for prefix in (1, 64, 100, length - 1):
        assert census("scores: shared prefix = repeated", case.after_prefix(scores, prefix), whole[prefix:]) == 0


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 4, 256), (64, 8, 64), (5, 1, 24), (40, 8, 80)])
def test_other_heads(census, heads, kv_heads, head_dim):
    case, scores = case_of(600, heads, kv_heads, head_dim), scores_of("all", heads)
    whole, rows = case.packed(scores), edges(600)
    assert error(whole, case.exact(scores)) < 1e-2
    assert census("scores: decode = packed, other heads", case.decoded(scores, 16, rows), whole[rows]) == 0
    assert census("scores: prefill = packed, other heads", case.prefilled(scores, 16, [99, 300]), whole) == 0


@pytest.mark.parametrize("window", [0, 100, 3000, 4096, 5000])
def test_long_contexts(census, window):
    case, scores = case_of(9000, 4, 2), AttentionScores(torch.randn(4, device=DEVICE).bfloat16(), window)
    whole, rows = case.packed(scores), [0, 63, 64, 2999, 3000, 3001, 4095, 4096, 4097, 4195, 7100, 8191, 8192, 8999]
    assert census("scores: long decode = packed", case.decoded(scores, 64, rows), whole[rows]) == 0
    assert census("scores: long prefill = packed", case.prefilled(scores, 16, [100, 4095, 8200]), whole) == 0


@pytest.mark.parametrize("name", ["window of 20", "window of 65", "all"])
def test_groups_and_pages_that_are_gone(census, name):
    case, scores, page_size, rows = case_of(700), scores_of(name, 16), 16, [400, 450, 511, 699]
    whole, (k, v, table) = case.packed(scores), case.cache(page_size, 700, torch.nan)
    tables, steps, context = table.repeat(len(rows), 1), case.int32(*range(len(rows) + 1)), case.int32(*rows) + 1
    by, cache = ops.Paged(tables, steps, context, 1, 700), ops.KVPages(k, v)
    groups = ops.PrefixGroups(case.int32(0, 2, 1, 3, -1).unsqueeze(0), case.int32(*[400] * 4))
    grouped = ops.attention_paged(case.q[rows], cache, by, groups, scores)
    assert census("scores: decode in groups = packed", grouped, whole[rows]) == 0
    for pages, row in zip(tables, rows, strict=True):
        pages[: scores.first_key(row) // page_size] = 1 << 20
    gone = ops.attention_paged(case.q[rows], cache, by, ops.NO_GROUPS, scores)
    assert census("scores: without the pages before a window", gone, whole[rows]) == 0


@pytest.mark.parametrize("bound", [700, 8200])
def test_decode_is_its_parts(census, bound):
    heads, kv_heads, head_dim, page, scores = 16, 8, 128, 16, scores_of("all", 16)
    contexts = [n for n in (1, 16, 63, 64, 65, 76, 77, 78, 200, 700, 4095, 4096, 4097, 4200, 8200) if n <= bound]
    count, pages, context = len(contexts), -(-bound // page), torch.tensor(contexts, device=DEVICE).int()
    table = torch.randperm(count * pages, device=DEVICE).int().view(count, pages)
    position, starts = context.long() - 1, torch.arange(count + 1, device=DEVICE).int()
    slots = table.gather(1, (position // page).unsqueeze(1)).squeeze(1) * page + position % page
    caches = torch.randn(2, count * pages, page, kv_heads, head_dim, device=DEVICE).bfloat16()
    expected, qkv = caches.clone(), torch.randn(count, (heads + 2 * kv_heads) * head_dim, device=DEVICE).bfloat16()
    weights = [torch.randn(head_dim, device=DEVICE).bfloat16() for _ in range(2)]
    rotation = ops.Rotation(*weights, torch.randn(count, head_dim, device=DEVICE), heads, kv_heads, 1e-6)
    with torch.no_grad():
        by = ops.Contexts(table, context, bound)
        out = ops.attention_decode(qkv, rotation, ops.KVPages(*caches), slots, by, ops.NO_GROUPS, scores)
        q = ops.qk_norm_rope_write_kv(qkv, rotation, ops.KVPages(*expected), slots)
        paged = ops.Paged(table, starts, context, 1, bound)
        apart = ops.attention_paged(q, ops.KVPages(*expected), paged, ops.NO_GROUPS, scores)
    assert census("scores: attention_decode = its parts", out, apart) == 0
    assert census("scores: attention_decode: cache", caches, expected) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["window of 20", "cap", "sinks", "all"])
def test_gradients_are_those_of_dense_attention(layout, name):
    check_gradients(LAYOUTS[layout], SCORES[name], str(DEVICE))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (8, 4, 256), (16, 2, 64)])
@pytest.mark.parametrize("name", ["window of 65", "all"])
def test_gradients_of_long_sequences(census, name, heads, kv_heads, head_dim):
    """In bfloat16, with the tiles of long sequences, a prompt's samples among them; the same every time."""
    scores, lengths, prefix = scores_of(name, heads)._replace(window=200), [900, 700, 250, 300], [0, 0, 900, 900]
    case = case_of(sum(lengths) + 5, heads, kv_heads, head_dim)
    cu_seqlens = case.int32(*(sum(lengths[:i]) for i in range(len(lengths) + 1)))
    by = ops.Packed(cu_seqlens, case.int32(0, 0, 0, 0), case.int32(*prefix), 1200)
    q, k = (x / x.float().std(-1, keepdim=True).bfloat16() for x in (case.q, case.k))
    leaves = [x.detach().requires_grad_() for x in (q, k, case.v)]
    grad = torch.randn_like(case.q)
    given = leaves if scores.sinks_N is None else [*leaves, scores.sinks_N.requires_grad_()]
    found, again = (torch.autograd.grad(ops.attention_packed(*leaves, by, scores), given, grad) for _ in range(2))
    exact = reference.packed_backward((grad, q, k, case.v), by, scores)
    for name, x, y, same in zip(("dq", "dk", "dv", "dsinks"), found, exact, again, strict=False):
        assert census(f"scores: {name}, again", x, same) == 0
        assert error(x, y) < 2e-2, name
        assert name == "dsinks" or not x[-5:].any()


def test_the_backward_operators_are_those_of_the_registry():
    """They compute on a GPU what autograd asks of them; a wrong window is another gradient."""
    case = case_of(300)
    by = ops.Packed(case.int32(0, 300), case.int32(0), case.int32(0), 300)
    for scores in (AttentionScores(window=70), scores_of("all", 16)):
        out, lse = torch.ops.lockstep.attention_packed(case.q, case.k, case.v, *by, *scores)
        x = AttentionGradient(torch.randn_like(out), case.q, case.k, case.v, out, lse)
        operator = attention_packed_backward if scores.sinks_N is None else attention_sinks_packed_backward
        right, wrong = (operator(x, by, s) for s in (scores, scores._replace(window=scores.window + 1)))
        assert not torch.equal(right[0], wrong[0]) and not torch.equal(right[1], wrong[1])
