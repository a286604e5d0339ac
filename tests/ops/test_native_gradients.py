"""Parts of gradients in C: the bits of plain torch, whoever computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from c_library import using
from native_cases import same, wide
from torch import Tensor

from lockstep.ops import native
from lockstep.ops.native import library
from lockstep.ops.norm import operator as norm
from lockstep.ops.records import Rotation
from lockstep.ops.rope import operator as rope

pytestmark = pytest.mark.skipif(library.built is None, reason="the C library is not built")


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The work is shared however little it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(native, "THREAD_WORK", 1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def of_both(gradients: Callable[[], tuple[Tensor | None, ...]]) -> None:
    """Hold `gradients` in C to `gradients` in torch."""
    with using(None):
        expected = gradients()
    found = gradients()
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or same(one, other)


@pytest.mark.parametrize("dim", [1, 24, 128, 333])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_of_a_norm(dim: int, offset: float) -> None:
    fused, weight, grad = wide(37, dim + 5).requires_grad_(), torch.randn(dim, requires_grad=True), wide(37, dim)
    of_both(lambda: torch.autograd.grad(norm.rms_norm(fused[:, 5:], weight, 1e-6, offset), (fused, weight), grad))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("tokens", "head_dim"), [(1, 2), (37, 12), (40, 64)])
def test_of_norm_and_rotation(tokens: int, head_dim: int, normed: bool) -> None:
    qkv, grad = wide(tokens, 7 * head_dim), wide(tokens, 5 * head_dim).view(tokens, 5, head_dim)
    weights = (torch.randn(head_dim), torch.randn(head_dim)) if normed else (None, None)
    table = torch.rand(tokens, head_dim) * 2 - 1
    by = Rotation(*weights, table, 3, 2, 1e-6)
    compute = {None: rope.qk_norm_rope_backward.__wrapped__}
    for offset in (0.0, 1.0):
        of_both(lambda offset=offset: compute.get(library.current, rope._native_backward)(grad, qkv, by, offset))
    assert not rope._native_backward(grad, qkv, by)[0][:, 5 * head_dim :].any()
