"""The models: one decoder for both roles, and its conversion from and to Hugging Face folders."""

from .blocks.attention import Masks, PackedAttention, PagedAttention
from .blocks.moe import Routing
from .config import ModelConfig
from .decoder import Decoder, num_parameters
from .hf.export import save_model
from .hf.folder import EXTRA_TEMPLATES, FolderWeights, describe_folder, resolve_folder, sampled_hashes
from .parts import Ranges, ResidentWeights, TensorRange, WeightSource, all_gather_shares, load_part, ranges_of
from .patterns import select_by_pattern
