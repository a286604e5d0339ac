"""Mixture of experts on a GPU, at Qwen3-30B-A3B's shapes: bits of every operator in any batch, gradients, and the time
of grouped products beside torch's (`-s` shows the table).
"""

import pytest
import torch
import torch.nn.functional as F
from attention_cases import DEVICE, PEAK_TFLOPS, READ_GBPS, captured_milliseconds
from torch import Tensor
from values import relative_error, wide

from lockstep import ops

EXPERTS, SLOTS, DIM, FEED_FORWARD = 128, 8, 2048, 768
ROWS = (1, 2, 7, 8, 16, 17, 63, 64, 65, 129, 512)
SOFTMAX = ops.RouteSettings(SLOTS, False, 1, 1, True, 1.0)
DEEPSEEK = ops.RouteSettings(SLOTS, True, 8, 4, True, 2.5)

chain_of = pytest.importorskip("lockstep.ops.linear.triton", exc_type=ImportError).chain


@pytest.mark.parametrize("settings", [SOFTMAX, DEEPSEEK], ids=["softmax", "sigmoid, groups, bias"])
def test_a_token_is_routed_and_combined_alike_in_any_batch(census, settings):
    x, router, y = wide(1025, DIM), torch.randn(EXPERTS, DIM, device=DEVICE).bfloat16(), wide(1025 * SLOTS, DIM)
    bias = 0.1 * torch.randn(EXPERTS, device=DEVICE) if settings is DEEPSEEK else None

    def routed(rows: slice) -> list[Tensor]:
        logits = ops.router_logits(x[rows], router)
        weights, experts = ops.route(logits, bias, settings)
        order, row, _ = ops.dispatch_plan(experts, EXPERTS)
        sent = ops.dispatch(x[rows], order, row)
        back = sent[row.flatten()].view(*row.shape, DIM)
        assert census("dispatch and its inverse", back[:, 3], x[rows]) == 0
        ours = y.view(1025, SLOTS, DIM)[rows].flatten(0, 1)[order]
        return [logits, weights, experts, ops.combine(ours, row, weights)]

    whole = routed(slice(None))
    for mine, cpu in zip(ops.dispatch_plan(whole[2], EXPERTS), ops.dispatch_plan(whole[2].cpu(), EXPERTS), strict=True):
        assert census("plan, as on a CPU", mine, cpu.to(DEVICE)) == 0
    cpu_weights, cpu_experts = ops.route(whole[0].cpu(), None if bias is None else bias.cpu(), settings)
    assert (cpu_experts == whole[2].cpu()).float().mean() > 0.999
    torch.testing.assert_close(cpu_weights.sum(1), whole[1].sum(1).cpu())
    for rows in ROWS:
        last = slice(1025 - rows, None)
        for name, some, all_ in zip(("logits", "weights", "experts", "combine"), routed(last), whole, strict=True):
            assert census(f"{name}: in any batch", some, all_[last]) == 0


@pytest.mark.parametrize("tokens", [1, 40, 300, 1200, 3000])
@pytest.mark.parametrize(("columns", "depth"), [(2 * FEED_FORWARD, DIM), (DIM, FEED_FORWARD)])
def test_grouped_products_are_the_chain_at_any_sizes(census, tokens, columns, depth):
    experts = torch.rand(tokens, EXPERTS, device=DEVICE).pow(3).topk(SLOTS).indices  # uneven, some without rows
    order, _, offsets = ops.dispatch_plan(experts, EXPERTS)
    x, weight = wide(len(order), depth), torch.randn(EXPERTS, columns, depth, device=DEVICE).bfloat16()
    out, bounds = ops.grouped_linear(x, weight, offsets), offsets.tolist()
    for e in range(0, EXPERTS, 5):
        own = slice(bounds[e], bounds[e + 1])
        if own.start < own.stop:
            chain = chain_of(x[own], weight[e])
            assert census("grouped product = one-accumulator chain", out[own], chain) == 0


