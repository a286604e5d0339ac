"""Joining the processes that `torchrun` started."""

from __future__ import annotations

import itertools
import logging
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from .. import machine
from ..config import ParallelConfig, require_divisor
from ..errors import InputError, refuse
from . import torch_private
from .cells import Cells
from .collectives import exchange, gather
from .mesh import Axis, exchanging
from .push.memory import forget_memory, own_slots, share_memory
from .ranks import ONE, World

_log = logging.getLogger("lockstep")
_joined = itertools.count()  # times that this process joined: the addresses of each time need keys of their own
_NCCL_TIMEOUTS = 20  # NCCL's own timeout aborts the process without a message, so `World.deadline` must come first


def join(config: ParallelConfig, device_type: str) -> World:
    """The world of this process: all processes that torchrun started, over NCCL on GPUs and gloo on CPUs, or this one.

    Raises:
        InputError: the process has joined already; MASTER_ADDR or MASTER_PORT is missing or the port is taken;
            `parallel.fsdp` times `parallel.tp` is not the number of processes; or processes have different kinds of
            devices, for example because there are more of them than GPUs.
        PeerLost: another process did not join in time.
    """
    launch = machine.launched()
    require_divisor(config, launch.processes)
    if launch.processes == 1:
        return ONE
    refuse(
        dist.is_initialized(),
        "this process is among others already, of a model or a run that is not closed; close that first: with LLM(...) "
        "as llm",
    )
    on_gpu = device_type == "cuda"
    timeout = timedelta(seconds=config.timeout)
    tp = config.tp
    groups = launch.processes // tp
    lanes = Cells(config.batch_shards or groups, config.cell, groups).lanes
    rank, count = launch.rank, launch.processes
    pushes, local_rank = config.symmetric_memory and on_gpu, launch.local_rank
    world = World(rank, count, config.timeout, on_gpu, tp, pushes=pushes, lanes=lanes, local_rank=local_rank)
    if on_gpu:
        machine.prepare_nccl(len(world.mesh.in_graphs))
    first = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} (MASTER_ADDR, MASTER_PORT)"
    with world.peers(), world.deadline(f"joining the other processes at {first}"):
        store = dist.PrefixStore(f"lockstep/{next(_joined)}", _store(timeout))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)  # host-side
        try:
            world.same("the processes of this run", lambda: {"device": device_type, "parallel": config})
            for axis in world.mesh.in_graphs:
                _bind(world, axis)
            return in_groups(world, config.generator_tp or 1)
        except Exception:
            with suppress(Exception):
                world.close(failed=True)  # so that it may join others
            raise


def in_groups(world: World, ranks: int) -> World:
    """`world` with groups of `ranks` neighbours that generate together, in place of earlier such groups, whose graphs
    must be closed. Every rank calls this."""
    made = replace(world, generator_tp=ranks, together=None, apart=False)
    with made.peers(), made.deadline("joining those that generate together"):
        world.end_groups()
        if ranks == 1:
            return made
        axis = made.generator.tp
        group = _bind(made, axis)
        if made.pushes and made.on_gpu and not _share(made, axis, group):
            made = replace(made, apart=True)
        return replace(made, together=_own_group(made, axis, "gloo", timedelta(seconds=world.timeout)))


def _bind(world: World, axis: Axis) -> dist.ProcessGroup:
    """Make the groups along an axis for collectives in graphs, bind this rank's, and return it."""
    timeout = timedelta(seconds=world.timeout)
    backend = ("nccl", _NCCL_TIMEOUTS * timeout) if world.on_gpu else (torch_private.GLOO_IN_ORDER, timeout)
    group = _own_group(world, axis, *backend)
    world.bind(axis, group)
    device = torch.device("cuda", torch.cuda.current_device()) if world.on_gpu else torch.device("cpu")
    probe = torch.zeros(axis.size, device=device)
    gather(probe, axis)  # the first use creates the communicator and its buffers, before memory is measured
    if axis in exchanging(world.axes):
        exchange(probe, 1, axis)
    return group


def _share(world: World, axis: Axis, group: dist.ProcessGroup) -> bool:
    """Let the ranks of each group write to one another's memory. Unless all can, none does, and a warning says why."""
    hosts = world.gather(platform.node())
    groups = [hosts[i : i + axis.size] for i in range(0, world.size, axis.size)]
    memory: list[Tensor] = []

    def allocate() -> None:
        if any(len(set(of)) > 1 for of in groups):
            raise RuntimeError("they are of several hosts")
        memory.append(own_slots(axis.size, torch.device("cuda", torch.cuda.current_device())))

    # The second attempt is a collective. After its gather, the memory of all ranks is ready.
    for attempt in (allocate, lambda: share_memory(axis.group, group, memory[0], world.timeout)):
        if faults := [fault for fault in world.gather(_fault(attempt)) if fault]:
            break
    else:
        return True
    forget_memory(axis.group)
    if world.first:
        _log.warning(
            "parallel.symmetric_memory: processes that generate together cannot write to one another's memory, and "
            "NCCL moves their words, which takes longer (%s)",
            faults[0],
        )
    return False


def _fault(attempt: Callable[[], object]) -> str:
    """The first line of the error that `attempt` raises; empty if it succeeds."""
    try:
        attempt()
        return ""
    except RuntimeError as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]


@cache
def _store(timeout: timedelta) -> dist.Store:
    """The rendezvous store, which rank 0 serves."""
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(
            f"MASTER_ADDR is {host!r} and MASTER_PORT {port!r}; torchrun sets them to the first process's host and to "
            "a port that is free there"
        )
    try:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
    except dist.DistNetworkError as error:
        refuse(
            "EADDRINUSE" in str(error),
            f"port {port} of this host is taken, by another run perhaps, and the processes would meet there; choose "
            "another one by MASTER_PORT (torchrun: --master-port)",
        )
        raise
    return store


def _own_group(world: World, axis: Axis, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """This rank's group along an axis. Every rank takes part in creating every group, as torch requires."""
    ranks, tp = list(range(world.size)), world.tp
    widths = {"tp": tp, "generator_tp": world.generator_tp}
    along = {name: [ranks[i : i + width] for i in ranks[::width]] for name, width in widths.items()}
    along["fsdp"] = shards = [ranks[i::tp] for i in range(tp)]
    lanes = world.lanes
    along["cell"] = [of[i : i + lanes] for of in shards for i in range(0, len(of), lanes)]
    along["cells"] = [of[i::lanes] for of in shards for i in range(lanes)]
    made = [(of, dist.new_group(of, backend=backend, timeout=timeout)) for of in along[axis.name]]
    return next(group for of, group in made if world.rank in of)
