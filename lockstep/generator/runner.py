"""Forward passes of the generator: a mixed step (prompt chunks and running sequences), and runs of decode steps.

Shape suffixes: S sequences, T new tokens, C rows that are sampled from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..models import PagedAttention
from .decode_graphs import DecodeGraphs
from .kv_cache import KVCache
from .request import Sequence
from .weights import SharedWeights, SnapshotWeights


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling parameters and keys of the sequences that are sampled, one row each."""

    key_S4: Tensor
    temperature_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    truncated: bool
    greedy: bool

    @staticmethod
    def of(sequences: list[Sequence], device: torch.device) -> SamplingTensors:
        """Gather the parameters of `sequences`."""
        params = [s.sampling for s in sequences]

        def floats(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        return SamplingTensors(
            torch.tensor([s.key for s in sequences], dtype=torch.int64, device=device),
            floats([p.temperature for p in params]),
            torch.tensor([p.top_k for p in params], dtype=torch.int32, device=device),
            floats([p.top_p for p in params]),
            floats([p.min_p for p in params]),
            any(p.truncated for p in params),
            any(p.temperature == 0 for p in params),
        )


@dataclass(frozen=True)
class Work:
    """New tokens of one sequence (or prefill) for a mixed step: they go to positions `start` onwards of `pages`."""

    tokens: list[int]
    start: int
    pages: list[int]


Sampled = tuple[Tensor, Tensor, Tensor]  # token ids, both log-probabilities


class Runner:
    """Builds tensors, calls the model, samples."""

    def __init__(
        self,
        weights: SharedWeights | SnapshotWeights,
        cache: KVCache,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.graphs = graphs
        self.weights = weights
        self.cache = cache
        self.device = device
        self._decode: DecodeState | None = None

    @torch.inference_mode()
    def mixed(self, work: list[Work], rows: list[int], sequences: list[Sequence]) -> Sampled:
        """Run new tokens of several sequences, then sample for `sequences[c]` from the last token of `work[rows[c]]`.

        Returns host tensors [C].
        """
        page_size, device = self.cache.page_size, self.device
        lengths = [len(w.tokens) for w in work]
        tokens = torch.tensor([t for w in work for t in w.tokens])
        positions = torch.cat([torch.arange(w.start, w.start + n) for w, n in zip(work, lengths, strict=True)])
        table = _block_table([w.pages for w in work])
        owner = torch.repeat_interleave(torch.arange(len(work)), torch.tensor(lengths))
        slots = table[owner, positions // page_size].long() * page_size + positions % page_size
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        context = torch.tensor([w.start + n for w, n in zip(work, lengths, strict=True)], dtype=torch.int32)
        attend = PagedAttention(
            self.cache.k,
            self.cache.v,
            slots.to(device),
            table.to(device),
            cu_seqlens.to(device),
            context.to(device),
            max(lengths),
            int(context.max()),
        )
        hidden_TD = self.weights.model(tokens.to(device), positions.to(device), attend)
        if not rows:
            nothing = torch.empty(0)
            return nothing.long(), nothing, nothing
        last = (cu_seqlens[1:].long() - 1)[rows].to(device)
        drawn_at = context[rows].long().to(device)
        result = self._sample(hidden_TD[last], SamplingTensors.of(sequences, device), drawn_at)
        return tuple(t.cpu() for t in result)  # type: ignore[return-value]

    @torch.inference_mode()
    def decode(self, sequences: list[Sequence], steps: int) -> Sampled:
        """Run `steps` decode steps without looking at the results; host tensors [steps, S]."""
        if self.graphs is not None:
            return self.graphs.run(self.weights.model, sequences, steps)
        state = self._decode
        if state is None or not state.fits(sequences):
            state = self._decode = DecodeState.of(sequences, self.device)
        max_context = max(s.length for s in sequences) + steps - 1
        position = state.position_S + torch.arange(steps + 1, device=self.device).unsqueeze(1)
        context = position.int()
        slots = _slots(state.table, position[:-1], self.cache.page_size)
        drawn = []
        for i in range(steps):
            attend = PagedAttention(
                self.cache.k, self.cache.v, slots[i], state.table, state.cu_seqlens, context[i + 1], 1, max_context
            )
            hidden_SD = self.weights.model(state.token_S, position[i], attend)
            drawn.append(self._sample(hidden_SD, state.sampling, position[i + 1]))
            state.token_S = drawn[-1][0]
        state.position_S = position[-1]
        state.num_cached = [n + steps for n in state.num_cached]
        return tuple(torch.stack(column).cpu() for column in zip(*drawn, strict=True))  # type: ignore[return-value]

    def _sample(self, hidden_CD: Tensor, s: SamplingTensors, position_C: Tensor) -> Sampled:
        return ops.sample(
            hidden_CD,
            self.weights.model.lm_head,
            s.key_S4,
            position_C,
            s.temperature_S,
            s.top_k_S,
            s.top_p_S,
            s.min_p_S,
            s.truncated,
            s.greedy,
        )


@dataclass
class DecodeState:
    """Device tensors of the running sequences, from step to step."""

    sequences: list[Sequence]
    pages: list[list[int]]
    num_cached: list[int]
    token_S: Tensor
    position_S: Tensor
    table: Tensor
    cu_seqlens: Tensor
    sampling: SamplingTensors

    @staticmethod
    def of(sequences: list[Sequence], device: torch.device) -> DecodeState:
        """The state before the next step: each sequence's last token is to run at the position after its cache."""
        num_cached = [s.num_cached for s in sequences]
        return DecodeState(
            list(sequences),
            [list(s.pages) for s in sequences],
            num_cached,
            torch.tensor([s.last_token for s in sequences], device=device),
            torch.tensor(num_cached, device=device),
            _block_table([s.pages for s in sequences]).to(device),
            torch.arange(len(sequences) + 1, dtype=torch.int32, device=device),
            SamplingTensors.of(sequences, device),
        )

    def fits(self, sequences: list[Sequence]) -> bool:
        """Whether these are the same sequences, where this state left them, with the same pages."""
        return (
            self.sequences == sequences
            and self.num_cached == [s.num_cached for s in sequences]
            and self.pages == [s.pages for s in sequences]
        )


def _slots(table_SP: Tensor, position_iS: Tensor, page_size: int) -> Tensor:
    """Cache slots of one position a sequence, [steps, S]."""
    return table_SP.t().gather(0, position_iS // page_size) * page_size + position_iS % page_size


def _block_table(pages: list[list[int]]) -> Tensor:
    width = max(len(p) for p in pages)
    return torch.tensor([p + [0] * (width - len(p)) for p in pages], dtype=torch.int32)
