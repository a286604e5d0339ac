"""Data rows to problems: reading JSON lines, parquet, Hugging Face datasets, and checking every row at the start."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

from ..errors import InputError
from .base import Problem
from .rewards import RESERVED_NAMES

Row = dict[str, Any]

JSON_LINES_SUFFIXES = (".jsonl", ".json", ".ndjson")

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")

_SURROGATE = re.compile("[\ud800-\udfff]")

GSM8K_INSTRUCTION = "Reason step by step. End with the final number alone after ####, like this: #### 42"


def read_problems(data: str, split: str) -> list[Problem]:
    """Every row of `data` as a problem, in the data's order.

    `data` is a JSON lines or parquet file, a folder (saved by `datasets`, or of data files), or a hub id, which may
    name its configuration as "id:configuration"; `split` is for the last two. A row's `prompt` is text or chat
    messages and its other columns go to the rewards; a row with `question` and `answer` instead (GSM8K) asks the
    question. A column that some rows lack is None there.

    Raises `InputError` naming the file and the line, or the row, and what is wrong with it.
    """
    problems = [_problem(row, origin) for row, origin in _rows(data, split)]
    if not problems:
        raise InputError(f"task.data {data} has no rows")
    names = list(dict.fromkeys(name for problem in problems for name in problem.columns))
    return [Problem(p.prompt, {name: p.columns.get(name) for name in names}, origin=p.origin) for p in problems]


def _rows(data: str, split: str) -> Iterable[tuple[Row, str]]:
    path = Path(data)
    if path.suffix in JSON_LINES_SUFFIXES:
        return _json_lines(path)
    if path.is_file() and path.suffix != ".parquet":
        raise InputError(f"task.data {data} must end in {', '.join(JSON_LINES_SUFFIXES)} or .parquet, or be a folder")
    if not path.exists() and (path.suffix == ".parquet" or not _HUB_ID.fullmatch(data)):
        raise InputError(f"task.data {data} does not exist")
    return ((row, f"{data} row {index}") for index, row in enumerate(_dataset_rows(data, path, split)))


def _json_lines(path: Path) -> Iterator[tuple[Row, str]]:
    """The objects of a file with one a line, blank lines left out, with the line that each stands in."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"task.data {path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        origin = f"{path} line {number}"
        try:
            row = json.loads(line)
        except UnicodeDecodeError as error:
            raise InputError(f"{origin} is not UTF-8: {error.reason}") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{origin} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise InputError(f"{origin} is of type {type(row).__name__}; each line must be a JSON object")
        yield row, origin


def _dataset_rows(data: str, path: Path, split: str) -> list[Row]:
    """All rows as `datasets` reads them."""
    import datasets

    try:
        if path.suffix == ".parquet":
            dataset = datasets.load_dataset("parquet", data_files=data, split="train")
        elif (path / "dataset_dict.json").is_file():
            dataset = datasets.load_from_disk(data)[split]
        elif (path / "state.json").is_file():
            dataset = datasets.load_from_disk(data)
        else:
            name, _, configuration = (data, "", "") if path.exists() else data.partition(":")
            dataset = datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # the library raises many types: missing, offline, unknown split, damaged
        taken = "" if path.exists() else "no such path here; as a hub id: "
        reason = f"{taken}{type(error).__name__}: {error}"
        raise InputError(f"task.data {data} (split {split}) cannot be loaded: {reason}") from error
    return dataset.to_list()


def _problem(row: Row, origin: str) -> Problem:
    for name in RESERVED_NAMES:
        if name in row:
            raise InputError(f"{origin}: column {name!r} has the name of a reward argument; rename it")
    if "prompt" not in row and "question" in row and "answer" in row:
        question = row["question"]
        if not _is_text(question):
            raise InputError(f"{origin}: question must be a text that is not empty")
        return Problem([{"role": "user", "content": f"{question}\n\n{GSM8K_INSTRUCTION}"}], row, origin=origin)
    if "prompt" not in row:
        found = ", ".join(row) or "no columns"
        raise InputError(f"{origin} has {found}; it needs prompt, or question and answer")
    columns = {name: value for name, value in row.items() if name != "prompt"}
    return Problem(_checked_prompt(row["prompt"], origin), columns, origin=origin)


def _checked_prompt(prompt: Any, origin: str) -> str | list[dict[str, Any]]:
    if _is_text(prompt):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        found = f"of type {type(prompt).__name__}" if prompt not in ("", []) else "empty"
        raise InputError(f"{origin}: prompt is {found}; it must be a text or a list of chat messages")
    for index, message in enumerate(prompt):
        if not isinstance(message, dict) or not all(_is_text(message.get(key)) for key in ("role", "content")):
            raise InputError(f"{origin}: prompt message {index} must be an object with role and content, both texts")
    if prompt[-1]["role"] == "assistant":
        raise InputError(f"{origin}: the prompt's last message is the assistant's; the completion must come there")
    return prompt


def _is_text(value: Any) -> TypeGuard[str]:
    """Whether this is a text that is not empty and that UTF-8 can hold (JSON can escape half a surrogate pair)."""
    return isinstance(value, str) and value != "" and not _SURROGATE.search(value)
