"""Compares tensors bit for bit through hashes that are computed on their device."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

CHUNK = 1 << 22  # words hashed at once on a CPU; bounds the memory that hashing takes
ROW = 1 << 20  # least bytes of a row of a non-contiguous tensor to hash rows one by one
GOLDEN = -7046029254386353131  # 2**64 divided by the golden ratio, odd, as int64
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """A hash of a tensor's bits; int64, 0-dim, on its device, without a sync.

    Two tensors of equal shape and dtype that differ in exactly one element never collide; others collide only by
    chance, with a probability of about 2 ** -63.
    """
    total, first = torch.zeros((), dtype=torch.int64, device=tensor.device), 1
    for words in map(_words, _contiguous_pieces(tensor.detach())):
        if words.is_cuda:
            from .triton_hash import add_hash

            add_hash(total, words, first, GOLDEN)
        else:
            total += _hash(words, first)
        first += words.numel()
    return total


def _hash(words: Tensor, first: int) -> Tensor:
    """The sum of the mixed words, numbered from `first`."""
    total = torch.zeros((), dtype=torch.int64)
    for chunk in words.split(CHUNK):
        key = torch.arange(first, first + chunk.numel()) * GOLDEN
        mixed = chunk.long() * ((key ^ ((key >> 29) & 0x7FFFFFFFF)) | 1)  # multiplying by an odd number is bijective
        mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * GOLDEN  # after one round, two sign flips would cancel
        total += (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)).sum()
        first += chunk.numel()
    return total


def _contiguous_pieces(tensor: Tensor) -> Sequence[Tensor]:
    """A tensor, or its rows if only these are contiguous, such as pages in the layers of a KV cache: `contiguous` would
    copy all of it."""
    rows = tensor.unbind() if tensor.dim() > 1 and not tensor.is_contiguous() else ()
    apart = rows and rows[0].is_contiguous() and rows[0].nbytes >= ROW and rows[0].nbytes % 8 == 0
    return rows if apart else [tensor]


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bits as flat integers, int64 if its size allows."""
    flat = tensor.contiguous().reshape(-1)
    size = flat.element_size()
    if flat.numel() * size % 8:
        return flat.view(WORDS[size])
    if flat.storage_offset() * size % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


def fingerprints(tensors: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """One hash per name, over its tensors in order, with their dtypes and shapes."""
    result = {}
    for name, parts in tensors.items():
        total = torch.zeros((), dtype=torch.int64, device=parts[0].device if parts else None)
        for part in parts:
            total = total * GOLDEN + fingerprint(part) + _hash_form(part)
        result[name] = total
    return result


def _hash_form(tensor: Tensor) -> int:
    form = repr((tensor.dtype, tuple(tensor.shape))).encode()
    return int.from_bytes(hashlib.blake2b(form, digest_size=8).digest(), signed=True)


def first_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> str | None:
    """The first name, in the order of `b`, whose hashes differ; names that only one has do not count."""
    names = [name for name in b if name in a]
    if not names:
        return None
    unlike = torch.stack([a[name].cpu() != b[name].cpu() for name in names]).tolist()
    return next((name for name, differs in zip(names, unlike, strict=True) if differs), None)
