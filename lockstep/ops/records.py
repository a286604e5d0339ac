"""Records of operators' arguments. Python passes the records; an operator's schema has their fields instead, in order.

Shape suffixes: T tokens, D model dim, S segments or sequences, N query heads, H head dim, R latent rank, P rotated dim,
C rows or groups of sequences, W sequences of a group, V vocabulary, B bytes of a mask; in decode steps R rows,
K stop ids, M words per result, N steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

SILU = "silu"
ACTIVATIONS = (SILU, "gelu_tanh", "swiglu_clamped")  # for the gate of a gated product: see `activation.operator`


SLOT = 1 << 19  # words in a slot, the most in one launch from rank to rank; beyond that a collective is as fast
PARITIES = 2  # slots for each pair of ranks: a rank is at most one launch ahead of another, which may still be reading


class Peers(NamedTuple):
    """Where a kernel stores words for the other ranks: see `distributed/push`, which shares the memory.

    Attributes:
        addresses: int64 [ranks, or more]: addresses of each rank's slots, int64 [PARITIES, ranks, SLOT] with the
            sender's rank in the middle.
        state: int64, first the number of launches so far.
    """

    addresses: Tensor
    state: Tensor
    rank: int
    ranks: int


def peer_arguments(peers: Peers | None) -> dict[str, Any]:
    """A kernel's arguments for where to store its result for other ranks; none without any."""
    if peers is None:
        return {}
    return {"addresses_ptr": peers.addresses, "state_ptr": peers.state, "rank": peers.rank, "RANKS": peers.ranks}


class Epilogue(NamedTuple):
    """What a product's kernel does to its float32 accumulator, besides what the kind of product implies.

    Attributes:
        bias_N: added before the result is rounded.
        activation: applied to the gate, one of `ACTIVATIONS`.
        peers: where the result's words are stored as well.
    """

    bias_N: Tensor | None = None
    activation: str = SILU
    peers: Peers | None = None

    @property
    def contiguous_bias(self) -> Tensor | None:
        """The bias as kernels read it."""
        return None if self.bias_N is None else self.bias_N.contiguous()


PLAIN_EPILOGUE = Epilogue()


class Norm(NamedTuple):
    """An RMSNorm: its weights, what is added to the mean square, and to the weights."""

    weight_D: Tensor
    eps: float
    offset: float = 0.0


class Packed(NamedTuple):
    """Packed segments, each after an optional shared prefix. Rows after the last segment are padding.

    Attributes:
        cu_seqlens: int32 [S + 1]; segment s is rows `cu_seqlens[s]:cu_seqlens[s + 1]` (empty ones allowed).
        prefix_start_S, prefix_len_S: int32 [S]; first row and length of the shared prefix that precedes the segment's
            own rows (length 0: none). A prefix consists of the first rows of another segment.
        max_len: upper bound on prefix + own length.
    """

    cu_seqlens: Tensor
    prefix_start_S: Tensor
    prefix_len_S: Tensor
    max_len: int


class KVPages(NamedTuple):
    """A paged cache of keys and values, [pages, page_size, K, H] each, in the queries' dtype."""

    k_cache: Tensor
    v_cache: Tensor


class Contexts(NamedTuple):
    """What each sequence's single new token sees of a paged cache; the fields are those of `Paged`."""

    block_table: Tensor
    context_len_S: Tensor
    max_context_len: int


class Paged(NamedTuple):
    """Sequences with new tokens, over a paged KV cache that already holds those tokens.

    Attributes:
        block_table: int32 [S, pages per sequence]; the page at entry j holds positions `j * page_size` onwards.
        cu_seqlens: int32 [S + 1]; the new tokens of sequence s are rows `cu_seqlens[s]:cu_seqlens[s + 1]` and the last
            ones of its context.
        context_len_S: int32 [S], context lengths, the new tokens included.
        max_query_len, max_context_len: upper bounds on any sequence's new tokens and context length.
    """

    block_table: Tensor
    cu_seqlens: Tensor
    context_len_S: Tensor
    max_query_len: int
    max_context_len: int

    def decode_contexts(self, tokens: int) -> Contexts | None:
        """`Contexts` if every sequence has one new token; None if that is not certain. No sequence of a layout of at
        most one new token each may be empty: with a row of padding for it, this would not notice."""
        if self.max_query_len == 1 and tokens == self.context_len_S.shape[0]:
            return Contexts(self.block_table, self.context_len_S, self.max_context_len)
        return None

    def split_decodes(self, single: int) -> tuple[Contexts, Paged]:
        """The first `single` sequences, which have one new token each, and the others, whose rows keep their places."""
        table, starts, context_len_S, _, max_context_len = self
        first = Contexts(table[:single], context_len_S[:single], max_context_len)
        return first, self._replace(
            block_table=table[single:], cu_seqlens=starts[single:], context_len_S=context_len_S[single:]
        )


class PrefixGroups(NamedTuple):
    """Which sequences with one new token share their first pages, so that a GPU reads those once per group; no bit
    depends on it.

    Attributes:
        group_rows_CW: int32, each group's sequences, padded with -1 (a group may be all -1); a sequence is in at most
            one group.
        shared_len_S: int32, how many leading positions all sequences of its group share, the same number throughout
            the group; 0 for a sequence without a group. Only whole key tiles of them are read together. A sequence
            whose context is shorter is idle, and its result is meaningless.
    """

    group_rows_CW: Tensor | None = None
    shared_len_S: Tensor | None = None

    @property
    def sequences(self) -> int:
        """How many sequences the groups describe: all those with one new token."""
        return 0 if self.shared_len_S is None else self.shared_len_S.shape[0]


