"""Mixture of experts in place of a layer's feed-forward.

Shape suffixes: T tokens, E experts, K slots per token, R = T * K rows sorted by expert, D hidden, F feed-forward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ... import ops
from ...distributed.placement import ROWS, Placement
from ..config import MoEConfig
from .weights import WeightFactory


class Routing(NamedTuple):
    """What a layer's router computed: float32 logits [T, E], and the chosen experts, int64 [T, K]."""

    logits_TE: Tensor
    experts_TK: Tensor


class MixtureOfExperts(nn.Module):
    """Routed experts, and shared ones as one wide feed-forward. The submodules name the regions of a captured graph.

    `router_bias` (float32, a buffer without gradient) is added to the scores by which experts are chosen, not to those
    by which they are weighted.
    """

    router_bias: Tensor | None

    def __init__(self, config: MoEConfig, hidden_size: int, weight: WeightFactory) -> None:
        super().__init__()
        self.config, self.spread = config, weight.spread
        self.router = weight(config.num_experts, hidden_size)
        self.router_offset = weight(config.num_experts, fill=0.0) if config.biases else None
        bias = torch.zeros(config.num_experts, device=self.router.device) if config.router_bias else None
        self.register_buffer("router_bias", bias)
        self.dispatch = Dispatch(config)
        self.experts = Experts(config, hidden_size, weight)
        self.combine = Combine()
        self.shared = SharedExperts(config, hidden_size, weight) if config.shared_experts else None

    def forward(self, x_TD: Tensor, routes: list[Routing] | None = None) -> Tensor:
        """The weighted sum of each token's experts' outputs, plus the shared experts' output, [T, D]."""
        dispatched = self.dispatch(x_TD, self.router, self.router_bias, self.router_offset)
        x_RD, (_, row_TK, offsets), weights_TK, routing = dispatched
        if routes is not None:
            routes.append(routing)
        y_TD = self.combine(self.experts(x_RD, offsets), row_TK, weights_TK)
        return self.spread.gather_columns(y_TD if self.shared is None else self.shared(x_TD, y_TD))


class Dispatch(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config

    def forward(
        self, x_TD: Tensor, router_ED: Tensor, bias_E: Tensor | None, offset_E: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor, Routing]:
        """Rows sorted by expert, their plan (`ops.dispatch_plan`), the experts' weights, and the `Routing`."""
        c = self.config
        settings = c.sigmoid, c.groups, c.kept_groups, c.normalize, c.scale
        logits_TE = ops.router_logits(x_TD, router_ED)
        if offset_E is not None:
            logits_TE = logits_TE + offset_E  # in float32
        weights_TK, experts_TK = ops.route(logits_TE, bias_E, ops.RouteSettings(c.num_experts_per_token, *settings))
        plan = ops.dispatch_plan(experts_TK, c.num_experts)
        order_R, row_TK, _ = plan
        return ops.dispatch(x_TD, order_R, row_TK), plan, weights_TK, Routing(logits_TE, experts_TK)


class Experts(nn.Module):
    """One gated feed-forward per expert, as grouped products. A bias is one vector, with the experts' concatenated."""

    def __init__(self, config: MoEConfig, hidden_size: int, weight: WeightFactory) -> None:
        super().__init__()
        count, width = config.num_experts, config.intermediate_size
        self.config, self.spread = config, weight.spread
        fused = Placement(ep=0, tp=1, blocks=(width, width))
        self.gate_up = weight(count, 2 * width, hidden_size, on=fused)
        fused, plain = (Placement(ep=0, tp=0, blocks=blocks) for blocks in ((width, width), (hidden_size,)))  # biases
        self.gate_up_bias = weight(count * 2 * width, on=fused, fill=0.0) if config.biases else None
        self.down = weight(count, hidden_size, width, on=Placement(ep=0, tp=1))
        self.down_bias = weight(count * hidden_size, on=plain, fill=0.0) if config.biases else None

    def forward(self, x_RD: Tensor, offsets: Tensor) -> Tensor:
        """Each row through its expert; this rank's columns of the outputs, [R, D / ranks]."""
        up_bias, down_bias = self.gate_up_bias, self.down_bias
        if up_bias is not None and down_bias is not None:
            up_bias, down_bias = (bias.unflatten(0, (self.config.num_experts, -1)) for bias in (up_bias, down_bias))
        gated_RF = ops.silu_mul(ops.grouped_linear(x_RD, self.gate_up, offsets, up_bias), self.config.activation)
        return ops.grouped_linear(self.spread.gather_columns(gated_RF), self.down, offsets, down_bias)


class Combine(nn.Module):
    def forward(self, y_RD: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The weighted sum of each token's rows, [T, D]."""
        return ops.combine(y_RD, row_TK, weights_TK)


class SharedExperts(nn.Module):
    """A SiLU-gated feed-forward for every token, as wide as the shared experts together."""

    def __init__(self, config: MoEConfig, hidden_size: int, weight: WeightFactory) -> None:
        super().__init__()
        width = config.shared_experts * config.intermediate_size
        self.spread = weight.spread
        self.gate_up = weight(2 * width, hidden_size, on=Placement(tp=0, blocks=(width, width)))
        self.down = weight(hidden_size, width, on=ROWS)

    def forward(self, x_TD: Tensor, y_TD: Tensor) -> Tensor:
        """`y` plus the feed-forward of x; of `y` and of the result, this rank's columns, [T, D / ranks]."""
        gated_TF = self.spread.gather_columns(ops.silu_mul(ops.linear(x_TD, self.gate_up)))
        return ops.linear_add(gated_TF, self.down, y_TD)
