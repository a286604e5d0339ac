"""Model families: Hugging Face's `config.json` from and to the decoder's configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from .blocks.rope import YarnScaling, rope_of_hf, scaling_from_hf, scaling_to_hf
from .config import MLAConfig, ModelConfig, MoEConfig

# Fields of ours that are integers, and what config.json calls them.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
}
_MLA_SIZES = {
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
}


@dataclass(frozen=True)
class _Raw:
    """A parsed config.json; `where` names the file in errors."""

    values: dict[str, Any]
    where: str

    def integer(self, *names: str) -> int:
        """The first of these fields that is there."""
        name = next((n for n in names if n in self.values), names[0])
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputError(f"{self.where}: {name} is {value!r}; it must be an integer")
        return value


@dataclass(frozen=True)
class Family:
    """What a `model_type` implies.

    Attributes:
        architecture: the class in Hugging Face.
        fixed: the fields of config.json that the decoder implements at one value only, with those that mean it (the
            first when absent).
        read: fields of the configuration that are the family's own, or stand elsewhere in its config.json.
        write: the other way round.
    """

    architecture: str
    fixed: dict[str, tuple[Any, ...]]
    read: Callable[[_Raw], dict[str, Any]] = lambda raw: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}


def without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """The fields that are there. Null is absent, and false in a flag whose default may be true, as in transformers."""
    flags = {name: False for name in ("norm_topk_prob", "rope_interleave") if name in values}
    return flags | {name: value for name, value in values.items() if value is not None}


def require_family(name: Any, where: str) -> None:
    """Raise `InputError` for a `model_type` that is none of ours."""
    if name not in FAMILIES:
        raise InputError(f"{where}: model_type is {name!r}; supported: {', '.join(FAMILIES)}")


def from_hf(values: dict[str, Any], where: str) -> ModelConfig:
    """Read a parsed `config.json`; `where` names the file in errors."""
    name: Any = values.get("model_type")
    require_family(name, where)
    family = FAMILIES[name]
    for key, allowed in family.fixed.items():
        if values.get(key, allowed[0]) not in allowed:
            raise InputError(f"{where}: {key} is {values[key]!r}; supported: {allowed[0]!r}")
    raw = _Raw(values, where)
    rope = rope_of_hf(values, where)
    fields = {ours: raw.integer(theirs) for ours, theirs in _SIZES.items()}
    fields["num_kv_heads"] = raw.integer("num_key_value_heads", "num_attention_heads")
    fields["head_dim"] = values.get("head_dim") or fields["hidden_size"] // fields["num_heads"]
    return ModelConfig(
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or values.get("rope_theta") or 10000.0),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        eos_token_ids=end_of_sequence(values),
        bos_token_id=values.get("bos_token_id"),
        pad_token_id=values.get("pad_token_id"),
        family=name,
        rope_scaling=scaling_from_hf(values, where),
        **fields | family.read(raw),
    )


def end_of_sequence(values: dict[str, Any]) -> tuple[int, ...]:
    """The tokens in a parsed config.json's or generation_config.json's field, which may be one, a list or null."""
    ids = values.get("eos_token_id")
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


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
        "initializer_range": 0.02,
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else scaling,
        "rope_parameters": {"rope_theta": config.rope_theta, **scaling},
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
        **family.write(config),
    }


def _read_qwen3(raw: _Raw) -> dict[str, Any]:
    """Windows by `layer_types` or, without it, from layer `max_window_layers` on."""
    layers = range(raw.integer("num_hidden_layers"))
    kinds = raw.values.get("layer_types")
    if kinds is None:
        first = raw.values.get("max_window_layers", 28)  # as in transformers
        return _windows(raw, tuple(i for i in layers if i >= first))
    if len(kinds) != len(layers):
        raise InputError(f"{raw.where}: layer_types has {len(kinds)} entries; there are {len(layers)} layers")
    sliding = tuple(i for i in layers if kinds[i] == "sliding_attention")
    if sliding and not raw.values.get("use_sliding_window"):
        raise InputError(f"{raw.where}: layer_types has sliding_attention, and use_sliding_window is not true")
    return _windows(raw, sliding)


def _windows(raw: _Raw, layers: tuple[int, ...]) -> dict[str, Any]:
    if not raw.values.get("use_sliding_window") or not layers:
        return {}
    return {"sliding_window": raw.integer("sliding_window"), "sliding_layers": layers}


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    if not config.sliding_layers:
        return _write_window(config)
    kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
    first = next(i for i, window in enumerate(config.windows) if window)
    return {**_write_window(config), "max_window_layers": first, "layer_types": kinds}


def _write_window(config: ModelConfig) -> dict[str, Any]:
    window = config.sliding_window if config.sliding_layers else None
    return {"use_sliding_window": window is not None, "sliding_window": window}


def _read_qwen3_moe(raw: _Raw) -> dict[str, Any]:
    step, plain = raw.values.get("decoder_sparse_step", 1), raw.values.get("mlp_only_layers") or []
    layers = range(raw.integer("num_hidden_layers"))
    moe = MoEConfig(
        raw.integer("num_experts", "num_local_experts"),
        raw.integer("num_experts_per_tok"),
        raw.integer("moe_intermediate_size"),
        tuple(i for i in layers if i in plain or (i + 1) % step),
        normalize=bool(raw.values.get("norm_topk_prob", False)),
    )
    return {"moe": moe, **_windows(raw, tuple(layers))}


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "mlp_only_layers": list(moe.dense_layers),
        "decoder_sparse_step": 1,
        "norm_topk_prob": moe.normalize,
        **_write_window(config),
    }


def _read_deepseek_v3(raw: _Raw) -> dict[str, Any]:
    get = raw.values.get
    rope = rope_of_hf(raw.values, raw.where)
    if rope.get("mscale_all_dim") and not isinstance(scaling_from_hf(raw.values, raw.where), YarnScaling | None):
        raise InputError(f"{raw.where}: mscale_all_dim is {rope['mscale_all_dim']!r}; it is supported with yarn only")
    sizes = {ours: raw.integer(theirs) for ours, theirs in _MLA_SIZES.items()}
    q_rank = None if get("q_lora_rank") is None else raw.integer("q_lora_rank")
    mla = MLAConfig(**sizes, q_rank=q_rank, interleaved=bool(get("rope_interleave", True)))
    moe = MoEConfig(
        raw.integer("n_routed_experts", "num_local_experts"),
        raw.integer("num_experts_per_tok"),
        raw.integer("moe_intermediate_size"),
        tuple(range(min(raw.integer("first_k_dense_replace"), raw.integer("num_hidden_layers")))),
        sigmoid=True,
        groups=raw.integer("n_group"),
        kept_groups=raw.integer("topk_group"),
        normalize=bool(get("norm_topk_prob", True)),
        scale=float(get("routed_scaling_factor", 2.5)),  # as in transformers
        shared_experts=raw.integer("n_shared_experts"),
        router_bias=True,
    )
    return {"mla": mla, "moe": moe, "num_kv_heads": 1, "head_dim": mla.rope_dim}


def _write_deepseek_v3(config: ModelConfig) -> dict[str, Any]:
    mla, moe = config.mla, config.moe
    assert mla is not None and moe is not None
    return {
        "num_key_value_heads": config.num_heads,
        **{theirs: getattr(mla, ours) for ours, theirs in _MLA_SIZES.items()},
        "q_lora_rank": mla.q_rank,
        "rope_interleave": mla.interleaved,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "first_k_dense_replace": len(moe.dense_layers),
        "n_group": moe.groups,
        "topk_group": moe.kept_groups,
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.scale,
        "num_nextn_predict_layers": 0,
    }


_FIXED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish"), "attention_bias": (False, None)}
_LLAMA = _FIXED | {"mlp_bias": (False, None), "pretraining_tp": (1, None)}
_DEEPSEEK_V3 = _FIXED | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}

FAMILIES: dict[str, Family] = {
    "qwen3": Family("Qwen3ForCausalLM", _FIXED, _read_qwen3, _write_windows),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _FIXED, _read_qwen3_moe, _write_qwen3_moe),
    "llama": Family("LlamaForCausalLM", _LLAMA),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _DEEPSEEK_V3, _read_deepseek_v3, _write_deepseek_v3),
}
