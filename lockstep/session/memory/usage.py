"""A run's memory: planned before its model is loaded, measured at its end, and explained when it runs out."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ...config import RunConfig
from ...distributed import ONE_PROCESS, World
from ...errors import InputError, LockstepError, is_out_of_memory
from ...generator import KVCache
from ...graph import Runtime, clear_matmul_workspaces
from ...machine import address_space_limit, cgroup_memory_limit, local_world_size
from ...models import ModelConfig, resolve_folder
from ...models.checks import memory_bytes
from ...models.hf.folder import read_config
from ...models.init import architecture
from ...trainer import Trainer
from .plan import KEPT_STATE, MemoryPlan, plan
from .remedies import refusal_message
from .terms import CONTEXT_AT_START, GIB, STATE_ON_HOST, communicators
from .workload import Workload

# Unavailable memory is rounded up to a multiple of this, so that plans, and thus stored graphs, do not vary with it.
ROUNDING = GIB // 8


def model_config(config: RunConfig) -> ModelConfig:
    """The configuration of the run's model; reads nothing else of it."""
    return architecture(config.arch) if config.model is None else read_config(resolve_folder(config.model))


def workload(config: RunConfig, ranks: int, on_gpu: bool, model: ModelConfig, **prompts: int) -> Workload:
    """The workload of a resolved configuration, with the loss's reference or teacher. `prompts`: `longest_prompt` and
    `prompt_limit` of `Workload`, once known."""
    dtype = torch.bfloat16 if on_gpu or config.dtype == "bfloat16" else torch.float32
    frozen = [model] if config.loss.beta > 0 else []
    if config.loss.teacher is not None:
        try:
            frozen = [read_config(resolve_folder(config.loss.teacher))]
        except InputError as error:
            raise InputError(f"loss.teacher: {error}") from error
    return Workload(model, config, ranks, dtype, frozen=frozen, on_gpu=on_gpu, **prompts)


def available_memory(device: torch.device, world: World = ONE_PROCESS, local_ranks: int = 0) -> int:
    """The bytes that this process may take. Of a GPU: all that others do not use, measured before anything but CUDA and
    NCCL is loaded (what these take beyond their plan counts as others'). Of a host, or of what a container may use of
    it: an equal share for each process of the machine (`local_ranks`, by default as many as it has), or less where the
    address space is limited."""
    if device.type != "cuda":
        whole, group_limit, address_limit = memory_bytes(device), cgroup_memory_limit(), address_space_limit()
        share = (whole if group_limit is None else min(whole, group_limit)) // (local_ranks or local_world_size())
        return share if address_limit is None else min(share, address_limit)
    if torch.cuda.memory_allocated(device):
        gc.collect()  # earlier models are in reference cycles with the programs that ran them
        clear_matmul_workspaces()  # which keep the pools of failed runs alive
    torch.cuda.empty_cache()  # frees what measuring the links left
    free, total = torch.cuda.mem_get_info(device)
    unavailable = max(0, total - free - CONTEXT_AT_START - communicators(world.axes))
    return total - -(-unavailable // ROUNDING) * ROUNDING


def require_room(w: Workload, memory: int) -> MemoryPlan:
    """The plan of a workload. If it does not fit, raises an `InputError` that says what would."""
    found = plan(w, memory)
    if not found.fits:
        raise InputError(refusal_message(w, found))
    return found


def require_host_room(found: MemoryPlan) -> None:
    """Raise `InputError` if this process's share of the host's memory does not hold the plan's offloaded state."""
    needed, available = found.host.get(STATE_ON_HOST, 0), available_memory(torch.device("cpu"))
    if needed > available:
        raise InputError(
            f"optimizer.offload needs {needed / GIB:.1f} GiB of the host's memory a process, and there are "
            f"{available / GIB:.1f}; use more GPUs, over which masters and moments are sharded, or leave it off"
        )


def has_room_for_copy(found: MemoryPlan, device: torch.device) -> bool:
    """Whether the host terms, including the copy that a checkpoint is written from, fit in four fifths of the host
    memory at hand; the rest is for all else, above all the page cache."""
    taken = sum(found.host.values()) + (found.total if device.type == "cpu" else 0)
    return taken <= 0.8 * available_memory(torch.device("cpu"))


def measure_memory(trainer: Trainer, cache: KVCache, runtime: Runtime) -> dict[str, float]:
    """GiB that the plan's terms take now, as far as known, and the totals that the device's driver reports."""
    optimizer, flat, device = trainer.optimizer, trainer.flat, trainer.flat.data.device
    rounded = flat.data.dtype != flat.dtype  # the shard is the masters, rounded when gathered

    def on_device(tensor: torch.Tensor) -> int:
        return tensor.nbytes if tensor.device == device else 0

    storages = [parameter.data.untyped_storage() for parameter in trainer.model.parameters()]
    weights = {storage.data_ptr(): storage.nbytes() for storage in storages}
    sizes = {
        "weights": sum(weights.values()),
        "shard of the weights": 0 if flat.data.untyped_storage().data_ptr() in weights or rounded else flat.data.nbytes,
        "masters": 0 if optimizer.master is flat.data and not rounded else on_device(optimizer.master),
        "moments": on_device(optimizer.exp_avg) + on_device(optimizer.exp_avg_sq),
        KEPT_STATE: optimizer.kept_bytes,
        "gradients": flat.grad.nbytes + (0 if flat.cells is None else flat.cells.nbytes),
        "reference or teacher": 0 if trainer.reference is None else trainer.reference.nbytes,
        "KV cache": sum(tensor.nbytes for tensor in cache.tensors().values()),
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        lent = 0 if cache.borrower is None else cache.k.nbytes + cache.v.nbytes
        sizes["graphs' pool"] = runtime.pool_bytes() - lent
        sizes["CUDA and NCCL"] = total - free - reserved
        sizes["together, now"] = total - free
        sizes["together, at most"] = total - free - reserved + torch.cuda.max_memory_reserved(device)
    return {name: round(size / GIB, 3) for name, size in sizes.items() if size}


@contextmanager
def explain_out_of_memory(table: Callable[[], str], world: World) -> Iterator[None]:
    """A context that turns an out-of-memory error into an `InputError` with the process, its plan and the remedy."""
    try:
        yield
    except LockstepError:
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        where = f" on rank {world.rank} ({socket.gethostname()})" if world.size > 1 else ""
        sentences = (str(error) or type(error).__name__).splitlines()[0].split(". ")
        planned = f"; it was planned as\n{terms}\n" if (terms := table()) else ". "
        if (limit := address_space_limit()) is not None:
            planned += f"This process may address {limit / GIB:.2f} GiB (ulimit -v): raise that where it ran out. "
        raise InputError(
            f"memory ran out{where}: {'. '.join(sentences[:2])}{planned}Lower --trainer.max-tokens-per-micro-batch or "
            "--generator.kv-cache-tokens, set --compile.recompute full, or use more GPUs; `lockstep plan` shows what "
            "fits"
        ) from error
