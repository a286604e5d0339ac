"""How an operator is defined, so that it can be traced, differentiated and called cheaply."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.fx.experimental._config


class Operator:
    """A `torch.library` operator, called past the dispatcher where nobody but the CPU is concerned.

    Autograd, tracers and other devices need the dispatcher, which costs 3 to 5 us a call; decoding one token of a
    small model makes forty. In inference mode on a CPU none of them is there.

    Args:
        name: "namespace::name".
        mutates_args: names of the arguments that it writes.
        cpu: the implementation for a CPU; its annotations are the operator's schema, its first argument is a tensor.
    """

    __wrapped__: Callable[..., Any]

    def __init__(self, name: str, mutates_args: tuple[str, ...], cpu: Callable[..., Any]) -> None:
        functools.update_wrapper(self, cpu)
        self._cpu = cpu
        self._op = torch.library.custom_op(name, cpu, mutates_args=mutates_args, device_types="cpu")
        self.register_kernel = self._op.register_kernel
        self.register_fake = self._op.register_fake
        self.register_autograd = self._op.register_autograd

    def __call__(self, *args: Any) -> Any:
        return self._cpu(*args) if _direct(args[0]) else self._op(*args)


def operator(name: str, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Operator]:
    """Decorates the CPU implementation of an operator."""
    return functools.partial(Operator, name, mutates_args)


@contextmanager
def recording_gradients() -> Iterator[None]:
    """Autograd within the implementation of an operator, which the dispatcher reaches with autograd behind it."""
    keys = [torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradCUDA, torch._C.DispatchKey.ADInplaceOrView]
    before = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in keys]
    try:
        for key in keys:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for key, excluded in zip(keys, before, strict=True):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


def sizes_apart() -> AbstractContextManager[None]:
    """Within, `torch.compile` does not take open sizes for one because they are equal when it compiles."""
    patched: AbstractContextManager[None] = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore
    return patched


def _direct(tensor: torch.Tensor) -> bool:
    """Whether nothing records, intercepts or replaces a call on this tensor."""
    return (
        not torch.compiler.is_compiling()  # first: its tracer understands none of the others
        and torch.is_inference_mode_enabled()
        and tensor.is_cpu
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and torch._C._len_torch_dispatch_stack() == 0
    )
