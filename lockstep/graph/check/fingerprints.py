"""Tensors compared bit for bit through hashes made on their device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

CHUNK = 1 << 22  # words hashed at once on a host; bounds the memory that hashing takes
ROW = 1 << 20  # bytes from which on it is hashed by itself
GOLDEN = -7046029254386353131  # 2**64 divided by the golden ratio, odd, as a signed word
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """A hash of a tensor's values, bit for bit; int64, 0-dim, on its device, without waiting for that.

    Two tensors of one shape and dtype that differ in one element never have the same hash; others have it by chance
    alone, once in about 2 ** 63.
    """
    total, first = torch.zeros((), dtype=torch.int64, device=tensor.device), 1
    for words in map(_words, _in_one_piece(tensor.detach())):
        if words.is_cuda:
            from .triton_hash import add_hash

            add_hash(total, words, first, GOLDEN)
        else:
            total += _hash(words, first)
        first += words.numel()
    return total


def _hash(words: Tensor, first: int) -> Tensor:
    """The sum of the mixed words, of which the first has the number `first`."""
    total = torch.zeros((), dtype=torch.int64)
    for chunk in words.split(CHUNK):
        key = torch.arange(first, first + chunk.numel()) * GOLDEN
        mixed = chunk.long() * ((key ^ ((key >> 29) & 0x7FFFFFFFF)) | 1)  # an odd factor loses nothing
        mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * GOLDEN  # one pass would leave two changed signs to cancel
        total += (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)).sum()
        first += chunk.numel()
    return total


def _in_one_piece(tensor: Tensor) -> Sequence[Tensor]:
    """A tensor, or its rows where only they lie in one piece, such as some pages of a cache's layers: to be laid out
    anew it would take as much memory again."""
    rows = tensor.unbind() if tensor.dim() > 1 and not tensor.is_contiguous() else ()
    apart = rows and rows[0].is_contiguous() and rows[0].nbytes >= ROW and rows[0].nbytes % 8 == 0
    return rows if apart else [tensor]


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers, eight bytes each where its size allows."""
    flat = tensor.contiguous().reshape(-1)
    size = flat.element_size()
    if flat.numel() * size % 8:
        return flat.view(WORDS[size])
    if flat.storage_offset() * size % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


def fingerprints(tensors: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """One hash a name, over the tensors that it stands for in their order."""
    result = {}
    for name, parts in tensors.items():
        total = torch.zeros((), dtype=torch.int64, device=parts[0].device if parts else None)
        for part in parts:
            total = total * GOLDEN + fingerprint(part)
        result[name] = total
    return result


def first_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> str | None:
    """The first name, in the order of `b`, whose hashes in both are unlike; names that only one has do not count."""
    names = [name for name in b if name in a]
    if not names:
        return None
    unlike = torch.stack([a[name].cpu() != b[name].cpu() for name in names]).tolist()
    return next((name for name, differs in zip(names, unlike, strict=True) if differs), None)
