"""Between two decode steps: where the next token's keys and values go, and what a drawn token does to its row.

Only positions and counts are computed here; as two operators they take two kernels on a GPU instead of twenty-five.

Shape suffixes: R rows, W pages per sequence, K stop ids, M words per result, N steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operator import like, operator
from ..records import DecodeRows, SampledTokens


@operator(cuda="triton:slots", fake=like(0, 1))
def decode_slots(
    position_R: Tensor, remaining_R: Tensor, table_RW: Tensor, page_size: int, null_page: int
) -> tuple[Tensor, Tensor]:
    """The cache slot of each row's token, int64 [R], and its context length, this token included, int32 [R].

    Args:
        position_R: int64, the token's position. remaining_R: int32; 0: an idle row, whose slot is in the null page.
        table_RW: int32, the block table.
    """
    page_R = table_RW.gather(1, (position_R // page_size).unsqueeze(1)).squeeze(1)
    slots_R = (page_R * page_size + position_R % page_size).masked_fill_(remaining_R == 0, null_page * page_size)
    return slots_R, (position_R + 1).int()


@operator(mutates=("token_R", "position_R", "remaining_R", "results_RMN", "next_result"), cuda="triton:advance")
def decode_advance(drawn: SampledTokens, rows: DecodeRows, route_R: Tensor | None = None) -> None:
    """Store what was drawn and prepare each row for its next token.

    A row whose token is its last (by count, or one of its stop ids) becomes idle: nothing remains, position 0. The
    results of step `next_result`, which is then incremented, are the token, the bits of both log-probabilities, and the
    route. For an idle row they are -1 and zeros, and it keeps its token, since what it draws depends on who last wrote
    to the null page.

    Args:
        route_R: int32, digests of the experts that the rows were routed to; None without experts, and then M is 3.
    """
    idle_R = rows.remaining_R == 0
    words = [drawn.logprob_R.view(torch.int32), drawn.model_logprob_R.view(torch.int32)]
    if route_R is not None:
        words.append(route_R)
    results = [drawn.drawn_R.int().masked_fill_(idle_R, -1), *(word.masked_fill(idle_R, 0) for word in words)]
    rows.results_RMN.index_copy_(2, rows.next_result, torch.stack(results, dim=1).unsqueeze(2))
    rows.next_result.add_(1)
    rows.token_R.copy_(torch.where(idle_R, rows.token_R, drawn.drawn_R))
    stopped_R = (rows.stop_RK == drawn.drawn_R.unsqueeze(1)).any(1)
    rows.remaining_R.sub_(1).clamp_min_(0).masked_fill_(stopped_R, 0)
    rows.position_R.add_(1).masked_fill_(rows.remaining_R == 0, 0)
