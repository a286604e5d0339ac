"""The fused linear kernels on a CPU, under Triton's interpreter, against the separate kernels: the same bits.

As in `test_kernels_interpret.py`, one test runs `Interpreted` in a process of its own, and products are float32.
"""

import json
import os
from typing import get_args

import numpy as np
import pytest
import torch
from processes import run_interpreted

from lockstep.ops.linear import choice as linear_choice
from lockstep.ops.linear.choice import Choice
from lockstep.ops.records import ACTIVATIONS, Epilogue, Rotation

if os.environ.get("TRITON_INTERPRET") == "1":
    from lockstep.ops.activation import triton as activation_triton
    from lockstep.ops.linear import triton as linear_triton
    from lockstep.ops.rope import triton as rope_triton

TILES = [Choice("pipelined", *tile) for tile in ((16, 16, 32, 4, 2), (32, 64, 16, 4, 2), (16, 32, 64, 4, 3))]


def test_kernels_under_the_interpreter():
    run_interpreted(__file__)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


class Interpreted:
    @pytest.fixture(autouse=True)
    def exact(self, monkeypatch):
        """Products that do not depend on where in the block a row stands, as NumPy's own do: rounded from float64."""
        torch.manual_seed(0)
        monkeypatch.setattr(
            np, "matmul", lambda a, b, dtype: (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype)
        )

    @pytest.mark.parametrize("tile", TILES)
    @pytest.mark.parametrize(("m", "n", "k"), [(1, 48, 64), (17, 40, 96), (40, 100, 128), (16, 64, 72)])
    def test_fused_is_separate(self, tile, m, n, k):
        x, weight, residual = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
        plain = linear_triton.run("linear", tile, x, weight)
        torch.testing.assert_close(plain, x @ weight.t(), atol=1e-4, rtol=1e-5)
        assert same_bits(linear_triton.run("linear_add", tile, x, weight, residual), residual + plain)
        for activation in ACTIVATIONS:
            gated = linear_triton.run("norm_gate_up", tile, 4 * x, weight, None, Epilogue(activation=activation))
            assert same_bits(gated, activation_triton.silu_mul(4 * plain, activation))
        bias = torch.randn(n)
        biased = linear_triton.run("linear", tile, x, weight, None, Epilogue(bias))
        assert same_bits(biased, plain + bias)
        assert same_bits(linear_triton.run("linear_add", tile, x, weight, residual, Epilogue(bias)), residual + biased)

    def test_a_residual_is_added_to_the_rounded_product_and_a_bias_before(self):
        x, weight, residual = torch.randn(17, 64).half(), torch.randn(40, 64).half(), torch.randn(17, 40).half()
        bias = torch.randn(80).half()[::2]
        exact = linear_triton.run("linear_fp32", TILES[0], x, weight)
        plain, biased = exact.half(), (exact + bias.float()).half()
        assert torch.equal(linear_triton.run("linear_add", TILES[0], x, weight, residual), residual + plain)
        assert torch.equal(
            linear_triton.run("linear_add", TILES[0], x, weight, residual, Epilogue(bias)), residual + biased
        )
        assert not torch.equal(biased, plain + bias)

    @pytest.mark.parametrize("weights", [True, False])
    def test_write_kv_inside_is_write_kv_after(self, weights):
        heads, kv_heads, head_dim, tokens = 6, 2, 24, 5
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim)
        norms = [torch.randn(head_dim) if weights else None for _ in range(2)]
        by = Rotation(*norms, torch.randn(tokens, head_dim), heads, kv_heads, 1e-6)
        caches = [torch.full((4, 3, kv_heads, head_dim), torch.nan) for _ in range(2)]
        slots = torch.tensor([7, 0, 11, 4, 3])
        q = rope_triton.qk_norm_rope_write_kv(qkv, by, caches, slots)
        qk = rope_triton.qk_norm_rope(qkv, by)
        expected = [torch.full((12, kv_heads, head_dim), torch.nan) for _ in range(2)]
        expected[0][slots] = qk[:, heads:]
        expected[1][slots] = qkv[:, (heads + kv_heads) * head_dim :].view(tokens, kv_heads, head_dim)
        assert same_bits(q, qk[:, :heads])
        for cache, e in zip(caches, expected, strict=True):
            assert same_bits(cache.view_as(e), e)


