"""FlexAttention's bits on a GPU, the same for every layout; its gradients; and both roles in recorded graphs."""

from dataclasses import replace

import pytest
import torch
from both_roles import assert_roles_agree_over_updates, drawn
from flex_cases import MASKS, Case, Mask, dense, edges

from lockstep import ops
from lockstep.config import CompileConfig, GeneratorConfig
from lockstep.graph import Runtime
from lockstep.models.init import ARCHITECTURES
from lockstep.session.attention import set_attention

DEVICE = torch.device("cuda")
CHOSEN = ["causal", "window of 100", "dilated in a window", "rows without keys"]


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch.compiler.reset()  # torch bounds how often one piece of code is compiled
    with torch.no_grad():
        yield


def case_of(length: int, heads: int = 16, kv_heads: int = 8, head_dim: int = 128) -> Case:
    return Case(length, heads, kv_heads, head_dim, torch.bfloat16, DEVICE)


@pytest.mark.parametrize("name", CHOSEN)
def test_no_layout_changes_a_bit(census, name):
    case, mask = case_of(300), MASKS[name]
    whole = case.packed(mask)
    assert (whole.double() - case.exact(mask)).norm() / case.exact(mask).norm() < 1e-2
    for before, after in ((3, 40), (64, 1), (1000, 129)):
        assert census("flex: a segment among others = alone", case.among(mask, before, after), whole) == 0
    for page_size in (64, 128):
        for cuts in ([], [1, 2], [63, 64, 65], [100, 256], list(range(50, 300, 50))):
            prefilled = case.prefilled(mask, page_size, cuts, rest=0.0)
            assert census("flex: chunked prefill = packed", prefilled, whole) == 0
        rows = edges(300) * 5
        assert census("flex: decode = packed", case.decoded(mask, page_size, rows), whole[rows]) == 0
        for row in (0, 64, 299):
            alone = case.decoded(mask, page_size, [row])
            assert census("flex: decode alone = packed", alone, whole[row : row + 1]) == 0
    for prefix in (1, 64, 100, 299):
        assert census("flex: shared prefix = repeated", case.after_prefix(mask, prefix), whole[prefix:]) == 0


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 64), (12, 4, 64), (6, 1, 128)])
def test_other_heads(census, heads, kv_heads, head_dim):
    case, mask = case_of(200, heads, kv_heads, head_dim), MASKS["dilated in a window"]
    whole, rows = case.packed(mask), edges(200)
    assert (whole.double() - case.exact(mask)).norm() / case.exact(mask).norm() < 1e-2
    assert census("flex: decode = packed, other heads", case.decoded(mask, 64, rows), whole[rows]) == 0


def test_long_contexts(census):
    case, mask = case_of(9000, 4, 2), Mask(3000, "dilated")
    whole, rows = case.packed(mask), [0, 63, 64, 2999, 3000, 3001, 4095, 4096, 8191, 8999]
    assert census("flex: long decode = packed", case.decoded(mask, 64, rows), whole[rows]) == 0
    assert census("flex: long prefill = packed", case.prefilled(mask, 128, [100, 4095, 8200], 0.0), whole) == 0


def test_other_tiles_are_caught(census, monkeypatch):
    from lockstep.ops.attention import triton_flex

    case = case_of(300)
    whole = case.packed(Mask())
    triton_flex._compiled_attend.cache_clear()
    torch.compiler.reset()
    monkeypatch.setitem(triton_flex.KERNEL_OPTIONS, "fwd_BLOCK_N", 32)
    assert census("CONTROL flex: key tiles of 32", case.packed(Mask()), whole) > 0
    triton_flex._compiled_attend.cache_clear()


@pytest.mark.parametrize("name", CHOSEN)
def test_gradients(census, name):
    mask, lengths, prefix = MASKS[name], [145, 100, 37, 64], 145
    q, k, v, grad = (torch.randn(sum(lengths) + 11, n, 128, device=DEVICE).bfloat16() for n in (16, 8, 8, 16))
    case = case_of(1)
    starts = case.int32(0, *torch.tensor(lengths).cumsum(0).tolist())
    by = ops.Packed(starts, case.int32(0, 0, 0, 0), case.int32(0, prefix, prefix, prefix), prefix + 100)
    tiles = ops.flex_tiles_packed(by, ops.FlexSizes(len(q), 16, 8), mask.window)

    def gradients():
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            return torch.autograd.grad(ops.flex_packed(*leaves, by, ops.FlexMask(*mask, tiles)), leaves, grad)

    found = gradients()
    for _ in range(3):
        for x, again in zip(found, gradients(), strict=True):
            assert census("flex: the backward repeats its bits", again, x) == 0
    with torch.enable_grad():
        exact_leaves, total = [x.double().requires_grad_() for x in (q, k, v)], 0.0
        for i, own in enumerate(lengths):
            begin, before = int(starts[i]), int(by.prefix_len_S[i])
            at = torch.cat((torch.arange(before), torch.arange(begin, begin + own))).to(DEVICE)
            attended = dense(exact_leaves[0][begin : begin + own], *(x[at] for x in exact_leaves[1:]), mask, before)
            total = total + (attended * grad[begin : begin + own].double()).sum()
        exact = torch.autograd.grad(total, exact_leaves)
    for x, y in zip(found, exact, strict=True):
        assert not x[sum(lengths) :].any()
        assert (x.double() - y).norm() <= 2e-2 * max(y.norm(), 1.0)


@pytest.mark.parametrize("cudagraph_mode", ["full", "piecewise"])
def test_generator_and_trainer_agree_over_updates(cudagraph_mode):
    config = replace(
        ARCHITECTURES["qwen3-0.6b"], num_layers=3, vocab_size=4096, sliding_window=50, sliding_layers=(0, 2)
    )
    model = drawn(config, DEVICE)
    set_attention(model, "flex", "flex_cases:dilated")
    runtime = Runtime(CompileConfig("step", cudagraph_mode), DEVICE)
    assert_roles_agree_over_updates(model, runtime, GeneratorConfig(page_size=64), 65536)
