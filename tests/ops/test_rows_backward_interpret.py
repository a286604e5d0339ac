"""The backward kernels of the row operators under Triton's interpreter, against autograd of float64 formulas.

As in `test_kernels_interpret`, one test runs `Interpreted` in a process of its own, in float32. Memory that a kernel
leaves unwritten is NaN there.
"""

import mmap
import os
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import run_interpreted
from torch import Tensor

from lockstep import ops
from lockstep.ops.activation.operator import silu_mul_backward
from lockstep.ops.embedding.operator import gather_rows_backward
from lockstep.ops.norm.operator import rms_norm_backward
from lockstep.ops.records import ACTIVATIONS, Rotation
from lockstep.ops.rope.operator import qk_norm_rope_backward

if os.environ.get("TRITON_INTERPRET") == "1":
    from lockstep.ops import rows as row_kernels
    from lockstep.ops.activation import triton as activation_triton
    from lockstep.ops.embedding import triton_backward as embedding_triton_backward
    from lockstep.ops.fused import triton_backward as fused_triton_backward
    from lockstep.ops.norm import triton as norm_triton
    from lockstep.ops.rope import triton as rope_triton

ROWS = (1, 16, 35)  # one, a whole program, programs and a part of one


def test_kernels_under_the_interpreter():
    run_interpreted(__file__)


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def exact_qk(qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos_sin: Tensor, heads: int, kv_heads: int):
    qk = qkv[:, : (heads + kv_heads) * cos_sin.shape[1]].unflatten(1, (heads + kv_heads, -1))
    if q_weight is not None and k_weight is not None:
        qk = exact_norm(qk, torch.cat((q_weight.expand(heads, -1), k_weight.expand(kv_heads, -1))), 1e-6)
    (cos, sin), (first, second) = cos_sin.double().unsqueeze(1).chunk(2, -1), qk.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def exact_gated(x: Tensor, activation: str) -> Tensor:
    """As transformers writes them."""
    gate, up = x.chunk(2, 1)
    if activation == "swiglu_clamped":
        gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    function = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}[activation]
    return function(gate) * up


