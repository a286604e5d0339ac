"""What a model's modules hold besides parameters, buffers and submodules; traces hold it as constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

_MODULE_STATE = {"_parameters", "_buffers", "_modules"}
_SIMPLE_TYPES = bool, int, float, str, bytes, torch.dtype, torch.device


class Attributes:
    """The attributes of modules, in the modules' order.

    Attributes:
        values: text for each module that has its numbers, strings and the like by name.
        classes: those of the modules and of the records among their attributes; `object` stands for a value, such as a
            function, that its text does not distinguish from another.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.values: list[str] = []
        self.classes: dict[type, None] = {}
        self._described: dict[int, str] = {}
        for module in modules:
            self.classes[type(module)] = None
            held = [(name, value) for name, value in vars(module).items() if name not in _MODULE_STATE]
            self.values.append(self._describe(dict(sorted(held))))

    def _describe(self, value: Any) -> str:
        if value is None or type(value) in _SIMPLE_TYPES:
            return repr(value)
        if isinstance(value, Tensor):
            return "tensor"
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{self._describe(k)}: {self._describe(v)}' for k, v in value.items())}}}"
        if isinstance(value, (list, tuple)):
            return f"({', '.join(map(self._describe, value))})"
        if isinstance(value, (set, frozenset)):
            return f"({', '.join(sorted(map(self._describe, value)))})"
        if is_dataclass(value) and not isinstance(value, type):
            return self._describe_record(value)
        self.classes[value if isinstance(value, type) else object] = None
        return getattr(value, "__qualname__", type(value).__qualname__)

    def _describe_record(self, value: Any) -> str:
        if id(value) not in self._described:  # layers share one configuration
            self.classes[type(value)] = None
            named = {field.name: getattr(value, field.name) for field in fields(value)}
            self._described[id(value)] = f"{type(value).__qualname__}{self._describe(named)}"
        return self._described[id(value)]
