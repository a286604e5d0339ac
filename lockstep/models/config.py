"""The decoder's configuration and its translation from and to Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..errors import InputError
from .rope import RopeScaling, scaling_from_hf, scaling_to_hf


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder-only transformer. Sizes are counts of elements; names follow Hugging Face.

    `family` is Hugging Face's `model_type`; what it implies is in `FAMILIES`.
    """

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
    family: Literal["qwen3", "llama"] = "qwen3"
    rope_scaling: RopeScaling | None = None

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
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalized a head."""
        return FAMILIES[self.family].qk_norm

    @property
    def num_parameters(self) -> int:
        """Weights, tied ones counted once."""
        attention = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.hidden_size
        attention += 2 * self.head_dim * self.qk_norm
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_layers * layer + tables * self.vocab_size * self.hidden_size + self.hidden_size


@dataclass(frozen=True)
class Family:
    """What a `model_type` implies: the class in Hugging Face, whether queries and keys are normalized, and the fields
    of config.json that the decoder implements at one value only, with those that mean it (the first when absent)."""

    architecture: str
    qk_norm: bool
    fixed: dict[str, tuple[Any, ...]]


_FIXED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "attention_bias": (False, None)}

FAMILIES: dict[str, Family] = {
    "qwen3": Family("Qwen3ForCausalLM", True, _FIXED | {"use_sliding_window": (False, None)}),
    "llama": Family("LlamaForCausalLM", False, _FIXED | {"mlp_bias": (False, None), "pretraining_tp": (1, None)}),
}


def from_hf(raw: dict[str, Any], where: str) -> ModelConfig:
    """Read a parsed `config.json`; `where` names the file in errors."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise InputError(f"{where}: model_type is {family!r}; supported: {', '.join(FAMILIES)}")
    for key, allowed in FAMILIES[family].fixed.items():
        if raw.get(key, allowed[0]) not in allowed:
            raise InputError(f"{where}: {key} is {raw[key]!r}; supported: {allowed[0]!r}")
    rope = raw.get("rope_parameters") or {}

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
        family=family,
        rope_scaling=scaling_from_hf(raw, where),
    )


def to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The `config.json` that `transformers` 4 and 5 read."""
    eos: int | list[int] | None = list(config.eos_token_ids) or None
    scaling = scaling_to_hf(config.rope_scaling)
    family = FAMILIES[config.family]
    return {
        "architectures": [family.architecture],
        "model_type": config.family,
        **{key: allowed[0] for key, allowed in family.fixed.items()},
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if isinstance(eos, list) and len(eos) == 1 else eos,
        "pad_token_id": config.pad_token_id,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else scaling,
        "rope_parameters": {"rope_theta": config.rope_theta, **scaling},
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
