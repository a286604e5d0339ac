"""The only numerics: public operators, each backed by a reference path or C on a CPU and by kernels on a GPU.

Both roles call these and nothing else, so a log-probability has the same bits wherever it is computed. The rules are
in `docs/numerics.md`.

Operators import their Triton kernels when they first run on a GPU, never before. Two rules make the kernels' bits
independent of the batch. The order of a reduction depends on the tile's shape, the number of warps and the alignment of
the loads, so all three are functions of the model's sizes alone. Multiplications and additions are fused only where
`tl.fma` says so (`enable_fp_fusion=False`), so the compiler has no choice left.
"""

from .activation.operator import silu_mul
from .adamw.operator import adamw
from .attention.flex import flex_packed, flex_paged, flex_tiles_packed, flex_tiles_paged
from .attention.operator import (
    KEY_SPLIT,
    KEY_TILE,
    MAX_SEQUENCES,
    attention_decode,
    attention_packed,
    attention_paged,
    qk_norm_rope_write_kv,
    write_kv,
)
from .attention.reference import MaskFunction, register_mask, visibility
from .decode_update.operator import decode_advance, decode_slots
from .embedding.operator import gather_rows
from .fold.operator import fold_rows, sum_rows
from .fused import backward as fused_backward  # registers operators that only captured graphs call
from .gradient_norm.operator import BLOCK as SQUARES_BLOCK
from .gradient_norm.operator import exact_sum, root_of_sum, square_sums
from .linear.operator import gate_up, linear, linear_add, linear_fp32, norm_gate_up, norm_linear, per_head_linear
from .logprobs.operator import TokenLogprobs, sample, sample_logits, support_mask, token_logprobs
from .logprobs.philox import sample_key
from .mla.operator import mla_packed, mla_paged, mla_write
from .moe.grouped_linear import grouped_linear
from .moe.routing import (
    combine,
    dispatch,
    dispatch_plan,
    expert_loads,
    route,
    route_digest,
    router_logits,
    router_probabilities,
    times_in_sequences,
)
from .native.library import cpu_backend, cpu_build
from .norm.operator import norm_add, rms_norm
from .records import (
    ACTIVATIONS,
    NO_GROUPS,
    PLAIN,
    AdamWSettings,
    AdamWState,
    AdamWStep,
    AttentionScores,
    Contexts,
    DecodeRows,
    Filters,
    FlexMask,
    FlexSizes,
    KVPages,
    Latent,
    Norm,
    Packed,
    Paged,
    PrefixGroups,
    Rotation,
    RouteSettings,
    SampledTokens,
    SampleKeys,
)
from .rope.operator import qk_norm_rope, rope_table
from .sequence.operator import sequence_sum
