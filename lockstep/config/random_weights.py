"""Which model folders hold the random weights that `lockstep init` wrote; read without torch.

The mark is in the metadata of the weights' own files, which `transformers` passes over: whoever trains the model and
writes its weights again leaves it out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..json_file import read_json

MARK = {"lockstep": "random weights"}
_MAX_HEADER_BYTES = 100 * 10**6  # the safetensors format's own limit


def random_width(model: str) -> int | None:
    """`hidden_size` of the folder `model` when all its weights are marked as random; None for any other model, such as
    a hub id, or a folder that cannot be read (loading it says why)."""
    folder = Path(model).expanduser()
    if not model.strip() or not folder.is_dir():
        return None
    files = list(folder.glob("*.safetensors"))
    if not files or not all(map(_is_marked, files)):
        return None
    try:
        width = read_json(folder / "config.json")["hidden_size"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return width if type(width) is int and width > 0 else None


def _is_marked(path: Path) -> bool:
    """Whether a safetensors file has the mark: eight bytes of length, then a header in JSON."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: Any = json.loads(file.read(length)) if length <= _MAX_HEADER_BYTES else None
        return MARK.items() <= header["__metadata__"].items()
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