KINDS = get_args(linear_choice.Kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 8, 9, 24, 33, 40, 57, 65, 128, 129, 9000])
@pytest.mark.parametrize(
    ("columns", "depth"),
    [(4096, 1024), (1024, 3072), (300, 72), (512, 12288), (37888, 3584), (5120, 2880), (128, 64), (6144, 320)],
)
def test_every_shape_has_a_choice(kind, m, columns, depth):
    choice = linear_choice.choose(kind, m, columns, depth)
    if choice == linear_choice.LIBRARY:
        assert m > 8, "few rows are ours: the library may take a matrix-vector kernel"
        assert columns % 8 == depth % 8 == 0, "the library's kernels for unaligned rows add up in another order"
        return
    weights = 2 if kind == "norm_gate_up" else 1
    if choice.kernel == "async":
        wide, steps = weights * choice.block_n, depth // choice.block_k
        used = 2 * choice.block_k * (choice.block_m * choice.x_stages + wide * choice.num_stages)
        assert used <= 224 * 1024, "shared memory of a multiprocessor"
        assert depth % choice.block_k == 0 and choice.x_stages >= 2 and choice.num_stages >= min(choice.x_stages, steps)
    elif choice.kernel == "tma":
        stage = 2 * choice.block_k * (choice.block_m + weights * choice.block_n)
        assert choice.block_m in (64, 128) and m > 4 and depth % choice.block_k == 0
        assert stage * choice.num_stages <= 224 * 1024 and choice.num_stages >= 2 and depth > choice.block_k
    else:
        stage = 2 * choice.block_k * (choice.block_m + weights * choice.block_n)
        assert choice.block_m >= 16 and choice.block_k % 16 == 0 and choice.num_stages >= 2
        assert stage * choice.num_stages <= 224 * 1024, "shared memory of a multiprocessor"


def test_what_the_table_has_of_the_copy_engine_s_kernel_can_be_launched():
    found = 0
    for kind, shapes in linear_choice.table().items():
        for (_, depth), entries in shapes.items():
            for i, (bound, choice) in enumerate(entries):
                if choice.kernel == "tma":
                    fewest, found = (entries[i - 1][0] if i else 0) + 1, found + 1
                    stage = 2 * choice.block_k * (choice.block_m + (1 + (kind == "norm_gate_up")) * choice.block_n)
                    assert fewest > 4, (kind, depth, bound)
                    assert depth % choice.block_k == 0 and depth > choice.block_k and choice.num_stages > 1
                    assert stage * choice.num_stages <= 224 * 1024
    assert found > 50


@pytest.mark.parametrize(("capability", "kernel"), [((8, 0), "pipelined"), ((9, 0), "tma"), ((10, 0), "pipelined")])
def test_hopper_s_instructions_are_for_hopper(monkeypatch, capability, kernel):
    pytest.importorskip("triton.experimental.gluon")
    from lockstep.ops import pdl
    from lockstep.ops.linear import kernels

    monkeypatch.setattr(pdl, "_capability", lambda _: capability)
    assert kernels.choose("linear_add", 40, torch.empty(1024, 3072)).kernel == kernel, "of the table"
    assert kernels.choose("linear_add", 40, torch.empty(1536, 8960)).kernel == kernel, "by its rule"
    apart = torch.empty(1024, 6144)[:, ::2]  # not contiguous
    assert kernels.choose("linear_add", 40, apart).kernel == "pipelined"


def test_the_table_covers_the_architectures_it_was_measured_for():
    table = linear_choice.table()
    for kind, shapes in {
        "norm_linear": [(4096, 1024), (4096, 2048), (6144, 4096), (10240, 5120)],
        "linear_add": [(1024, 2048), (1024, 3072), (2048, 6144), (4096, 12288), (5120, 25600)],
        "norm_gate_up": [(6144, 1024), (12288, 2048), (24576, 4096), (51200, 5120)],
        "linear": [(4096, 1024), (5120, 25600)],
        "linear_fp32": [(151936, 1024), (151936, 5120)],
    }.items():
        for shape in shapes:
            bounds = [bound for bound, _ in table[kind][shape]]
            assert bounds == sorted(set(bounds)) and bounds[-1] >= 256


def test_a_gpu_has_its_own_table_or_the_nearest(monkeypatch, tmp_path):
    for name, capability in {"A": (8, 0), "B": (9, 0), "C": (9, 0), "D": (12, 0)}.items():
        entry = {"64x64": [[8, ["pipelined", ord(name), 16, 32, 4, 2]]]}
        path = tmp_path / f"linear_{name}.json"
        path.write_text(json.dumps({"gpu": name, "capability": capability, "linear": entry}))
    monkeypatch.setattr(linear_choice, "FOLDER", tmp_path)

    def found(*gpu) -> str:
        return chr(linear_choice.table_for(*gpu)["linear"][64, 64][0][1].block_m)

    assert [found(name, (9, 0)) for name in "BC"] == ["B", "C"]
    assert found("E", (9, 0)) == "B" and found("E", (8, 6)) == "A"
    assert found("E", (10, 0)) in "BC" and found("E", (12, 1)) == "D"


def test_the_measured_gpu_has_the_table_in_the_package():
    name, capability = linear_choice.DEFAULT_GPU
    raw = json.loads(linear_choice.table_path(name).read_text())
    assert raw["gpu"] == name and tuple(raw["capability"]) == capability
    assert linear_choice.table_for("NVIDIA H100 80GB HBM3", (9, 0)) == linear_choice.table_for(name, capability)
