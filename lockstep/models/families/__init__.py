"""The model families, one file each: layers, conversion of configurations, names of weights, and what is refused."""

import difflib
import functools
from collections import Counter
from importlib import import_module
from os.path import commonprefix
from typing import Any

from ...errors import InputError
from ..config import ModelConfig
from .family import Family, Raw

_NAMES = (
    *("qwen3", "qwen3_moe", "qwen2", "llama", "mistral", "mixtral", "phi3", "gemma3_text", "olmo2", "olmo3"),
    *("gpt_oss", "glm4_moe", "deepseek_v3"),
)
FAMILIES: dict[str, Family] = {name: import_module(f"{__name__}.{name}").FAMILY for name in _NAMES}
"""Families by Hugging Face's `model_type`, which is also the name of the family's file."""


def family_of(config: ModelConfig) -> Family:
    return FAMILIES[config.family]


def nearest(name: str, field: str, value: Any = None) -> str:
    """The end of a message that refuses a field's value for `model_type` `name`: of the families that support the
    value, the one with the most similar name."""
    able = [other for other, family in FAMILIES.items() if family.takes(field, value)]
    closest = difflib.get_close_matches(name, able, n=1, cutoff=0.0)
    return f"the nearest family that can is {closest[0]}" if closest else "no family here can"


def nearest_to(values: dict[str, Any]) -> str:
    """The end of a message that refuses a whole config.json: the family that shares most of the distinctive fields with
    it; of several, the one with the longest common prefix of names, or the most similar name."""
    name, own = str(values.get("model_type")), _telling()
    theirs = {field for fields in own.values() for field in fields} & values.keys()

    def likeness(other: str) -> tuple[float, int, float]:
        either = own[other] | theirs
        shared = len(own[other] & theirs) / len(either) if either else 1.0
        return shared, len(commonprefix((name, other))), difflib.SequenceMatcher(None, name, other).ratio()

    return f"the nearest family that can is {max(FAMILIES, key=likeness)}"


@functools.cache
def _telling() -> dict[str, set[str]]:
    """Each family's distinctive fields of config.json: those that at most two families have."""
    own = {
        name: {*family.fixed, *family.also, *family.write(next(iter(family.architectures.values())))}
        for name, family in FAMILIES.items()
    }
    having = Counter(field for fields in own.values() for field in fields)
    # common in files, although few families write them
    everywhere = {"intermediate_size", "num_key_value_heads", "original_max_position_embeddings"}
    return {name: {field for field in fields if having[field] <= 2} - everywhere for name, fields in own.items()}


_OF_THE_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "quantization_config")


def is_wrapped(values: dict[str, Any]) -> bool:
    """Whether a config.json is that of a multimodal model whose text model is of a known family."""
    part, name = values.get("text_config"), values.get("model_type")
    return isinstance(part, dict) and any(
        name in family.inside and part.get("model_type") == own for own, family in FAMILIES.items()
    )


def text_part(values: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the text model; outer values of `_OF_THE_WHOLE` take precedence if it `is_wrapped`."""
    if not is_wrapped(values):
        return values
    return values["text_config"] | {name: values[name] for name in _OF_THE_WHOLE if values.get(name) is not None}


def require_family(values: dict[str, Any], where: str) -> None:
    """Raise `InputError` for an unsupported `model_type`."""
    name, part = values.get("model_type"), values.get("text_config")
    if name in FAMILIES:
        return
    supported = ", ".join(FAMILIES)
    if not isinstance(part, dict):
        raise InputError(f"{where}: model_type is {name!r}; supported: {supported}; {nearest_to(values)}")
    kind = part.get("model_type")
    known = str(kind) in FAMILIES  # it may be of any type
    able = f"is a {kind}, which is supported: save it as" if known else f"is a {kind!r}; needed is"
    can = "" if known else f"; {nearest_to(part)}"
    raise InputError(
        f"{where}: model_type is {name!r}, which reads more than text; its text part (text_config) {able} a folder "
        f"of its own, with a model_type of {supported}{can}"
    )
