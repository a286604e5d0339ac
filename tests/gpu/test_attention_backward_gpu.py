"""The backward of packed attention on a GPU: its error beside the torch path's, its bits when repeated and captured,
and its time (`-s` shows the tables). Head shapes are Qwen3-0.6B's where a test does not say otherwise.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from attention_cases import DEVICE, HEAD_DIM, HEADS, KV_HEADS, PEAK_TFLOPS, capture, captured_milliseconds, milliseconds
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from values import relative_error

from lockstep import ops
from lockstep.ops.attention import reference

Segment = tuple[int, int, int]  # own length, prefix start, prefix length


class Packing(NamedTuple):
    """Segments and padding rows; empty segments fill up `segments` of the layout to `bound`."""

    segments: list[Segment]
    padding: int
    bound: int

    @property
    def rows(self) -> int:
        return sum(own for own, _, _ in self.segments)

    @property
    def max_len(self) -> int:
        return max(own + length for own, _, length in self.segments)

    def layout(self) -> tuple[Tensor, Tensor, Tensor]:
        segments = self.segments + [(0, 0, 0)] * (self.bound - len(self.segments))
        own, start, length = torch.tensor(segments, dtype=torch.int32).unbind(1)
        cu_seqlens = F.pad(own.cumsum(0).int(), (1, 0))
        return cu_seqlens.to(DEVICE), start.contiguous().to(DEVICE), length.contiguous().to(DEVICE)


def groups(prompts: list[int], completions: list[int], padding: int = 0, bound: int = 0) -> Packing:
    """Every prompt once, each followed by all the completions."""
    segments: list[Segment] = []
    row = 0
    for prompt in prompts:
        segments += [(prompt, 0, 0), *[(own, row, prompt) for own in completions]]
        row += prompt + sum(completions)
    return Packing(segments, padding, bound or len(segments))


def alone(lengths: list[int], padding: int = 0) -> Packing:
    return Packing([(length, 0, 0) for length in lengths], padding, len(lengths))


SEED = groups([145] * 5, [100] * 8, padding=5120 - 4725, bound=48)  # as the trainer packs it: buckets of both
PACKINGS = {
    "seed workload": SEED,
    "odd groups": groups([1, 63, 64, 65, 200], [1, 127, 0, 64, 130, 17], padding=3, bound=40),
    "parts of a prompt": Packing([(300, 0, 0), (90, 0, 300), (70, 0, 64), (50, 77, 100), (128, 0, 300)], 10, 7),
    "alone": alone([1, 63, 64, 65, 145, 0, 257, 777], padding=19),
    "long": alone([2048, 1500]),
}


def inputs(
    packing: Packing,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dO, q, k, v; queries and keys are views of one buffer, as the model hands them over. Padding rows are NaN."""
    qk, v, grad = (
        torch.randn(packing.rows + packing.padding, n, head_dim, device=DEVICE).to(dtype)
        for n in (heads + kv_heads, kv_heads, heads)
    )
    for x in (qk, v, grad):
        x[packing.rows :] = torch.nan
    return grad, qk[:, :heads], qk[:, heads:], v


def gradients(packing: Packing, grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = ops.attention_packed(*leaves, ops.Packed(*packing.layout(), packing.max_len))
    return torch.autograd.grad(out, leaves, grad)


def torch_path(packing: Packing, grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return reference.packed_backward((grad, q, k, v), ops.Packed(*packing.layout(), packing.max_len))[:3]


def dense(packing: Packing, grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """float64 gradients by autograd, a segment at a time over the keys it sees."""
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    totals = [torch.zeros_like(x) for x in leaves]
    group, scale, end = q.shape[1] // k.shape[1], q.shape[2] ** -0.5, 0
    for own, start, length in packing.segments:
        first, end = end, end + own
        rows = torch.cat((torch.arange(start, start + length), torch.arange(first, end))).to(DEVICE)
        keys, values = (x[rows].repeat_interleave(group, dim=1) for x in leaves[1:])
        scores = torch.einsum("qnh,knh->nqk", leaves[0][first:end], keys) * scale
        hidden = torch.ones(own, length + own, dtype=torch.bool, device=DEVICE).triu(length + 1)
        p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        loss = (torch.einsum("nqk,knh->qnh", p, values) * grad[first:end].double()).sum()
        for total, x in zip(totals, torch.autograd.grad(loss, leaves), strict=True):
            total += x
    return totals


@pytest.mark.parametrize("name", PACKINGS)
def test_error_is_no_larger_than_the_torch_path_s(name):
    packing = PACKINGS[name]
    x = inputs(packing)
    rows = slice(packing.rows)
    for what, ours, torch_s, exact in zip(
        ("dQ", "dK", "dV"), gradients(packing, *x), torch_path(packing, *x), dense(packing, *x), strict=True
    ):
        assert not ours[packing.rows :].any(), f"{what}: padding rows must be exactly zero"
        error, torch_error = relative_error(ours[rows], exact[rows]), relative_error(torch_s[rows], exact[rows])
        print(f"{name:20s} {what} ||err||/||exact||: kernel {error:.2e}, torch path {torch_error:.2e}")
        assert error < 5e-3 and error < 1.05 * torch_error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 64), (6, 2, 80), (8, 1, 16), (9, 3, 32), (3, 3, 24), (16, 2, 128)]
)
def test_head_shapes(heads, kv_heads, head_dim, dtype):
    packing = PACKINGS["odd groups"]
    x = inputs(packing, heads, kv_heads, head_dim, dtype)
    rows = slice(packing.rows)
    for what, ours, exact in zip(("dQ", "dK", "dV"), gradients(packing, *x), dense(packing, *x), strict=True):
        assert ours.dtype == dtype and not ours[packing.rows :].any()
        assert relative_error(ours[rows], exact[rows]) < (5e-3 if dtype == torch.bfloat16 else 1e-5), what


