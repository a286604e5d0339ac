"""What travels together. An operator's arguments are records in Python and their fields, in a row, in its schema.

Shape suffixes: T tokens, S segments or sequences, N query heads, H head dim, R latent rank, P rotated dim, C rows or
groups of sequences, W sequences of a group, V vocabulary, B bytes of a mask; of decode steps R rows, K stop
ids, M words a result, N steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

SILU = "silu"
ACTIVATIONS = (SILU, "gelu_tanh", "swiglu_clamped")  # of a gated product: see `activation.operator`


class Epilogue(NamedTuple):
    """What a product's kernel does to its float32 accumulator beside what its kind says.

    Attributes:
        bias_N: added to it before it is rounded.
        activation: of the gate, of `ACTIVATIONS`.
    """

    bias_N: Tensor | None = None
    activation: str = SILU

    @property
    def contiguous_bias(self) -> Tensor | None:
        """As kernels read it."""
        return None if self.bias_N is None else self.bias_N.contiguous()


PLAIN_EPILOGUE = Epilogue()


class Packed(NamedTuple):
    """Packed segments, each after an optional shared prefix. Rows after the last segment are padding.

    Attributes:
        cu_seqlens: int32 [S + 1]; segment s is rows `cu_seqlens[s]:cu_seqlens[s + 1]` (empty ones allowed).
        prefix_start_S, prefix_len_S: int32 [S]; the rows that come before the segment's own (length 0: none), the first
            ones of one segment.
        max_len: bound on prefix + own length.
    """

    cu_seqlens: Tensor
    prefix_start_S: Tensor
    prefix_len_S: Tensor
    max_len: int


class KVPages(NamedTuple):
    """A paged cache of keys and values, [pages, page_size, K, H] each, of the queries' dtype."""

    k_cache: Tensor
    v_cache: Tensor


class Contexts(NamedTuple):
    """What one new token a sequence sees of a paged cache; the fields are those of `Paged`."""

    block_table: Tensor
    context_len_S: Tensor
    max_context_len: int


class Paged(NamedTuple):
    """Sequences with new tokens, over a paged cache that already holds these.

    Attributes:
        block_table: int32 [S, pages a sequence]; entry j holds positions `j * page_size` onwards.
        cu_seqlens: int32 [S + 1]; sequence s has the new tokens in rows `cu_seqlens[s]:cu_seqlens[s + 1]`, the last
            ones of its context.
        context_len_S: int32 [S], positions that exist, the new ones included.
        max_query_len, max_context_len: bounds on new tokens and on context over the sequences.
    """

    block_table: Tensor
    cu_seqlens: Tensor
    context_len_S: Tensor
    max_query_len: int
    max_context_len: int

    def decoding(self, tokens: int) -> Contexts | None:
        """Of one new token a sequence; None if it may be otherwise."""
        if self.max_query_len == 1 and tokens == self.context_len_S.shape[0]:
            return Contexts(self.block_table, self.context_len_S, self.max_context_len)
        return None

    def divided(self, single: int) -> tuple[Contexts, Paged]:
        """The first sequences, so many, which have one new token each, and the others, at the rows where they are."""
        table, starts, context_len_S, _, max_context_len = self
        first = Contexts(table[:single], context_len_S[:single], max_context_len)
        return first, self._replace(
            block_table=table[single:], cu_seqlens=starts[single:], context_len_S=context_len_S[single:]
        )


class PrefixGroups(NamedTuple):
    """Which sequences with one new token read the same first pages, so that a GPU reads those once a group; no bit
    depends on it.

    Attributes:
        group_rows_CW: int32, the group's sequences and then -1 (a group may be all -1); a sequence is in one group at
            most.
        shared_len_S: int32, the positions that all of the sequence's group have in common, the same number for each of
            them, and 0 for a sequence without a group. Whole key tiles of them are shared. One that does not see them
            all is at rest: what it attends to means nothing.
    """

    group_rows_CW: Tensor | None = None
    shared_len_S: Tensor | None = None

    @property
    def sequences(self) -> int:
        """That they are of: all that have one new token."""
        return 0 if self.shared_len_S is None else self.shared_len_S.shape[0]


ALONE = PrefixGroups()


class AttentionScores(NamedTuple):
    """How a layer makes weights of the products of queries and keys.

    Attributes:
        sinks_N: a logit a query head that takes part in the softmax beside those of the keys and has no value
            (gpt-oss, arXiv 2508.10925, section 2); None: without.
        window: of so many last keys, its own among them, a query sees; 0: of all.
        scale: on the products; 0: H ** -0.5.
        softcap: scaled products x become `softcap * tanh(x / softcap)` (Gemma 2, arXiv 2408.00118, section 2); 0: they
            stay as they are.
    """

    sinks_N: Tensor | None = None
    window: int = 0
    scale: float = 0.0
    softcap: float = 0.0

    def first_key(self, position: int) -> int:
        """The first position that a query at this one sees."""
        return max(0, position - self.window + 1) if self.window else 0


