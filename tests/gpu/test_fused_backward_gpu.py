"""The fused backward operators on a GPU: the bits of the separate ones, and of eager in a captured step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small import completed, train_group
from torch import Tensor

from lockstep import ops
from lockstep.config import CompileConfig, LossConfig, OptimizerConfig
from lockstep.graph import EAGER, Runtime
from lockstep.models import Decoder
from lockstep.models.init import architecture, initialize
from lockstep.ops.attention import operator as attention_operator
from lockstep.ops.embedding.operator import gather_rows_backward
from lockstep.ops.fused import backward as fused_backward
from lockstep.ops.norm.operator import rms_norm_backward
from lockstep.ops.records import AttentionGradient
from lockstep.ops.rope.operator import qk_norm_rope_backward
from lockstep.trainer import Trainer, pack
from lockstep.types import SamplingParams

DEVICE, TOKENS, EPS = "cuda", 515, 1e-6


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(torch.bfloat16)


@pytest.mark.parametrize("width", [128, 1024, 5120])
def test_norm_and_residual(width: int, census) -> None:
    torch.manual_seed(0)
    grad, x, weight, other = normal(TOKENS, width), 3 * normal(TOKENS, width), normal(width), normal(TOKENS, width)
    separate = rms_norm_backward(grad, x, weight, EPS)
    joined = fused_backward.rms_norm_add(grad, x, weight, EPS, other)
    assert census("residual gradients with norms", other + separate[0], joined[0]) == 0
    assert census("norm weights with residual gradients", separate[1], joined[1]) == 0


@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 64), (4, 1, 256)])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("bound", [300, 1024])
def test_attention_and_rotation(heads: tuple[int, int, int], norm: bool, bound: int, census) -> None:
    torch.manual_seed(0)
    num_heads, kv_heads, head_dim = heads
    lengths, starts, prefixes = [145, 99, 99, 130, 40], [0, 0, 0, 0, 0], [0, 145, 145, 0, 70]
    cu_seqlens, start, prefix = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE)
        for x in ([0, *torch.tensor(lengths).cumsum(0).tolist()], starts, prefixes)
    )
    packed = ops.Packed(cu_seqlens, start, prefix, bound)
    qkv = normal(TOKENS, (num_heads + 2 * kv_heads) * head_dim)
    weights = (normal(head_dim), normal(head_dim)) if norm else (None, None)
    inverse = 1e6 ** (-torch.arange(0, 1, 2 / head_dim, device=DEVICE))
    table = ops.rope_table(torch.arange(TOKENS, device=DEVICE), inverse)
    rotation = ops.Rotation(*weights, table, num_heads, kv_heads, EPS)
    q, k = ops.qk_norm_rope(qkv, rotation).split((num_heads, kv_heads), 1)
    v = qkv.unflatten(1, (-1, head_dim))[:, num_heads + kv_heads :]
    out, lse = attention_operator._packed(q, k, v, packed)
    gradient = AttentionGradient(normal(TOKENS, num_heads, head_dim), q, k, v, out, lse)
    dq, dk, dv = attention_operator.attention_packed_backward(gradient, packed)
    expected, *of_weights = qk_norm_rope_backward(torch.cat((dq, dk), 1), qkv, rotation)
    of_values = torch.nn.functional.pad(dv.flatten(1), (expected.shape[1] - dv[0].numel(), 0))
    found = fused_backward.rotated_attention_packed(gradient, packed, qkv, rotation)
    assert census("gradients of fused projections", expected + of_values, found[0] + 0) == 0  # a -0 is 0 in a sum
    assert all(map(torch.equal, of_weights, found[1:]))


@pytest.mark.parametrize("size", [1, 1023, 4097, 6_291_456])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradient_and_total(size: int, dtype: torch.dtype, census) -> None:
    torch.manual_seed(0)
    total, grad = torch.randn(size, device=DEVICE), torch.randn(size, device=DEVICE).to(dtype)
    expected = total + grad
    fused_backward.add_gradient(total, grad)
    assert census("gradients and totals", expected, total) == 0


def test_embedding_and_head(census) -> None:
    torch.manual_seed(0)
    rows = (torch.rand(TOKENS, device=DEVICE) ** 8 * 5000).long()
    grad, total = normal(TOKENS, 1024), normal(5000, 1024)
    expected = total + gather_rows_backward(grad, rows, 5000)
    fused_backward.add_gathered_rows(total, grad, rows)
    assert census("embeddings and LM heads", expected, total) == 0


def trained(capture: str | None, arch: str) -> tuple[Tensor, Tensor, str]:
    """Gradients of two micro-batches, the weights after an update, and what the fusion did."""
    model = initialize(Decoder(replace(architecture(arch), num_layers=2), torch.bfloat16, DEVICE), 0)
    device = torch.device(DEVICE)
    runtime = Runtime(CompileConfig(capture), device) if capture else EAGER
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), enforce_parity=False, runtime=runtime)
    torch.manual_seed(1)
    groups = []
    for _ in range(2):
        prompt, ids = torch.randint(0, 5000, (60,)).tolist(), torch.randint(0, 5000, (4, 50)).tolist()
        made = [completed(x, 1.0 - i, 0.01, [-1.0] * 50, [-1.0] * 50) for i, x in enumerate(ids)]
        groups.append(train_group(prompt, made, SamplingParams(temperature=0.8, top_p=0.95)))
    for _ in range(2):
        for batch in pack(groups, max_tokens=1024, check_parity=False):
            trainer.forward_backward(batch.to(device))
    grads = trainer.flat.grad.clone()
    assert trainer.optim_step(1e-3).applied
    functions = runtime.programs
    log = [line for f in functions for graph in f.graphs.values() for line in graph.captured.log]
    return grads, trainer.flat.data.clone(), next((line for line in log if line.startswith("fuse")), "")


@pytest.mark.parametrize("arch", ["qwen3-0.6b", "llama3.2-1b"])
def test_captured_steps_have_eager_s_bits(arch: str, census) -> None:
    grads, weights, _ = trained(None, arch)
    for way in ("step", "joint"):
        found = trained(way, arch)
        assert "2 rotations joined with attention, 4 residual gradients with norms, 1 embeddings" in found[2], found[2]
        assert census(f"gradients of a captured step, {way}", grads, found[0]) == 0
        assert census(f"weights after a captured step, {way}", weights, found[1]) == 0
