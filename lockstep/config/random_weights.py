"""Recognizes model folders with random weights from `lockstep init`, without importing torch.

The mark is in the metadata of the weight files. `transformers` ignores it, and it disappears when a trained model's
weights are written.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..json_file import read_json

MARK = {"lockstep": "random weights"}


def random_width(model: str) -> int | None:
    """`hidden_size` of the folder `model` if all its weights are marked as random; None for any other model, such as a
    hub id or a folder that cannot be read (loading it will say why)."""
    folder = Path(os.path.expanduser(model))
    if not model.strip() or not os.path.isdir(folder):
        return None
    files = list(folder.glob("*.safetensors"))
    if not files or not all(path.is_file() and _is_marked(path) for path in files):
        return None
    try:
        width = read_json(folder / "config.json")["hidden_size"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return width if type(width) is int and width > 0 else None


def _is_marked(path: Path) -> bool:
    """Whether a safetensors file has the mark."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return MARK.items() <= (file.metadata() or {}).items()
    except (OSError, SafetensorError):
        return False
