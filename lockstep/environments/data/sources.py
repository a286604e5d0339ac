"""Data rows on disk, read one at a time: JSON lines by their offsets, everything else through `datasets`, which
memory-maps Arrow files. So data may exceed the memory, except for a JSON array, which is read whole."""

from __future__ import annotations

import bisect
import csv
import itertools
import json
import math
import os
import re
import warnings
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ...errors import InputError, refuse
from ..base import RowSource
from .reasoning_gym import SCHEME, ProceduralRows

Row = dict[str, Any]

VERIFIERS = "verifiers:"  # prefix of that package's tasksets
JSON_LINES_SUFFIXES = (".jsonl", ".json", ".ndjson")
_BUILDERS = {".parquet": "parquet", ".csv": "csv"}  # of `datasets`, by suffix
# Names with these can only be files, and are not looked for on the hub.
_FILE_SUFFIXES = {*_BUILDERS, *JSON_LINES_SUFFIXES, ".arrow", ".tsv", ".txt", ".gz", ".zst", ".zip", ".yaml", ".py"}
Column = Literal["int64", "float64", "string"]  # what a CSV file's column holds
_PARSERS: dict[Column, Callable[[str], Any]] = {"int64": int, "float64": float, "string": str}
_INTEGER, _MAX_EXACT = re.compile("-?(0|[1-9][0-9]*)"), 1 << 53
_NUMBER = re.compile("-?(0|[1-9][0-9]*)?([.][0-9]+|(?<=[0-9])[.]?)([eE][+-]?[0-9]+)?")
_FOLDER_PATTERNS = "*", "*/*"  # where data files are looked for in a folder
_DATA_SUFFIXES = {*JSON_LINES_SUFFIXES, ".parquet", ".arrow", ".csv", ".gz", ".zst"}
_METADATA_FILES = "dataset_info.json", "dataset_infos.json", "croissant.json"  # metadata, not data
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def open_source(data: str, split: str, field: str = "task.data") -> RowSource:
    """The rows of a JSON lines, JSON, CSV or parquet file; of a folder (saved by `datasets`, or of data files) or a hub
    id, perhaps with a configuration as "id:configuration", for both of which `split` counts; or of tasks of
    reasoning-gym or verifiers. `InputError` names `field`, the setting that names `data`: they cannot be read."""
    path, label = Path(os.path.expanduser(data)), f"{field} {data}"
    is_file, is_folder, exists = os.path.isfile(path), os.path.isdir(path), os.path.exists(path)
    if data.startswith(SCHEME):
        return ProceduralRows(data, label)
    if data.startswith(VERIFIERS):
        from ..adapters.verifiers import TasksetRows  # imports torch, which processes that only score do without

        return TasksetRows(data, label)
    is_special = exists and not is_file and not is_folder  # a pipe or device, which may never end
    refuse(is_special, f"{label} is not a regular file")
    if path.suffix in JSON_LINES_SUFFIXES and not is_folder:
        return JsonArray(path, label) if _is_array(path) else JsonLines(path, label)
    if is_file and path.suffix not in _BUILDERS:
        raise InputError(f"{label} must end in {', '.join(JSON_LINES_SUFFIXES)}, .csv or .parquet, or be a folder")
    if not exists and (path.suffix in _FILE_SUFFIXES or not _HUB_ID.fullmatch(data)):
        raise InputError(f"{label} does not exist")
    files = _data_files(label, path) if is_folder else [path]
    if is_folder and split == "train" and _are_one_split(files):
        return ConcatenatedRows([JsonLines(file, f"{label}: {file.name}") for file in files], data)
    return ArrowRows(data, path, split, label, files)


def has_splits(data: str) -> bool:
    """Whether `data` may have splits: it is a hub id, or a folder other than a single saved dataset."""
    path = Path(os.path.expanduser(data))
    if os.path.isdir(path):
        return not (path / "state.json").is_file()
    return not os.path.exists(path) and path.suffix not in _FILE_SUFFIXES and not data.startswith((SCHEME, VERIFIERS))


def _is_array(path: Path) -> bool:
    """Whether this is a .json file that holds an array rather than JSON lines."""
    if path.suffix == ".json" and os.path.isfile(path):
        with suppress(OSError), path.open("rb") as file:  # reading it later will raise
            return file.read(4096).removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"[")
    return False


class JsonLines(RowSource):
    """A file with one JSON object per line; blank lines are skipped. `InputError` names a line that is not one."""

    def __init__(self, path: Path, label: str) -> None:
        """`label` names the file and its setting in messages."""
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
        return _parse_line(self._file.readline(), self.origin(index))

    def origin(self, index: int) -> str:
        """The file and the line."""
        return f"{self._data} line {self._lines[index]}"


