"""Data rows on disk, read one at a time: JSON lines by their offsets, everything else through `datasets`.

`datasets` keeps rows in a memory-mapped Arrow file, and JSON lines keep two numbers a row, so neither holds the rows in
memory: data may be larger than it.
"""

from __future__ import annotations

import csv
import json
import re
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import InputError, refuse
from ..base import Source
from .reasoning_gym import SCHEME, ProceduralRows

Row = dict[str, Any]

VERIFIERS = "verifiers:"  # tasksets of that package
JSON_LINES_SUFFIXES = (".jsonl", ".json", ".ndjson")
_BUILDERS = {".parquet": "parquet", ".csv": "csv", ".json": "json"}  # of `datasets`, for files; .json: an array
# Of what can only be a file, so that none of them is looked for on the hub.
_FILE_SUFFIXES = {*_BUILDERS, *JSON_LINES_SUFFIXES, ".arrow", ".tsv", ".txt", ".gz", ".zst", ".zip", ".yaml", ".py"}
_LED_BY_ZEROS = re.compile("[+-]?0[0-9]")
_DATA_SUFFIXES = {*JSON_LINES_SUFFIXES, ".parquet", ".arrow", ".csv", ".gz", ".zst"}
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def open_source(data: str, split: str, field: str = "task.data") -> Source:
    """The rows of a JSON lines, JSON, CSV or parquet file, of a folder (saved by `datasets`, or of data files), or of a
    hub id, which may name its configuration as "id:configuration"; `split` is for the last two. Or tasks of
    reasoning-gym, or of verifiers.

    Raises `InputError` naming `field`, the setting that `data` is of, when they cannot be read.
    """
    path, label = Path(data).expanduser(), f"{field} {data}"
    if data.startswith(SCHEME):
        return ProceduralRows(data, label)
    if data.startswith(VERIFIERS):
        from ..adapters.verifiers import TasksetRows  # with torch, which processes that only score go without

        return TasksetRows(data, label)
    special = path.exists() and not path.is_file() and not path.is_dir()  # a pipe or a device, which may have no end
    refuse(special, f"{label} is not a regular file")
    if path.suffix in JSON_LINES_SUFFIXES and not path.is_dir() and not _is_array(path):
        return JsonLines(path, label)
    if path.is_file() and path.suffix not in _BUILDERS:
        raise InputError(f"{label} must end in {', '.join(JSON_LINES_SUFFIXES)}, .csv or .parquet, or be a folder")
    if not path.exists() and (path.suffix in _FILE_SUFFIXES or not _HUB_ID.fullmatch(data)):
        raise InputError(f"{label} does not exist")
    if path.is_dir():
        _require_data_files(label, path)
    return ArrowRows(data, path, split, label)


def has_splits(data: str) -> bool:
    """Whether `data` names what may have splits: a hub id, or a folder other than one saved dataset."""
    path = Path(data).expanduser()
    if path.is_dir():
        return not (path / "state.json").is_file()
    return not path.exists() and path.suffix not in _FILE_SUFFIXES and not data.startswith((SCHEME, VERIFIERS))


def _is_array(path: Path) -> bool:
    """Whether this is a .json file that holds one array, over several lines as a rule."""
    if path.suffix == ".json" and path.is_file():
        with suppress(OSError), path.open("rb") as file:  # which reading it will say
            return file.read(4096).removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"[")
    return False


class JsonLines(Source):
    """A file with one JSON object a line; blank lines are left out. `InputError` names the line that is none."""

    def __init__(self, path: Path, label: str) -> None:
        """`label` names the file in messages, with the setting it is of."""
        self._offsets, self._lines = array("Q"), array("Q")
        super().__init__(str(path), self._lines)
        try:
            self._file = path.open("rb")
            self._scan()
        except OSError as error:
            raise InputError(f"{label} cannot be read: {error.strerror}") from error

    def _scan(self) -> None:
        offset = len(_BYTE_ORDER_MARK) if self._file.read(len(_BYTE_ORDER_MARK)) == _BYTE_ORDER_MARK else 0
        self._file.seek(offset)
        for number, line in enumerate(self._file, start=1):
            if not line.isspace():
                self._offsets.append(offset)
                self._lines.append(number)
            offset += len(line)

    def row(self, index: int) -> Row:
        self._file.seek(self._offsets[index])
        return _parse(self._file.readline(), self.origin(index))

    def origin(self, index: int) -> str:
        """The file and the line."""
        return f"{self._data} line {self._lines[index]}"


