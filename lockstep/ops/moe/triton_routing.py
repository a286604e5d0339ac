"""Routing, sorting of rows by expert, dispatch and combine, with gradients. Semantics and rounding points:
`ops/moe/routing.py`.

A program handles one token or one row of the result, so its sums run in the order of experts or slots; sorting has one
program per expert, which only counts.

Shape suffixes: T tokens, E experts, K slots per token, R = T * K rows, D hidden dim, G groups of experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..records import RouteSettings
from ..rows import unit_inner

NUM_WARPS = 4
MAX_PLAN_BLOCK, PLAN_WARPS = 4096, 8  # rows that an expert's program reads at once
LOWEST = tl.constexpr(-(1 << 63))  # below every key


@triton.jit
def _sort_key(value, index):
    """int64 keys, no two equal: the largest belongs to the largest value, on ties to the lower index."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0xFFFFFFFF - index.to(tl.int64))


@triton.jit
def _key_value(key):
    """The value of a key."""
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _mask_ineligible(key_E, e, size, GROUPS: tl.constexpr, KEPT: tl.constexpr, BLOCK_G: tl.constexpr):
    """Keys of the experts in the `KEPT` groups whose two best have the highest sum; `LOWEST` for the others."""
    g = tl.arange(0, BLOCK_G)
    inside_GE = (e // size)[None, :] == g[:, None]
    key_GE = tl.where(inside_GE, key_E[None, :], LOWEST)
    best_G = tl.max(key_GE, axis=1)
    second_G = tl.max(tl.where(key_GE == best_G[:, None], LOWEST, key_GE), axis=1)
    score_G = _key_value(best_G)
    score_G = tl.where(second_G == LOWEST, score_G, score_G + _key_value(second_G))
    group_key_G = tl.where(g < GROUPS, _sort_key(score_G, g), LOWEST)
    kept_G = tl.zeros((BLOCK_G,), tl.int32)
    for _ in tl.static_range(KEPT):
        is_best_G = group_key_G == tl.max(group_key_G, axis=0)
        kept_G = tl.where(is_best_G, 1, kept_G)
        group_key_G = tl.where(is_best_G, LOWEST, group_key_G)
    kept_E = tl.max(tl.where(inside_GE, kept_G[:, None], 0), axis=0)
    return tl.where(kept_E > 0, key_E, LOWEST)


@triton.jit
def _route_kernel(
    logits_ptr,  # [T, E], contiguous, like the others
    bias_ptr,  # [E], or None
    weights_ptr,  # [T, K]
    experts_ptr,  # [T, K]
    scale,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e, k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    inside_E = e < EXPERTS
    logit_E = tl.load(logits_ptr + token * EXPERTS + e, mask=inside_E, other=float("-inf"))
    if SIGMOID:
        score_E = tl.div_rn(1.0, 1.0 + tl.exp(-logit_E))
    else:
        exp_E = tl.exp(logit_E - tl.max(logit_E, axis=0))
        score_E = tl.div_rn(exp_E, tl.sum(exp_E, axis=0))
    choice_E = score_E
    if bias_ptr is not None:
        choice_E += tl.load(bias_ptr + e, mask=inside_E, other=0.0)
    key_E = tl.where(inside_E, _sort_key(choice_E, e), LOWEST)
    if GROUPS > 1:
        key_E = _mask_ineligible(key_E, e, EXPERTS // GROUPS, GROUPS, KEPT, BLOCK_G)
    weight_K, expert_K = tl.zeros((BLOCK_K,), tl.float32), tl.zeros((BLOCK_K,), tl.int64)
    total = tl.sum(weight_K, axis=0)
    for slot in tl.static_range(SLOTS):
        best = tl.max(key_E, axis=0)
        weight = tl.sum(tl.where(key_E == best, score_E, 0.0), axis=0)  # of a single expert
        total += weight
        weight_K = tl.where(k == slot, weight, weight_K)
        expert_K = tl.where(k == slot, 0xFFFFFFFF - (best & 0xFFFFFFFF), expert_K)
        key_E = tl.where(key_E == best, LOWEST, key_E)
    if NORMALIZE:
        weight_K = tl.div_rn(weight_K, tl.zeros((BLOCK_K,), tl.float32) + total)
    tl.store(weights_ptr + token * SLOTS + k, weight_K * scale, mask=k < SLOTS)
    tl.store(experts_ptr + token * SLOTS + k, expert_K, mask=k < SLOTS)


def route(logits_TE: Tensor, bias_E: Tensor | None, settings: RouteSettings) -> tuple[Tensor, Tensor]:
    logits_TE = logits_TE.contiguous()
    tokens, experts = logits_TE.shape
    weights_TK = torch.empty((tokens, settings.slots), dtype=torch.float32, device=logits_TE.device)
    experts_TK = torch.empty((tokens, settings.slots), dtype=torch.int64, device=logits_TE.device)
    _route_kernel[(tokens,)](
        logits_TE, bias_E, weights_TK, experts_TK, settings.scale,
        EXPERTS=experts, SLOTS=settings.slots, SIGMOID=settings.sigmoid, GROUPS=settings.groups,
        KEPT=settings.kept_groups, NORMALIZE=settings.normalize, BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_G=triton.next_power_of_2(settings.groups), BLOCK_K=triton.next_power_of_2(settings.slots),
        num_warps=1 if experts <= 128 else NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return weights_TK, experts_TK


@triton.jit(do_not_specialize=["rows"])
def _plan_kernel(experts_ptr, order_ptr, row_ptr, offsets_ptr, rows, BLOCK: tl.constexpr):
    """Place one expert's rows, in the order of their tokens, after those of the experts before it."""
    expert = tl.program_id(0)
    r = tl.arange(0, BLOCK)
    before_B, own_B = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows, BLOCK):
        expert_B = tl.load(experts_ptr + start + r, mask=start + r < rows, other=1 << 30)
        before_B += (expert_B < expert).to(tl.int32)
        own_B += (expert_B == expert).to(tl.int32)
    place = tl.sum(before_B, axis=0)
    tl.store(offsets_ptr + expert, place)
    if expert == tl.num_programs(0) - 1:
        tl.store(offsets_ptr + expert + 1, rows)
    end = place + tl.sum(own_B, axis=0)
    start = 0
    while place < end:  # until all of the expert's rows have been found
        is_own_B = tl.load(experts_ptr + start + r, mask=start + r < rows, other=1 << 30) == expert
        place_B = (place + tl.cumsum(is_own_B.to(tl.int32), axis=0) - 1).to(tl.int64)
        tl.store(order_ptr + place_B, (start + r).to(tl.int64), mask=is_own_B)
        tl.store(row_ptr + start + r, place_B, mask=is_own_B)
        place += tl.sum(is_own_B.to(tl.int32), axis=0)
        start += BLOCK


def dispatch_plan(experts_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    experts_TK, rows = experts_TK.contiguous(), experts_TK.numel()
    order_R = torch.empty(rows, dtype=torch.int64, device=experts_TK.device)
    row_TK = torch.empty_like(experts_TK)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=experts_TK.device)
    block = min(triton.next_power_of_2(rows), MAX_PLAN_BLOCK)
    _plan_kernel[(experts,)](experts_TK, order_R, row_TK, offsets, rows, BLOCK=block, num_warps=PLAN_WARPS)
    return order_R, row_TK, offsets


@triton.jit
def _dispatch_kernel(
    x_ptr, order_ptr, out_ptr, x_stride, WIDTH: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(order_ptr + row) // SLOTS
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    tl.store(out_ptr + row * WIDTH + column, tl.load(x_ptr + token * x_stride + column, mask=inside), mask=inside)


def dispatch(x_TD: Tensor, order_R: Tensor, row_TK: Tensor) -> Tensor:
    x_TD = unit_inner(x_TD)
    rows, width = len(order_R), x_TD.shape[1]
    out_RD = torch.empty((rows, width), dtype=x_TD.dtype, device=x_TD.device)
    _dispatch_kernel[(rows,)](
        x_TD, order_R, out_RD, x_TD.stride(0),
        WIDTH=width, SLOTS=row_TK.shape[1], BLOCK=triton.next_power_of_2(width), num_warps=NUM_WARPS,
    )  # fmt: skip
    return out_RD


@triton.jit
def _combine_kernel(
    y_ptr, row_ptr, weight_ptr, out_ptr, y_stride, WIDTH: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(SLOTS):
        row = tl.load(row_ptr + token * SLOTS + slot)
        weight = tl.load(weight_ptr + token * SLOTS + slot)
        y = tl.load(y_ptr + row * y_stride + column, mask=inside, other=0.0).to(tl.float32)
        total = total + y * weight if slot > 0 else y * weight
    tl.store(out_ptr + token * WIDTH + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def combine(y_RD: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    y_RD = unit_inner(y_RD)
    (tokens, slots), width = row_TK.shape, y_RD.shape[1]
    out_TD = torch.empty((tokens, width), dtype=y_RD.dtype, device=y_RD.device)
    _combine_kernel[(tokens,)](
        y_RD, row_TK.contiguous(), weights_TK.contiguous(), out_TD, y_RD.stride(0),
        WIDTH=width, SLOTS=slots, BLOCK=triton.next_power_of_2(width), num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out_TD


@triton.jit
def _combine_backward_kernel(
    grad_ptr,
    y_ptr,
    order_ptr,
    weight_ptr,
    grad_y_ptr,
    grad_weight_ptr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(order_ptr + row)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    grad = tl.load(grad_ptr + place // SLOTS * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + place)
    tl.store(grad_y_ptr + row * WIDTH + column, (grad * weight).to(grad_y_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_weight_ptr + row, tl.sum(grad * y, axis=0))


def combine_backward(grad_TD: Tensor, y_RD: Tensor, order_R: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = y_RD.shape
    grad_y_RD = torch.empty((rows, width), dtype=y_RD.dtype, device=y_RD.device)
    grad_R = torch.empty(rows, dtype=torch.float32, device=y_RD.device)
    _combine_backward_kernel[(rows,)](
        grad_TD.contiguous(), y_RD.contiguous(), order_R, weights_TK.contiguous(), grad_y_RD, grad_R,
        WIDTH=width, SLOTS=weights_TK.shape[1], BLOCK=triton.next_power_of_2(width), num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return grad_y_RD, grad_R
