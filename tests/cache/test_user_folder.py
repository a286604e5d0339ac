"""What is kept between runs lies in a folder of the user's own, whole or not at all."""

from __future__ import annotations

import os
import pwd
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.cache import user_folder


@contextmanager
def masked(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_every_folder_that_is_made_is_closed_whatever_the_umask(tmp_path: Path) -> None:
    below, above = tmp_path / "cache" / "lockstep" / "graphs" / "a.json", tmp_path / "cache" / "lockstep" / "b.json"
    with masked(0o002):  # the default of many systems, where each user has a group
        for path in (below, above):
            assert user_folder.write(path, [1]) and user_folder.read(path) == [1]
    for folder in (below.parent, above.parent, above.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_others_is_neither_written_nor_read(tmp_path: Path) -> None:
    path = tmp_path / "open" / "a.json"
    assert user_folder.write(path, 1)
    path.parent.chmod(0o770)
    assert not user_folder.write(path, 2) and user_folder.read(path) is None
    path.parent.chmod(0o700)
    assert user_folder.read(path) == 1


@pytest.mark.parametrize("content", [b"", b"\xff", b"{", b"[" * 200_000, b"\0" * 99], ids=len)
def test_what_is_no_json_is_absent(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert user_folder.read(path) is None


def test_a_write_that_fails_leaves_what_there_was(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert user_folder.write_bytes(path, b"before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        assert not user_folder.write_bytes(path, b"x" * 5000)  # as on a full disk
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in tmp_path.iterdir()] == ["a"] and user_folder.read_bytes(path) == b"before"


def test_of_many_files_the_newest_stay(tmp_path: Path) -> None:
    for i in range(40):
        assert user_folder.write(tmp_path / f"{i:02}.json", i, keep=16)
        os.utime(tmp_path / f"{i:02}.json", (i, i))
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names[-1] == f"{i:02}.json" and min(i + 1, 14) <= len(names) <= 16
        assert names == [f"{n:02}.json" for n in range(i + 1 - len(names), i + 1)]


def test_a_cache_that_cannot_be_written_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", "/dev/null/cache")
    monkeypatch.setattr(user_folder, "_unwritable", set())
    for name in ("graphs", "verdicts"):
        assert not user_folder.write(user_folder.cache_folder() / name / "a.json", 1)
    (warning,) = caplog.messages
    assert warning.startswith("the cache /dev/null/cache cannot be written ([Errno 20] Not a directory")
    assert warning.endswith("set LOCKSTEP_CACHE to a folder of your own")


def test_a_user_without_a_home_has_a_cache_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that is started as a number that its `/etc/passwd` does not have."""
    for name in ("LOCKSTEP_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert user_folder.cache_folder() == tmp_path / f"lockstep-{os.getuid()}"
    assert user_folder.write(user_folder.cache_folder() / "graphs" / "a.json", 1)