class ArrowRows(Source):
    """Rows as `datasets` loads them: parquet, CSV, a JSON array, a folder, a hub id."""

    def __init__(self, data: str, path: Path, split: str, label: str) -> None:
        try:
            super().__init__(data, _read(data, path, split))
        except InputError:
            raise
        except Exception as error:  # the library raises many types: missing, offline, unknown split, damaged
            taken = "" if path.exists() else "no such path here; as a hub id: "
            cause = error.__cause__ or error
            reason = f"{taken}{type(cause).__name__}: {cause}"
            raise InputError(f"{label} (split {split}) cannot be loaded: {reason}") from error

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)


def _read(data: str, path: Path, split: str) -> Any:
    if path.suffix == ".csv" and path.is_file():
        count, texts = _checked_csv(path)
        return _load(data, path, split, converters=dict.fromkeys(texts, str)) if count else []
    return [] if _is_empty(path) else _load(data, path, split)


def _is_empty(path: Path) -> bool:
    """Whether this is a file without rows, which `datasets` cannot read."""
    if path.suffix == ".json":
        with path.open("rb") as file:
            return b"".join(file.read(64).split()) == b"[]"
    if path.suffix != ".parquet":
        return False
    from pyarrow import parquet  # type: ignore[import-untyped]

    return parquet.read_metadata(path).num_rows == 0


def _checked_csv(path: Path) -> tuple[int, list[str]]:
    """The number of rows of a CSV file, each of as many fields as the first line has names, as the library would shift
    them; and its columns that are text although they look like numbers, which would lose their zeros: 007, 02139."""
    before = csv.field_size_limit(1 << 30)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file)
            names = next(lines, [])
            if repeated := [name for name in names if names.count(name) > 1]:
                raise InputError(f"{path} line 1 names the column {repeated[0]!r} twice")
            rows, texts = 0, set[str]()
            for row in filter(None, lines):
                if len(row) != len(names):
                    raise InputError(f"{path} line {lines.line_num} has {len(row)} fields for {len(names)} columns")
                rows += 1
                texts.update(name for name, field in zip(names, row, strict=True) if _LED_BY_ZEROS.match(field))
            return rows, sorted(texts)
    finally:
        csv.field_size_limit(before)


def _load(data: str, path: Path, split: str, **options: Any) -> Any:
    import datasets

    if path.is_file():
        return datasets.load_dataset(_BUILDERS[path.suffix], data_files=str(path), split="train", **options)
    if (path / "dataset_dict.json").is_file():
        return datasets.load_from_disk(str(path))[split]
    if (path / "state.json").is_file():
        return datasets.load_from_disk(str(path))
    name, _, configuration = (str(path.resolve()), "", "") if path.exists() else data.partition(":")
    return datasets.load_dataset(name, configuration or None, split=split)


def _require_data_files(label: str, folder: Path) -> None:
    """`datasets` would search a whole tree for files; a folder without any near its top is a mistake."""
    for pattern in ("*", "*/*"):
        if any(path.suffix in _DATA_SUFFIXES for path in folder.glob(pattern)):
            return
    raise InputError(
        f"{label} is a folder without data files; name a .jsonl or .parquet file, a folder of such files, "
        "or a folder that datasets saved"
    )


def _without_repeats(pairs: list[tuple[str, Any]]) -> Row:
    """An object. Raises `KeyError` for a key that it has twice, of which plain JSON would take the last in silence."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise KeyError(next(key for key in keys if keys.count(key) > 1))
    return row


def _parse(line: bytes, origin: str) -> Row:
    try:
        row = json.loads(line, object_pairs_hook=_without_repeats)
    except UnicodeDecodeError as error:
        raise InputError(f"{origin} is not UTF-8: {error.reason}") from error
    except KeyError as error:
        raise InputError(f"{origin} has the key {error.args[0]!r} twice; a key may stand in an object once") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{origin} is not JSON: {error}; each line must be one JSON object") from error
    if not isinstance(row, dict):
        raise InputError(f"{origin} is of type {type(row).__name__}; each line must be a JSON object")
    return row
