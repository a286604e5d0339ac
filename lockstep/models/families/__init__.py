"""The model families, one file each: layers, configuration in and out, names of weights, and what is refused."""

import difflib
from typing import Any

from ...errors import InputError
from ..config import ModelConfig
from . import deepseek_v3, gemma3_text, glm4_moe, gpt_oss, llama, mistral, olmo2, olmo3, qwen2, qwen3, qwen3_moe
from .family import Family, Raw

FAMILIES: dict[str, Family] = {
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen2": qwen2.FAMILY,
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "gemma3_text": gemma3_text.FAMILY,
    "olmo2": olmo2.FAMILY,
    "olmo3": olmo3.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
}
"""By Hugging Face's `model_type`."""


def family_of(config: ModelConfig) -> Family:
    """The configuration's row."""
    return FAMILIES[config.family]


def nearest(name: str, field: str = "", value: Any = None) -> str:
    """The end of a message that refuses a model of this `model_type`, or a field's value in it: of the families that
    take it, the one whose name is most like it."""
    able = [other for other, family in FAMILIES.items() if not field or family.takes(field, value)]
    closest = difflib.get_close_matches(name, able, n=1, cutoff=0.0)
    return f"the nearest family that can is {closest[0]}" if closest else "no family here can"


def require_family(values: dict[str, Any], where: str) -> None:
    """Raise `InputError` for a `model_type` that is none of ours."""
    name, part = values.get("model_type"), values.get("text_config")
    if name in FAMILIES:
        return
    if isinstance(part, dict):
        kind = part.get("model_type")
        able = f"is a {kind}, which is supported: save it as" if kind in FAMILIES else f"is a {kind!r}; needed is"
        raise InputError(
            f"{where}: model_type is {name!r}, which reads more than text; its text part (text_config) {able} a folder "
            f"of its own, with a model_type of {', '.join(FAMILIES)}"
        )
    raise InputError(f"{where}: model_type is {name!r}; supported: {', '.join(FAMILIES)}; {nearest(str(name))}")
