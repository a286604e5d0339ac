"""What families add to an operator, on a GPU: the words of separate operators, whatever kernel computes them.

Shapes are Qwen2.5-7B's, Gemma 3's and gpt-oss's; inputs have wide exponents, so that a missing rounding shows.
"""

import pytest
import torch
from torch import Tensor
from values import wide

from lockstep import ops
from lockstep.ops.linear import cublas
from lockstep.ops.linear.choice import Choice
from lockstep.ops.records import Epilogue

DEVICE = "cuda"
ROWS = (1, 2, 7, 16, 40, 64, 100, 129, 256, 700, 4096)
TILES = (
    Choice("pipelined", 16, 32, 256, 4, 3),
    Choice("pipelined", 64, 64, 128, 4, 4, early=True),
    Choice("pipelined", 128, 128, 64, 8, 4),
    Choice("async", 16, 16, 128, 4, 6, 4),
    Choice("async", 64, 64, 128, 4, 3, 3),
    Choice("async", 128, 64, 64, 8, 4, 4),
    Choice("tma", 64, 32, 128, 4, 6),
    Choice("tma", 128, 128, 64, 8, 4),
)


@pytest.mark.parametrize(("n", "k"), [(4608, 3584), (5120, 2880), (1024, 3072), (2880, 4096)])
def test_a_bias_is_added_to_the_accumulator(census, n, k):
    """By the library, by every kernel of ours, in products with a norm before and a residual after."""
    from lockstep.ops.linear import triton as linear_triton
    from lockstep.ops.linear.kernels import KERNELS

    x, norm, weight, bias, residual = wide(max(ROWS), k), wide(k), wide(n, k) * 0.02, wide(n), wide(max(ROWS), n)
    chain = linear_triton.chain(x, weight, bias_N=bias)
    float32 = linear_triton.chain(x, weight, "linear_fp32")
    assert census("bias: chain = rounded sum", chain, (float32 + bias.float()).bfloat16()) == 0
    assert census("CONTROL bias: product rounded before", chain, float32.bfloat16() + bias) > 0
    for m in ROWS:
        library = cublas.cublaslt_linear(x[:m], weight, bias_N=bias)
        assert census("bias: cuBLASLt = chain", library, chain[:m]) == 0
        assert census("bias: linear = chain", ops.linear(x[:m], weight, bias), chain[:m]) == 0
        with torch.no_grad():
            added = ops.linear_add(x[:m], weight, residual[:m], bias)
            normed = ops.norm_linear(x[:m], norm, weight, 1e-6, bias)
        assert census("bias: linear_add = separate", added, residual[:m] + chain[:m]) == 0
        expected = linear_triton.chain(ops.rms_norm(x[:m], norm, 1e-6), weight, bias_N=bias)
        assert census("bias: norm_linear = separate", normed, expected) == 0
        for tile in TILES:
            if m <= 700 and k % tile.block_k == 0:
                found = KERNELS[tile.kernel].run("linear_add", tile, x[:m], weight, residual[:m], Epilogue(bias))
                assert census(f"bias: {tile.kernel} tile = chain", found, residual[:m] + chain[:m]) == 0


@pytest.mark.parametrize("rows", [5, 130, 2000, 9000])
@pytest.mark.parametrize(("columns", "depth"), [(5760, 2880), (2880, 2880)])
def test_experts_have_biases(census, rows, columns, depth):
    """Every group's rows are those of a product with its bias; sums of rows are exact ones, rounded."""
    from lockstep.ops.linear.triton import chain
    from lockstep.ops.moe.grouped_linear import grouped_sum

    groups = 32
    starts = torch.rand(groups - 1, device=DEVICE).pow(2).mul(rows).long().sort().values
    offsets = torch.cat((starts.new_zeros(1), starts, starts.new_full((1,), rows))).int()
    x, weight, bias = wide(rows, depth), wide(groups, columns, depth) * 0.02, wide(groups, columns)
    out, bounds = ops.grouped_linear(x, weight, offsets, bias), offsets.tolist()
    sums = grouped_sum(out, offsets)
    assert census("grouped sum, again", grouped_sum(out, offsets), sums) == 0
    for g in range(groups):
        own = slice(bounds[g], bounds[g + 1])
        if own.start < own.stop:
            assert census("grouped product with bias = chain", out[own], chain(x[own], weight[g], bias_N=bias[g])) == 0
        exact, size = out[own].double().sum(0), out[own].double().abs().sum(0)
        assert ((sums[g].double() - exact).abs() <= 2**-8 * exact.abs() + 2**-18 * size).all()


