"""The choice of a model's attention, the same in both roles: native, or flex with a user's mask."""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch

from .. import ops
from ..cache import fingerprint
from ..config import Attention, GeneratorConfig
from ..errors import InputError, refuse
from ..graph.torch_private.trace import flat_graph
from ..models import Decoder, Masks
from ..user_functions import load_function

_MAX_QUERIES_PER_KEY, _MIN_HEAD_DIM = 64, 16  # limits of the GPU kernel, enforced on every device
_PROBE_SIZE = 130  # positions on which a mask is tried: more than two key tiles


def set_attention(model: Decoder, attention: Attention, mask: str | None) -> None:
    """Set the model's attention and mask. Raises `InputError` if the model does not support them."""
    refuse(attention not in ("native", "flex"), f"attention is {attention!r}; it must be native or flex")
    if attention == "native":
        refuse(mask is not None, "attention_mask has no effect on attention native; set attention to flex")
        return
    c, why = model.config, ""
    if c.mla is not None:
        why = f"and {c.family} has latent attention, whose heads read one latent in another way"
    elif not c.supports_flex_attention:
        why = f"and {c.family} has sinks or a scale of its own on attention's scores, which flex has not"
    elif c.num_heads // c.num_kv_heads > _MAX_QUERIES_PER_KEY or c.head_dim < _MIN_HEAD_DIM:
        why = (
            f"which takes at most {_MAX_QUERIES_PER_KEY} query heads a key head and heads of at least {_MIN_HEAD_DIM} "
            f"elements; the model has {c.num_heads} heads, {c.num_kv_heads} of keys, of {c.head_dim}"
        )
    refuse(bool(why), f"attention is flex, {why}; use --attention native")
    model.masks = Masks(c.windows, "" if mask is None else register_mask_function(mask))


def round_page_size(config: GeneratorConfig, attention: Attention) -> GeneratorConfig:
    """The configuration with a page size that the attention can read: flex needs whole key tiles."""
    if attention != "flex":
        return config
    return replace(config, page_size=-(-config.page_size // ops.KEY_TILE) * ops.KEY_TILE)


def register_mask_function(spec: str) -> str:
    """Register the function that `spec` names (module:function or path.py:function) and return the name that operators
    know it by. The function is traced at every start and the name contains a hash of the trace, so nothing that was
    compiled, checked or stored for another function is reused. Raises `InputError` if there is no such function or it
    is not an elementwise function of two positions."""
    function = load_function(spec, f"attention_mask {spec!r}")
    if not inspect.isfunction(function):
        raise InputError(f"attention_mask {spec!r} is a {type(function).__name__}; it must be a function made by def")
    name = f"{spec}@{_check_mask(spec, function)[:12]}"
    ops.register_mask(name, function)
    return name


def _hash_trace(function: ops.MaskFunction, query: torch.Tensor, key: torch.Tensor) -> str:
    """A hash of what the function computes: its operators with all their constants, and the tensors it captures."""
    module = flat_graph(lambda *positions: [function(*positions)], (query, key))
    captured = [getattr(module, str(node.target)) for node in module.graph.nodes if node.op == "get_attr"]
    return fingerprint.digest(module.code, [(tensor.dtype, tensor.tolist()) for tensor in captured])


def _check_mask(spec: str, function: ops.MaskFunction) -> str:
    """Check that the function can be a mask, and return its hash. It is called on positions that broadcast, as on a
    CPU; on one pair at a time under vmap, as by FlexAttention; and on the meta device, where reading a table on the CPU
    is wrong as it would be on a GPU."""
    query, key = torch.arange(_PROBE_SIZE, dtype=torch.int32).unsqueeze(1), torch.arange(_PROBE_SIZE, dtype=torch.int32)
    try:
        whole = function(query, key)
        if not isinstance(whole, torch.Tensor) or whole.dtype != torch.bool:
            found = str(whole.dtype) if isinstance(whole, torch.Tensor) else type(whole).__name__
            raise InputError(f"attention_mask {spec!r} returned {found}; it must return a bool tensor")
        if function(query.to("meta"), key.to("meta")).device != torch.device("meta"):  # table[key]
            raise InputError(
                f"attention_mask {spec!r} reads a tensor from elsewhere; it must use operators of torch on query and "
                "key alone"
            )
        trace_hash = _hash_trace(function, query, key)
        pairs = torch.vmap(torch.vmap(function, (None, 0)), (0, None))(query.squeeze(1), key)
    except InputError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"attention_mask {spec!r} raised {type(error).__name__}: {reason}; it is called with two int32 tensors of "
            "positions that broadcast, query and key, and must use operators of torch on these alone: & for and, | "
            "for or, torch.where for if"
        ) from error
    broadcasts = whole.dim() <= 2 and all(size in (1, _PROBE_SIZE) for size in whole.shape)
    if not broadcasts or not torch.equal(whole.expand(_PROBE_SIZE, _PROBE_SIZE), pairs):
        raise InputError(
            f"attention_mask {spec!r} is not elementwise: one pair of positions gives another answer than many do"
        )
    return trace_hash
