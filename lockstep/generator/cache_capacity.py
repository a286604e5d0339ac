"""The capacity of the KV cache, decided before anything is generated."""

from __future__ import annotations

import torch

from ..config import GeneratorConfig
from ..errors import refuse
from ..models import ModelConfig
from ..models.checks import memory_bytes

HOST_CACHE = 2 << 30  # the most bytes of a cache on a CPU, unless its capacity is given


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Cache bytes for one position: keys and values of all layers."""
    heads, key, value = config.kv_cache_sizes
    return config.num_layers * heads * (key + value) * dtype.itemsize


def capacity_per_sequence(config: GeneratorConfig, tokens: int) -> int:
    """The capacity to plan for a sequence of `tokens` tokens: whole pages, and one more."""
    return (-(-tokens // config.page_size) + 1) * config.page_size


def round_capacity(fitting: int) -> int:
    """`fitting` rounded down to five significant bits. Stored graphs depend on the capacity, so it should not change
    with the exact free memory of a start."""
    low = max(0, fitting.bit_length() - 5)
    return fitting >> low << low


def plan_cache_tokens(
    config: GeneratorConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    sequences: int,
    tokens_per_sequence: int,
) -> int:
    """The cache's capacity in tokens: `generator.kv_cache_tokens` if given, otherwise what `sequences` sequences of
    `tokens_per_sequence` need at once, bounded by `max_num_seqs` and by memory (half of the GPU's free memory; 2 GiB on
    a CPU).

    Raises:
        InputError: not even one sequence of that length fits.
    """
    one_sequence = capacity_per_sequence(config, tokens_per_sequence) - config.page_size
    if config.kv_cache_tokens:
        planned = config.kv_cache_tokens
        needed, memory = planned * bytes_per_token(model, dtype), memory_bytes(device)
        refuse(
            needed > memory,
            f"generator.kv_cache_tokens: {planned} tokens take {needed / 2**30:,.0f} GiB, and {device.type} has "
            f"{memory / 2**30:,.0f} GiB; lower it, or set it to 0 to have it planned",
        )
    else:
        wanted = min(sequences, config.max_num_seqs) * capacity_per_sequence(config, tokens_per_sequence)
        free = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else HOST_CACHE
        planned = min(wanted, round_capacity(free // bytes_per_token(model, dtype)))
    refuse(
        planned // config.page_size * config.page_size < one_sequence,
        f"generator.kv_cache_tokens: the cache holds {planned} tokens, one sequence may need {one_sequence}; raise it, "
        "or shorten the prompt or sampling.max_completion_length",
    )
    return planned
