"""Generation: continuous batching over a paged KV cache with the trainer's own model."""

from .engine import Engine
from .kv_cache import KVCache, plan_cache_tokens
from .request import Grown
from .weights import SharedWeights, SnapshotWeights
