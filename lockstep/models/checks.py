"""Checks of a model before any tensor is read: types of config fields, memory, and tensor-parallel degree."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..distributed.mesh import ONE_RANK, Mesh
from ..errors import InputError
from .blocks.rope import is_positive
from .config import ModelConfig
from .decoder import num_parameters
from .families import FAMILIES, Family, suggest_family_for

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "kv_lora_rank", "q_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_COUNTS = ("first_k_dense_replace", "n_shared_experts", "max_window_layers")
# More layers or experts are a mistake, and listing their tensors would take minutes before the memory check fails.
_LIMITS = {"num_hidden_layers": 10_000} | dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), 100_000
)
_LARGEST = 2**31 - 1  # for every other size
_MAPPINGS = ("rope_parameters", "rope_scaling")
_KINDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("rms_norm_eps", "rope_theta", "routed_scaling_factor"), is_positive, "a number above 0"),
    (
        (
            *("tie_word_embeddings", "norm_topk_prob", "rope_interleave", "use_sliding_window"),
            *("attention_bias", "attention_out_bias"),
        ),
        lambda value: isinstance(value, bool),
        "true or false",
    ),
    (_MAPPINGS, lambda value: isinstance(value, dict), "an object"),
)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_fields(values: dict[str, Any], where: str) -> None:
    """Raise `InputError` naming the first field of a parsed config.json or generation_config.json that has a wrong type
    or value; null counts as absent."""

    def refuse(name: str, wanted: str) -> None:
        raise InputError(f"{where}: {name} is {values[name]!r}; it must be {wanted}")

    present = {name: value for name, value in values.items() if value is not None}
    if not isinstance(present.get("model_type", ""), str):
        refuse("model_type", "a string")
    family = FAMILIES.get(present.get("model_type", ""))
    sizes = (*_SIZES, "sliding_window", *(family.sizes if family else ()))
    for name in (*sizes, *_COUNTS):
        if name not in present:
            continue
        least, limit = int(name in sizes), _LIMITS.get(name, _LARGEST)
        if not _is_integer(present[name]) or present[name] < least:
            refuse(name, "an integer above 0" if least else "an integer, 0 or above")
        if present[name] > limit:
            raise InputError(f"{where}: {name} is too large; it must be at most {limit:,}")
    _check_layers(present, family, refuse)
    for names, fits, wanted in _KINDS:
        for name in names:
            if name in present and not fits(present[name]):
                refuse(name, wanted)
    for name in _TOKENS:
        ids, several = present.get(name, 0), name == "eos_token_id"
        if not all(map(_is_integer, ids if several and isinstance(ids, list) else [ids])):
            refuse(name, "a token id, or a list of them" if several else "a token id")
    if not present.get("is_causal", True):
        refuse("is_causal", "true, or left out: every token attends to those before it, and to no later one")
    for name in _MAPPINGS:
        if "rope_theta" in present.get(name, {}):
            check_fields({"rope_theta": present[name]["rope_theta"]}, f"{where}: {name}")


def _check_layers(present: dict[str, Any], family: Family | None, refuse: Callable[[str, str], None]) -> None:
    """Refuse layer kinds and quantization methods that the family does not support."""
    kinds, dense = present.get("layer_types", []), present.get("mlp_only_layers", [])
    known = family.layer_kinds if family else ()
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        can = suggest_family_for(str(present.get("model_type")), "layer_types", kinds)
        refuse("layer_types", f"a list of {' or '.join(map(repr, known))}; other kinds are not supported; {can}")
    if not isinstance(dense, list) or not all(map(_is_integer, dense)):
        refuse("mlp_only_layers", "a list of layers' indices")
    quantization = present.get("quantization_config")
    if quantization and not (family and family.supports("quantization_config", quantization)):
        can = suggest_family_for(str(present.get("model_type")), "quantization_config", quantization)
        advice = "quantized weights are not supported, use a bfloat16 model"
        refuse("quantization_config", f"left out: {advice}; {can}")


def check_end_of_sequence(ids: Sequence[int], vocab_size: int, where: str) -> None:
    """Raise `InputError` for an end-of-sequence id outside the vocabulary, which the model could never sample."""
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise InputError(f"{where}: eos_token_id is {outside[0]}, outside the model's vocabulary of {vocab_size}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def require_memory(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str, where: str, mesh: Mesh = ONE_RANK
) -> None:
    """Raise `InputError` if the weights alone (on a mesh, this rank's part) exceed the device's total memory."""
    count, memory = num_parameters(config, mesh), memory_bytes(device)
    needed = count * dtype.itemsize
    if needed > memory:
        raise InputError(
            f"{where}: {count:,} parameters take {needed / 2**30:,.0f} GiB as {dtype}, and "
            f"{torch.device(device).type} has {memory / 2**30:,.0f} GiB; use a smaller model"
        )


def memory_bytes(device: torch.device | str) -> int:
    """The device's total memory in bytes, free or not."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def is_divisible(config: ModelConfig, ranks: int) -> bool:
    """Whether the model can be divided evenly among this many tensor-parallel ranks."""
    try:
        require_divisible(config, ranks, "")
    except InputError:
        return False
    return True


def require_divisible(config: ModelConfig, ranks: int, setting: str) -> None:
    """Raise `InputError` unless the model's heads and the output columns of its projections divide evenly among this
    many tensor-parallel ranks; `setting` is what the message calls their number."""
    mla, moe = config.mla, config.moe
    sizes = {"num_key_value_heads": config.num_kv_heads} if mla is None else {"num_attention_heads": config.num_heads}
    sizes |= {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    if config.moe_layers < config.num_layers:
        sizes["intermediate_size"] = config.intermediate_size
    if moe is not None and config.moe_layers:
        sizes["moe_intermediate_size"] = moe.intermediate_size
    if mla is not None:
        sizes |= {"kv_lora_rank": mla.kv_rank, "qk_rope_head_dim": mla.rope_dim}
    if mla is not None and mla.q_rank is not None:
        sizes["q_lora_rank"] = mla.q_rank
    indivisible = {name: size for name, size in sizes.items() if size % ranks}
    if indivisible:
        fitting = [str(n) for n in range(1, ranks + 1) if not any(size % n for size in sizes.values())]
        named = ", ".join(f"{name} {size}" for name, size in indivisible.items())
        raise InputError(f"{setting} is {ranks}, which does not divide the model's {named}; use {' or '.join(fitting)}")
