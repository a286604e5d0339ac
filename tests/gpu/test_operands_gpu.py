"""What families add to an operator, on a GPU: the words of separate operators, whatever kernel computes them.

Shapes are Qwen2.5-7B's, Gemma 3's and gpt-oss's; inputs have wide exponents, so that a missing rounding shows.
"""

import pytest
import torch
from torch import Tensor

from lockstep import ops
from lockstep.ops.linear import cublas
from lockstep.ops.tables.linear_table import Choice

DEVICE = "cuda"
ROWS = (1, 2, 7, 16, 40, 64, 100, 129, 256, 700, 4096)
TILES = (
    Choice("pipelined", 16, 32, 256, 4, 3),
    Choice("pipelined", 64, 64, 128, 4, 4, early=True, prefetch=True),
    Choice("pipelined", 128, 128, 64, 8, 4),
    Choice("async", 16, 16, 128, 4, 6, 4),
    Choice("async", 64, 64, 128, 4, 3, 3),
    Choice("async", 128, 64, 64, 8, 4, 4),
    Choice("tma", 64, 32, 128, 4, 6),
    Choice("tma", 128, 128, 64, 8, 4),
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def wide(*shape: int) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * torch.exp(2 * torch.randn(*shape, device=DEVICE))).bfloat16()


def fits(tile: Choice, rows: int) -> bool:
    return tile.kernel != "tma" or rows > tile.block_m // 2


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
            if m <= 700 and k % tile.block_k == 0 and fits(tile, m):
                found = KERNELS[tile.kernel].run("linear_add", tile, x[:m], weight, residual[:m], bias)
                assert census(f"bias: {tile.kernel} tile = chain", found, residual[:m] + chain[:m]) == 0


def test_the_gradient_of_a_bias_is_the_same_every_time(census):
    x, weight, bias, grad = wide(3000, 256), wide(512, 256), wide(512).requires_grad_(), wide(3000, 512)
    found = [torch.autograd.grad(ops.linear(x, weight, bias), bias, grad)[0] for _ in range(3)]
    for again in found[1:]:
        assert census("bias: gradient, again", again, found[0]) == 0
    exact = grad.double().sum(0)
    assert ((found[0].double() - exact).abs() <= 2**-8 * exact.abs() + 2**-18 * grad.double().abs().sum(0)).all()
