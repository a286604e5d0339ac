"""Decode steps as captured graphs, from the last tokens to the next ones without the host.

A graph embeds, runs the layers, samples, scores, stores the result in the row of its step, and leaves token and
position for the next launch. It is made for a number of sequences and a length of context; rows without a sequence
hold the cache's null page.

Shape suffixes: S rows of the bucket, P pages a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import graph, ops
from ..models import Decoder, PagedAttention
from .kv_cache import KVCache
from .request import Sequence

RESULTS = 3  # token, log-probability, the model's own: 32-bit words each
MIN_CONTEXT = 64


def batch_buckets(largest: int) -> list[int]:
    """Numbers of sequences that graphs are made for, up to one that holds `largest`, largest first.

    1, 2, 4, 8, then steps of 8, from 64 on of a quarter of the power of two below: at most a fifth of the rows, or 7,
    are padding.
    """
    sizes = [1]
    while sizes[-1] < largest:
        last = sizes[-1]
        sizes.append(last * 2 if last < 8 else last + max(8, (1 << (last.bit_length() - 1)) // 4))
    return sizes[::-1]


def context_bucket(tokens: int) -> int:
    """The power of two of at least `MIN_CONTEXT` that holds so many positions."""
    return max(MIN_CONTEXT, 1 << (tokens - 1).bit_length())


class DecodeGraphs:
    """Runs decode steps of whatever sequences there are, capturing a graph for each bucket when it is first met.

    Args:
        steps: the most steps that one call runs.
    """

    def __init__(self, cache: KVCache, steps: int, compiler: graph.Compiler) -> None:
        self._cache, self._steps, self._compiler = cache, steps, compiler
        self._buckets: dict[tuple[int, int, int], _Bucket] = {}

    def run(self, model: Decoder, sequences: list[Sequence], steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """Run `steps` decode steps; token ids and both log-probabilities, host tensors [steps, S]."""
        longest = max(len(s.prompt_ids) + s.sampling.max_completion_length for s in sequences)
        bucket = self._bucket(model, len(sequences), longest)
        bucket.load(sequences)
        truncated = any(s.sampling.truncated for s in sequences)
        greedy = any(s.sampling.temperature == 0 for s in sequences)
        words = bucket.launch(steps, truncated, greedy)[:, :, : len(sequences)]
        tokens, logprobs, model_logprobs = (w.contiguous() for w in words.unbind(1))
        return tokens.long(), logprobs.view(torch.float32), model_logprobs.view(torch.float32)

    def warm_up(self, model: Decoder, sequences: int, tokens: int, truncated: bool, greedy: bool) -> None:
        """Make the graphs for up to so many sequences of so many tokens, largest first."""
        for size in batch_buckets(sequences):
            bucket = self._bucket(model, size, tokens)
            bucket.load([])
            bucket.launch(1, truncated, greedy)

    def _bucket(self, model: Decoder, sequences: int, tokens: int) -> _Bucket:
        rows, context = batch_buckets(sequences)[0], context_bucket(tokens)
        key = (id(model), rows, context)
        if key not in self._buckets:
            pages = self._cache.pages_for(context)
            self._buckets[key] = _Bucket(model, self._cache, rows, pages, self._steps, self._compiler)
        return self._buckets[key]


class _Bucket:
    """The static tensors of one bucket, and the function of them."""

    def __init__(
        self, model: Decoder, cache: KVCache, rows: int, pages: int, steps: int, compiler: graph.Compiler
    ) -> None:
        self._model, self._cache = model, cache
        self._pages: list[list[int]] = []
        self._next: list[tuple[Sequence, int]] | None = None  # sequences and positions that the device is ready for
        self._state = _state(rows, pages, steps, cache.null_page, cache.k.device)
        own = graph.module_inputs(model)
        buffers = {**own.buffer, **self._state}
        inputs = graph.Inputs(param=own.param, buffer=buffers, kv={"k": cache.k, "v": cache.v})
        self._function = compiler.function("decode", self._body, inputs, {"kv", "buffer"})

    def load(self, sequences: list[Sequence]) -> None:
        """Bring the rows up to date with `sequences`; only what the device does not know yet is copied."""
        s, count = self._state, len(sequences)
        pages = [list(sequence.pages) for sequence in sequences]
        if self._next != [(sequence, sequence.num_cached) for sequence in sequences]:
            rows = len(s["token"])
            _fill(s["token"], [q.last_token for q in sequences], 0)
            _fill(s["position"], [q.num_cached for q in sequences], 0)
            _fill(s["active"], [1] * count, 0)
            _fill(s["temperature"], [q.sampling.temperature for q in sequences], 1)
            _fill(s["top_k"], [q.sampling.top_k for q in sequences], 0)
            _fill(s["top_p"], [q.sampling.top_p for q in sequences], 1)
            _fill(s["min_p"], [q.sampling.min_p for q in sequences], 0)
            s["key"].copy_(torch.tensor([q.key for q in sequences] + [(0, 0, 0, 0)] * (rows - count)))
            self._next = [(sequence, sequence.num_cached) for sequence in sequences]
        if pages != self._pages or not sequences:
            rows, width = s["table"].shape
            table = torch.full((rows, width), self._cache.null_page, dtype=torch.int32)
            for row, held in enumerate(pages):
                table[row, : len(held)] = torch.tensor(held, dtype=torch.int32)
            s["table"].copy_(table)
            self._pages = pages

    def launch(self, steps: int, truncated: bool, greedy: bool) -> Tensor:
        """Run the steps; what they stored, a host tensor of int32 words [steps, RESULTS, S]."""
        assert self._next is not None and steps <= len(self._state["results"])
        self._state["row"].zero_()
        self._function(times=steps, truncated=truncated, greedy=greedy)
        self._next = [(sequence, position + steps) for sequence, position in self._next]
        return self._state["results"][:steps].cpu()

    def _body(self, inputs: graph.Inputs, truncated: bool, greedy: bool) -> dict[str, Tensor]:
        b, kv, page_size = inputs.buffer, inputs.kv, self._cache.page_size
        position = b["position"]
        page = b["table"].gather(1, (position // page_size).unsqueeze(1)).squeeze(1)
        slots = page * page_size + position % page_size
        max_context = b["table"].shape[1] * page_size
        context = (position + 1).int()
        attend = PagedAttention(kv["k"], kv["v"], slots, b["table"], b["cu_seqlens"], context, 1, max_context)
        filters = b["temperature"], b["top_k"], b["top_p"], b["min_p"]
        with graph.substituted(self._model, inputs):
            hidden = self._model(b["token"], position, attend)
            drawn = ops.sample(hidden, self._model.lm_head, b["key"], position + 1, *filters, truncated, greedy)
        token, *logprobs = drawn
        words = torch.stack((token.int(), *(value.view(torch.int32) for value in logprobs)))
        b["results"].index_copy_(0, b["row"], words.unsqueeze(0))
        b["token"].copy_(token)
        position.add_(b["active"])
        b["row"].add_(1)
        return {}


def _state(rows: int, pages: int, steps: int, null_page: int, device: torch.device) -> dict[str, Tensor]:
    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    with torch.inference_mode(False):
        return {
            "token": zeros(rows),
            "position": zeros(rows),
            "active": zeros(rows),  # what a step adds to the position
            "table": zeros(rows, pages, dtype=torch.int32).fill_(null_page),
            "cu_seqlens": torch.arange(rows + 1, dtype=torch.int32, device=device),
            "key": zeros(rows, 4),
            "temperature": zeros(rows, dtype=torch.float32),
            "top_k": zeros(rows, dtype=torch.int32),
            "top_p": zeros(rows, dtype=torch.float32),
            "min_p": zeros(rows, dtype=torch.float32),
            "row": zeros(1),  # of `results`, for the next step
            "results": zeros(steps, RESULTS, rows, dtype=torch.int32),
        }


def _fill(target: Tensor, values: list, rest: float) -> None:
    """Copy host values into the first rows and `rest` into the others."""
    target.copy_(torch.tensor(values + [rest] * (len(target) - len(values)), dtype=target.dtype))
