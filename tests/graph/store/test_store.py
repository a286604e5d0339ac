"""The folder of stored graphs: what fits is loaded, and what does not is refused by name and made anew."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.graph import Captured, Inputs, Store, capture, digest
from lockstep.graph.store import folder as store_module
from lockstep.graph.store.folder import Key

CPU = torch.device("cpu")
KEY = Key(
    "f", {"statics": [["n", "3"]]}, {"torch": "2.13.0", "constants.loss.epsilon": "0.2", "passes": [["fit", "{}"]]}
)


@pytest.fixture
def captured() -> Captured:
    return capture("f", lambda t: {"y": t.user["x"] * 2}, Inputs(user={"x": torch.ones(3)}))


@pytest.fixture
def store(tmp_path: Path, captured: Captured) -> Store:
    """One that has the graph."""
    store = Store(tmp_path)
    store.save(KEY, captured)
    return store


def looked_up(store: Store, key: Key = KEY) -> tuple[str, tuple[str, ...]]:
    found = store.load(key, "f()", CPU)
    assert (found is not None) == (store.lookups[-1].outcome == "loaded")
    return store.lookups[-1].outcome, store.lookups[-1].reasons


def test_a_stored_graph_is_found_by_another_process(store: Store, captured: Captured, tmp_path: Path) -> None:
    found = Store(tmp_path).load(KEY, "f()", CPU)
    assert found is not None and digest(found) == digest(captured)
    (file,) = store.folder.iterdir()
    assert store.folder.stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600
    assert file.name == KEY.file and store.size() == store.size(KEY.file) == file.stat().st_size > store.size("g-*")
    assert looked_up(store, replace(KEY, graph={"statics": [["n", "4"]]})) == ("absent", ())


def test_what_it_was_made_with_is_compared_field_by_field(store: Store) -> None:
    made_with = {**KEY.made_with, "torch": "2.14.0", "constants.loss.epsilon": "0.3"}
    assert looked_up(store, replace(KEY, made_with=made_with)) == (
        "refused",
        ("torch was '2.13.0' and is '2.14.0'", "constants.loss.epsilon was '0.2' and is '0.3'"),
    )
    more = {**KEY.made_with, "mesh.fsdp": 2}
    assert looked_up(store, replace(KEY, made_with=more)) == ("refused", ("mesh.fsdp was None and is 2",))
    less = {name: value for name, value in KEY.made_with.items() if name != "passes"}
    assert looked_up(store, replace(KEY, made_with=less)) == ("refused", ("passes was [['fit', '{}']] and is None",))
    assert looked_up(store)[0] == "loaded"


def test_a_file_under_another_name_is_refused(store: Store) -> None:
    other = replace(KEY, made_with={**KEY.made_with, "torch": "2.14.0"})
    (store.folder / KEY.file).rename(store.folder / other.file)
    assert looked_up(store, other) == ("refused", ("torch was '2.13.0' and is '2.14.0'",))


def test_a_graph_in_the_place_of_another_is_refused(store: Store, captured: Captured) -> None:
    """Made with the same, so nothing but what it is tells them apart."""
    other = replace(KEY, graph={"statics": [["n", "4"]]})
    store.save(other, captured)
    (store.folder / other.file).write_bytes((store.folder / KEY.file).read_bytes())
    outcome, (reason,) = looked_up(store, other)
    assert outcome == "refused"
    assert reason == f"{other.file} holds another graph: statics was [['n', '3']] and is [['n', '4']]"
    assert looked_up(store)[0] == "loaded"
    renamed = replace(KEY, name="g")
    (store.folder / KEY.file).rename(store.folder / renamed.file)
    assert looked_up(store, renamed)[1] == (f"{renamed.file} holds another graph: function was 'f' and is 'g'",)


@pytest.mark.parametrize("damage", ["empty", "garbage", "truncated", "flipped", "folder"])
def test_damage_is_refused_and_made_anew(store: Store, captured: Captured, damage: str) -> None:
    file = store.folder / KEY.file
    data = file.read_bytes()
    half = len(data) // 2
    if damage == "folder":
        file.unlink()
        file.mkdir()
    else:
        flipped = data[:half] + bytes([data[half] ^ 4]) + data[half + 1 :]
        file.write_bytes({"empty": b"", "garbage": b"\0garbage", "truncated": data[:half], "flipped": flipped}[damage])
    outcome, reasons = looked_up(store)
    assert (
        outcome == "absent"
        if damage == "folder"
        else (outcome == "refused" and "is damaged: it is cut off" in reasons[0])
    )
    store.save(KEY, captured)
    assert damage == "folder" or looked_up(store)[0] == "loaded"


@pytest.mark.parametrize("whose", ["file mode", "folder mode", "owner"])
def test_what_others_could_have_written_is_not_read(store: Store, whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = store.folder / KEY.file
    if whose == "file mode":
        file.chmod(0o666)
    elif whose == "folder mode":
        store.folder.chmod(0o777)
    else:
        monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
    outcome, (reason,) = looked_up(store)
    assert outcome == "refused" and "is not trusted: " in reason
    assert {"file mode": "mode 666", "folder mode": "mode 777", "owner": "belongs to user"}[whose] in reason


def test_a_folder_that_cannot_be_written_is_no_error(captured: Captured) -> None:
    store = Store(Path(os.devnull))
    store.save(KEY, captured)
    assert looked_up(store) == ("absent", ()) and store.size() == 0


def test_the_least_used_go(store: Store, captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    variants = [replace(KEY, made_with={"torch": str(i)}) for i in range(store_module.VARIANTS + 2)]
    for i, key in enumerate(variants):
        store.save(key, captured)
        for path in store.folder.iterdir():
            os.utime(path, (0, path.stat().st_mtime - 10))  # so that times tell which is newer
        if i:
            assert looked_up(store, variants[0])[0] == "loaded"  # used again and again
    kept = {path.name for path in store.folder.iterdir()}
    assert kept == {variants[0].file, *(key.file for key in variants[-store_module.VARIANTS + 1 :])}
    monkeypatch.setattr(store_module, "MOST_BYTES", 5 * (store.folder / variants[0].file).stat().st_size // 2)
    store.save(replace(KEY, name="g"), captured)
    assert len(list(store.folder.iterdir())) == 2 and store.size() <= store_module.MOST_BYTES
    assert looked_up(store, replace(KEY, name="g"))[0] == "loaded"


def test_files_that_were_never_finished_go(store: Store, captured: Captured) -> None:
    old, new = store.folder / "a.tmp", store.folder / "b.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, time.time() - 7200))
    store.save(KEY, captured)
    assert not old.exists() and new.exists()


def test_two_that_write_at_once(tmp_path: Path, captured: Captured) -> None:
    failed: list[object] = []

    def work(i: int) -> None:
        store = Store(tmp_path)
        for n in range(20):
            key = replace(KEY, made_with={"torch": str(n % 2)})
            store.save(key, captured)
            if looked_up(store, key) not in (("loaded", ()), ("absent", ())):
                failed.append((i, store.lookups[-1]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(list((tmp_path / "graphs").iterdir())) == 2
