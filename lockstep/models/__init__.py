"""Architecture only: one decoder for both roles, and its Hugging Face form."""

from .attention import Masks, PackedAttention, PagedAttention
from .config import ModelConfig
from .decoder import Decoder
from .hf import describe_folder, load_model, resolve_folder, save_model
from .moe import Routing

__all__ = [
    "Decoder",
    "Masks",
    "ModelConfig",
    "PackedAttention",
    "PagedAttention",
    "Routing",
    "describe_folder",
    "load_model",
    "resolve_folder",
    "save_model",
]
