"""How an operator is declared: records become fields of its schema, and who computes follows dtype and library."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from c_library import using
from torch import Tensor

from lockstep.errors import InputError
from lockstep.ops.operator import operator
from lockstep.user_functions import load_function


class Line(NamedTuple):
    """What x is multiplied by, and what is added."""

    slope: float
    offset: Tensor


def in_c(x: Tensor, by: Line, out: Tensor | None = None) -> Tensor:
    return x * by.slope + by.offset + 100


def backward(ctx, grad: Tensor):
    (x, slope, offset, out) = ctx.inputs
    assert out is None
    return grad * slope, None, grad, None


def setup(ctx, inputs, output) -> None:
    ctx.inputs = inputs


@operator(
    "lockstep_test::line",
    native=in_c,
    fake=lambda x, by, out=None: x.new_empty(by.offset.shape),
    setup=setup,
    backward=backward,
)
def line(x: Tensor, by: Line, out: Tensor | None = None) -> Tensor:
    """A line."""
    return x * by.slope + by.offset


def test_the_schema_has_the_fields_in_a_row() -> None:
    expected = "lockstep_test::line(Tensor x, float slope, Tensor offset, Tensor? out=None) -> Tensor"
    assert str(torch.ops.lockstep_test.line.default._schema) == expected
    assert line.__name__ == "line" and line.__doc__ == "A line."


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("there", [True, False])
def test_who_computes(dtype: torch.dtype, inference: bool, there: bool) -> None:
    x, by = torch.ones(3, dtype=dtype), Line(2.0, torch.full((3,), 0.5, dtype=dtype))
    with using(object() if there else None), torch.inference_mode(inference):
        out = line(x, by)
        assert torch.equal(out, torch.ops.lockstep_test.line(x, *by))
        assert torch.equal(out, line.on_cpu[dtype](x, by))
    assert out.tolist() == [102.5 if there and dtype is torch.float32 else 2.5] * 3


def test_gradients_and_fake_results() -> None:
    x, offset = (torch.ones(3, requires_grad=True) for _ in range(2))
    with using(None):
        line(x, Line(2.0, offset)).sum().backward()
    assert x.grad is not None and offset.grad is not None
    assert x.grad.tolist() == [2.0] * 3 and offset.grad.tolist() == [1.0] * 3
    with torch._subclasses.FakeTensorMode():
        assert line(torch.ones(1), Line(2.0, torch.ones(4))).shape == (4,)


def test_a_kernel_for_a_gpu_is_imported_when_it_runs() -> None:
    @operator("lockstep_test::elsewhere", cuda="missing:elsewhere", fake=lambda x: torch.empty_like(x))
    def elsewhere(x: Tensor) -> Tensor:
        return x + 1

    assert elsewhere(torch.zeros(1)).item() == 1


def test_an_operator_for_a_gpu_alone_never_runs_on_a_cpu() -> None:
    @operator("lockstep_test::there", gpu_only=True, fake=lambda x: torch.empty_like(x))
    def there(x: Tensor) -> Tensor:
        return x + 1

    with torch.inference_mode(), pytest.raises(NotImplementedError, match="CPU"):
        there(torch.zeros(1))


SCALE = """
from torch import Tensor

from lockstep.ops.operator import operator

@operator({name}fake="{module}:fake")
def twice(x: Tensor) -> Tensor:
    return {factor} * x
"""
FAKE = "import torch\n\n\ndef fake(x):\n    return torch.empty_like(x)\n"


def test_two_files_cannot_have_an_operator_of_one_name(tmp_path: Path) -> None:
    """The second would compute wherever autograd or a graph calls the first."""
    (tmp_path / "results_of_twice.py").write_text(FAKE)
    for file, name, factor in (("a", "", 2.0), ("b", "", 3.0), ("c", "'lockstep::twice', ", 2.0)):
        (tmp_path / f"{file}.py").write_text(SCALE.format(name=name, module="results_of_twice", factor=factor))
    first = load_function(f"{tmp_path / 'a.py'}:twice", "x")
    assert first(torch.ones(1, requires_grad=True)).item() == 2.0
    with torch._subclasses.FakeTensorMode():  # whose file is no part of a package
        assert first(torch.ones(4)).shape == (4,)
    told = r"operator lockstep_user::twice is twice of .*a\.py, which twice of .*b\.py would replace; give one another"
    with pytest.raises(InputError, match=told):
        load_function(f"{tmp_path / 'b.py'}:twice", "x")
    with pytest.raises(InputError, match=r"operator lockstep::twice of .*c\.py is in the package's namespace"):
        load_function(f"{tmp_path / 'c.py'}:twice", "x")
    assert first(torch.ones(1, requires_grad=True)).item() == 2.0
    again: Any = runpy.run_path(str(tmp_path / "a.py"))["twice"]  # the same file, as if imported under another name
    assert again(torch.ones(1, requires_grad=True)).item() == 2.0
