"""Reading a JSON file that anyone may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """What the file holds; a byte order mark is let pass.

    Raises:
        OSError: it is missing, no regular file, or cannot be read.
        ValueError: it is not UTF-8, not JSON, or nested deeper than can be read.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is not a regular file")
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
