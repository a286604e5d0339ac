"""Generation: continuous batching over a paged KV cache with the trainer's own model."""

from .cache_capacity import plan_cache_tokens
from .engine import Engine
from .kv_cache import KVCache
from .sizes import pays_to_group
from .weights import SharedWeights
