"""The model families, one file each: layers, configuration in and out, names of weights, and what is refused."""

from ..config import ModelConfig
from . import deepseek_v3, glm4_moe, llama, mistral, olmo2, olmo3, qwen2, qwen3, qwen3_moe
from .family import Family, Raw

FAMILIES: dict[str, Family] = {
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "olmo2": olmo2.FAMILY,
    "olmo3": olmo3.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
}
"""By Hugging Face's `model_type`."""


def family_of(config: ModelConfig) -> Family:
    """The configuration's row."""
    return FAMILIES[config.family]


__all__ = ["FAMILIES", "Family", "Raw", "family_of"]