PLAIN = AttentionScores()


class FlexSizes(NamedTuple):
    """Of queries, [tokens, heads, H], and of what they read."""

    tokens: int
    heads: int
    kv_heads: int


class FlexMask(NamedTuple):
    """What a query sees of the keys up to its own: see `masks.visibility`; and where a GPU finds both, from
    `flex_tiles_packed` or `flex_tiles_paged` of the same window."""

    window: int
    mask: str
    tiles: Sequence[Tensor]


class AttentionGradient(NamedTuple):
    """What attention's gradients are made of: that of its output, contiguous; its inputs; what it returned."""

    grad_TNH: Tensor
    q_TNH: Tensor
    k_TKH: Tensor
    v_TKH: Tensor
    out_TNH: Tensor
    lse_KTG: Tensor


class Rotation(NamedTuple):
    """How a fused projection becomes rotated queries and keys.

    Attributes:
        q_weight_H, k_weight_H: weights of the RMSNorm a head, both or neither.
        cos_sin_TH: float32 [T, H]; cosines in the first half, sines in the second (`rope_table`).
    """

    q_weight_H: Tensor | None
    k_weight_H: Tensor | None
    cos_sin_TH: Tensor
    num_heads: int
    num_kv_heads: int
    eps: float


class Latent(NamedTuple):
    """Absorbed queries, and what all their heads read, with the rotated parts apart, all of one dtype.

    `latent_TR` and `k_rope_TP` are the tokens' own, and what the cache keeps of them; `scale` is on the scores.
    """

    q_TNR: Tensor
    q_rope_TNP: Tensor
    latent_TR: Tensor
    k_rope_TP: Tensor
    scale: float


class Filters(NamedTuple):
    """How each row is sampled, as in `types.SamplingParams`: float32 but for top-k, int32."""

    temperature_C: Tensor
    top_k_C: Tensor
    top_p_C: Tensor
    min_p_C: Tensor


class RowStatistics(NamedTuple):
    """Per row, float32: log-sum-exp of the logits; of logits / temperature over the support; the smallest
    logit / temperature in the support (-inf: all); entropy in nats at temperature 1, untruncated."""

    lse_C: Tensor
    sampled_lse_C: Tensor
    threshold_C: Tensor
    entropy_C: Tensor


class SampleKeys(NamedTuple):
    """Which random numbers a row is drawn with: int64 words of the sample's identity (`philox.sample_key`), and the
    absolute position of the token that is drawn."""

    key_C4: Tensor
    position_C: Tensor


class ScoredRows(NamedTuple):
    """What log-probabilities of targets are differentiated with: how they were computed, and `RowStatistics`."""

    targets_C: Tensor
    temperature_C: Tensor
    support_CB: Tensor | None
    lse_C: Tensor
    sampled_lse_C: Tensor
    threshold_C: Tensor
    truncated: bool


class Drawn(NamedTuple):
    """What a step drew: int64 tokens, and their float32 log-probabilities under the sampled distribution and under the
    model's own."""

    drawn_R: Tensor
    logprob_R: Tensor
    model_logprob_R: Tensor


class DecodeRows(NamedTuple):
    """The rows' state between steps.

    Attributes:
        stop_RK: int64; -1: none.
        token_R, position_R, remaining_R: int64, int64 and int32.
        results_RMN, next_result: int32 words, and the step, int64 [1], whose are written next.
    """

    stop_RK: Tensor
    token_R: Tensor
    position_R: Tensor
    remaining_R: Tensor
    results_RMN: Tensor
    next_result: Tensor


class AdamWState(NamedTuple):
    """What an update writes, flat.

    Attributes:
        weights: the masters rounded to the compute dtype; None when they are the masters.
        grad, master, exp_avg, exp_avg_sq: float32 [size].
        steps: float32 [2], updates applied to matrices and to vectors.
    """

    weights: Tensor | None
    grad: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: Tensor


class AdamWStep(NamedTuple):
    """An update's rate and what its gradients are divided by, float32, and whether it is applied, bool; all 0-dim."""

    lr: Tensor
    grad_scale: Tensor
    applied: Tensor


class AdamWSettings(NamedTuple):
    """The elements before `num_matrix_elements` are matrices', to which alone weight decay applies."""

    num_matrix_elements: int
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


class RouteSettings(NamedTuple):
    """How a token's experts are chosen and weighted.

    Attributes:
        slots: experts a token.
        sigmoid: scores are the sigmoid of the logits, not their softmax.
        groups, kept_groups: with several groups, only experts of the `kept_groups` groups whose two best sum highest
            are eligible.
        normalize: divide a token's weights by their sum.
        scale: factor on the weights.
    """

    slots: int
    sigmoid: bool
    groups: int
    kept_groups: int
    normalize: bool
    scale: float


Record = TypeVar("Record", Filters, ScoredRows)


def cut(record: Record, rows: slice) -> Record:
    return type(record)(*(x[rows] if isinstance(x, Tensor) else x for x in record))  # type: ignore[arg-type]
