"""The terms of a plan: bytes that one process takes on its device. Each is a function, with its formula in a docstring.

Letters: N parameters, R ranks, S and G the tensor-parallel sizes of trainer and generator, b bytes of an element of the
compute dtype (2 on a GPU), L layers, T packed tokens and C scored ones of the largest micro-batch, D hidden, E fused
projection, A query heads, K key/value heads, H head dim, F feed-forward, V vocabulary, X experts, k experts of a token.
`activations` and what a backward pass writes in addition are those of the captured graph;
`tests/session/test_memory_terms.py` compares them with the bytes that a trace of each model family keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...cache.tensor_file import CHUNK_BYTES
from ...distributed.mesh import ONE_RANK, Axis, all_to_all_axes
from ...generator.cache_capacity import bytes_per_token
from ...graph.check.snapshot import MAX_DEVICE_BYTES as MOST_COPIED
from ...models import ModelConfig, num_parameters
from ...models.checks import is_divisible
from ...models.config import MLAConfig
from ...ops.logprobs.operator import CHUNK as LOGIT_ROWS
from ...ops.machine_check.check import CHAIN_ROWS
from ...ops.machine_check.inputs import CHUNK_ELEMENTS
from ...trainer.optimizer import CHUNK
from .workload import Workload

GIB = 1 << 30
GRADIENT_CHUNK = 256 << 20  # bytes of the logits' gradients in a chunk (`ops.logprobs.triton_backward.CHUNK_BYTES`)
CONTEXT = int(0.9 * GIB)  # CUDA's context, the libraries' workspaces, loaded kernels
# The part of it before anything is loaded; an estimate, below the final size (0.78 GiB on an H200).
CONTEXT_AT_START = int(0.7 * GIB)
RING, PEER = int(0.8 * GIB), int(0.45 * GIB)  # NCCL's buffers for an axis, and with all-to-alls for each other rank
PINNED_PER_BYTE = 512  # bytes of the host that a byte of the GPU's page tables maps, 8 of them a page of 4 KiB
MOST_PEERS = 7  # other ranks of a host
ALLOCATOR = 1 / 64  # fraction of what is allocated
STATE_ON_HOST, SAVED_COPY, READING = "masters and moments", "copy for checkpoints", "weights being read"
COPIED = "copies while checking"
HASHES = 256 << 20  # bytes that `graph.check.fingerprints` works in


# ---- what stays ----


def weights(w: Workload) -> int:
    """`N b`: the generator's weights, whole or its tensor-parallel part. The trainer's `shard` is in addition to it."""
    return num_parameters(w.model, w.generator_mesh) * w.b


def shard(w: Workload) -> int:
    """`n b` with several ranks, n = N / R padded: the part of the weights that this rank updates; 0 where masters are
    on the device, which are rounded when gathered."""
    return w.layout.size * w.b if w.sharded and not masters(w) else 0


def masters(w: Workload) -> int:
    """`4 n`; 0 in float32, where the weights are the masters, and with offloading."""
    return 0 if w.b == 4 or w.offloads else 4 * w.layout.size


def moments(w: Workload) -> int:
    """`8 n`: AdamW's two moments, in float32; 0 with offloading."""
    return 0 if w.offloads else 8 * w.layout.size


def offloaded_chunks(w: Workload) -> int:
    """`24 CHUNK`, in float32 `16 CHUNK`: two chunks of the masters and moments that are on the host."""
    return 2 * _state_bytes(w) * min(CHUNK, w.layout.size) if w.offloads else 0


