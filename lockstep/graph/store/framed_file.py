"""Named sections in one byte string under one hash, so that a damaged file is detected."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from ..ir.captured import GraphError

FORMAT = 1


class Damaged(GraphError):
    """The bytes are not what was stored, or name something that this process lacks."""


def pack(sections: Mapping[str, bytes]) -> bytes:
    """The hash of everything, an index with the sections' names and sizes, and the sections, in this order."""
    index = {"format": FORMAT, "sections": [[name, len(data)] for name, data in sections.items()]}
    body = json.dumps(index).encode() + b"\n" + b"".join(sections.values())
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def unpack(data: bytes) -> dict[str, bytes]:
    """The sections by name. `Damaged`: the bytes are truncated or changed, or of another format."""
    stated, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != stated:
        raise Damaged("it is cut off or changed: it does not have the hash that it was stored with")
    header, _, rest = body.partition(b"\n")
    index = json.loads(header)
    if index["format"] != FORMAT:
        raise Damaged(f"it is of format {index['format']}, not {FORMAT}")
    found, begin = {}, 0
    for name, size in index["sections"]:
        found[name] = rest[begin : begin + size]
        begin += size
    return found
