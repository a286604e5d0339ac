"""The decoder's configuration and its translation from and to Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import InputError


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder-only transformer. Sizes are counts of elements; names follow Hugging Face."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 40960
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    tie_word_embeddings: bool = True
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise InputError(f"model config: {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"model config: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise InputError(f"model config: head_dim is {self.head_dim}; rotary embedding needs an even number")

    @property
    def num_parameters(self) -> int:
        """Weights, tied ones counted once."""
        attention = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.hidden_size + 2 * self.head_dim
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_layers * layer + tables * self.vocab_size * self.hidden_size + self.hidden_size


# Fields of config.json that change the architecture: accepted only at the value the decoder implements.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "use_sliding_window": (False, None),
    "rope_scaling": (None,),
}


def from_hf(raw: dict[str, Any], where: str) -> ModelConfig:
    """Read a parsed `config.json`; `where` names the file in errors."""
    if raw.get("model_type") != "qwen3":
        raise InputError(f"{where}: model_type is {raw.get('model_type')!r}; supported: qwen3")
    for key, allowed in _FIXED.items():
        if raw.get(key, allowed[0]) not in allowed:
            raise InputError(f"{where}: {key} is {raw[key]!r}; supported: {allowed[0]!r}")
    rope = raw.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise InputError(f"{where}: rope_type is {rope['rope_type']!r}; supported: 'default'")

    def size(key: str) -> int:
        value = raw.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputError(f"{where}: {key} is {value!r}; it must be an integer")
        return value

    eos = raw.get("eos_token_id")
    return ModelConfig(
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=size("num_attention_heads"),
        num_kv_heads=size("num_key_value_heads"),
        head_dim=raw.get("head_dim") or size("hidden_size") // size("num_attention_heads"),
        max_position_embeddings=size("max_position_embeddings"),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        bos_token_id=raw.get("bos_token_id"),
        pad_token_id=raw.get("pad_token_id"),
    )


def to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The `config.json` that `transformers` 4 and 5 read."""
    eos: int | list[int] | None = list(config.eos_token_ids) or None
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if isinstance(eos, list) and len(eos) == 1 else eos,
        "pad_token_id": config.pad_token_id,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }
