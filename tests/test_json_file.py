"""What `read_json` takes and refuses."""

from __future__ import annotations

import math
import os
from array import array
from pathlib import Path

import pytest

from lockstep.json_file import read_json, to_plain


def test_a_byte_order_mark_is_let_pass(tmp_path: Path) -> None:
    for content in (b'{"a": "\xc3\xa9"}', b'\xef\xbb\xbf{"a": "\xc3\xa9"}'):
        (tmp_path / "x.json").write_bytes(content)
        assert read_json(tmp_path / "x.json") == {"a": "é"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "Expecting property name"),
        (b"", "Expecting value"),
        (b'"\xff"', "invalid start byte"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
    ],
)
def test_what_is_not_json_is_a_value_error(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_json(tmp_path / "x.json")


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for a writer
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            read_json(path)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "missing")


def test_lists_of_any_kind_become_what_json_can_hold() -> None:
    for alike in ([1, True, None, "x"], [0.5, -0.0], [], ["x", "y"]):
        assert to_plain(alike) == alike and to_plain(tuple(alike)) == alike
    assert to_plain([0.5, math.nan, math.inf, 1]) == [0.5, "NaN", "Infinity", 1]
    assert to_plain([math.nan]) == ["NaN"] and to_plain([[-math.inf], {1: (math.nan,)}]) == [
        ["-Infinity"],
        {"1": ["NaN"]},
    ]
    assert to_plain([array("i", [1, 2]), Path("x"), 3]) == [[1, 2], "x", 3]
