"""The only numerics. One public operator each, the reference path on a CPU and kernels on a GPU behind it.

Both roles call these and nothing else, so a log-probability is the same bits wherever it is computed. The rules are
in `docs/numerics.md`.
"""

from .attention import KEY_TILE, attention_packed, attention_paged, write_kv
from .linear import linear
from .logprobs import TokenLogprobs, sample, support_mask, token_logprobs
from .native.library import cpu_backend
from .philox import sample_key
from .rows import gather_rows, qk_norm_rope, rms_norm, rope_table, silu_mul

__all__ = [
    "KEY_TILE",
    "TokenLogprobs",
    "attention_packed",
    "attention_paged",
    "cpu_backend",
    "gather_rows",
    "linear",
    "qk_norm_rope",
    "rms_norm",
    "rope_table",
    "sample",
    "sample_key",
    "silu_mul",
    "support_mask",
    "token_logprobs",
    "write_kv",
]
