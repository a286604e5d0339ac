"""Conversion of Hugging Face's `config.json` from and to `ModelConfig`, for all families."""

from __future__ import annotations

from typing import Any

from ...errors import InputError
from ..blocks.rope import scaling_to_hf
from ..config import ModelConfig
from ..families import FAMILIES, Family, Raw, family_of, require_family, suggest_family_for
from ..families.family import PARTIAL_ROTARY, ROPE_BY_LAYER_TYPE

# Integer fields of `ModelConfig`, and their names in config.json.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
}


def drop_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not null. As in transformers, null counts as absent, except that it means false for flags
    whose default may be true, no window for `sliding_window`, and for `head_dim` the hidden state's share of a head."""
    flags: dict[str, Any] = {name: False for name in ("norm_topk_prob", "rope_interleave") if name in values}
    flags |= {"sliding_window": 0} if "sliding_window" in values else {}
    flags |= {"head_dim": 0} if "head_dim" in values else {}
    return flags | {name: value for name, value in values.items() if value is not None}


def from_hf(values: dict[str, Any], where: str) -> ModelConfig:
    """Read a parsed `config.json`; `where` names the file in errors."""
    require_family(values, where)
    name: str = values["model_type"]
    family = FAMILIES[name]
    values = {**family.defaults, **values}
    for key, allowed in family.fixed.items():
        if values.get(key, allowed[0]) not in allowed:
            can = suggest_family_for(name, key, values[key])
            raise InputError(f"{where}: {key} is {values[key]!r}; supported: {allowed[0]!r}; {can}")
    raw = Raw(values, where)
    fields = {ours: raw.integer(theirs) for ours, theirs in _SIZES.items()}
    fields["num_kv_heads"] = raw.integer("num_key_value_heads", "num_attention_heads")
    fields["head_dim"] = raw.head_dim
    config = ModelConfig(
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        eos_token_ids=read_eos_token_ids(values),
        bos_token_id=values.get("bos_token_id"),
        pad_token_id=values.get("pad_token_id"),
        family=name,
        **fields | _read_rope(raw, family) | family.read(raw),
    )
    family.check(config)
    return config


def _read_rope(raw: Raw, family: Family) -> dict[str, Any]:
    """The family's fields for rotary positions. An `InputError` names a family that supports what this one does not."""
    try:
        return family.rope(raw)
    except InputError as error:
        others = [name for name in (PARTIAL_ROTARY, ROPE_BY_LAYER_TYPE) if not family.supports(name, None)]
        field = next((name for name in others if name in str(error)), None)
        if field is None:
            raise
        raise InputError(f"{error}; {suggest_family_for(raw.values['model_type'], field)}") from None


def read_eos_token_ids(values: dict[str, Any]) -> tuple[int, ...]:
    """The token ids in `eos_token_id` of a parsed config.json or generation_config.json: an id, a list or null."""
    ids = values.get("eos_token_id")
    if isinstance(ids, list):
        return tuple(ids)
    return () if ids is None else (ids,)


def to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The `config.json` that `transformers` 4 and 5 read."""
    eos: int | list[int] | None = list(config.eos_token_ids) or None
    scaling = scaling_to_hf(config.rope_scaling)
    family = family_of(config)
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
