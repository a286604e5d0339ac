"""Architecture only: one decoder for both roles, and its Hugging Face form."""

from .blocks.attention import Masks, PackedAttention, PagedAttention
from .blocks.moe import Routing
from .config import ModelConfig
from .decoder import Decoder, num_parameters
from .folder import (
    TEMPLATES,
    describe_folder,
    load_model,
    load_value_head,
    resolve_folder,
    save_model,
)
from .parts import Held, ModelPart, Ranges
from .patterns import by_pattern