def kept_state(w: Workload, room: int) -> int:
    """With offloading, `12 CHUNK` (in float32 `8 CHUNK`) times the chunks of the masters and moments that `room` holds:
    these stay on the device between updates."""
    if not w.offloads or room <= 0:
        return 0
    chunk = _state_bytes(w) * CHUNK
    return min(room // chunk * chunk, _state_bytes(w) * w.layout.size)


def _state_bytes(w: Workload) -> int:
    """Bytes of a parameter's master and moments: 12; 8 in float32, where the weights are the masters."""
    return 8 if w.b == 4 else 12


def host(w: Workload, checks: bool) -> dict[str, int]:
    """What a process takes of the host's memory, by name: `12 n` for offloaded masters and moments (in float32
    `8 n`), and `12 n` for the copy that a checkpoint is written from; at the start what `reading` takes, and where
    graphs are checked, the part of `state_copies` that is not on the device."""
    found = {READING: reading(w)}
    if w.offloads:
        found[STATE_ON_HOST] = _state_bytes(w) * w.layout.size
    if w.config.checkpoint.interval > 0:
        found[SAVED_COPY] = 12 * w.layout.size
    if checks and w.on_gpu and (copied := max(0, state_copies(w) - device_copies(w))):
        found[COPIED] = copied
    return found


def reading(w: Workload) -> int:
    """A chunk of a model's files, or the largest random tensor, drawn in float32."""
    return CHUNK_BYTES if w.config.model is not None else 4 * w.largest_parameter


def gradients(w: Workload) -> int:
    """`4 n`, in float32; twice that where a cell's sum needs a buffer apart from the total."""
    return 4 * w.layout.size * (1 + w.cells.span_rounds)


def frozen(w: Workload) -> int:
    """`M b` for each model that is only read (the reference or teacher, of M parameters); with several ranks
    `M b / R`, padded."""
    return w.frozen_parameters * w.b


def cache(w: Workload, tokens: int) -> int:
    """Keys and values of `tokens` tokens and one more page: `L K (key + value) b` per token for this rank's heads
    (`ModelConfig.kv_cache_sizes`), and with experts a digest of 4 bytes."""
    page = w.config.generator.page_size
    each = bytes_per_token(w.model.per_rank(w.config.parallel.generator_tp), w.dtype)
    return (tokens // page + 1) * page * (each + 4 * (w.model.moe_layers > 0))


def sampling_supports(w: Workload) -> int:
    """`V / 8` for each completion token of a step whose sampling support is kept for later updates: with one iteration
    not those of the first mini-batch, with a single update or no filter none."""
    c = w.config
    filtered = c.sampling.top_k > 0 or c.sampling.top_p < 1 or c.sampling.min_p > 0
    if c.trainer.updates == 1 or not filtered:
        return 0
    parts = c.trainer.num_mini_batches - (c.trainer.num_iterations == 1)
    groups = parts * c.shard_groups * w.cells.shards // w.groups
    return groups * c.sampling.num_generations * c.max_response_length * -(-w.model.vocab_size // 8)


# ---- what a micro-batch takes ----


class Recomputed(NamedTuple):
    """What the backward pass recomputes: the first `layers` whole; with `elementwise`, the norms, rotations and gated
    activations of the others; and the head's `logits`. Ordered by the time that this takes."""

    layers: int = 0
    elementwise: bool = False
    logits: bool = False


NOTHING = Recomputed()


def layer_activations(w: Workload, layer: int, recomputed: bool = False) -> int:
    """Bytes per token that a layer's forward pass keeps for its backward pass; `recomputed`: if it is.

    These are the residual stream twice and each norm's input or output, `(2 + norms) D b`; attention; and `(2 / S + 1)
    F b` of a dense feed-forward, or the experts. A recomputed layer keeps its output, `D b`, and its modules' outputs.
    """
    c, experts = w.model, w.model.is_moe(layer)
    if recomputed:
        latent = c.num_heads * c.mla.v_dim * w.b if c.mla is not None and w.tp == 1 else 0
        return c.hidden_size * w.b + latent + (_expert_module_outputs(w) if experts else 0)
    of_heads = "q_norm", "k_norm"  # counted by `_attention_activations`
    norms = sum(name.endswith("norm") and name not in of_heads for name in w.layer_parameters[layer])
    attention = _attention_activations(w, layer) if c.mla is None else _latent_activations(w)
    feed_forward = _expert_activations(w) if experts else _gated_activations(w, c.intermediate_size)
    return (2 + norms) * c.hidden_size * w.b + attention + feed_forward


def layer_elementwise(w: Workload, layer: int) -> int:
    """The part of `layer_activations` that elementwise operators recompute, without tensor parallelism: outputs of
    norms that products read, `D b` each; rotated queries and keys, `(A + K) H b`, or normed latents; and `F b` of a
    dense feed-forward, or the experts' activations."""
    c, m, width = w.model, w.model.mla, w.model.intermediate_size
    if m is None:
        rotated = (c.num_heads + c.num_kv_heads) * c.head_dim
    else:
        rotated = (m.q_rank or 0) + m.kv_rank + (c.num_heads + 1) * m.rope_dim
    if c.moe is not None and c.is_moe(layer):
        width = (c.moe.num_experts_per_token + c.moe.shared_experts) * c.moe.intermediate_size
    block: Any = w.decoder.layers[layer]
    return (block.num_pre_norms * c.hidden_size + rotated + width) * w.b


def _gated_activations(w: Workload, width: int) -> int:
    """Kept by a feed-forward: this rank's columns of both projections, and the whole gated activation."""
    return (2 * width // w.tp + width) * w.b


def _attention_activations(w: Workload, layer: int) -> int:
    """`((E + (A + K) H + A H) b + 4 A) / S`: the projection, rotated queries and keys, the output, and log-sum-exps.
    With norms that span the heads the projection again, `E b`; with tensor parallelism instead the gathered queries and
    keys, `(A + K) H b`. With tensor parallelism also the gathered output, `A H b`."""
    c = w.model
    heads, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    spanning = w.layer_parameters[layer].get("q_norm", 0) > c.head_dim
    own = ((heads + 2 * keys) + (heads + keys) + heads) * w.b + 4 * c.num_heads
    normed = heads + (2 if w.tp == 1 else 1) * keys
    return own // w.tp + normed * spanning * w.b + heads * w.b * (w.tp > 1)


def _latent_activations(w: Workload) -> int:
    """The same for latent attention: both latents before and after their norms, queries projected and absorbed, the
    rotated parts before and after, and the weighted sums of latents and values."""
    c, m = w.model, w.model.mla
    assert m is not None
    alike = 2 * (m.q_rank or 0) + 2 * m.kv_rank + 2 * m.rope_dim + c.num_heads * m.v_dim
    return (alike + _latent_queries(c, m) // w.tp) * w.b + 4 * c.num_heads // w.tp


def _latent_queries(c: ModelConfig, m: MLAConfig) -> int:
    """Elements per token of all heads' queries, projected and absorbed, their rotated parts, and the weighted sums."""
    return c.num_heads * (m.nope_dim + m.rope_dim + 2 * m.rope_dim + 2 * m.kv_rank)


def _expert_module_outputs(w: Workload) -> int:
    """The outputs of the modules of a mixture of experts: of the norm before them, the router and its plan, and the
    experts' rows before and after, `(D + (1 + 1 / S) k D) b + 28 k`."""
    c, moe = w.model, w.model.moe
    assert moe is not None
    slots = moe.num_experts_per_token
    return (c.hidden_size + slots * (c.hidden_size + c.hidden_size // w.tp)) * w.b + 28 * slots


def _expert_activations(w: Workload) -> int:
    """All that a mixture of experts keeps except for the norm's output: `_expert_module_outputs`, its activations
    (shared experts' too) of `(2 / S + 1) k F b`, and `4 X` of the router."""
    c, moe = w.model, w.model.moe
    assert moe is not None
    width = (moe.num_experts_per_token + moe.shared_experts) * moe.intermediate_size
    return _expert_module_outputs(w) + _gated_activations(w, width) - c.hidden_size * w.b + 4 * moe.num_experts


def activations(w: Workload, recomputed: Recomputed = NOTHING) -> int:
    """What the forward pass keeps of T tokens besides what is `recomputed`: the layers' (`layer_activations`), the
    embedded tokens, the rotary table, and for C rows the head's input and results."""
    c, tokens = w.model, w.shape.tokens
    rope = c.mla.rope_dim if c.mla is not None else c.head_dim

    def kept(layer: int, whole: bool) -> int:
        less = 0
        if recomputed.elementwise:  # in layers that are recomputed whole, the norm's output before experts
            less = c.hidden_size * w.b * c.is_moe(layer) if whole else layer_elementwise(w, layer)
        return layer_activations(w, layer, whole) - less

    parts = (w.layer_kinds[: recomputed.layers], True), (w.layer_kinds[recomputed.layers :], False)
    layers = sum(count * kept(kind, whole) for part, whole in parts for kind, count in Counter(part).items())
    scored = w.shape.completion_tokens * (c.hidden_size * w.b + 40)
    return tokens * (layers + c.hidden_size * w.b + 4 * rope) + scored


def head(w: Workload, recomputed: bool = True) -> int:
    """What the LM head works in, for this rank's C / S rows, with logits `recomputed` or kept. Forward: kept
    `logits`, or two chunks of them, `2 LOGIT_ROWS V 4`. Backward: its gradient, `V D b`, a chunk of the logits'
    gradients, the kept logits or a float32 chunk of recomputed ones, and the gradient of the rows in float32 and
    rounded, `C D (4 + b) / S`."""
    c, rows = w.model, -(-w.shape.completion_tokens // w.tp)
    chunk = min(GRADIENT_CHUNK, rows * c.vocab_size * w.b)
    if recomputed:
        forward, in_backward = min(rows, 2 * LOGIT_ROWS) * c.vocab_size * 4, chunk * 4 // w.b
    else:
        forward = in_backward = logits(w)
    backward = head_weight(w) + in_backward + chunk + rows * c.hidden_size * (4 + w.b)
    return max(forward, backward) + w.shape.tokens * c.hidden_size * w.b


def logits(w: Workload) -> int:
    """`C V 4 / S`: the float32 logits of a micro-batch."""
    return -(-w.shape.completion_tokens // w.tp) * w.model.vocab_size * 4


def head_weight(w: Workload) -> int:
    """`V D b`: the weights of the LM head."""
    return w.model.vocab_size * w.model.hidden_size * w.b


def layer_backward(w: Workload) -> int:
    """What the backward pass of the widest layer writes in addition to what was kept: `T (2 D + 2 F) b`, the gradients
    of the fused gate and up projection and of the residual stream, and a weight's gradient. With tensor parallelism,
    `3 F` instead of `2 F`: the gradient of the gathered activation as computed, sent and received."""
    c, times = w.model, 2 if w.tp == 1 else 3
    wide = times * c.intermediate_size
    if c.moe is not None and c.moe_layers:
        routed = c.moe.num_experts_per_token * (times * c.moe.intermediate_size + c.hidden_size)
        wide = max(routed, times * c.intermediate_size * (c.moe_layers < c.num_layers))
    return w.shape.tokens * (2 * c.hidden_size + wide) * w.b + layer_weights(w) // 2


def layer_weights(w: Workload, model: ModelConfig | None = None) -> int:
    """The mean bytes of a layer's parameters on this rank, before sharding along `fsdp`; of `w.model` or of `model`."""
    c = model or w.model
    tables = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 1 + 1 / w.tp)
    return (num_parameters(c, w.trainer_mesh) - int(tables)) // c.num_layers * w.b


def workspace(w: Workload, recomputed: Recomputed) -> int:
    """The most in addition to `activations` at one time: the head's, or the backward pass of a layer with what it
    recomputes. A tied head's gradient lives until the embedding's."""
    c = w.model
    last, recomputed_bytes = c.num_layers - 1, 0
    if recomputed.layers > last:
        recomputed_bytes = layer_activations(w, last) - layer_activations(w, last, recomputed=True)
    elif recomputed.elementwise:
        recomputed_bytes = layer_elementwise(w, last)
    layer = layer_backward(w) + recomputed_bytes * w.shape.tokens + head_weight(w) * c.tie_word_embeddings
    return max(head(w, recomputed.logits), layer)


def transit(w: Workload) -> int:
    """With several ranks: two layers' gradients in transit with the rows received, and the head's; in ZeRO stage 3 as
    many gathered weights, and the parts that are sent."""
    if not w.sharded:
        return 0
    gathered = (1 + 1 / w.groups) * (w.zero_stage == 3)
    return int((4 + 2 * gathered) * layer_weights(w) + (1 + gathered) * head_weight(w))


# ---- what the graphs' pool holds at other times, one of these at a time ----


def prefill(w: Workload) -> int:
    """A mixed step of prompt tokens and a row per sequence: `(4 D + (1 + 2 / G) F) b` per token, `2 k D b` more with
    experts, and the queries of latent attention; and the logits of every row, twice, or three times a rank's columns of
    them where they are exchanged between tensor-parallel ranks."""
    c, g, tp = w.model, w.config.generator, w.config.parallel.generator_tp
    rows = min(w.sequences, g.max_num_seqs)
    slots = 0 if c.moe is None else c.moe.num_experts_per_token
    wide = c.intermediate_size if c.moe is None else slots * c.moe.intermediate_size
    queries = 0 if c.mla is None else _latent_queries(c, c.mla) // tp
    per_token = ((4 + 2 * slots) * c.hidden_size + wide + 2 * wide // tp + queries) * w.b
    logits = (2 if tp == 1 else 3) * rows * c.vocab_size * 4 // tp
    return (rows + g.max_num_batched_tokens) * per_token + logits


def scoring(w: Workload, by_layer: bool) -> int:
    """Scoring a micro-batch by the reference or teacher: `(3 D + 3 F) b` per token, and the head's logits; with several
    ranks the gathered weights: two layers' and both tables (`by_layer`), or all at once, `M b / S`."""

    def bytes_for(c: ModelConfig) -> int:
        tables = 2 * c.vocab_size * c.hidden_size * w.b
        wide = c.intermediate_size if c.moe is None else c.moe.num_experts_per_token * c.moe.intermediate_size
        logits = min(w.shape.completion_tokens, 2 * LOGIT_ROWS) * c.vocab_size * 4
        whole = num_parameters(c, w.trainer_mesh if is_divisible(c, w.tp) else ONE_RANK) * w.b
        gathered = min(whole, 2 * layer_weights(w, c) + tables if by_layer else whole) * w.sharded
        return w.shape.tokens * 3 * (c.hidden_size + wide) * w.b + logits + gathered

    return max(map(bytes_for, w.frozen), default=0)


def eager_check(w: Workload) -> int:
    """The largest eager call of the start-up check, which recomputes every layer in the backward pass and accumulates
    gradients one by one: `T D b` per layer, and the head's or a layer's work; with several ranks a gradient in transit
    and, unless ranks hold whole weights, the gathered weights of a layer and both tables."""
    c, tokens = w.model, w.shape.tokens
    layers = tokens * c.hidden_size * w.b * (c.num_layers + 1)
    layer = layer_activations(w, c.num_layers - 1) * tokens + layer_backward(w)
    gathered = (layer_weights(w) + 2 * head_weight(w)) * (w.sharded and not w.holds_whole_weights)
    return layers + max(head(w), head_weight(w) + layer) + 2 * head_weight(w) * w.sharded + gathered


def machine_check(w: Workload, recomputed: Recomputed) -> int:
    """The check of this machine's products at the run's shapes. For the head: its weight and two chunks of logits or,
    with kept logits, a micro-batch's rows, logits, and the chain's logits for `CHAIN_ROWS` of them. For the
    feed-forward: its weight, and its inputs and outputs twice."""
    c = w.model
    wide = 2 * c.intermediate_size if c.moe is None else 2 * c.moe.intermediate_size
    of_head = head_weight(w) + 2 * LOGIT_ROWS * c.vocab_size * 4
    if not recomputed.logits:
        rows = -(-w.shape.completion_tokens // w.tp)
        chain = min(rows, CHAIN_ROWS) * c.vocab_size * 4
        of_head = max(of_head, head_weight(w) + rows * c.hidden_size * w.b + logits(w) + chain)
    of_rows = w.shape.tokens * (2 * wide + 2 * c.hidden_size) * w.b + wide * c.hidden_size * w.b
    return max(of_head, of_rows) + CHUNK_ELEMENTS * 4


def state_copies(w: Workload) -> int:
    """What the check of the update copies, to restore it: masters, `4 n`, or `2 n` if they are bfloat16 weights still,
    whose lower half-words are 0; and float32 weights, `4 n`. Other weights are rounded from the masters again. Ranks
    that hold whole weights remake all from these before the first update. Gradients are 0, and so are moments except
    for a checkpoint's, whose graphs have mostly passed before. With offloading nothing is copied. What exceeds
    `MOST_COPIED` is copied to the host."""
    if w.offloads or w.sharded and w.holds_whole_weights and not w.config.trainer.warmup_steps:
        return 0
    return masters(w) // (1 if w.config.trainer.warmup_steps else 2) or w.layout.size * w.b


def device_copies(w: Workload) -> int:
    """The part of `state_copies` on the device. A new run plans for what it would copy if it were resumed."""
    return 0 if w.offloads else min(state_copies(w) or masters(w), MOST_COPIED)


def context(w: Workload) -> int:
    """CUDA's, with page tables for what `host` pins, and NCCL's for each axis. What other processes use is subtracted
    from the plan's memory beforehand."""
    found = host(w, checks=False)
    pinned = found.get(STATE_ON_HOST, 0) + found.get(SAVED_COPY, 0)
    return CONTEXT + pinned // PINNED_PER_BYTE + communicators(w.axes) if w.on_gpu else 0


def allocator(w: Workload, taken: int) -> int:
    """Rounding of blocks and fragmentation, for `taken` bytes: a fraction of these, or the largest tensor of a step, as
    it may fit no hole: a chunk of logits, or the gate and up projections."""
    c = w.model
    experts = 0 if c.moe is None else c.moe.num_experts_per_token * c.moe.intermediate_size
    rows = w.shape.tokens * 2 * max(experts, c.intermediate_size * (c.moe_layers < c.num_layers)) * w.b
    return max(int(taken * ALLOCATOR), rows, LOGIT_ROWS * c.vocab_size * 4) if w.on_gpu else 0


def communicators(axes: Sequence[Axis]) -> int:
    """NCCL's buffers for axes with collectives in graphs (1.2 GiB for an axis of two H200s, and 2.0 of four)."""
    peers = (min(axis.size - 1, MOST_PEERS) for axis in all_to_all_axes(axes))
    return RING * len(axes) + PEER * sum(peers)
