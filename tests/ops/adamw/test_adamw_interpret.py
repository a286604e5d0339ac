"""The one-pass AdamW kernel under Triton's interpreter, against torch's own optimizer.

As in `test_kernels_interpret`, one test runs `Interpreted` in a process of its own.
"""

from __future__ import annotations

import os

import pytest
import torch
from processes import run_interpreted

from lockstep import ops

if os.environ.get("TRITON_INTERPRET") == "1":
    from lockstep.ops.adamw import triton as kernels

SIZE, MATRICES = 5000, 3100  # neither a multiple of a block
SETTINGS = ops.AdamWSettings(MATRICES, 0.9, 0.95, 1e-8, 0.1)


def test_kernel_under_the_interpreter() -> None:
    run_interpreted(__file__)


def state(dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Weights, gradients, masters, both moments, steps."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(SIZE, generator=generator)
    weights = None if dtype == torch.float32 else master.to(dtype)
    return [weights, torch.zeros(SIZE), master, torch.zeros(SIZE), torch.zeros(SIZE), torch.tensor([0.0, 3.0])]


class Interpreted:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_equals_torch(self, dtype: torch.dtype) -> None:
        theirs, ours = state(dtype), state(dtype)
        lr, scale = torch.tensor(3e-3), torch.tensor(2.5)
        for step in range(4):
            applied = torch.tensor(step != 2)
            grad = torch.randn(SIZE, generator=torch.Generator().manual_seed(step))
            for tensors, run in ((theirs, ops.adamw), (ours, kernels.adamw)):
                assert not tensors[1].any()
                tensors[1].copy_(grad)
                before = [t.clone() for t in tensors[2:]]
                run(ops.AdamWState(*tensors), ops.AdamWStep(lr, scale, applied), SETTINGS)
                assert applied or all(map(torch.equal, before, tensors[2:]))
            assert torch.equal(ours[5], theirs[5])
            torch.testing.assert_close(ours[2:5], theirs[2:5], rtol=2e-6, atol=1e-7)
            if dtype == torch.bfloat16:  # the interpreter cuts where a GPU rounds
                torch.testing.assert_close(ours[0].float(), ours[2], rtol=2**-7, atol=0)
        assert not torch.equal(ours[2], state(dtype)[2])

    def test_an_update_in_parts_has_the_bits_of_one(self) -> None:
        whole, parts = state(torch.float32), state(torch.float32)
        for tensors, spans in ((whole, [slice(None)]), (parts, [slice(0, 1024), slice(1024, None)])):
            tensors[1].copy_(torch.randn(SIZE, generator=torch.Generator().manual_seed(0)))
            for span in spans:
                own = ops.AdamWState(None, *(t[span] for t in tensors[1:5]), tensors[5].clone())
                step = ops.AdamWStep(torch.tensor(3e-3), torch.tensor(2.5), torch.tensor(True))
                kernels.adamw(own, step, SETTINGS._replace(num_matrix_elements=MATRICES - (span.start or 0)))
        assert all(map(torch.equal, whole[1:5], parts[1:5]))

    def test_gradients_that_are_not_finite_leave_nothing_behind(self) -> None:
        tensors = state(torch.bfloat16)
        tensors[1].fill_(float("nan"))
        before = [t.clone() for t in tensors]
        step = ops.AdamWStep(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(False))
        kernels.adamw(ops.AdamWState(*tensors), step, SETTINGS)
        assert not tensors[1].any()
        assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(tensors, before, strict=True)) if i != 1)
