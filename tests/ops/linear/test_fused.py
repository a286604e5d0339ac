"""Fused operators on a CPU: with gradients enabled, without, and in inference mode, the separate operators' bits."""

import pytest
import torch
import torch.nn.functional as F

from lockstep import ops

ROWS = (1, 2, 7, 16, 33)
DIM, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM = 48, 40, 4, 2, 12
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def wide(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape) * torch.exp(2 * torch.randn(shape))).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    words = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(words), b.contiguous().view(words))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_layers_are_the_separate_operators(dtype, mode):
    norm, gate_up, down = (wide(*s, dtype=dtype) for s in ((DIM,), (2 * FEED_FORWARD, DIM), (DIM, FEED_FORWARD)))
    for rows in ROWS:
        x, hidden = wide(rows, DIM, dtype=dtype), wide(rows, FEED_FORWARD, dtype=dtype)
        projected = ops.linear(ops.rms_norm(x, norm, 1e-6), gate_up)
        biases = wide(2 * FEED_FORWARD, dtype=dtype), wide(DIM, dtype=dtype)
        with MODES[mode]():
            biased = ops.linear(ops.rms_norm(x, norm, 1e-6), gate_up, biases[0])
            assert same_bits(ops.norm_linear(x, norm, gate_up, 1e-6, biases[0]), biased)
            assert same_bits(ops.linear_add(hidden, down, x, biases[1]), x + ops.linear(hidden, down, biases[1]))
            assert same_bits(ops.norm_linear(x, norm, gate_up, 1e-6), projected)
            assert same_bits(ops.norm_gate_up(x, norm, gate_up, 1e-6), ops.silu_mul(projected))
            more = ops.linear(ops.rms_norm(x, norm.float() + 1, 1e-6), gate_up)
            assert same_bits(ops.norm_linear(x, norm, gate_up, 1e-6, None, 1.0), more)
            behind, hidden_D = ops.rms_norm(x, norm.float() + 1, 1e-6), biases[1].expand(rows, -1)
            assert same_bits(ops.norm_add(x, norm, hidden_D, 1e-6, 1.0), hidden_D + behind)
            assert same_bits(ops.gate_up(x, gate_up), ops.silu_mul(ops.linear(x, gate_up)))
            for activation in ops.ACTIVATIONS:
                gated = ops.norm_gate_up(x, norm, gate_up, 1e-6, 1.0, activation)
                assert same_bits(gated, ops.silu_mul(more, activation))
            assert same_bits(ops.linear_add(hidden, down, x), x + ops.linear(hidden, down))


def test_gradients_are_those_of_the_separate_operators():
    leaves = [wide(*s, dtype=torch.float32) for s in ((5, DIM), (DIM,), (2 * FEED_FORWARD, DIM), (DIM, FEED_FORWARD))]
    for leaf in leaves:
        leaf.requires_grad_()
    x, norm, gate_up, down = leaves
    fused = ops.linear_add(
        ops.norm_gate_up(x, norm, gate_up, 1e-6), down, ops.norm_linear(x, norm, gate_up, 1e-6)[:, :DIM]
    )
    projected = ops.linear(ops.rms_norm(x, norm, 1e-6), gate_up)
    separate = projected[:, :DIM] + ops.linear(ops.silu_mul(projected), down)
    assert same_bits(fused, separate)
    grads, expected = (torch.autograd.grad(out.sum(), leaves) for out in (fused, separate))
    for grad, e in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, e, rtol=1e-5, atol=1e-6 * float(e.abs().max()))
        assert grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_is_added_to_the_float32_product(dtype):
    """Before the one rounding, so that a row has the same bits among few as among many."""
    x, weight, bias = wide(33, DIM, dtype=dtype), wide(20, DIM, dtype=dtype), wide(20, dtype=dtype)
    product = torch.ops.lockstep.linear_fp32(x, weight)
    whole = ops.linear(x, weight, bias)
    assert same_bits(whole, (product + bias.float()).to(dtype))
    assert dtype is torch.float32 or not same_bits(whole, product.to(dtype) + bias), "rounded once"
    for rows in ROWS:
        assert same_bits(ops.linear(x[-rows:], weight, bias), whole[-rows:])