NO_GROUPS = PrefixGroups()


class AttentionScores(NamedTuple):
    """How a layer turns query-key products into attention weights.

    Attributes:
        sinks_N: a logit per query head that joins the softmax beside those of the keys and has no value (gpt-oss,
            arXiv 2508.10925, section 2); None: no sinks.
        window: how many of the last keys a query sees, its own included; 0: all.
        scale: factor on the products; 0: H ** -0.5.
        softcap: scaled products x become `softcap * tanh(x / softcap)` (Gemma 2, arXiv 2408.00118, section 2); 0: no
            cap.
    """

    sinks_N: Tensor | None = None
    window: int = 0
    scale: float = 0.0
    softcap: float = 0.0

    def first_key(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        return max(0, position - self.window + 1) if self.window else 0


PLAIN = AttentionScores()


class FlexSizes(NamedTuple):
    """Sizes of queries, [tokens, heads, H], and the number of heads of the keys and values that they read."""

    tokens: int
    heads: int
    kv_heads: int


class FlexMask(NamedTuple):
    """Which of the keys up to its own a query sees, by window and mask (`visibility`), and where a GPU finds
    queries and keys, from `flex_tiles_packed` or `flex_tiles_paged` with the same window."""

    window: int
    mask: str
    tiles: Sequence[Tensor]


class AttentionGradient(NamedTuple):
    """What attention's backward reads: the gradient of its output, contiguous; its inputs; what it returned."""

    grad_TNH: Tensor
    q_TNH: Tensor
    k_TKH: Tensor
    v_TKH: Tensor
    out_TNH: Tensor
    lse_KTG: Tensor


class Rotation(NamedTuple):
    """How a fused projection becomes rotated queries and keys.

    Attributes:
        q_weight_H, k_weight_H: weights of the RMSNorm of each head; both or neither.
        cos_sin_TH: float32 [T, H]; cosines in the first half, sines in the second (`rope_table`).
    """

    q_weight_H: Tensor | None
    k_weight_H: Tensor | None
    cos_sin_TH: Tensor
    num_heads: int
    num_kv_heads: int
    eps: float


class Latent(NamedTuple):
    """Absorbed queries and what all their heads read, the rotated parts separately, all of one dtype.

    `latent_TR` and `k_rope_TP` are what the cache keeps of each token; `scale` multiplies the scores.
    """

    q_TNR: Tensor
    q_rope_TNP: Tensor
    latent_TR: Tensor
    k_rope_TP: Tensor
    scale: float


class Filters(NamedTuple):
    """How each row is sampled, as in `types.SamplingParams`: float32, except int32 for top-k."""

    temperature_C: Tensor
    top_k_C: Tensor
    top_p_C: Tensor
    min_p_C: Tensor


class RowStatistics(NamedTuple):
    """Per row, float32: log-sum-exp of the logits; log-sum-exp of logits / temperature over the support; the smallest
    logit / temperature in the support (-inf: all are); entropy in nats at temperature 1, without filters."""

    lse_C: Tensor
    sampled_lse_C: Tensor
    threshold_C: Tensor
    entropy_C: Tensor


class SampleKeys(NamedTuple):
    """What a row's random numbers are functions of: int64 words of the sample's identity (`philox.sample_key`), and the
    absolute position of the token that is drawn."""

    key_C4: Tensor
    position_C: Tensor


class ScoredRows(NamedTuple):
    """What the backward of targets' log-probabilities reads: how they were computed, and their `RowStatistics`."""

    targets_C: Tensor
    temperature_C: Tensor
    support_CB: Tensor | None
    lse_C: Tensor
    sampled_lse_C: Tensor
    threshold_C: Tensor
    truncated: bool


class SampledTokens(NamedTuple):
    """What a step drew: int64 tokens, and their float32 log-probabilities under the sampled distribution and under the
    model's own."""

    drawn_R: Tensor
    logprob_R: Tensor
    model_logprob_R: Tensor


class DecodeRows(NamedTuple):
    """The rows' state between decode steps.

    Attributes:
        stop_RK: int64 stop ids; -1: none.
        token_R, position_R, remaining_R: int64, int64 and int32.
        results_RMN, next_result: int32 words of results, and the index of the step to write next, int64 [1].
    """

    stop_RK: Tensor
    token_R: Tensor
    position_R: Tensor
    remaining_R: Tensor
    results_RMN: Tensor
    next_result: Tensor


class AdamWState(NamedTuple):
    """The flat buffers that an update writes.

    Attributes:
        weights: the master weights rounded to the compute dtype; None if the weights are the masters themselves.
        grad, master, exp_avg, exp_avg_sq: float32 [size].
        steps: float32 [2], how many updates were applied to matrices and to vectors.
    """

    weights: Tensor | None
    grad: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: Tensor


class AdamWStep(NamedTuple):
    """Learning rate and divisor of the gradients, float32, and whether the update is applied, bool; all 0-dim."""

    lr: Tensor
    grad_scale: Tensor
    applied: Tensor


class AdamWSettings(NamedTuple):
    """The first `num_matrix_elements` elements belong to matrices; weight decay applies only to them."""

    num_matrix_elements: int
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


class RouteSettings(NamedTuple):
    """How a token's experts are chosen and weighted.

    Attributes:
        slots: experts per token.
        sigmoid: scores are the sigmoid of the logits, not their softmax.
        groups, kept_groups: with several groups, only experts of `kept_groups` groups are eligible, those whose two
            best experts have the highest sum.
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


def slice_rows(record: Record, rows: slice) -> Record:
    return type(record)(*(x[rows] if isinstance(x, Tensor) else x for x in record))  # type: ignore[arg-type]