@pytest.mark.parametrize("name", ["seed workload", "odd groups", "long"])
def test_same_bits_every_time(census, name):
    packing = PACKINGS[name]
    x = inputs(packing)
    first = gradients(packing, *x)
    other = torch.randn(4096, 4096, device=DEVICE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        with torch.cuda.stream(stream):  # a busy neighbour moves the programs about
            other = (other @ other).clamp(-1, 1)
        for what, a, b in zip(("dQ", "dK", "dV"), gradients(packing, *x), first, strict=True):
            assert census(f"attention backward: {what} again", a, b) == 0


def test_another_order_is_caught(census):
    """A prompt's completions in reverse: the same sum, in another order."""
    packing = groups([145], [100] * 8)
    x = inputs(packing)
    order = torch.cat([torch.arange(145), *[torch.arange(100) + 145 + 100 * i for i in reversed(range(8))]]).to(DEVICE)
    dk, again = gradients(packing, *x)[1], gradients(packing, *(t[order] for t in x))[1]
    assert census("CONTROL attention backward: dK of a prompt, completions reversed", dk[:145], again[:145]) > 0
    assert census("attention backward: dK of completions, reversed", dk[order[145:]], again[145:]) == 0


def test_captured_is_eager(census):
    """One graph serves other values and another packing of the same shapes: nothing was read on the host."""
    first, second = SEED, groups([64, 200, 1], [1, 400, 37, 128, 300, 200], padding=5120 - 3463, bound=48)
    x, layout = [t.clone() for t in inputs(first)], [t.clone() for t in first.layout()]
    bound = max(first.max_len, second.max_len)

    def step() -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in x[1:]]
        return torch.autograd.grad(ops.attention_packed(*leaves, ops.Packed(*layout, bound)), leaves, x[0])

    graph, captured = capture(step)
    for packing in (first, second):
        for to, new in zip([*x, *layout], [*inputs(packing), *packing.layout()], strict=True):
            to.copy_(new)
        graph.replay()
        for what, a, b in zip(("dQ", "dK", "dV"), captured, step(), strict=True):
            assert census(f"attention backward: {what} replayed = eager", a, b) == 0


def backward_milliseconds(attend: Callable[..., Tensor], grad: Tensor, leaves: list[Tensor]) -> float:
    """Forward and backward in a graph less the forward in one."""
    both = captured_milliseconds(lambda: torch.autograd.grad(attend(*leaves), leaves, grad))
    return both - captured_milliseconds(lambda: attend(*leaves))


def flash_milliseconds(packing: Packing) -> float:
    """Backward of torch's FlashAttention on the same sequences, prompts repeated; they have one length."""
    own, length = packing.segments[-1][0], packing.segments[-1][2]
    batch = sum(p_len == length for _, _, p_len in packing.segments)
    grad, q, k, v = (
        torch.randn(batch, heads, own + length, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
        for heads in (HEADS, HEADS, KV_HEADS, KV_HEADS)
    )
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return backward_milliseconds(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            grad,
            [x.requires_grad_() for x in (q, k, v)],
        )


@pytest.mark.timed
@pytest.mark.parametrize(
    ("name", "packing", "limit"),
    [
        ("seed workload", SEED, 0.25),
        ("40 x 245", alone([245] * 40), None),
        ("16 x 2,048", alone([2048] * 16), None),
        ("2 x 16,384", alone([16384] * 2), None),
    ],
)
def test_speed(name, packing, limit):
    """The seed workload within `limit` ms, the others within FlashAttention's time / 0.9."""
    grad, q, k, v = inputs(packing)
    layout = packing.layout()
    ours = backward_milliseconds(
        lambda q, k, v: ops.attention_packed(q, k, v, ops.Packed(*layout, packing.max_len)),
        grad,
        [x.detach().requires_grad_() for x in (q, k, v)],
    )
    flash = flash_milliseconds(packing)
    short = packing.max_len < 16384  # the torch path holds all scores of a segment
    plain = milliseconds(lambda: torch_path(packing, grad, q, k, v), 2) if short else float("nan")
    pairs = sum(own * length + own * (own + 1) / 2 for own, _, length in packing.segments)
    flops = 5 * 2 * pairs * HEADS * HEAD_DIM  # five products
    floor = flops / PEAK_TFLOPS / 1e9
    print(
        f"\n{name:14s} ms: kernel {ours:.3f} ({flops / ours / 1e9:.0f} TFLOP/s), floor {floor:.3f}, "
        f"FlashAttention {flash:.3f} ({ours / flash:.2f}x its time), torch path {plain:.1f}"
    )
    assert ours < (limit if limit is not None else flash / 0.9)
