"""One step, from the rows' state to their next state; run eagerly or captured.

`b` are the tensors of `RunningBatch.tensors`. A decode step runs one token of every row. A mixed step also runs prompt
tokens (`MixedBatch`), cut into segments of at most `SEGMENT`. To attention a segment is a sequence with the pages of
its row, so nothing is sized by the longest prompt. Each row then samples from its own hidden state or, if its prompt
ends in this step, from that of the prompt's last token.

Shape suffixes: R rows, P prompt tokens, S segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from .. import ops
from ..graph import Inputs
from ..models import Decoder, PagedAttention, Routing

SEGMENT = 64  # tokens

State = Mapping[str, Tensor]
_ROWS = itemgetter("stop", "token", "position", "remaining", "results", "next_result")  # `ops.DecodeRows`


@dataclass(frozen=True)
class Paging:
    """What a step depends on besides the tensors of the cache and rows; part of the key of stored graphs.

    Attributes:
        max_context: upper bound on the context length.
    """

    page_size: int
    null_page: int
    max_context: int


def decode_step(model: Decoder, inputs: Inputs, paging: Paging, truncated: bool, greedy: bool, grouped: bool) -> None:
    """Run every row's token and sample the next one.

    Args:
        inputs: `buffer` has the rows' tensors, and `kv` the cache's (`KVCache.tensors`).
        truncated, greedy: whether any row may have a filter, or temperature 0.
        grouped: read the shared prefixes in "groups" once per group, which changes the time but not the bits.
    """
    b, kv = inputs.buffer, inputs.kv
    position, table = b["position"], b["table"]
    slots, context = ops.decode_slots(position, b["remaining"], table, paging.page_size, paging.null_page)
    groups = ops.PrefixGroups(b["groups"], b["shared_len"]) if grouped else ops.NO_GROUPS
    paged = ops.Paged(table, b["cu_seqlens"], context, 1, paging.max_context)
    contexts = ops.Contexts(table, context, paging.max_context)
    attend = PagedAttention(ops.KVPages(kv["k"], kv["v"]), slots, paged, contexts, groups, model.masks)
    hidden, route = _forward(model, b["token"], position, attend, kv.get("routes"))
    _sample_and_advance(model, b, hidden, route, truncated, greedy)


def mixed_step(model: Decoder, inputs: Inputs, paging: Paging, truncated: bool, greedy: bool, grouped: bool) -> None:
    """Run prompt tokens, and the token of every row except those whose prompt ends here; then sample for each row.

    Args:
        inputs: as in `decode_step`; `buffer` also has the fields of `MixedBatch` as "prompt.FIELD", and the block table
            of all rows, the null row last, as "tables".
    """
    b, kv, table = inputs.buffer, inputs.kv, inputs.buffer["tables"]
    prompt = {name.removeprefix("prompt."): tensor for name, tensor in b.items() if name.startswith("prompt.")}
    row, page_size, null_row = b["ordinal"], paging.page_size, table.shape[0] - 1
    is_idle = (b["remaining"] == 0) | (prompt["source"] != row)
    own_position = b["position"].masked_fill(is_idle, 0)
    written = row.masked_fill(is_idle, null_row)  # whose pages a row's token is written to; it reads its own pages
    position = torch.cat((own_position, prompt["position"]))
    entry = torch.cat((written, prompt["row"])) * table.shape[1] + position // page_size
    slots = table.flatten().index_select(0, entry).long() * page_size + position % page_size
    paged = ops.Paged(
        table.index_select(0, torch.cat((row, prompt["segment_row"]))),
        torch.cat((row, prompt["segment_start"])).int(),
        torch.cat((own_position + 1, prompt["segment_context"])).int(),
        SEGMENT,
        paging.max_context,
    )
    groups = ops.PrefixGroups(b["groups"], b["shared_len"]) if grouped else ops.NO_GROUPS
    attend = PagedAttention(ops.KVPages(kv["k"], kv["v"]), slots, paged, groups=groups, masks=model.masks)
    tokens = torch.cat((b["token"], prompt["token"]))
    hidden, route = _forward(model, tokens, position, attend, kv.get("routes"), prompt["source"])
    _sample_and_advance(model, b, hidden, route, truncated, greedy)


def _forward(
    model: Decoder,
    tokens: Tensor,
    position: Tensor,
    attend: PagedAttention,
    routes: Tensor | None,
    source_R: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The hidden states of the source rows (None: of all) and, with experts, their route digests. The digests of all
    tokens are stored in their slots of `routes`."""
    found: list[Routing] | None = [] if model.config.moe_layers else None
    hidden = model(tokens, position, attend, found)
    if source_R is not None:
        hidden = hidden.index_select(0, source_R)
    if not found or routes is None:
        return hidden, None
    digest = ops.route_digest(torch.cat([routing.experts_TK for routing in found], dim=1))
    routes.view(-1).index_copy_(0, attend.slots_T, digest)
    return hidden, digest if source_R is None else digest.index_select(0, source_R)


def _sample_and_advance(
    model: Decoder, b: State, hidden: Tensor, route: Tensor | None, truncated: bool, greedy: bool
) -> None:
    """Sample, store the results, and advance each row to the next step; it becomes idle after its last token."""
    filters = ops.Filters(b["temperature"], b["top_k"], b["top_p"], b["min_p"])
    keys = ops.SampleKeys(b["key"], b["position"] + 1)
    drawn = _sample(model, hidden, keys, filters, truncated, greedy)
    ops.decode_advance(ops.SampledTokens(*drawn), ops.DecodeRows(*_ROWS(b)), route)


def _sample(
    model: Decoder, hidden_RD: Tensor, keys: ops.SampleKeys, by: ops.Filters, truncated: bool, greedy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.sample` from the model's head. Tensor-parallel ranks compute their columns of the logits, exchange these so
    that each has all columns for its share of the rows, sample those rows, and all-gather the results."""
    spread, rows = model.spread, hidden_RD.shape[0]
    if spread.axis.size == 1:
        return ops.sample(hidden_RD, model.lm_head, keys, by, truncated, greedy)
    logits_RV = spread.columns_to_rows(ops.linear_fp32(hidden_RD, model.lm_head))
    key, position, *filters = spread.local_rows(*keys, *by)
    own = ops.SampleKeys(key, position), ops.Filters(*filters)
    token, logprob, model_logprob = ops.sample_logits(logits_RV, *own, truncated, greedy)
    words = torch.stack((token.int(), logprob.view(torch.int32), model_logprob.view(torch.int32)), dim=1)
    token, logprob, model_logprob = spread.gather_rows(words, rows).t().contiguous().unbind()
    return token.long(), logprob.view(torch.float32), model_logprob.view(torch.float32)
