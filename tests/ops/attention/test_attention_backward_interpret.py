"""The backward of packed attention against autograd of a dense float64 one: the operator on a CPU, and the Triton
kernels under the interpreter.

As in `test_kernels_interpret`, one test runs `Interpreted` in a process of its own, in float32. Memory that a kernel
leaves unwritten is NaN there, and so are the padding rows of every input.
"""

import os
from functools import partial

import pytest
import torch
from processes import run_interpreted
from scores_cases import SINKS
from scores_cases import dense as attended
from torch import Tensor

from lockstep import ops
from lockstep.ops.records import PLAIN, AttentionGradient, AttentionScores, Rotation

if os.environ.get("TRITON_INTERPRET") == "1":
    from lockstep.ops.attention import triton as attention_triton
    from lockstep.ops.attention import triton_backward as kernels
    from lockstep.ops.fused import triton_backward as fused_triton_backward
    from lockstep.ops.mla import triton as mla_triton
    from lockstep.ops.rope import triton as rope_triton

Segment = tuple[int, int, int]  # own length, prefix start, prefix length

LAYOUTS: dict[str, tuple[int, list[Segment]]] = {  # padding rows, segments
    "alone": (0, [(67, 0, 0)]),
    "one token": (0, [(1, 0, 0)]),
    "all padding": (5, [(0, 0, 0), (0, 0, 0)]),
    "no prefixes": (3, [(33, 0, 0), (1, 0, 0), (0, 0, 0), (32, 0, 0), (65, 0, 0)]),
    "a group": (3, [(70, 0, 0), (30, 0, 70), (27, 0, 70), (1, 0, 70), (0, 0, 0)]),  # prompts end within a tile
    "one-token prompt": (0, [(1, 0, 0), (40, 0, 1), (1, 0, 1), (33, 0, 1)]),
    "groups, one of them split": (
        9,
        [(33, 0, 0), (20, 0, 33), (41, 0, 33), (33, 94, 0), (7, 94, 33), (64, 0, 0), (32, 134, 64), (5, 134, 64)],
    ),
    "empty segments between": (1, [(0, 0, 0), (40, 0, 0), (0, 0, 0), (9, 0, 40), (0, 0, 40), (0, 0, 0), (12, 0, 40)]),
    "parts of a prompt": (2, [(70, 0, 0), (30, 0, 70), (20, 0, 33), (27, 5, 12), (20, 31, 39), (8, 0, 70)]),
    "a child of a child": (0, [(20, 0, 0), (50, 0, 20), (17, 20, 35), (9, 0, 20)]),
    "many segments": (4, [(3, 0, 0), *[(1 + i % 2, 0, 3) for i in range(20)]]),
}


def test_kernels_under_the_interpreter():
    run_interpreted(__file__)


def layout_tensors(segments: list[Segment]) -> tuple[Tensor, Tensor, Tensor]:
    lengths, start, length = (torch.tensor(column, dtype=torch.int32) for column in zip(*segments, strict=True))
    return torch.nn.functional.pad(lengths.cumsum(0).int(), (1, 0)), start, length