def test_the_gradient_of_a_bias_is_the_same_every_time(census):
    x, weight, bias, grad = wide(3000, 256), wide(512, 256), wide(512).requires_grad_(), wide(3000, 512)
    found = [torch.autograd.grad(ops.linear(x, weight, bias), bias, grad)[0] for _ in range(3)]
    for again in found[1:]:
        assert census("bias: gradient, again", again, found[0]) == 0
    exact = grad.double().sum(0)
    assert ((found[0].double() - exact).abs() <= 2**-8 * exact.abs() + 2**-18 * grad.double().abs().sum(0)).all()


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu_clamped"])
@pytest.mark.parametrize(("n", "k"), [(20480, 2560), (6144, 1024)])
def test_activations_are_separate_ones(census, activation, n, k):
    """In every kernel's epilogue, behind a norm whose weights are beside 1; and close to exact ones."""
    from lockstep.ops.linear import triton as linear_triton
    from lockstep.ops.linear.kernels import KERNELS

    x, norm, weight = wide(max(ROWS), k), wide(k) * 0.1, wide(n, k) * 0.02
    normed = ops.rms_norm(x, norm, 1e-6, 1.0)
    expected = ops.silu_mul(linear_triton.chain(normed, weight), activation)
    for m in ROWS:
        with torch.no_grad():
            fused = ops.norm_gate_up(x[:m], norm, weight, 1e-6, 1.0, activation)
            without_norm = ops.gate_up(normed[:m], weight, activation)
        assert census(f"{activation}: norm_gate_up = separate", fused, expected[:m]) == 0
        assert census(f"{activation}: gate_up = separate", without_norm, expected[:m]) == 0
        for tile in TILES:
            staged = (tile.x_stages or tile.num_stages) * tile.block_m + tile.num_stages * 2 * tile.block_n
            if m <= 700 and 2 * staged * tile.block_k < 220 * 1024:
                found = KERNELS[tile.kernel].run(
                    "norm_gate_up", tile, normed[:m], weight, None, Epilogue(activation=activation)
                )
                assert census(f"{activation}: {tile.kernel} tile = separate", found, expected[:m]) == 0
    rows = 3 * torch.randn(40, 4096, device=DEVICE).bfloat16()
    on_cpu = ops.silu_mul(rows.cpu(), activation)
    torch.testing.assert_close(ops.silu_mul(rows, activation).cpu(), on_cpu, rtol=2**-7, atol=1e-6)


def beside_1(width: int) -> Tensor:
    """Weights whose sums with 1 are bfloat16 numbers."""
    return torch.randint(-60, 60, (width,), device=DEVICE).bfloat16() / 64


@pytest.mark.parametrize("width", [256, 1152, 2560, 4096, 5376])
def test_norm_weights_beside_1(census, width):
    """The bits of weights that hold the sum; of heads too, in both roles. A residual is added as it is apart."""
    x, weight = wide(700, width), beside_1(width)
    expected = ops.rms_norm(x, weight + 1, 1e-6)
    assert census("rms_norm: 1 + weight", ops.rms_norm(x, weight, 1e-6, 1.0), expected) == 0
    for n in (1, 7, 64):
        assert census("rms_norm: 1 + weight, n rows", ops.rms_norm(x[-n:], weight, 1e-6, 1.0), expected[-n:]) == 0
    residual = wide(700, 2 * width)[:, width:]
    with torch.no_grad():
        added = ops.norm_add(x, weight, residual, 1e-6, 1.0)
    assert census("norm_add = norm, add", added, residual + expected) == 0
    if width != 256:
        return
    qkv, angles = wide(257, 16 * width), torch.randn(257, width, device=DEVICE)
    q, k = beside_1(width), beside_1(width)
    own = ops.Rotation(q, k, angles, 8, 4, 1e-6)
    summed = ops.Rotation(q + 1, k + 1, angles, 8, 4, 1e-6)
    rotated = ops.qk_norm_rope(qkv, summed)
    assert census("qk_norm_rope: 1 + weight", ops.qk_norm_rope(qkv, own, 1.0), rotated) == 0
    caches, slots = [torch.zeros(40, 16, 4, width, device=DEVICE).bfloat16() for _ in range(2)], torch.arange(257)
    with torch.no_grad():
        written = ops.qk_norm_rope_write_kv(qkv, own, ops.KVPages(*caches), slots.to(DEVICE), 1.0)
    assert census("qk_norm_rope_write_kv: 1 + weight", written, rotated[:, :8]) == 0
    assert census("qk_norm_rope_write_kv: 1 + weight, keys", caches[0].flatten(0, 1)[:257], rotated[:, 8:]) == 0


def test_gradients_with_operands_are_close_and_the_same_every_time(census):
    """To autograd of plain torch in float64."""
    x, weight, gate_up = torch.randn(300, 512), torch.randn(512), 3 * torch.randn(300, 512)
    cases = {
        "rms_norm": (lambda x, w: ops.rms_norm(x, w, 1e-6, 1.0), [x, weight]),
        "gelu_tanh": (lambda x: ops.silu_mul(x, "gelu_tanh"), [gate_up]),
        "swiglu_clamped": (lambda x: ops.silu_mul(x, "swiglu_clamped"), [gate_up]),
    }
    for name, (function, inputs) in cases.items():
        leaves = [x.to(DEVICE).bfloat16().requires_grad_() for x in inputs]
        out = function(*leaves)
        grad = torch.randn(out.shape, device=DEVICE).bfloat16()
        first, second = (torch.autograd.grad(function(*leaves), leaves, grad) for _ in range(2))
        on_cpu = [leaf.detach().cpu().float().requires_grad_() for leaf in leaves]
        expected = torch.autograd.grad(function(*on_cpu), on_cpu, grad.cpu().float())
        for one, again, other in zip(first, second, expected, strict=True):
            assert census(f"{name}: gradient, again", again, one) == 0
            torch.testing.assert_close(one.cpu().float(), other, rtol=2**-6, atol=2**-7 * float(other.abs().max()))
