"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts in place of every feed-forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..blocks.weight_slices import LayerSlice, slices_of_layer
from ..config import ModelConfig, MoEConfig
from . import qwen3
from .family import Family, Raw, read_uniform_window, require_uniform_windows, write_uniform_window


def _read(raw: Raw) -> dict[str, Any]:
    moe = MoEConfig(
        raw.integer("num_local_experts"), raw.integer("num_experts_per_tok"), raw.integer("intermediate_size")
    )
    return {"moe": moe, **read_uniform_window(raw)}


def _write(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    return {
        **write_uniform_window(config),
        "intermediate_size": moe.intermediate_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
    }


def _experts(config: ModelConfig) -> Iterator[LayerSlice]:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    width = moe.intermediate_size
    yield LayerSlice("block_sparse_moe.gate.weight", "moe.router", 0, moe.num_experts)
    for e in range(moe.num_experts):
        expert = f"block_sparse_moe.experts.{e}"
        yield LayerSlice(f"{expert}.w1.weight", "moe.experts.gate_up", 2 * e * width, width)
        yield LayerSlice(f"{expert}.w3.weight", "moe.experts.gate_up", (2 * e + 1) * width, width)
        yield LayerSlice(f"{expert}.w2.weight", "moe.experts.down", e * hidden, hidden)


_TINY = replace(
    qwen3.TINY, family="mixtral", tie_word_embeddings=False, intermediate_size=192, moe=MoEConfig(8, 2, 192)
)  # fmt: skip

FAMILY = Family(
    "MixtralForCausalLM",
    slices=lambda config, index: slices_of_layer(config, index, feed_forward=_experts(config)),
    fixed={"hidden_act": ("silu", "swish")},
    read=_read,
    write=_write,
    sizes=("num_local_experts", "num_experts_per_tok"),
    check=require_uniform_windows,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    architectures={
        "tiny-mixtral": _TINY,
        "mixtral-8x7b": ModelConfig(
            32000, 4096, 14336, 32, 32, 8, 128, 32768, 1e-5, 1e6, False, family="mixtral", moe=MoEConfig(8, 2, 14336)
        ),
    },
)  # fmt: skip
