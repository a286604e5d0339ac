"""Joining the processes that `torchrun` started."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from .. import machine
from ..config import ParallelConfig
from ..errors import InputError
from . import torch_private
from .collectives import gather
from .mesh import Axis
from .ranks import ONE, World

_NCCL_TIMEOUTS = 20  # NCCL's own deadline aborts the process without a word for the user: `World.deadline` comes first


def join(config: ParallelConfig, device_type: str) -> World:
    """The world of this process: all that torchrun started, over NCCL on GPUs and gloo on CPUs, or itself alone.

    Raises:
        InputError: `parallel.fsdp` times `parallel.tp` is not the number of processes, or these are on devices of
            different kinds, as where there are more of them than GPUs.
        PeerLost: another process did not come.
    """
    launch = machine.launched()
    _check(config, launch.processes)
    if launch.processes == 1:
        return ONE
    on_gpu = device_type == "cuda"
    if on_gpu:
        machine.prepare_nccl()
    timeout = timedelta(seconds=config.timeout)
    world = World(launch.rank, launch.processes, config.timeout, on_gpu, config.tp)
    with world.peers(), world.deadline("joining the other processes"):
        dist.init_process_group("gloo", timeout=timeout)  # what goes through the host
        world.same("the processes of this run", lambda: {"device": device_type, "parallel": config})
        backend, patience = ("nccl", _NCCL_TIMEOUTS * timeout) if on_gpu else ("gloo", timeout)
        for axis, groups in _groups(world).items():
            made = [dist.new_group(ranks, backend=backend, timeout=patience) for ranks in groups]  # all make all groups
            own = next(group for group, ranks in zip(made, groups, strict=True) if world.rank in ranks)
            torch_private.name_group(axis.group, own)
            gather(torch.zeros(1, device=device_type), axis)  # a communicator is made at its first use
    return world


def _groups(world: World) -> dict[Axis, list[list[int]]]:
    """Along each axis of several ranks the processes that lie together: those of all but that coordinate in common."""
    ranks, tp = range(world.size), world.tp
    along = {"fsdp": [list(ranks[i::tp]) for i in range(tp)], "tp": [list(ranks[i : i + tp]) for i in ranks[::tp]]}
    return {axis: along[axis.name] for axis in world.mesh.axes}


def _check(config: ParallelConfig, processes: int) -> None:
    """Raise `InputError` where so many processes do not make the mesh."""
    shards, tp = config.fsdp, config.tp
    if processes % tp:
        below = f" or {processes // tp * tp}" if processes > tp else ""
        raise InputError(
            f"parallel.tp is {tp}, and {_words(processes)}; start a multiple of {tp} with torchrun --nproc-per-node "
            f"{-(-processes // tp) * tp}{below} -m lockstep, or set parallel.tp to what divides {processes}"
        )
    if shards not in (0, processes // tp):
        apart = f" and parallel.tp {tp}" if tp > 1 else ""
        raise InputError(
            f"parallel.fsdp is {shards}{apart}, and {_words(processes)}; start it with torchrun "
            f"--nproc-per-node {shards * tp} -m lockstep, or leave parallel.fsdp at 0 for as many as there are"
        )


def _words(processes: int) -> str:
    return "there is one process" if processes == 1 else f"torchrun started {processes} processes"
