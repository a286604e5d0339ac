"""Lists of the kernels that a start needed, by which the next loads them, if it can while it reads the weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..cache import fingerprint, user_folder
from ..config import RunConfig
from ..timings import Timings

KEPT = 64  # lists; and as many notes of which one a configuration last needed


def kernel_list(*about: object) -> Path:
    """Where the kernels of a start that depends on these are listed. A list that is wrong costs time alone."""
    return _folder() / f"{fingerprint.key(*about)}.json"


def preload_async(config: RunConfig, device: str, ranks: int, timings: Timings) -> Callable[[], Path | None]:
    """Begin to load, on other threads, what the last start with this resolved configuration needed; several `ranks`
    agree on what they load, later. The list is found by more than is known before the weights are read, so whether it
    was the right one shows later, and what goes wrong is left to the start that needs the kernels. What is returned
    is to be called before anything is launched: it waits, and gives the path of the list, or None for no kernels."""
    if device != "cuda" or not config.compile.chosen[0].graphs:
        return lambda: None
    path, loading = _folder() / str(user_folder.read(_note(config))), None
    with timings.measured("compile"), suppress(Exception):
        from ..ops.precompile import hash_compiler, preload_beside

        if ranks == 1 and (listed := user_folder.read(path)):
            loading = preload_beside(listed)
        else:
            hash_compiler()

    def loaded() -> Path | None:
        with timings.measured("compile"):
            return path if loading is not None and loading.exception() is None and loading.result() else None

    return loaded


def remember(config: RunConfig, path: Path) -> None:
    user_folder.write(_note(config), path.name, keep=KEPT)


def _note(config: RunConfig) -> Path:
    model = config.model, config.arch, config.dtype, config.attention, config.attention_mask
    return user_folder.cache_folder() / "kernels-of" / f"{fingerprint.key(*model, *of_steps(config))}.json"


def of_steps(config: RunConfig) -> tuple[object, ...]:
    """What of a run's configuration the kernels of its steps depend on, besides the model."""
    loss = config.loss.algorithm, config.loss.beta, config.loss.teacher
    return config.sampling, config.generator, config.trainer, config.compile, config.parity, *loss


def _folder() -> Path:
    return user_folder.cache_folder() / "kernels"