def test_gradients_of_biases_are_exact_ones_rounded():
    """Against autograd in float64."""
    shapes = (5, DIM), (DIM,), (2 * FEED_FORWARD, DIM), (2 * FEED_FORWARD,), (DIM, FEED_FORWARD), (DIM,)
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def fused(x, norm, up, up_bias, down, down_bias):
        return ops.linear_add(ops.norm_linear(x, norm, up, 1e-6, up_bias)[:, :FEED_FORWARD], down, x, down_bias)

    def exact(x, norm, up, up_bias, down, down_bias):
        hidden = F.linear(F.rms_norm(x, (DIM,), norm, 1e-6), up, up_bias)[:, :FEED_FORWARD]
        return x + F.linear(hidden, down, down_bias)

    grad, doubles = torch.randn(5, DIM), [leaf.detach().double().requires_grad_() for leaf in leaves]
    found = torch.autograd.grad(fused(*leaves), leaves, grad)
    expected = torch.autograd.grad(exact(*doubles), doubles, grad.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_norms", [True, False])
def test_write_kv_inside_is_write_kv_after(dtype, mode, with_norms):
    qkv = wide(5, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
    norms = [wide(HEAD_DIM, dtype=dtype) if with_norms else None for _ in range(2)]
    table = ops.rope_table(torch.tensor([0, 5, 77, 3, 900]), torch.rand(HEAD_DIM // 2))
    arguments, slots = (*norms, table, HEADS, KV_HEADS, 1e-6), torch.tensor([7, 0, 11, 4, 3])
    caches, expected = ([torch.full((4, 3, KV_HEADS, HEAD_DIM), 9.0).to(dtype) for _ in range(2)] for _ in range(2))
    with MODES[mode]():
        q = ops.qk_norm_rope_write_kv(qkv, ops.Rotation(*arguments), ops.KVPages(*caches), slots, 1.0)
        qk = ops.qk_norm_rope(qkv, ops.Rotation(*arguments), 1.0)
        v = qkv[:, -KV_HEADS * HEAD_DIM :].unflatten(1, (KV_HEADS, HEAD_DIM))
        ops.write_kv(qk[:, HEADS:], v, ops.KVPages(*expected), slots)
    assert same_bits(q, qk[:, :HEADS])
    assert all(same_bits(a, b) for a, b in zip(caches, expected, strict=True))
    assert (caches[0] == 9).any() and (caches[0] != 9).any()


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_is_write_kv_and_paged_attention(dtype, mode):
    qkv, context = wide(3, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype), torch.tensor([1, 5, 6], dtype=torch.int32)
    table = torch.tensor([[4, 0], [1, 3], [1, 2]], dtype=torch.int32)
    page = table.gather(1, ((context.long() - 1) // 3).unsqueeze(1)).squeeze(1).long()
    slots, starts = page * 3 + (context - 1) % 3, torch.arange(4, dtype=torch.int32)
    norms = [wide(HEAD_DIM, dtype=dtype) for _ in range(2)]
    arguments = (*norms, ops.rope_table(context.long() - 1, torch.rand(HEAD_DIM // 2)), HEADS, KV_HEADS, 1e-6)
    caches = [wide(5, 3, KV_HEADS, HEAD_DIM, dtype=dtype) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    with MODES[mode]():
        out = ops.attention_decode(
            qkv, ops.Rotation(*arguments), ops.KVPages(*caches), slots, ops.Contexts(table, context, 6)
        )
        q = ops.qk_norm_rope_write_kv(qkv, ops.Rotation(*arguments), ops.KVPages(*expected), slots)
        assert same_bits(out, ops.attention_paged(q, ops.KVPages(*expected), ops.Paged(table, starts, context, 1, 6)))
    assert all(same_bits(a, b) for a, b in zip(caches, expected, strict=True))


def test_decode_traces_as_it_runs():
    """Shapes, strides and what it writes, as its declaration says."""
    caches = [torch.randn(4, 3, KV_HEADS, HEAD_DIM) for _ in range(2)]
    arguments = (torch.ones(HEAD_DIM), torch.ones(HEAD_DIM), torch.randn(2, HEAD_DIM), HEADS, KV_HEADS, 1e-6)
    paged = torch.tensor([0, 4]), torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    qkv = torch.randn(2, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    torch.library.opcheck(torch.ops.lockstep.attention_decode.default, (qkv, *arguments, *caches, *paged, 3))


def test_without_gradients_one_operator_is_traced():
    from torch.fx.experimental.proxy_tensor import make_fx

    def layer(x, norm, gate_up, down):
        return ops.linear_add(ops.norm_gate_up(x, norm, gate_up, 1e-6), down, x)

    tensors = [wide(*s, dtype=torch.float32) for s in ((5, DIM), (DIM,), (2 * FEED_FORWARD, DIM), (DIM, FEED_FORWARD))]
    with torch.no_grad():
        graph = make_fx(layer)(*tensors)
    called = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert called == ["lockstep.norm_gate_up.default", "lockstep.linear_add.default"]
    assert same_bits(graph(*tensors), layer(*tensors))
