"""gpt-oss (arXiv 2508.10925): attention with sinks, a sliding window in every second layer, biases, and experts with a
clamped SwiGLU. MXFP4 weights are dequantized on loading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..blocks import mxfp4
from ..blocks.rope import YarnScaling
from ..blocks.weight_slices import BlockRead, LayerSlice, RowLayout, attention_slices, slices_of_layer
from ..config import ModelConfig, MoEConfig
from . import qwen3
from .family import (
    FULL,
    SLIDING,
    Family,
    Raw,
    all_but_every,
    read_alternating_windows,
    write_alternating_windows,
)

_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_YARN |= {"original_max_position_embeddings": 4096}
_BIASES = ("qkv", "o")


@dataclass(frozen=True)
class InputMajor(RowLayout):
    """A folder stores experts' weights as [E, inputs, outputs] and biases as [E, outputs]; the decoder's rows are
    outputs, `block` per expert. The folder interleaves the `kinds` of outputs, such as gate and up, and the decoder
    has all outputs of the first kind before those of the second."""

    kinds: int = 1

    def plan_reads(self, wanted: Sequence[range]) -> list[BlockRead]:
        """Wherever outputs of one kind are wanted, read those of all kinds, each once."""
        outputs = self.block // self.kinds  # of each kind
        starts = range(0, self.block, outputs)
        pieces = [(max(rows.start - at, 0), min(rows.stop - at, outputs)) for at in starts for rows in wanted]
        merged = list[tuple[int, int]]()
        for begin, end in sorted(piece for piece in pieces if piece[0] < piece[1]):
            if merged and begin <= merged[-1][1]:
                first, last = merged.pop()
                begin, end = first, max(end, last)
            merged.append((begin, end))
        return [
            BlockRead(range(begin * self.kinds, end * self.kinds), [range(at + begin, at + end) for at in starts])
            for begin, end in merged
        ]

    def from_hf(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(1, -1).unflatten(1, (-1, self.kinds)).transpose(1, 2).flatten(0, 2)

    def to_hf(self, rows: Tensor) -> Tensor:
        by_kind = rows.unflatten(0, (-1, self.kinds, self.block // self.kinds))
        return by_kind.transpose(1, 2).flatten(1, 2).transpose(1, -1)


def _moe(experts: int, slots: int, width: int) -> MoEConfig:
    return MoEConfig(experts, slots, width, activation="swiglu_clamped", biases=True)


def _read(raw: Raw) -> dict[str, Any]:
    moe = _moe(
        raw.integer("num_local_experts", "num_experts"),
        raw.integer("num_experts_per_tok", "experts_per_token"),
        raw.integer("intermediate_size"),
    )
    return {"moe": moe, "biases": _BIASES, "attention_sinks": True, **read_alternating_windows(raw, 2)}


def _write(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    return {
        **write_alternating_windows(config),
        "intermediate_size": moe.intermediate_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "experts_per_token": moe.num_experts_per_token,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }


def _slices(config: ModelConfig, index: int) -> Iterator[LayerSlice]:
    sinks = LayerSlice("self_attn.sinks", "sinks", 0, config.num_heads)
    return slices_of_layer(config, index, [*attention_slices(config), sinks], _experts(config))


def _experts(config: ModelConfig) -> Iterator[LayerSlice]:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    experts, width = moe.num_experts, moe.intermediate_size
    yield LayerSlice("mlp.router.weight", "moe.router", 0, experts)
    yield LayerSlice("mlp.router.bias", "moe.router_offset", 0, experts)
    up, down = InputMajor(2 * width, kinds=2), InputMajor(hidden)
    all_up, all_down = 2 * experts * width, experts * hidden
    yield LayerSlice("mlp.experts.gate_up_proj", "moe.experts.gate_up", 0, all_up, up)
    yield LayerSlice("mlp.experts.gate_up_proj_bias", "moe.experts.gate_up_bias", 0, all_up, up)
    yield LayerSlice("mlp.experts.down_proj", "moe.experts.down", 0, all_down, down)
    yield LayerSlice("mlp.experts.down_proj_bias", "moe.experts.down_bias", 0, all_down, down)


def _size(layers: int, experts: int) -> ModelConfig:
    return ModelConfig(
        201088, 2880, 2880, layers, 64, 8, 64, 131072, 1e-5, 150000.0, False, family="gpt_oss",
        rope_scaling=YarnScaling(32.0, 4096, truncate=False), moe=_moe(experts, 4, 2880), biases=_BIASES,
        attention_sinks=True, sliding_window=128, sliding_layers=all_but_every(2, layers),
    )  # fmt: skip


_TINY = replace(
    qwen3.TINY, family="gpt_oss", tie_word_embeddings=False, intermediate_size=192, moe=_moe(8, 2, 192),
    biases=_BIASES, attention_sinks=True, sliding_window=48, sliding_layers=(0, 2),
    rope_scaling=YarnScaling(8.0, 256, truncate=False),
)  # fmt: skip

FAMILY = Family(
    "GptOssForCausalLM",
    slices=_slices,
    fixed={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (True,),
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (7.0,),
    },
    read=_read,
    write=_write,
    layer_kinds=(FULL, SLIDING),
    quant_methods=(mxfp4.METHOD,),
    sizes=("num_local_experts", "num_experts_per_tok", "experts_per_token"),
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": _YARN,
        "sliding_window": 128,
        "head_dim": 64,
    },
    architectures={
        "tiny-gpt-oss": _TINY,
        "gpt-oss-20b": _size(24, 32),
        "gpt-oss-20b-4-layers": _size(4, 32),
        "gpt-oss-120b": _size(36, 128),
    },
)
