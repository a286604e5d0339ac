"""What a run ran on: versions and hardware, for its summary and report."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

from . import __version__

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "datasets")


def describe(device: torch.device) -> dict[str, str]:
    """Name to version or description; packages that are not installed are left out."""
    found = {"lockstep": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["device"] = _device(device)
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
    return found | {"platform": platform.platform(terse=True), "host": platform.machine()}


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    threads = torch.get_num_threads()
    return f"CPU with {os.cpu_count()} cores, {threads} {'thread' if threads == 1 else 'threads'}"
