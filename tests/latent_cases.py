"""Latent attention's inputs in the layouts of both roles, and what they must give, in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from lockstep import ops

PAGE_SIZE = 16


def same_bits(a: Tensor, b: Tensor) -> bool:
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def int32(*values: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Case:
    """Packed segments of these lengths; each has so many of the first segment's rows before it.

    Attributes:
        inputs: absorbed queries [T, N, R], rotated queries [T, N, P], latents [T, R], rotated keys [T, P].
        layout: the packing.
    """

    def __init__(
        self,
        lengths: list[int],
        heads: int,
        rank: int = 32,
        rope_dim: int = 12,
        prefixes: list[int] | None = None,
        padding: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        tokens, self.device = sum(lengths) + padding, device
        self.lengths, self.prefixes = lengths, prefixes or [0] * len(lengths)
        self.scale = 0.7 * (rank + rope_dim) ** -0.5

        def wide(*shape: int, spread: float) -> Tensor:
            x = torch.randn(*shape, device=device)
            return (x * torch.exp(spread * torch.randn_like(x))).to(dtype)

        rotated = torch.randn(tokens, heads + 1, rope_dim, device=device).to(dtype)  # as the model hands them over
        queries = wide(tokens, heads, rank, spread=0.5)
        self.inputs = queries, rotated[:, :heads], wide(tokens, rank, spread=1.0), rotated[:, heads]
        bounds = int32(0, *accumulate(lengths), device=device), int32(*[0] * len(lengths), device=device)
        longest = max(a + b for a, b in zip(lengths, self.prefixes, strict=True))
        self.layout = ops.Packed(*bounds, int32(*self.prefixes, device=device), longest)

    @property
    def latents(self) -> ops.Latent:
        """The inputs with the scale."""
        return ops.Latent(*self.inputs, self.scale)

    @staticmethod
    def like(case: Case, rows: list[int]) -> Case:
        """Some rows as one segment."""
        heads, rank = case.inputs[0].shape[1:]
        made = Case([len(rows)], heads, rank, case.inputs[1].shape[2], dtype=case.inputs[0].dtype, device=case.device)
        made.inputs = tuple(x[rows] for x in case.inputs)
        made.scale = case.scale
        return made

    def cache(self, end: int) -> tuple[Tensor, Tensor]:
        """The first `end` rows in shuffled pages, NaN elsewhere, and their block table."""
        latent, k_rope = (x[:end] for x in self.inputs[2:])
        pages = -(-len(self.inputs[2]) // PAGE_SIZE)
        table = torch.randperm(2 * pages, device=self.device)[:pages].int()
        width = latent.shape[1] + k_rope.shape[1]
        cache = torch.full((2 * pages, PAGE_SIZE, width), torch.nan, dtype=latent.dtype, device=self.device)
        position = torch.arange(end, device=self.device)
        cache[table[position // PAGE_SIZE].long(), position % PAGE_SIZE] = torch.cat((latent, k_rope), 1)
        return cache, table.unsqueeze(0)

    def prefilled(self, paged: Callable[..., Tensor], cuts: list[int]) -> Tensor:
        """One segment's queries in chunks that end at `cuts`."""
        chunks = []
        for start, end in zip([0, *cuts], cuts, strict=False):
            cache, table = self.cache(end)
            q, q_rope = (x[start:end] for x in self.inputs[:2])
            bounds = int32(0, end - start, device=self.device), int32(end, device=self.device), end - start, end
            chunks.append(paged(q, q_rope, cache, self.scale, ops.Paged(table, *bounds)))
        return torch.cat(chunks)

    def decoded(self, paged: Callable[..., Tensor], rows: list[int]) -> Tensor:
        """One segment's queries at `rows` as one batch of single tokens, each with its own context."""
        cache, table = self.cache(len(self.inputs[2]))
        q, q_rope = (x[rows] for x in self.inputs[:2])
        starts = torch.arange(len(rows) + 1, device=self.device).int()
        contexts = int32(*rows, device=self.device) + 1
        tables = table.expand(len(rows), -1).contiguous()
        by = ops.Paged(tables, starts, contexts, 1, len(self.inputs[2]))
        return paged(q, q_rope, cache, self.scale, by)


def _exact(case: Case, q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
    out, start = torch.zeros_like(q), 0
    for length, prefix in zip(case.lengths, case.prefixes, strict=True):
        own = torch.arange(start, start + length, device=q.device)
        keys = torch.cat((torch.arange(prefix, device=q.device), own))
        scores = torch.einsum("tnr,lr->ntl", q[own], latent[keys])
        scores = (scores + torch.einsum("tnp,lp->ntl", q_rope[own], k_rope[keys])) * case.scale
        hidden = torch.ones(length, prefix + length, dtype=torch.bool, device=q.device).triu(prefix + 1)
        attended = torch.einsum("ntl,lr->tnr", scores.masked_fill(hidden, -torch.inf).softmax(-1), latent[keys])
        out = out.index_copy(0, own, attended)
        start += length
    return out


def exact(case: Case) -> Tensor:
    """The output, computed in float64."""
    return _exact(case, *(x.double() for x in case.inputs)).to(case.inputs[0].dtype)


def exact_gradients(case: Case, grad: Tensor) -> tuple[Tensor, ...]:
    """Float64."""
    inputs = [x.detach().double().requires_grad_() for x in case.inputs]
    return torch.autograd.grad(_exact(case, *inputs), inputs, grad.double())
