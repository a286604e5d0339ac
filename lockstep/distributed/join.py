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
from .ranks import ONE, World

_NCCL_TIMEOUTS = 20  # NCCL's own deadline aborts the process without a word for the user: `World.deadline` comes first


def join(config: ParallelConfig, device_type: str) -> World:
    """The world of this process: all that torchrun started, over NCCL on GPUs and gloo on CPUs, or itself alone.

    Raises:
        InputError: `parallel.fsdp` is not the number of processes, or these are on devices of different kinds, as where
            there are more of them than GPUs.
        PeerLost: another process did not come.
    """
    launch = machine.launched()
    if config.fsdp not in (0, launch.processes):
        raise InputError(
            f"parallel.fsdp is {config.fsdp}, and {_words(launch.processes)}; start it with torchrun "
            f"--nproc-per-node {config.fsdp} -m lockstep, or leave parallel.fsdp at 0 for as many as there are"
        )
    if launch.processes == 1:
        return ONE
    on_gpu = device_type == "cuda"
    if on_gpu:
        machine.prepare_nccl()
    timeout = timedelta(seconds=config.timeout)
    world = World(launch.rank, launch.processes, config.timeout, on_gpu)
    with world.peers(), world.deadline("joining the other processes"):
        dist.init_process_group("gloo", timeout=timeout)  # what goes through the host
        world.same("the processes of this run", lambda: {"device": device_type, "parallel": config})
        backend, patience = ("nccl", _NCCL_TIMEOUTS * timeout) if on_gpu else ("gloo", timeout)
        group = dist.new_group(backend=backend, timeout=patience)
        torch_private.name_group(world.mesh.fsdp.group, group)
        gather(torch.zeros(1, device=device_type), world.mesh.fsdp)  # a communicator is made at its first use
    return world


def _words(processes: int) -> str:
    return "there is one process" if processes == 1 else f"torchrun started {processes} processes"
