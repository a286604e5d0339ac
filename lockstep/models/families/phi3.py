"""Phi-3 and 4 (arXiv 2404.14219, 2412.08905): Llama's layers, perhaps with a window, or with a part of each head
rotated; folders have fused projections. Models with a context of 131,072 scale positions by `longrope`, and have their
original context of 4,096 here, up to which `transformers` computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...errors import refuse
from ..blocks.rope import LongRopeScaling, is_positive, scaling_to_hf
from ..blocks.weight_slices import LayerSlice, fused_rotary_layout
from ..config import ModelConfig
from . import qwen3
from .family import (
    PARTIAL_ROTARY,
    SILU_WITHOUT_BIAS,
    Family,
    Raw,
    read_partial_rope,
    read_rotary_dim,
    read_uniform_window,
    require_uniform_windows,
    write_rotary_factor,
    write_uniform_window,
)

_LONG = "longrope", "su"  # the same, as in transformers


def _read(raw: Raw) -> dict[str, Any]:
    window = raw.values.get("sliding_window")
    reached = not window or window < raw.integer("max_position_embeddings")
    return {"rotary_dim": read_rotary_dim(raw, 1.0) % raw.head_dim, **(read_uniform_window(raw) if reached else {})}


def _read_rope(raw: Raw) -> dict[str, Any]:
    values = raw.values.get("rope_scaling") or raw.values.get("rope_parameters") or {}
    kind = values.get("rope_type", values.get("type", "default"))
    raw.refuse(kind not in ("default", *_LONG), f"rope_type is {kind!r}; supported: default, longrope")
    if kind == "default":
        return read_partial_rope(raw)
    original, whole = raw.integer("original_max_position_embeddings"), raw.integer("max_position_embeddings")
    raw.refuse(original < 2, f"original_max_position_embeddings is {original}; it must be at least 2")
    factors = [_read_factors(raw, name, values.get(name)) for name in ("short_factor", "long_factor")]
    given = {name: values.get(name) for name in ("factor", "attention_factor")}
    for name, value in given.items():
        raw.refuse(
            not (value is None or is_positive(value)),
            f"{name} of the longrope rope scaling is {value!r}; it must be a number above 0",
        )
    theta = values.get("rope_theta") or raw.values.get("rope_theta") or 10000.0
    return {
        "rope_theta": float(theta),
        "rope_scaling": LongRopeScaling(factors[0], factors[1], original, whole, **given),
        "max_position_embeddings": min(original, whole),
    }


def _read_factors(raw: Raw, name: str, found: Any) -> tuple[float, ...]:
    fits = isinstance(found, list) and all(map(is_positive, found))
    raw.refuse(not fits, f"{name} of the longrope rope scaling is {found!r}; it must be a list of numbers above 0")
    return tuple(map(float, found))


def _write(config: ModelConfig) -> dict[str, Any]:
    scaling, turned = config.rope_scaling, {PARTIAL_ROTARY: write_rotary_factor(config)} if config.rotary_dim else {}
    written = {**write_uniform_window(config), "original_max_position_embeddings": config.max_position_embeddings}
    if not isinstance(scaling, LongRopeScaling):
        return written | turned
    values = scaling_to_hf(scaling)
    lengths = {name: values.pop(name) for name in ("original_max_position_embeddings", "max_position_embeddings")}
    kind = values.pop("rope_type")
    return {
        **written,
        **lengths,
        **turned,
        "rope_scaling": {"type": kind, **values},  # transformers 4 takes no other fields
        "rope_parameters": {"rope_type": kind, "rope_theta": config.rope_theta, **turned, **values},
    }


def _check(config: ModelConfig) -> None:
    require_uniform_windows(config)
    scaling, pairs = config.rope_scaling, (config.rotary_dim or config.head_dim) // 2
    refuse(
        not isinstance(scaling, LongRopeScaling | None),  # transformers reads yarn as longrope, and no other scaling
        "model config: rope_scaling of a phi3 is not supported; positions must be scaled by longrope, or not at all",
    )
    if isinstance(scaling, LongRopeScaling):
        counts = len(scaling.short_factor), len(scaling.long_factor)
        refuse(
            counts != (pairs, pairs),
            f"model config: short_factor and long_factor of the longrope rope scaling have {counts[0]} and {counts[1]} "
            f"numbers; each must have {pairs}, one for each pair of elements that are rotated",
        )


def _slices(config: ModelConfig, index: int) -> Iterator[LayerSlice]:
    hidden, width = config.hidden_size, config.intermediate_size
    heads = config.num_heads + 2 * config.num_kv_heads
    yield LayerSlice("input_layernorm.weight", "attention_norm", 0, hidden)
    yield LayerSlice("self_attn.qkv_proj.weight", "qkv", 0, heads * config.head_dim, fused_rotary_layout(config))
    yield LayerSlice("self_attn.o_proj.weight", "o", 0, hidden)
    yield LayerSlice("post_attention_layernorm.weight", "mlp_norm", 0, hidden)
    yield LayerSlice("mlp.gate_up_proj.weight", "gate_up", 0, 2 * width)
    yield LayerSlice("mlp.down_proj.weight", "down", 0, hidden)


_TINY = replace(qwen3.TINY, family="phi3", tie_word_embeddings=False, sliding_window=64, sliding_layers=(0, 1, 2, 3))

FAMILY = Family(
    "Phi3ForCausalLM",
    slices=_slices,
    fixed=SILU_WITHOUT_BIAS,
    read=_read,
    write=_write,
    rope=_read_rope,
    extra_fields=(PARTIAL_ROTARY,),
    check=_check,
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    architectures={
        "tiny-phi3": _TINY,
        "phi3-mini": ModelConfig(
            32064, 3072, 8192, 32, 32, 32, 96, 4096, 1e-5, 10000.0, False, family="phi3", sliding_window=2047,
            sliding_layers=tuple(range(32)),
        ),
        "phi4": ModelConfig(100352, 5120, 17920, 40, 40, 10, 128, 16384, 1e-5, 250000.0, False, family="phi3"),
    },
)  # fmt: skip
