"""Renders pages from templates, and formats text, numbers and durations for people."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

from ...config.yaml_file import dotted_items
from ...errors import InputError
from ..metrics import atomic_write, format_number
from .charts import COLOURS

_TEXT_SHOWN = 4000


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Render `template`, a file in `templates/`, with `values`, and write the self-contained page atomically. Raises
    `InputError` for an unsuitable path and `LockstepError` if the file cannot be written."""
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise InputError(f"{path}: a page is written to a file whose name ends in .html")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}; make it, or name another file")
    with atomic_write(path) as temporary:
        page = _templates().get_template(template).render(values)
        temporary.write_text(page, encoding="utf-8", errors="replace")
    return path


@cache
def _templates() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals["COLOURS"] = COLOURS
    found.filters |= {
        "text": format_text,
        "duration": format_duration,
        "preformatted": preformatted,
        "dotted": dotted_items,
    }
    return found


def preformatted(value: Any) -> str:
    """The text, truncated if very long, without control characters that HTML does not allow."""
    whole = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "\N{REPLACEMENT CHARACTER}", format_text(value))
    return whole if len(whole) <= _TEXT_SHOWN else f"{whole[:_TEXT_SHOWN]} … ({len(whole):,} characters)"


def format_text(value: Any) -> str:
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return "; ".join(value)
    if isinstance(value, str):
        return value
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return format_number(value)
    try:
        return json.dumps(value)
    except RecursionError:
        return "(nested too deeply)"


def format_change(first: float, last: float) -> str:
    return f"{first:.3g} → {last:.3g}"


def format_duration(seconds: float) -> str:
    if 0 < abs(seconds) < 0.1:
        return f"{1e3 * seconds:.3g} ms"
    if not math.isfinite(seconds) or seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
