"""The only numerics. One public operator each, the reference path on a CPU and kernels on a GPU behind it.

Both roles call these and nothing else, so a log-probability is the same bits wherever it is computed. The rules are
in `docs/numerics.md`.
"""

from . import fused_backward  # registers what graphs call
from .adamw import BLOCK as SQUARES_BLOCK
from .adamw import adamw, square_sums
from .attention import KEY_TILE, attention_packed, attention_paged, write_kv
from .decode_state import advance_rows, decode_slots
from .flex import flex_packed, flex_paged, flex_tiles_packed, flex_tiles_paged
from .fused import attention_decode, linear_add, norm_gate_up, norm_linear, qk_norm_rope_write_kv
from .grouped import grouped_linear
from .head_linear import head_linear
from .latent import latent_attention_packed, latent_attention_paged, write_latent
from .linear import linear
from .logprobs import TokenLogprobs, sample, support_mask, token_logprobs
from .masks import MaskFunction, register_mask, visibility
from .native.library import cpu_backend, cpu_build
from .philox import sample_key
from .routing import combine, dispatch, dispatch_plan, route, router_logits
from .routing_statistics import expert_loads, route_digest, router_probabilities
from .rows import gather_rows, qk_norm_rope, rms_norm, rope_table, silu_mul

__all__ = [
    "SQUARES_BLOCK",
    "KEY_TILE",
    "MaskFunction",
    "TokenLogprobs",
    "adamw",
    "advance_rows",
    "attention_decode",
    "attention_packed",
    "attention_paged",
    "combine",
    "cpu_backend",
    "cpu_build",
    "decode_slots",
    "dispatch",
    "dispatch_plan",
    "expert_loads",
    "flex_packed",
    "flex_paged",
    "flex_tiles_packed",
    "flex_tiles_paged",
    "fused_backward",
    "gather_rows",
    "grouped_linear",
    "head_linear",
    "latent_attention_packed",
    "latent_attention_paged",
    "linear",
    "linear_add",
    "norm_gate_up",
    "norm_linear",
    "qk_norm_rope",
    "qk_norm_rope_write_kv",
    "register_mask",
    "rms_norm",
    "rope_table",
    "route",
    "route_digest",
    "router_logits",
    "router_probabilities",
    "sample",
    "sample_key",
    "silu_mul",
    "square_sums",
    "support_mask",
    "token_logprobs",
    "visibility",
    "write_kv",
    "write_latent",
]