def test_gradients_through_the_layer(census):
    tokens, dim, width, experts_ = 300, 256, 128, 16
    leaves = [
        torch.randn(tokens, dim, device=DEVICE).bfloat16(),
        torch.randn(experts_, 2 * width, dim, device=DEVICE).bfloat16() / 16,
        torch.randn(experts_, dim, width, device=DEVICE).bfloat16() / 11,
        torch.rand(tokens, 4, device=DEVICE),
    ]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    experts = torch.rand(tokens, experts_ - 1, device=DEVICE).topk(4).indices  # the last has no rows
    order, row, offsets = ops.dispatch_plan(experts, experts_)
    grad = torch.randn(tokens, dim, device=DEVICE).bfloat16()

    def gradients() -> tuple[Tensor, ...]:
        x, gate_up, down, weights = leaves
        hidden = ops.silu_mul(ops.grouped_linear(ops.dispatch(x, order, row), gate_up, offsets))
        out = ops.combine(ops.grouped_linear(hidden, down, offsets), row, weights)
        return torch.autograd.grad(out, leaves, grad)

    def exact() -> tuple[Tensor, ...]:
        doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
        x, gate_up, down, weights = doubles
        gate, up = torch.einsum("td,tkfd->tkf", x, gate_up[experts]).chunk(2, dim=2)
        out = torch.einsum("tkf,tkdf,tk->td", F.silu(gate) * up, down[experts], weights)
        return torch.autograd.grad(out, doubles, grad.double())

    found = gradients()
    for mine, again in zip(found, gradients(), strict=True):
        assert census("experts: gradients again", mine, again) == 0
    for mine, wanted in zip(found, exact(), strict=True):
        assert relative_error(mine, wanted) < 2e-2


@pytest.mark.timed
@pytest.mark.parametrize("tokens", [64, 1024, 9800])
@pytest.mark.parametrize(("columns", "depth"), [(2 * FEED_FORWARD, DIM), (DIM, FEED_FORWARD)])
def test_grouped_products_are_as_fast_as_torchs(tokens, columns, depth):
    theirs_of = getattr(F, "grouped_mm", None) or torch._grouped_mm
    experts = torch.rand(tokens, EXPERTS, device=DEVICE).topk(SLOTS).indices
    order, _, offsets = ops.dispatch_plan(experts, EXPERTS)
    x = torch.randn(len(order), depth, device=DEVICE).bfloat16()
    weight = torch.randn(EXPERTS, columns, depth, device=DEVICE).bfloat16()
    ends = offsets[1:].contiguous()
    ours = captured_milliseconds(lambda: ops.grouped_linear(x, weight, offsets))
    theirs = captured_milliseconds(lambda: theirs_of(x, weight.transpose(1, 2), offs=ends))
    read = 2 * (x.numel() + weight.numel() + len(x) * columns)
    floor = max(2 * len(x) * columns * depth / PEAK_TFLOPS / 1e9, read / READ_GBPS / 1e6)
    print(
        f"\n{tokens} x {SLOTS} rows, {columns} x {depth}: {ours:.4f} ms, torch {theirs:.4f} "
        f"({ours / theirs:.2f}x its time), floor {floor:.4f}"
    )
    assert ours < 1.1 * theirs


@pytest.mark.timed
@pytest.mark.parametrize("tokens", [1, 64, 9800])
def test_time_of_routing(tokens):
    """What a layer does around its grouped products; the floor is reading and writing each row once."""
    x, y = (
        torch.randn(tokens, DIM, device=DEVICE).bfloat16(),
        torch.randn(tokens * SLOTS, DIM, device=DEVICE).bfloat16(),
    )
    router = torch.randn(EXPERTS, DIM, device=DEVICE).bfloat16()
    weights, experts = ops.route(ops.router_logits(x, router), None, SOFTMAX)
    order, row, _ = ops.dispatch_plan(experts, EXPERTS)
    logits = ops.router_logits(x, router)
    parts = {
        "scores": lambda: ops.router_logits(x, router),
        "route": lambda: ops.route(logits, None, SOFTMAX)[0],
        "plan": lambda: ops.dispatch_plan(experts, EXPERTS)[0],
        "dispatch": lambda: ops.dispatch(x, order, row),
        "combine": lambda: ops.combine(y, row, weights),
    }
    times = {name: captured_milliseconds(part) for name, part in parts.items()}
    floor = 2 * x.nbytes / READ_GBPS / 1e6 * (SLOTS + 1)
    shown = ", ".join(f"{name} {1e3 * ms:.1f}" for name, ms in times.items())
    print(f"\n{tokens} tokens, us: {shown}; floor of dispatch and combine {1e3 * floor:.1f}")
    assert times["route"] + times["plan"] < 0.1
