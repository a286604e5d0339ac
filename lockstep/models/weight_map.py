"""Which rows of the decoder's tensors, whose weights are fused, the tensors of a Hugging Face folder are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import MLAConfig, ModelConfig, MoEConfig

HEAD = "lm_head.weight"  # the output's weights; those of the embedding where they are tied


@dataclass(frozen=True)
class WeightSlice:
    """Tensor `name` of a Hugging Face folder is rows `start : start + rows` of the decoder's `parameter`, whose leading
    dims count as rows when it has more than two.

    Attributes:
        interleaved: (rows a head, the last of them that are rotated) when the folder has the pairs that rotate together
            side by side; the decoder has their first elements first, then their second ones.
    """

    name: str
    parameter: str
    start: int
    rows: int
    interleaved: tuple[int, int] | None = None

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The rows, as a view."""
        tensor = tensors[self.parameter]
        rows = tensor.flatten(0, -2) if tensor.dim() > 2 else tensor
        return rows[self.start : self.start + self.rows]

    def from_hf(self, tensor: Tensor) -> Tensor:
        """The folder's tensor with its rows in the decoder's order."""
        return tensor if self.interleaved is None else self._reordered(tensor, -1, 2)

    def to_hf(self, rows: Tensor) -> Tensor:
        """The inverse of `from_hf`."""
        return rows if self.interleaved is None else self._reordered(rows, 2, -1)

    def _reordered(self, rows: Tensor, *shape: int) -> Tensor:
        """With the two dims that each head's rotated rows have in this shape exchanged."""
        assert self.interleaved is not None
        head, rotated = self.interleaved
        plain, pairs = rows.unflatten(0, (-1, head)).split((head - rotated, rotated), dim=1)
        return torch.cat((plain, pairs.unflatten(1, shape).transpose(1, 2).flatten(1, 2)), dim=1).flatten(0, 1)


def weight_map(config: ModelConfig) -> list[WeightSlice]:
    """Every tensor of the Hugging Face form, in file order."""
    slices = [WeightSlice("model.embed_tokens.weight", "embed", 0, config.vocab_size)]
    for i in range(config.num_layers):
        slices += _layer(config, i)
    slices.append(WeightSlice("model.norm.weight", "norm", 0, config.hidden_size))
    if not config.tie_word_embeddings:
        slices.append(WeightSlice(HEAD, "lm_head", 0, config.vocab_size))
    return slices


def fused_experts(config: ModelConfig) -> dict[str, str]:
    """The other form of a folder's experts, all of a layer in one tensor: its name, and the parameter that it is."""
    return {
        f"model.layers.{i}.mlp.experts.{own}_proj": f"layers.{i}.moe.experts.{own}"
        for i in range(config.num_layers)
        for own in ("gate_up", "down")
        if config.is_moe(i)
    }


def is_left_out(name: str, config: ModelConfig) -> bool:
    """Whether a folder's tensor is one that the decoder does without: rotary frequencies, and the layers after
    DeepSeek-V3's last, which predict further tokens."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    before, _, rest = name.partition("model.layers.")
    layer = rest.partition(".")[0]
    further = not before and layer.isdecimal() and int(layer) >= config.num_layers
    return config.family == "deepseek_v3" and further


_Rows = tuple[str, str, int, int]  # of a weight: its name and the parameter's in the layer, start, rows


def _layer(config: ModelConfig, i: int) -> Iterator[WeightSlice]:
    theirs, ours, hidden = f"model.layers.{i}", f"layers.{i}", config.hidden_size
    interleaved = _interleaved(config.mla) if config.mla is not None else {}
    rows: list[_Rows] = [("input_layernorm", "attention_norm", 0, hidden)]
    rows += _heads(config) if config.mla is None else _latent(config, config.mla)
    rows += [("self_attn.o_proj", "o", 0, hidden), ("post_attention_layernorm", "mlp_norm", 0, hidden)]
    moe = config.moe if config.is_moe(i) else None
    rows += _mlp("mlp", "", config.intermediate_size, hidden) if moe is None else _experts(moe, hidden)
    for name, parameter, start, count in rows:
        yield WeightSlice(f"{theirs}.{name}.weight", f"{ours}.{parameter}", start, count, interleaved.get(name))
    if moe is not None and moe.router_bias:
        bias = f"{theirs}.mlp.gate.e_score_correction_bias"
        yield WeightSlice(bias, f"{ours}.moe.router_bias", 0, moe.num_experts)


def _heads(config: ModelConfig) -> list[_Rows]:
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [
        ("self_attn.q_proj", "qkv", 0, q),
        ("self_attn.k_proj", "qkv", q, kv),
        ("self_attn.v_proj", "qkv", q + kv, kv),
        *[(f"self_attn.{own}", own, 0, config.head_dim) for own in ("q_norm", "k_norm") if config.qk_norm],
    ]


def _latent(config: ModelConfig, m: MLAConfig) -> list[_Rows]:
    queries, up = config.num_heads * (m.nope_dim + m.rope_dim), config.num_heads * (m.nope_dim + m.v_dim)
    keys: list[_Rows] = [
        ("self_attn.kv_a_proj_with_mqa", "mla.down", m.q_rank or queries, m.key_dim),
        ("self_attn.kv_a_layernorm", "mla.kv_norm", 0, m.kv_rank),
        ("self_attn.kv_b_proj", "mla.kv_up", 0, up),
    ]
    if m.q_rank is None:
        return [("self_attn.q_proj", "mla.down", 0, queries), *keys]
    return [
        ("self_attn.q_a_proj", "mla.down", 0, m.q_rank),
        ("self_attn.q_a_layernorm", "mla.q_norm", 0, m.q_rank),
        ("self_attn.q_b_proj", "mla.q_up", 0, queries),
        *keys,
    ]


def _interleaved(m: MLAConfig) -> dict[str, tuple[int, int]]:
    """`WeightSlice.interleaved` by the tensor's name in its layer."""
    queries, keys = (m.nope_dim + m.rope_dim, m.rope_dim), (m.key_dim, m.rope_dim)
    names = {"q_proj": queries, "q_b_proj": queries, "kv_a_proj_with_mqa": keys}
    return {f"self_attn.{name}": heads for name, heads in names.items()} if m.interleaved else {}


def _mlp(theirs: str, ours: str, width: int, hidden: int, index: int = 0) -> list[_Rows]:
    """Of a feed-forward, or of expert `index` among those in one parameter."""
    return [
        (f"{theirs}.gate_proj", f"{ours}gate_up", 2 * index * width, width),
        (f"{theirs}.up_proj", f"{ours}gate_up", (2 * index + 1) * width, width),
        (f"{theirs}.down_proj", f"{ours}down", index * hidden, hidden),
    ]


def _experts(moe: MoEConfig, hidden: int) -> list[_Rows]:
    f = moe.intermediate_size
    rows: list[_Rows] = [("mlp.gate", "moe.router", 0, moe.num_experts)]
    for e in range(moe.num_experts):
        rows += _mlp(f"mlp.experts.{e}", "moe.experts.", f, hidden, e)
    if moe.shared_experts:
        rows += _mlp("mlp.shared_experts", "moe.shared.", moe.shared_experts * f, hidden)
    return rows
