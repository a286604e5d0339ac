"""Rotary frequencies, with the scalings that extend a model's context."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import InputError

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies are stretched; field names follow Hugging Face.

    - `linear`: all divided by `factor` (Chen et al. 2023, arXiv 2306.15595).
    - `llama3`: wavelengths above `original_max_position_embeddings / low_freq_factor` divided by `factor`, those below
      `original_max_position_embeddings / high_freq_factor` kept, a linear blend in between (the Llama 3.1 release).
    """

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians a position of each pair of elements, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / theta**exponents
    if scaling is None:
        return inv_freq
    if scaling.rope_type == "linear":
        return inv_freq / scaling.factor
    low, high, context = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    stretched = torch.where(wavelength > context / low, inv_freq / scaling.factor, inv_freq)
    blend = (context / wavelength - low) / (high - low)
    between = (1 - blend) * stretched / scaling.factor + blend * stretched
    is_between = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(is_between, between, stretched)


def scaling_from_hf(raw: dict[str, Any], where: str) -> RopeScaling | None:
    """The scaling of a `config.json`: `rope_parameters` (transformers 5) or `rope_scaling` (4).

    Raises:
        InputError: its type is not in `ROPE_TYPES`, or a number is missing or is none.
    """
    values = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise InputError(f"{where}: rope_type is {kind!r}; supported: {', '.join(ROPE_TYPES)}")
    if kind == "default":
        return None

    def number(key: str) -> float:
        value = values.get(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise InputError(f"{where}: {key} of the {kind} rope scaling is {value!r}; it must be a number above 0")
        return value

    if kind == "linear":
        return RopeScaling("linear", number("factor"))
    low, high = number("low_freq_factor"), number("high_freq_factor")
    if low >= high:
        raise InputError(f"{where}: low_freq_factor {low} must be below high_freq_factor {high}")
    return RopeScaling("llama3", number("factor"), low, high, int(number("original_max_position_embeddings")))


def scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any]:
    """The entries of `rope_parameters` next to `rope_theta`."""
    if scaling is None:
        return {"rope_type": "default"}
    if scaling.rope_type == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return dict(vars(scaling))
