"""A kernel for matrix products from outside the package: this file, registered by one call.

As in `test_kernels_interpret.py`, one test runs `Interpreted` in a process of its own, under Triton's interpreter.
"""

import os
import sys
from collections.abc import Sequence

import pytest
import torch
from processes import run_interpreted
from torch import Tensor

from lockstep.ops.linear import choice as linear_choice
from lockstep.ops.linear.choice import Choice, Kind
from lockstep.ops.machine_check import check as machine_check

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton
    import triton.language as tl

    from lockstep.ops.linear import kernels

    @triton.jit
    def _toy_kernel(x_ptr, w_ptr, out_ptr, columns, depth, BLOCK: tl.constexpr):
        """A row and a block of columns a program: one multiplication and one addition a step."""
        row, n = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        acc = tl.zeros((BLOCK,), tl.float32)
        for k in range(depth):
            x = tl.load(x_ptr + row * depth + k).to(tl.float32)
            acc += x * tl.load(w_ptr + n * depth + k, mask=n < columns, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * columns + n, acc, mask=n < columns)


def supports(choice: Choice, weight_NK: Tensor) -> bool:
    return weight_NK.is_contiguous()


def candidates(kind: Kind, rows: Sequence[int], columns: int, depth: int) -> list[Choice]:
    return [Choice("toy", block_n=16)] if kind == "linear_fp32" and depth == 48 and rows[-1] <= 8 else []


def run(kind: Kind, choice: Choice, x_MK: Tensor, w_NK: Tensor, residual_MN: Tensor | None = None) -> Tensor:
    (rows, depth), columns = x_MK.shape, w_NK.shape[0]
    out_MN = torch.empty(rows, columns)
    grid = (rows, triton.cdiv(columns, choice.block_n))
    _toy_kernel[grid](x_MK.contiguous(), w_NK, out_MN, columns, depth, BLOCK=choice.block_n)
    return out_MN


def test_under_the_interpreter():
    run_interpreted(__file__)


class Interpreted:
    @pytest.fixture(autouse=True)
    def registered(self):
        kernels.register("toy", sys.modules[__name__])
        yield
        del kernels.KERNELS["toy"], linear_choice.registered["toy"]
        linear_choice.overrides.clear()

    def test_it_computes_the_shapes_that_it_has_candidates_for(self):
        torch.manual_seed(0)
        x, weight = torch.randn(5, 48).bfloat16(), torch.randn(40, 48).bfloat16()
        chain = torch.zeros(5, 40)
        for k in range(48):
            chain += x[:, k : k + 1].float() * weight[:, k].float()
        assert torch.equal(kernels.linear_fp32(x, weight).view(torch.int32), chain.view(torch.int32))
        assert kernels.choose("linear_fp32", 5, weight) == Choice("toy", block_n=16)
        assert ("linear_fp32", 5, 40, 48) in linear_choice.requested, "the machine check looks at it"

    def test_other_shapes_are_the_package_s(self):
        weight = torch.empty(40, 48, dtype=torch.bfloat16)
        assert kernels.choose("linear_fp32", 9, weight).kernel == "pipelined"
        assert kernels.choose("linear", 5, weight).kernel == "pipelined"
        transposed = weight.new_empty(48, 40).t()
        assert kernels.choose("linear_fp32", 5, transposed).kernel == "pipelined", "it says that it cannot"

    def test_a_name_of_the_package_s_is_refused_and_one_that_is_none(self, monkeypatch):
        with pytest.raises(ValueError, match="'pipelined' is a kernel of the package; register yours under another"):
            kernels.register("pipelined", sys.modules[__name__])
        kernels.register("toy", sys.modules[__name__])  # again, as in a notebook
        monkeypatch.setitem(linear_choice.registered, "toy", lambda *_: [Choice("toi", block_n=16)])
        with pytest.raises(ValueError, match=r"Choice\(kernel='toi', .*\) names no kernel; there are .*, toy"):
            kernels.choose("linear_fp32", 5, torch.empty(40, 48, dtype=torch.bfloat16))

    def test_the_machine_check_replaces_it_and_keeps_no_verdict_on_it(self, tmp_path, monkeypatch):
        weight, cpu = torch.empty(40, 48, dtype=torch.bfloat16), torch.device("cpu")
        linear_choice.overrides[40, 48] = linear_choice.CHAIN
        assert kernels.choose("linear_fp32", 5, weight) == linear_choice.CHAIN
        product = machine_check.Product("linear_fp32", 5, 40, 48)
        checked = []
        monkeypatch.setattr(machine_check, "_check_shape", lambda shape, *_: checked.append(shape) or "kept")
        for _ in range(2):
            machine_check.check([product], [], cpu, torch.float32, tmp_path / "cache")
        assert checked == [product, product]
