"""What several processes need of the rest of a configuration."""

from __future__ import annotations

from dataclasses import replace

from ..errors import InputError
from .fields import RunConfig


def resolve_parallel(c: RunConfig, ranks: int) -> RunConfig:
    """`c` with the shards of a batch filled in, for so many processes; `InputError` for what cannot work with them.

    `c.compile` is resolved before.
    """
    shards = c.parallel.batch_shards or ranks
    if shards % ranks:
        raise InputError(
            f"parallel.batch_shards is {shards}, which {ranks} processes cannot share evenly; use a multiple of {ranks}"
        )
    prompts = c.trainer.prompts_per_step
    if prompts % shards:
        raise InputError(
            f"trainer.prompts_per_step is {prompts}, which {shards} shards (parallel.batch_shards, by default one a "
            f"process) cannot share evenly; use {_multiples(prompts, shards)}"
        )
    if ranks > 1 and c.compile.cudagraph_mode in ("piecewise", "full_and_piecewise"):
        raise InputError(
            f"compile.cudagraph_mode is {c.compile.cudagraph_mode} with {ranks} processes: a collective may begin in "
            "one piece and end in another, which cannot be recorded; use full or none"
        )
    return replace(c, parallel=replace(c.parallel, batch_shards=shards))


def _multiples(near: int, of: int) -> str:
    below = near // of * of
    return f"{below} or {below + of}" if below else str(of)
