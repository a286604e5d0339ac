"""The models: one decoder for both roles, and its conversion from and to Hugging Face folders."""

from .blocks.attention import Masks, PackedAttention, PagedAttention
from .blocks.moe import Routing
from .config import ModelConfig
from .decoder import Decoder, num_parameters
from .hf.export import save_model
from .hf.folder import TEMPLATES, FolderWeights, describe_folder, glances, resolve_folder
from .parts import Held, Ranges, ResidentWeights, WeightSource, complete, load_part, ranges_of
from .patterns import by_pattern
