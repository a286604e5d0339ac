"""Lists of the kernels that a start needed. The next start loads them from its list, if possible beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..cache import fingerprint, user_folder
from ..config import RunConfig
from ..graph import read_tracer_ahead
from ..timings import Timings

KEPT_LISTS = 64  # lists, and as many notes of which list a configuration last needed


def kernel_list(*about: object) -> Path:
    """The path of the list of kernels of a start that depends on `about`. A wrong list costs only time."""
    return _folder() / f"{fingerprint.key(*about)}.json"


def preload_async(config: RunConfig, device: str, ranks: int, timings: Timings) -> Callable[[], Path | None]:
    """Begin to load, on another thread, the kernels that the last start with this resolved configuration needed; with
    several `ranks`, which load kernels later and agree on them, only hash the compiler. A first start also reads ahead
    what its traces will import. The key of a list needs more than is known before the weights are read, so whether this
    was the right list shows later. Errors are left to the code that needs the kernels. Call the returned function
    before anything is launched: it waits, and returns the path of the list, or None if no kernels were loaded."""
    if device != "cuda" or not config.compile.plugins[0].graphs:
        return lambda: None
    path, loading = _folder() / str(user_folder.read(_note(config))), None
    with timings.measure("compile"), suppress(Exception):
        from ..ops.precompile import hash_compiler, preload_in_background

        listed = user_folder.read(path)
        if not listed:
            read_tracer_ahead()
        if listed and ranks == 1:
            loading = preload_in_background(listed)
        else:
            hash_compiler()

    def finish() -> Path | None:
        with timings.measure("compile"):
            is_loaded = loading is not None and loading.exception() is None and loading.result()
            return path if is_loaded else None

    return finish


def remember_kernel_list(config: RunConfig, path: Path) -> None:
    user_folder.write(_note(config), path.name, keep=KEPT_LISTS)


def _note(config: RunConfig) -> Path:
    model = config.model, config.arch, config.dtype, config.attention, config.attention_mask
    return user_folder.cache_folder() / "kernels-of" / f"{fingerprint.key(*model, *step_settings(config))}.json"


def step_settings(config: RunConfig) -> tuple[object, ...]:
    """The parts of a run's configuration, besides the model, that the kernels of its steps depend on."""
    loss = config.loss.algorithm, config.loss.beta, config.loss.teacher
    return config.sampling, config.generator, config.trainer, config.compile, config.parity, *loss


def _folder() -> Path:
    return user_folder.cache_folder() / "kernels"