def exact_gradients(function, grad: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """By autograd in float64."""
    doubles = [x.double().detach().requires_grad_() for x in leaves]
    return torch.autograd.grad(function(*doubles), doubles, grad.double())


def assert_near(results: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    assert len(results) == len(exact)
    for result, expected in zip(results, exact, strict=True):
        assert result.dtype == torch.float32 and result.shape == expected.shape
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=2e-6 * float(expected.abs().max()))


class Interpreted:
    @pytest.fixture(autouse=True)
    def nan_for_unwritten(self):
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True)  # fills new memory
        yield
        torch.use_deterministic_algorithms(False)

    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize("width", [8, 40, 128])
    def test_rms_norm(self, rows, width):
        grad, x = torch.randn(rows, width), torch.randn(rows, 2 * width)[:, :width]
        weight = torch.randn(width)
        exact = exact_gradients(lambda x, w: exact_norm(x, w, 1e-6), grad, x, weight)
        separate = norm_triton.rms_norm_backward(grad, x, weight, 1e-6)
        assert_near(separate, exact)
        other = torch.randn(rows, 3 * width)[:, width : 2 * width]
        joined = norm_triton.rms_norm_backward_add(grad, x, weight, 1e-6, other)
        assert torch.equal(joined[0], separate[0] + other) and torch.equal(joined[1], separate[1])
        more = norm_triton.rms_norm_backward_add(grad, x, weight - 1, 1e-6, other, 1.0)
        expected = norm_triton.rms_norm_backward(grad, x, (weight - 1) + 1, 1e-6)
        assert torch.equal(more[0], expected[0] + other) and torch.equal(more[1], expected[1])

    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (3, 1, 24), (1, 1, 8)])
    @pytest.mark.parametrize("norm", [True, False])
    def test_qk_norm_rope(self, rows, heads, kv_heads, head_dim, norm):
        qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim)
        grad = torch.randn(rows, heads + kv_heads, head_dim)
        weights = (torch.randn(head_dim), torch.randn(head_dim)) if norm else ()
        cos_sin = ops.rope_table.__wrapped__(torch.arange(rows) * 7, torch.rand(head_dim // 2))

        def function(qkv, q_weight=None, k_weight=None):
            return exact_qk(qkv, q_weight, k_weight, cos_sin, heads, kv_heads)

        exact = exact_gradients(function, grad, qkv, *weights)
        by = Rotation(*(weights or (None, None)), cos_sin, heads, kv_heads, 1e-6)
        results = rope_triton.qk_norm_rope_backward(grad, qkv, by)
        assert not results[0][:, -kv_heads * head_dim :].any(), "the gradient for v is not here"
        assert norm or (results[1].numel() == 0 and results[2].numel() == 0)
        assert_near(results[: len(exact)], exact)
        there = torch.randn_like(qkv)
        joined = rope_triton.qk_norm_rope_backward(grad, qkv, by, 0.0, there.clone())
        qk = (heads + kv_heads) * head_dim
        assert torch.equal(joined[0], torch.cat((results[0][:, :qk], there[:, qk:]), 1))
        assert all(map(torch.equal, joined[1:], results[1:]))
        if norm:
            less = by._replace(q_weight_H=weights[0] - 1, k_weight_H=weights[1] - 1)
            more = less._replace(q_weight_H=less.q_weight_H + 1, k_weight_H=less.k_weight_H + 1)
            found = rope_triton.qk_norm_rope_backward(grad, qkv, less, 1.0)
            assert all(map(torch.equal, found, rope_triton.qk_norm_rope_backward(grad, qkv, more)))

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("width", [24, 1024, 1030])
    def test_silu_mul(self, width, activation):
        grad, gate_up = torch.randn(3, width), 6 * torch.randn(3, 2 * width)
        exact = exact_gradients(partial(exact_gated, activation=activation), grad, gate_up)
        assert_near((activation_triton.silu_mul_backward(grad, gate_up, activation),), exact)
        assert_near((silu_mul_backward.__wrapped__(grad, gate_up, activation),), exact)

    def test_silu_mul_far_out(self):
        gate_up = torch.tensor([[-200.0, 200.0, -0.0, 3.0, 3.0, 3.0]])
        assert activation_triton.silu_mul_backward(torch.ones(1, 3), gate_up)[0, :3].tolist() == [0.0, 3.0, 1.5]

    @pytest.mark.parametrize(
        "rows_T",
        [
            torch.tensor([3]),
            torch.tensor([], dtype=torch.int64),
            torch.tensor([6, 0, 3, 0, 6, 6]),
            torch.arange(7).flip(0),
            torch.full((16,), 2),  # as many as are added at a time
            torch.cat((torch.full((33,), 5), torch.tensor([4, 6]), torch.full((15,), 5))),
        ],
    )
    @pytest.mark.parametrize("width", [8, 300])
    def test_gather_rows(self, rows_T, width):
        grad = torch.randn(len(rows_T), width)
        exact = torch.zeros(7, width, dtype=torch.float64).index_add_(0, rows_T, grad.double())
        separate = embedding_triton_backward.gather_rows(grad, rows_T, 7)
        assert_near((separate,), (exact,))
        total = torch.randn(7, width)
        expected = total + separate
        embedding_triton_backward.add_gathered_rows(total, grad, rows_T)
        assert torch.equal(total, expected)

    def test_gather_rows_of_an_expanded_gradient(self):
        result = embedding_triton_backward.gather_rows(torch.ones(1, 1).expand(40, 8), torch.arange(40) % 3, 3)
        assert torch.equal(result, torch.tensor([14.0, 13.0, 13.0]).unsqueeze(1).expand(3, 8))

    def test_gather_rows_of_one_row_in_many_programs(self):
        tokens = embedding_triton_backward.ROWS * (2 * embedding_triton_backward.PIECES + 3)
        result = embedding_triton_backward.gather_rows(torch.ones(tokens, 1), torch.ones(tokens, dtype=torch.int64), 3)
        assert result.flatten().tolist() == [0.0, tokens, 0.0]

    def test_partial_sums_of_more_programs_than_are_added_at_a_time(self):
        partial = torch.randn(2 * row_kernels.SUM_ROWS + 1, 9)
        assert_near((row_kernels.sum_partials(partial, torch.float32),), (partial.double().sum(0),))

    def test_partial_sums_further_apart_than_an_int32_counts(self):
        programs, stride = 520, 1 << 22
        kept = mmap.mmap(-1, 4 * programs * stride, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        kept.madvise(mmap.MADV_NOHUGEPAGE)  # what is not touched takes no memory, and what is touched a small page
        apart = torch.from_numpy(np.frombuffer(kept, np.float32))
        partial_PD = apart.as_strided((programs, 4), (stride, 1)).copy_(torch.arange(programs * 4).view(-1, 4))
        assert torch.equal(row_kernels.sum_partials(partial_PD, torch.float32), partial_PD.sum(0))

    @pytest.mark.parametrize("shape", [(1,), (3, 5), (4097,)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_add_gradient(self, shape, dtype):
        total, grad = torch.randn(shape), torch.randn(shape).to(dtype)
        expected = total.clone().add_(grad)
        fused_triton_backward.add_gradient(total, grad)
        assert torch.equal(total, expected)

    def test_add_gradient_of_another_layout(self):
        total, grad = torch.randn(4, 6), torch.randn(6, 4).t()
        expected = total + grad
        fused_triton_backward.add_gradient(total, grad)
        assert torch.equal(total, expected)


@pytest.mark.parametrize("norm", [True, False])
def test_operators_under_fake_tensors(norm):
    """As a trace for a GPU calls them: nothing is launched, gradients have the shapes and dtypes of their inputs."""
    with torch._subclasses.FakeTensorMode():
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        table, x, weight = (torch.empty(*shape, **options) for shape in ((50, 16), (9, 16), (16,)))
        head, qkv, qk = (torch.empty(*shape, **options) for shape in ((8,), (9, 32), (9, 3, 8)))
        rows, cos_sin = torch.empty(9, dtype=torch.int64, device="cuda"), torch.empty(9, 8, device="cuda")
        weights = (head, head) if norm else (None, None)
        grads = (
            gather_rows_backward(x, rows, 50),
            *rms_norm_backward(x, x, weight, 1e-6),
            *qk_norm_rope_backward(qk, qkv, Rotation(*weights, cos_sin, 2, 1, 1e-6)),
        )
        none = torch.empty(0, **options)
    expected = (table, x, weight, qkv, *((head, head) if norm else (none, none)))
    assert [(g.shape, g.dtype, g.device) for g in grads] == [(e.shape, e.dtype, e.device) for e in expected]
