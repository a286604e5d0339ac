"""The model families, one file each: layers, conversion of configurations, names of weights, and what is refused."""

import difflib
from collections import Counter
from importlib import import_module
from os.path import commonprefix
from typing import Any

from ...errors import InputError
from ..config import ModelConfig
from .family import Family, Raw

_NAMES = (
    *("qwen3", "qwen3_moe", "qwen2", "llama", "mistral", "mixtral", "phi3", "gemma3_text", "olmo2", "olmo3"),
    *("olmoe", "smollm3", "seed_oss", "gpt_oss", "glm4_moe", "deepseek_v3"),
)
FAMILIES: dict[str, Family] = {name: import_module(f"{__name__}.{name}").FAMILY for name in _NAMES}
"""Families by Hugging Face's `model_type`, which is also the name of the family's file."""


def family_of(config: ModelConfig) -> Family:
    return FAMILIES[config.family]


def suggest_family_for(name: str, field: str, value: Any = None) -> str:
    """The end of a message that refuses a field's value for `model_type` `name`: of the families that support the
    value, the one with the most similar name."""
    supporting = [other for other, family in FAMILIES.items() if family.supports(field, value)]
    closest = difflib.get_close_matches(name, supporting, n=1, cutoff=0.0)
    return f"the nearest family that can is {closest[0]}" if closest else "no family here can"


def suggest_family(values: dict[str, Any]) -> str:
    """The end of a message that refuses a whole config.json: the family whose name begins with its own, or else the one
    that shares most of the distinctive fields with it; of several, the one with the longest common prefix of names, or
    the most similar name."""
    name, distinctive = str(values.get("model_type")), _distinctive_fields()
    given = {field for fields in distinctive.values() for field in fields} & values.keys()

    def similarity(other: str) -> tuple[bool, float, int, float]:
        either = distinctive[other] | given
        shared = len(distinctive[other] & given) / len(either) if either else 1.0
        alike = len(commonprefix((name, other))), difflib.SequenceMatcher(None, name, other).ratio()
        return other.startswith(name), shared, *alike

    return f"the nearest family that can is {max(FAMILIES, key=similarity)}"


def _distinctive_fields() -> dict[str, set[str]]:
    """Each family's distinctive fields of config.json: those that at most two families have."""
    all_fields = dict[str, set[str]]()
    for name, family in FAMILIES.items():
        first = family.first_architecture
        all_fields[name] = {*family.fixed, *family.extra_fields, *(family.write(first) if first is not None else ())}
    counts = Counter(field for fields in all_fields.values() for field in fields)
    # common in files, although few families write them
    common = {"intermediate_size", "num_key_value_heads", "original_max_position_embeddings", "partial_rotary_factor"}
    return {name: {field for field in fields if counts[field] <= 2} - common for name, fields in all_fields.items()}


_OUTER_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "quantization_config")


def is_multimodal(values: dict[str, Any]) -> bool:
    """Whether a config.json is that of a multimodal model whose text model is of a known family."""
    part, name = values.get("text_config"), values.get("model_type")
    return isinstance(part, dict) and any(
        name in family.multimodal_types and part.get("model_type") == own for own, family in FAMILIES.items()
    )


def text_config(values: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the text model; outer values of `_OUTER_FIELDS` take precedence if it `is_multimodal`."""
    if not is_multimodal(values):
        return values
    return values["text_config"] | {name: values[name] for name in _OUTER_FIELDS if values.get(name) is not None}


def require_family(values: dict[str, Any], where: str) -> None:
    """Raise `InputError` for an unsupported `model_type`."""
    name, text = values.get("model_type"), values.get("text_config")
    if name in FAMILIES:
        return
    supported = ", ".join(FAMILIES)
    if not isinstance(text, dict):
        raise InputError(f"{where}: model_type is {name!r}; supported: {supported}; {suggest_family(values)}")
    kind = text.get("model_type")
    is_known = str(kind) in FAMILIES  # it may be of any type
    advice = f"is a {kind}, which is supported: save it as" if is_known else f"is a {kind!r}; needed is"
    suggestion = "" if is_known else f"; {suggest_family(text)}"
    raise InputError(
        f"{where}: model_type is {name!r}, which reads more than text; its text part (text_config) {advice} a folder "
        f"of its own, with a model_type of {supported}{suggestion}"
    )