def inputs(name: str, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dO, and q, k, v as views of one buffer; NaN in the padding rows."""
    padding, segments = LAYOUTS[name]
    rows = sum(own for own, _, _ in segments)
    fused = torch.randn(rows + padding, heads + 2 * kv_heads, head_dim)
    grad = torch.randn(rows + padding, heads, head_dim)
    fused[rows:] = grad[rows:] = torch.nan
    return grad, fused[:, :heads], fused[:, heads:-kv_heads], fused[:, -kv_heads:]


def max_len(segments: list[Segment]) -> int:
    return max(own + length for own, _, length in segments)


def dense(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, segments: list[Segment], scores: AttentionScores = PLAIN
) -> list[Tensor]:
    """float64 gradients by autograd, a segment at a time over the keys it sees."""
    tensors = (q, k, v) if scores.sinks_N is None else (q, k, v, scores.sinks_N)
    leaves = [x.double().detach().requires_grad_() for x in tensors]
    if len(leaves) > 3:
        scores = scores._replace(sinks_N=leaves[3])
    end, total = 0, torch.zeros((), dtype=torch.float64)
    for own, start, length in segments:
        first, end = end, end + own
        rows = torch.cat((torch.arange(start, start + length), torch.arange(first, end)))
        out = attended(leaves[0][first:end], leaves[1][rows], leaves[2][rows], scores, length)
        total = total + (out * grad[first:end].double()).sum()
    return list(torch.autograd.grad(total, leaves))


def check(results: tuple[Tensor, ...], *inputs: Tensor, segments: list[Segment], scores: AttentionScores = PLAIN):
    rows, all_exact = sum(own for own, _, _ in segments), dense(*inputs, segments, scores)
    if scores.sinks_N is not None:
        *results, of_sinks = results
        torch.testing.assert_close(of_sinks.double(), all_exact.pop(), atol=1e-5, rtol=1e-4)
    for what, x, exact in zip(("dQ", "dK", "dV"), results, all_exact, strict=True):
        assert x.dtype == inputs[1].dtype and x.shape == exact.shape
        assert not x[rows:].any(), f"{what}: padding rows must be exactly zero"
        torch.testing.assert_close(
            x[:rows].double(), exact[:rows], atol=1e-5, rtol=1e-4, msg=lambda m, what=what: f"{what}: {m}"
        )


@pytest.mark.parametrize("name", LAYOUTS)
def test_operator_on_a_cpu(name):
    torch.manual_seed(0)
    segments = LAYOUTS[name][1]
    grad, q, k, v = inputs(name, 4, 2, 16)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = ops.attention_packed(*leaves, ops.Packed(*layout_tensors(segments), max_len(segments)))
    check(torch.autograd.grad(out, leaves, grad), grad, q, k, v, segments=segments)


class Interpreted:
    @pytest.fixture(autouse=True)
    def nan_for_unwritten(self):
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True)  # fills new memory
        yield
        torch.use_deterministic_algorithms(False)

    def run(self, name: str, heads: int, kv_heads: int, head_dim: int, scores: AttentionScores = PLAIN) -> None:
        segments = LAYOUTS[name][1]
        packed = ops.Packed(*layout_tensors(segments), max_len(segments))
        grad, q, k, v = inputs(name, heads, kv_heads, head_dim)
        x = AttentionGradient(grad, q, k, v, *attention_triton.packed(q, k, v, packed, scores))
        check(kernels.packed(x, packed, scores), grad, q, k, v, segments=segments, scores=scores)

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_layouts(self, name):
        self.run(name, 2, 1, 16)

    @pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 64), (6, 2, 24), (8, 1, 16), (1, 1, 128)])
    def test_heads(self, heads, kv_heads, head_dim):
        self.run("a group", heads, kv_heads, head_dim)

    @pytest.mark.parametrize(("norm", "offset"), [(True, 0.0), (True, 1.0), (False, 0.0)])
    def test_joined_with_the_rotation(self, norm, offset):
        """The bits of the separate kernels, their gradients added up as autograd does."""
        padding, segments = LAYOUTS["empty segments between"]
        tokens, head_dim, heads, kv_heads = padding + sum(own for own, _, _ in segments), 16, 4, 2
        packed = ops.Packed(*layout_tensors(segments), max_len(segments))
        qkv, cos_sin = torch.randn(tokens, heads + 2 * kv_heads, head_dim).flatten(1), torch.randn(tokens, head_dim)
        weights = (torch.randn(head_dim), torch.randn(head_dim)) if norm else (None, None)
        rotation = Rotation(*weights, cos_sin, heads, kv_heads, 1e-6)
        q, k = rope_triton.qk_norm_rope(qkv, rotation, offset).split((heads, kv_heads), 1)
        v = qkv.unflatten(1, (-1, head_dim))[:, heads + kv_heads :]
        out, lse = attention_triton.packed(q, k, v, packed)
        gradient = AttentionGradient(torch.randn_like(out), q, k, v, out, lse)
        dq, dk, dv = kernels.packed(gradient, packed)
        expected, *of_weights = rope_triton.qk_norm_rope_backward(torch.cat((dq, dk), 1), qkv, rotation, offset)
        expected = expected + torch.nn.functional.pad(dv.flatten(1), ((heads + kv_heads) * head_dim, 0))
        found, *joined_weights = fused_triton_backward.rotated_attention(gradient, packed, qkv, rotation, PLAIN, offset)
        assert all(map(torch.equal, joined_weights, of_weights))
        assert torch.equal(expected.view(torch.int32), (found + 0).view(torch.int32))  # a -0 is 0 in a sum
        assert not found[-padding:].any() and found[-padding:].signbit().any(), "some zeros of the padding are -0"

    @pytest.mark.parametrize("name", ["a group", "parts of a prompt"])
    def test_long_sequences(self, name, monkeypatch):
        monkeypatch.setattr(kernels, "LONG_CONTEXT", 0)
        self.run(name, 2, 1, 16)

    @pytest.mark.parametrize("long", [512, 0])
    def test_windows_sinks_and_caps(self, long, monkeypatch):
        monkeypatch.setattr(kernels, "LONG_CONTEXT", long)
        window = 20 if long else 2  # which begins with the last key of a tile, for the first row of a block
        self.run("groups, one of them split", 1, 1, 16, AttentionScores(window=window))
        self.run("parts of a prompt", 2, 1, 16, AttentionScores(SINKS[:2], 41, 0.4, 5.0))

    def test_many_tokens_are_launched(self, monkeypatch):
        """Of a grid only the first axis has more than 65,535 programs."""
        grids, tokens = [], 1 << 22

        class Kernel:
            def __getitem__(self, grid):
                grids.append(grid)
                return lambda *_, **__: None

        for name in ("_query_kernel", "_key_kernel"):
            monkeypatch.setattr(kernels, name, Kernel())
        empty = partial(torch.empty, device="meta", dtype=torch.bfloat16)
        by = ops.Packed(*(torch.empty(n, dtype=torch.int32, device="meta") for n in (65, 64, 64)), 4096)
        q, k, lse = empty(tokens, 16, 256), empty(tokens, 2, 256), empty(2, tokens, 8)
        kernels.packed(AttentionGradient(q, q, k, k, q, lse), by)
        x = ops.Latent(empty(tokens, 128, 512), empty(tokens, 128, 64), empty(tokens, 512), empty(tokens, 64), 1.0)
        mla_triton.packed_backward(x.q_TNR, x, by, x.q_TNR, empty(tokens, 128))
        assert len(grids) == 4 and all(size < 1 << 16 for _, *others in grids for size in others)

    @pytest.mark.parametrize(("query_rows", "keys", "long"), [(64, 64, 0), (16, 64, 512), (64, 16, 0), (128, 32, 0)])
    def test_tiles(self, query_rows, keys, long, monkeypatch):
        monkeypatch.setattr(kernels, "LONG_CONTEXT", long)
        monkeypatch.setattr(kernels, "SMALL_TILE", kernels.AttentionTile(query_rows, 4, 1, keys))
        self.run("groups, one of them split", 1, 1, 16)
        self.run("parts of a prompt", 3, 1, 16)
