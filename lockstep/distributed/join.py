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
from .collectives import all_gather, all_to_all
from .mesh import Axis, all_to_all_axes
from .push.memory import allocate_slots, forget_memory, share_memory
from .ranks import ONE_PROCESS, World

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
    launch = machine.torchrun_launch()
    require_divisor(config, launch.processes)
    if launch.processes == 1:
        return ONE_PROCESS
    machine.end_with_launcher()
    refuse(
        dist.is_initialized(),
        "this process is among others already, of a model or a run that is not closed; close that first: with LLM(...) "
        "as llm",
    )
    on_gpu = device_type == "cuda"
    shards = launch.processes // config.tp
    world = World(
        launch.rank,
        launch.processes,
        config.timeout,
        on_gpu,
        config.tp,
        pushes=config.symmetric_memory and on_gpu,
        ranks_per_cell=Cells(config.batch_shards or shards, config.cell, shards).ranks_per_cell,
        local_rank=launch.local_rank,
    )
    if on_gpu:
        machine.prepare_nccl(len(world.mesh.collective_axes))
    timeout = timedelta(seconds=config.timeout)
    first = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} (MASTER_ADDR, MASTER_PORT)"
    with world.detect_lost_peers(), world.deadline(f"joining the other processes at {first}"):
        store = dist.PrefixStore(f"lockstep/{next(_joined)}", _store(timeout))
        dist.init_process_group(
            "gloo", store=store, rank=world.rank, world_size=world.size, timeout=timeout
        )  # host-side
        try:
            layout = {f"parallel.{name}": value for name, value in vars(config).items()}
            world.require_same("the processes of this run", lambda: {"device": device_type, **layout})
            for axis in world.mesh.collective_axes:
                _bind(world, axis)
            return join_generator_groups(world, config.generator_tp or 1)
        except Exception:
            with suppress(Exception):
                world.close(failed=True)  # so that it may join others
            raise


def join_generator_groups(world: World, ranks: int) -> World:
    """`world` with groups of `ranks` neighbours that generate together, in place of earlier such groups, whose graphs
    must be closed. Every rank calls this."""
    made = replace(world, generator_tp=ranks, generator_group=None, push_unavailable=False)
    with made.detect_lost_peers(), made.deadline("joining those that generate together"):
        world.destroy_generator_groups()
        if ranks == 1:
            return made
        axis = made.generator_mesh.tp
        group = _bind(made, axis)
        if made.pushes and made.on_gpu and not _share_memory(made, axis, group):
            made = replace(made, push_unavailable=True)
        return replace(made, generator_group=_create_groups(made, axis, "gloo", timedelta(seconds=world.timeout)))


def _bind(world: World, axis: Axis) -> dist.ProcessGroup:
    """Make the groups along an axis for collectives in graphs, bind this rank's, and return it."""
    timeout = timedelta(seconds=world.timeout)
    backend = ("nccl", _NCCL_TIMEOUTS * timeout) if world.on_gpu else (torch_private.GLOO_IN_ORDER, timeout)
    group = _create_groups(world, axis, *backend)
    world.bind_group(axis, group)
    device = torch.device("cuda", torch.cuda.current_device()) if world.on_gpu else torch.device("cpu")
    probe = torch.zeros(axis.size, device=device)
    all_gather(probe, axis)  # the first use creates the communicator and its buffers, before memory is measured
    if axis in all_to_all_axes(world.axes):
        all_to_all(probe, 1, axis)
    return group


def _share_memory(world: World, axis: Axis, group: dist.ProcessGroup) -> bool:
    """Let the ranks of each group write to one another's memory. Unless all can, none does, and a warning says why."""
    hosts = world.gather(platform.node())
    groups = [hosts[i : i + axis.size] for i in range(0, world.size, axis.size)]
    memory: list[Tensor] = []

    def allocate() -> None:
        if any(len(set(hosts_of_group)) > 1 for hosts_of_group in groups):
            raise RuntimeError("they are of several hosts")
        memory.append(allocate_slots(axis.size, torch.device("cuda", torch.cuda.current_device())))

    def share() -> None:
        share_memory(axis.group, group, memory[0], world.timeout)

    faults = _faults_of_any(world, allocate)
    if not faults:  # sharing is a collective, so every rank must have allocated; after it the memory of all is ready
        faults = _faults_of_any(world, share)
    if not faults:
        return True
    forget_memory(axis.group)
    if world.is_first:
        _log.warning(
            "parallel.symmetric_memory: processes that generate together cannot write to one another's memory, and "
            "NCCL moves their words, which takes longer (%s)",
            faults[0],
        )
    return False


def _faults_of_any(world: World, attempt: Callable[[], None]) -> list[str]:
    """Call `attempt` on every rank. Returns the first line of each `RuntimeError` that it raises on any of them."""
    fault = ""
    try:
        attempt()
    except RuntimeError as error:
        fault = (str(error).strip() or type(error).__name__).splitlines()[0]
    return [found for found in world.gather(fault) if found]


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


def _create_groups(world: World, axis: Axis, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Create all groups along an axis, in which every rank takes part, as torch requires. Returns this rank's."""
    groups = _ranks_of_groups(world, axis.name)
    created = [dist.new_group(ranks, backend=backend, timeout=timeout) for ranks in groups]
    return next(group for ranks, group in zip(groups, created, strict=True) if world.rank in ranks)


def _ranks_of_groups(world: World, axis: str) -> list[list[int]]:
    """The ranks of each group along an axis."""
    ranks, tp, cell = list(range(world.size)), world.tp, world.ranks_per_cell
    if axis in ("tp", "generator_tp"):
        width = tp if axis == "tp" else world.generator_tp
        return [ranks[i : i + width] for i in ranks[::width]]
    along_fsdp = [ranks[i::tp] for i in range(tp)]
    if axis == "cell":
        return [group[i : i + cell] for group in along_fsdp for i in range(0, len(group), cell)]
    if axis == "cells":
        return [group[i::cell] for group in along_fsdp for i in range(cell)]
    assert axis == "fsdp", axis
    return along_fsdp
