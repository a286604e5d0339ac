"""Rotary frequencies, with the scalings that extend a model's context."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeGuard

import torch
from torch import Tensor

from ...errors import InputError, refuse

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies are scaled; field names follow Hugging Face.

    - `linear`: all are divided by `factor` (Chen et al. 2023, arXiv 2306.15595).
    - `llama3`: frequencies with wavelengths above `original_max_position_embeddings / low_freq_factor` are divided by
      `factor`, those with wavelengths below `original_max_position_embeddings / high_freq_factor` kept, and those in
      between blended linearly (the Llama 3.1 release).
    """

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    table_factor: ClassVar[float] = 1.0

    def frequencies(self, inv_freq: Tensor, theta: float) -> Tensor:
        """The scaled frequencies, float32 [pairs]."""
        if self.rope_type == "linear":
            return inv_freq / self.factor
        low, high, context = self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings
        wavelength = 2 * math.pi / inv_freq
        stretched = torch.where(wavelength > context / low, inv_freq / self.factor, inv_freq)
        blend = (context / wavelength - low) / (high - low)
        between = (1 - blend) * stretched / self.factor + blend * stretched
        is_between = (wavelength >= context / high) & (wavelength <= context / low)
        return torch.where(is_between, between, stretched)


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753); field names follow Hugging Face.

    Each pair's frequency is divided by its own factor: up to the original context by one of `short_factor`, beyond it
    by one of `long_factor`, at all positions of a sequence. So that no token depends on how long its sequence becomes,
    a model's context is the original one here, and the long factors are only kept. Cosines and sines are multiplied by
    `attention_factor` or, without it, by a function of `factor` or, without that, of the ratio of the contexts.
    """

    rope_type: ClassVar[str] = "longrope"

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    max_position_embeddings: int
    factor: float | None = None
    attention_factor: float | None = None

    def frequencies(self, inv_freq: Tensor, theta: float) -> Tensor:
        """The scaled frequencies, float32 [pairs]."""
        return 1.0 / (torch.tensor(self.short_factor) * _powers(2 * len(inv_freq), theta))

    @property
    def table_factor(self) -> float:
        """The factor on cosines and sines."""
        original = self.original_max_position_embeddings
        factor = self.max_position_embeddings / original if self.factor is None else self.factor
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071); field names follow Hugging Face.

    Frequencies that turn more than `beta_fast` times over the original context are kept, those that turn less than
    `beta_slow` times are divided by `factor`, with a linear ramp over the pairs in between; `truncate` rounds its ends
    to whole pairs. Cosines and sines are multiplied by `attention_factor` or, without it, by a function of `factor` and
    the `mscale`s.
    """

    rope_type: ClassVar[str] = "yarn"

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def frequencies(self, inv_freq: Tensor, theta: float) -> Tensor:
        """The scaled frequencies, float32 [pairs]."""
        pairs = len(inv_freq)

        def pair(turns: float) -> float:  # the (fractional) pair that turns this often over the original context
            wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return pairs * math.log(wavelength) / math.log(theta)

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        high += 0.001 if low == high else 0.0
        stretched = ((torch.arange(pairs, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        kept = 1 - stretched
        return inv_freq / self.factor * (1 - kept) + inv_freq * kept

    @property
    def table_factor(self) -> float:
        """The factor on cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def score_factor(self) -> float:
        """The factor on the scale of latent attention's scores, which covers the unrotated part too (DeepSeek-V2's
        code)."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


Scaling = RopeScaling | LongRopeScaling | YarnScaling


def partial_frequencies(head_dim: int, rotary_dim: int, theta: float, scaling: Scaling | None) -> Tensor:
    """`inverse_frequencies` of `rotary_dim` elements, and 0, which rotates nothing, for the rest of the head."""
    kept = torch.zeros((head_dim - rotary_dim) // 2)
    return torch.cat((inverse_frequencies(rotary_dim, theta, scaling), kept))


def inverse_frequencies(head_dim: int, theta: float, scaling: Scaling | None) -> Tensor:
    """Radians per position for each pair of elements, float32 [head_dim / 2]."""
    inv_freq = 1.0 / _powers(head_dim, theta)
    return inv_freq if scaling is None else scaling.frequencies(inv_freq, theta)


def _powers(head_dim: int, theta: float) -> Tensor:
    """Of `theta`, for each pair of elements, float32."""
    return theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def scale_rope_table(table_TH: Tensor, factor: float, rotary_dim: int) -> Tensor:
    """`ops.rope_table`'s result times `factor`, for the `rotary_dim` elements of a head that are rotated; 0: all."""
    if rotary_dim in (0, table_TH.shape[1]):
        return table_TH * factor
    cos, sin = table_TH.chunk(2, dim=1)
    pairs = rotary_dim // 2
    return torch.cat([part for t in (cos, sin) for part in (t[:, :pairs] * factor, t[:, pairs:])], dim=1)


def is_positive(value: Any) -> TypeGuard[float]:
    """Whether `value` is a number above 0 that a float can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def rope_parameters_from_hf(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """What a `config.json` says about rotations: all of `rope_scaling` if it is present and not empty, else
    `rope_parameters`, as in transformers 5. `InputError`: only a part of each head is rotated, or layers differ."""
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    values = raw.get(name) or {}
    for place in (raw, values):
        if place.get("partial_rotary_factor") not in (1, None):
            raise InputError(f"{where}: partial_rotary_factor is {place['partial_rotary_factor']!r}; supported: 1")
    layers = next((key for key, value in values.items() if isinstance(value, dict)), None)
    refuse(layers is not None, f"{where}: {name} has separate values for {layers!r}; supported: one for all layers")
    return values


def scaling_from_hf(raw: dict[str, Any], where: str) -> Scaling | None:
    """The scaling of a `config.json`. `InputError`: its type is not one of `ROPE_TYPES`, or a number is missing or
    invalid."""
    values = rope_parameters_from_hf(raw, where)
    kind = values.get("rope_type", values.get("type", "default"))
    refuse(kind not in ROPE_TYPES, f"{where}: rope_type is {kind!r}; supported: {', '.join(ROPE_TYPES)}")
    if kind == "default":
        return None

    def number(key: str, value: Any = None) -> float:
        value = value or values.get(key)
        if not is_positive(value):
            raise InputError(f"{where}: {key} of the {kind} rope scaling is {value!r}; it must be a number above 0")
        return float(value)

    if kind == "linear":
        return RopeScaling("linear", number("factor"))
    key = "original_max_position_embeddings"
    nested = values.get(key, raw.get("max_position_embeddings"))
    factor = number("factor")
    context = int(number(key, raw.get(key) or nested))  # one at the top level wins, as in transformers
    refuse(context < 1, f"{where}: {key} of the {kind} rope scaling is below 1")
    if kind == "yarn":
        optional = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
        given = {key: number(key) for key in optional if values.get(key)}
        if values.get("attention_factor") == 0:  # refused; for the others, 0 stands for the default
            number("attention_factor")
        truncate = values.get("truncate", True)
        if not isinstance(truncate, bool):
            raise InputError(f"{where}: truncate of the yarn rope scaling is {truncate!r}; it must be true or false")
        return YarnScaling(factor, context, **given, truncate=truncate)
    low, high = number("low_freq_factor"), number("high_freq_factor")
    refuse(low >= high, f"{where}: low_freq_factor {low} must be below high_freq_factor {high}")
    return RopeScaling("llama3", factor, low, high, context)


def scaling_to_hf(scaling: Scaling | None) -> dict[str, Any]:
    """The entries of `rope_parameters` next to `rope_theta`."""
    if scaling is None:
        return {"rope_type": "default"}
    if scaling.rope_type == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    given = {key: value for key, value in vars(scaling).items() if value is not None}
    return {"rope_type": scaling.rope_type, **{k: list(v) if isinstance(v, tuple) else v for k, v in given.items()}}