class JsonArray(RowSource):
    """A file that holds one array of JSON objects."""

    def __init__(self, path: Path, label: str) -> None:
        try:
            data = path.read_bytes().removeprefix(_BYTE_ORDER_MARK)
        except OSError as error:
            raise InputError(f"{label} cannot be read: {error.strerror}") from error
        rows = _decode_json(data, label)
        for index, row in enumerate(rows):
            if not isinstance(row, dict):
                raise InputError(f"{label} row {index} is of type {type(row).__name__}; it must be an object")
        super().__init__(str(path), rows)


class ConcatenatedRows(RowSource):
    """Several sources, concatenated."""

    def __init__(self, sources: Sequence[RowSource], data: str) -> None:
        self._sources, self._ends = sources, list(itertools.accumulate(map(len, sources)))
        super().__init__(data, range(self._ends[-1]))

    def row(self, index: int) -> Row:
        source, own_index = self._locate(index)
        return source.row(own_index)

    def origin(self, index: int) -> str:
        source, own_index = self._locate(index)
        return source.origin(own_index)

    def _locate(self, index: int) -> tuple[RowSource, int]:
        number = bisect.bisect_right(self._ends, index)
        return self._sources[number], index - (self._ends[number] - len(self._sources[number]))


class ArrowRows(RowSource):
    """Rows loaded by `datasets`: parquet, CSV, a folder, or a hub id."""

    def __init__(self, data: str, path: Path, split: str, label: str, files: Sequence[Path]) -> None:
        try:
            super().__init__(data, _read(data, path, split, files))
        except InputError:
            raise
        except Exception as error:  # the library raises many types: missing, offline, unknown split, damaged
            as_hub_id = "" if os.path.exists(path) else "no such path here; as a hub id: "
            cause = error.__cause__ or error
            reason = f"{as_hub_id}{type(cause).__name__}: {cause}"
            raise InputError(f"{label} (split {split}) cannot be loaded: {reason}") from error

    def row(self, index: int) -> Row:
        return _without_filled_arguments(super().row(index))

    def __iter__(self) -> Iterator[Row]:
        return map(_without_filled_arguments, self._rows)


def _without_filled_arguments(row: Row) -> Row:
    """The row, whose calls of tools have only arguments with a value: a table gives each call those of all, as None."""
    for value in row.values():
        messages = value if isinstance(value, list) and value and isinstance(value[0], dict) else []
        for call in itertools.chain.from_iterable(map(_calls, messages)):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
                function["arguments"] = _without_nulls(function["arguments"])
    return row


def _calls(message: Any) -> list[Any]:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    return calls if isinstance(calls, list) else []


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _read(data: str, path: Path, split: str, files: Sequence[Path]) -> Any:
    """Load rows. `files`: the local data files; empty for a folder that has a README or was saved by `datasets`."""
    if not os.path.exists(path) or not files or any(file.suffix != ".csv" for file in files):
        return [] if _is_empty(path) else _load(data, path, split)
    columns, rows = dict[str, Column](), 0
    for table in files:
        rows += _scan_csv(table, columns)
    return _load(data, path, split, columns) if rows else []


def _is_empty(path: Path) -> bool:
    """Whether this is a file without rows, which `datasets` cannot read."""
    if path.suffix != ".parquet":
        return False
    from pyarrow import parquet  # type: ignore[import-untyped]

    return parquet.read_metadata(path).num_rows == 0


def _scan_csv(table: Path, columns: dict[str, Column]) -> int:
    """The number of rows of a CSV file. Updates `columns`, the types of columns so far: a column is text if any field
    is not a number, or is one that would not be preserved, such as 007, +49151, or more digits than a float has.
    `InputError`: a row has another number of fields than the first line, which the library would shift."""
    before = csv.field_size_limit(1 << 30)
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file)
            names = next(lines, [])
            if repeated := [name for name in names if names.count(name) > 1]:
                raise InputError(f"{table} line 1 names the column {repeated[0]!r} twice")
            columns |= {name: columns.get(name, "int64") for name in names}
            rows = 0
            for row in filter(None, lines):
                if len(row) != len(names):
                    raise InputError(f"{table} line {lines.line_num} has {len(row)} fields for {len(names)} columns")
                rows += 1
                for name, field in zip(names, row, strict=True):
                    column_type = _column_type(field)
                    if columns[name] != "string" and column_type != "int64":
                        columns[name] = column_type
            return rows
    finally:
        csv.field_size_limit(before)


