"""Section `generator`."""

from dataclasses import dataclass

from .section import Section, at_least, between


@dataclass(frozen=True)
class GeneratorConfig(Section):
    """The generation engine."""

    page_size: int = between(1, 4096, default=16)
    """Tokens per KV-cache page; flex attention rounds it up to whole key tiles of 64."""
    kv_cache_tokens: int = at_least(0, default=0)
    """Capacity of the KV cache in tokens; 0 plans it from the workload and the available memory."""
    max_num_seqs: int = between(1, 1 << 16, default=256)
    """Maximum number of sequences running at once."""
    max_num_batched_tokens: int = at_least(1, default=8192)
    """Prefill tokens per forward pass; longer prompts are prefilled in chunks."""
    prefix_caching: bool = True
    """Reuse KV-cache pages of equal prefixes computed with equal weights."""
    steps_per_sync: int = between(1, 4096, default=8)
    """Decode steps between two reads of the results by the host."""
