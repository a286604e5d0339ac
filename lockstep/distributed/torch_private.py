"""All private interfaces of `torch.distributed` that the package uses; for torch 2.11 to 2.13."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the operators' shapes
from torch import Tensor

# These start a collective, whose result may be read after `wait`. A group is given by its name.
_operators = torch.ops._c10d_functional

GLOO_IN_ORDER = "gloo_in_order"  # a backend: gloo with collectives that run one after another


def _gloo_in_order(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo group with one thread. By default two threads run a group's collectives, and both write the name of the
    last finished collective to one string without a lock. When two finish at once and a name has more than 15
    characters, memory is freed twice."""
    gloo: Any = dist.ProcessGroupGloo
    interfaces = list(filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")))
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=name) for name in interfaces] or [gloo.create_default_device()]
    options._timeout, options._threads = timeout, 1
    return gloo(store, rank, size, options)


dist.Backend.register_backend(GLOO_IN_ORDER, _gloo_in_order, devices=["cpu"])


def all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """Start an all-gather of `x` along dimension 0, in rank order."""
    return _operators.all_gather_into_tensor.default(x, ranks, group)


def all_to_all(x: Tensor, ranks: int, group: str) -> Tensor:
    """Start an all-to-all of a flat `x`: part r goes to rank r; the result is the parts for this rank, by sender."""
    parts = [x.numel() // ranks] * ranks
    return _operators.all_to_all_single.default(x, parts, parts, group)


def wait(x: Tensor) -> Tensor:
    return _operators.wait_tensor.default(x)


def name_group(name: str, group: dist.ProcessGroup) -> None:
    """Make collectives find `group` by this name, which is the same on every rank."""
    torch._C._distributed_c10d._register_process_group(cast(Any, name), group)


def forget_group(name: str) -> None:
    torch._C._distributed_c10d._unregister_process_group(cast(Any, name))


def symmetric_bytes(size: int, device: torch.device) -> Tensor:
    """A uint8 buffer that can be shared with other ranks (`symmetric_memory`)."""
    import torch.distributed._symmetric_memory as symmetric

    return symmetric.empty(size, dtype=torch.uint8, device=device)


def symmetric_memory(words: Tensor, group: dist.ProcessGroup) -> tuple[list[int], Any]:
    """The addresses, by rank, at which this device reaches the `symmetric_bytes` of a group's ranks, and the handle
    that keeps them mapped. Collective. Raises `RuntimeError` if the devices cannot reach one another's memory."""
    import torch.distributed._symmetric_memory as symmetric

    handle = symmetric.rendezvous(words, group)
    return list(handle.buffer_ptrs), handle


def is_peer_failure(error: BaseException) -> bool:
    """Whether torch raised this exception because a rank is gone or late."""
    signs = "gloo", "nccl", "pair closure", "connection closed by peer", "connection reset by peer"
    of_transport = isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)
    return of_transport or isinstance(error, dist.DistError)