def _column_type(field: str) -> Column:
    if field == "":
        return "int64"
    if _INTEGER.fullmatch(field):
        return "int64" if len(field) < 18 and abs(int(field)) <= _MAX_EXACT else "string"
    return "float64" if _NUMBER.fullmatch(field) and math.isfinite(float(field)) else "string"


def _csv_value(kind: Column, field: str) -> Any:
    return _PARSERS[kind](field) if field else None


def _load(data: str, path: Path, split: str, columns: Mapping[str, Column] | None = None) -> Any:
    import datasets

    options = dict[str, Any]()
    if columns is not None:
        options["features"] = datasets.Features({name: datasets.Value(kind) for name, kind in columns.items()})
        options["converters"] = {name: partial(_csv_value, kind) for name, kind in columns.items()}
        options["keep_default_na"] = False
        warnings.filterwarnings("ignore", "Both a converter and dtype were specified")  # by `features`
    shows_progress = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()  # they would interrupt the run's output
    try:
        if path.is_file():
            return datasets.load_dataset(_BUILDERS[path.suffix], data_files=str(path), split="train", **options)
        if (path / "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(str(path))
            for name in re.sub(r"\[.*?\]", "", split).split("+"):  # train[:5%]+test
                refuse(name not in splits, f"{data} has no split {name!r}; it has {', '.join(splits)}")
            parts = datasets.ReadInstruction.from_spec(split).to_absolute({n: len(rows) for n, rows in splits.items()})
            return datasets.concatenate_datasets([splits[p.splitname].select(range(p.from_, p.to)) for p in parts])
        if (path / "state.json").is_file():
            return datasets.load_from_disk(str(path))
        name, _, configuration = (str(path.resolve()), "", "") if path.exists() else data.partition(":")
        return datasets.load_dataset(name, configuration or None, split=split, **options)
    finally:
        if shows_progress:
            datasets.enable_progress_bars()


def _data_files(label: str, folder: Path) -> list[Path]:
    """A folder's data files, which must be of one format: `datasets` would search the whole tree, and ignore other
    formats. Empty for a folder that it saved, or that has a README as on the hub, which it can read itself."""
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return []
    paths = [path for pattern in _FOLDER_PATTERNS for path in folder.glob(pattern)]
    files = [path for path in paths if path.suffix in _DATA_SUFFIXES and path.name not in _METADATA_FILES]
    if not files:
        raise InputError(
            f"{label} is a folder without data files; name a .jsonl or .parquet file, a folder of such files, "
            "or a folder that datasets saved"
        )
    if (folder / "README.md").is_file():
        return []
    formats = {_format(path): path for path in files}
    examples = " and ".join(path.name for path in formats.values())
    refuse(len(formats) > 1, f"{label} has files of several formats: {examples}; name one of them")
    return sorted(files)


def _format(path: Path) -> str:
    suffix = path.with_suffix("").suffix if path.suffix in (".gz", ".zst") else path.suffix
    return "JSON" if suffix in JSON_LINES_SUFFIXES else suffix


def _are_one_split(files: Sequence[Path]) -> bool:
    """Whether these are all JSON lines files in one folder, with no splits in their names."""
    names_split = any(re.search(r"(?<![a-z])(train|valid|dev|val|test|eval)", file.name.lower()) for file in files)
    all_lines = bool(files) and all(file.suffix in JSON_LINES_SUFFIXES and not _is_array(file) for file in files)
    return all_lines and not names_split and len({file.parent for file in files}) == 1


def _unique_keys(pairs: list[tuple[str, Any]]) -> Row:
    """A JSON object. Raises `KeyError` for a duplicate key, of which `json` would silently take the last."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise KeyError(next(key for key in keys if keys.count(key) > 1))
    return row


def _decode_json(data: bytes, origin: str, form: str = "") -> Any:
    """The value of JSON text. `InputError` says that it is not valid, and ends with `form`."""
    try:
        return json.loads(data, object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise InputError(f"{origin} is not UTF-8: {error.reason}") from error
    except KeyError as error:
        raise InputError(f"{origin} has the key {error.args[0]!r} twice; a key may stand in an object once") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{origin} is not JSON: {error}{form}") from error


def _parse_line(line: bytes, origin: str) -> Row:
    row = _decode_json(line, origin, "; each line must be one JSON object")
    if not isinstance(row, dict):
        raise InputError(f"{origin} is of type {type(row).__name__}; each line must be a JSON object")
    return row
