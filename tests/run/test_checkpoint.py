"""Checkpoints: what is saved comes back, and no kill or damage ever yields one that is not whole."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from processes import wait_for
from runs import saved, tensors_of
from torch import Tensor

from lockstep.distributed import ONE_PROCESS, World
from lockstep.errors import InputError, LockstepError, PeerLost
from lockstep.run import checkpoint
from lockstep.run.checkpoint import files
from lockstep.run.checkpoint import saver as writing


def contents(step: int) -> dict[str, dict[str, Tensor]]:
    """Tensors that are a function of the step, in several files."""
    wide = torch.arange(4096, dtype=torch.float32) * step
    return {
        "weights": {f"layer{i}": (wide + i).to(torch.bfloat16) for i in range(4)},
        "moments": {"m": wide / 3, "v": wide * wide, "count": torch.tensor(step)},
    }


def save(folder: Path, step: int, keep_last: int = 2) -> Path:
    return saved(folder, step, contents(step), state(step), keep_last)


def state(step: int) -> dict[str, object]:
    return {"step": step, "seen": [0.1 * step]}


def assert_whole(loaded: checkpoint.LoadedCheckpoint | None, step: int) -> None:
    assert loaded is not None and loaded.step == step
    assert loaded.state == state(step)
    for name, expected in contents(step).items():
        actual = tensors_of(loaded, name)
        assert actual.keys() == expected.keys()
        for key, tensor in expected.items():
            assert actual[key].dtype == tensor.dtype and torch.equal(actual[key], tensor)


def test_round_trip_and_layout(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert checkpoint.latest(folder) is None
    path = save(folder, 3)
    assert path == folder / "step_3"
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        "moments-00001.safetensors",
        "state.json",
        "weights-00001.safetensors",
    ]
    assert_whole(checkpoint.latest(folder), 3)


def test_values_survive_bit_for_bit(tmp_path: Path) -> None:
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, 3.4e38])
    saved(tmp_path, 0, {"x": {"special": special}}, {"float": 0.1 + 0.2, "int": 2**63 - 1}, 1)
    loaded = checkpoint.latest(tmp_path)
    assert loaded is not None
    assert torch.equal(tensors_of(loaded, "x")["special"].view(torch.int32), special.view(torch.int32))
    assert loaded.state == {"float": 0.1 + 0.2, "int": 2**63 - 1}


def test_large_groups_are_split_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_SHARD_BYTES", 100)
    tensors = {f"t{i}": torch.full((n,), float(i)) for i, n in enumerate([10, 10, 10, 60, 1, 1])}  # 4 bytes each
    saved(tmp_path, 1, {"a": tensors, "a-b": {"other": torch.ones(1)}, "none": {}}, {}, 1)
    loaded = checkpoint.latest(tmp_path)
    assert loaded is not None
    assert [f for f in loaded.files if f.startswith("a-0")] == [f"a-{i:05d}.safetensors" for i in (1, 2, 3, 4)]
    assert {key: t.tolist() for key, t in tensors_of(loaded, "a").items()} == {
        key: t.tolist() for key, t in tensors.items()
    }
    assert list(tensors_of(loaded, "a-b")) == ["other"]
    assert tensors_of(loaded, "none") == {}


def test_a_checkpoint_that_a_run_deletes_before_it_is_read_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    loaded = checkpoint.latest(tmp_path)
    assert loaded is not None
    saved(tmp_path, 2, {}, {}, 1)
    with pytest.raises(InputError, match=f"{tmp_path}/step_1 cannot be read: No such file"):
        loaded.by_rank("weights")


def test_views_and_tied_tensors(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    tensors = {"left": flat[:6], "right": flat[6:], "tied": flat[:6], "transposed": flat.view(3, 4).t()}
    saved(tmp_path, 1, {"x": tensors}, {}, 1)
    loaded = checkpoint.latest(tmp_path)
    assert loaded is not None
    for key, tensor in tensors_of(loaded, "x").items():
        assert torch.equal(tensor, tensors[key])


def test_keeps_the_last_and_drops_an_abandoned_future(tmp_path: Path) -> None:
    for step in (2, 4, 6, 10):
        save(tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_10", "step_6"]
    (tmp_path / ".tmp-step_7-1").mkdir()
    save(tmp_path, 8)  # a run that resumed from step 6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_6", "step_8"]
    assert_whole(checkpoint.latest(tmp_path), 8)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 4)
    saved(tmp_path, 4, {}, {"second": True}, 2)
    loaded = checkpoint.latest(tmp_path)
    assert loaded is not None and loaded.state == {"second": True}
    assert [p.name for p in tmp_path.iterdir()] == ["step_4"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize("damage", [_flip, _truncate, Path.unlink], ids=["flipped", "truncated", "missing"])
@pytest.mark.parametrize(
    "file", ["weights-00001.safetensors", "moments-00001.safetensors", "state.json", "manifest.json"]
)
def test_damage_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage, file: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    damage(tmp_path / "step_2" / file)
    with caplog.at_level(logging.WARNING):
        assert_whole(checkpoint.latest(tmp_path), 1)
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(tmp_path / "step_2") in message
    assert file in message or (file == "manifest.json" and "JSON" in message)


def test_every_flipped_byte_of_the_manifest_is_seen(tmp_path: Path) -> None:
    path = save(tmp_path, 1) / "manifest.json"
    original = path.read_bytes()
    for index in range(len(original)):
        data = bytearray(original)
        data[index] ^= 1
        path.write_bytes(data)
        loaded = checkpoint.latest(tmp_path)
        # A flip in the white space between values changes nothing that is read.
        assert loaded is None or json.loads(bytes(data)) == json.loads(original), f"byte {index}"


def test_all_damaged_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        (save(tmp_path, step) / "state.json").unlink()
    assert checkpoint.latest(tmp_path) is None
    assert len(caplog.records) == 2


def test_a_checkpoint_under_another_step_name_is_damaged(tmp_path: Path) -> None:
    shutil.copytree(save(tmp_path, 1), tmp_path / "step_5")
    assert_whole(checkpoint.latest(tmp_path), 1)


def test_state_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(ValueError, match="JSON compliant"):
        saved(tmp_path, 2, {}, {"loss": float("nan")}, 2)
    assert_whole(checkpoint.latest(tmp_path), 1)


def test_a_disk_that_refuses_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    with monkeypatch.context() as patch:

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "fsync", full)
        with pytest.raises(LockstepError, match="step_2.*No space left"):
            save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]
    assert_whole(checkpoint.latest(tmp_path), 1)


class Killed(BaseException):
    """Stands for a kill: nothing in the code under test may handle it."""


@pytest.mark.parametrize("step", [1, 2], ids=["same-step-again", "next-step"])
def test_death_at_every_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Stop at the k-th fsync, rename or removal, for every k: a whole checkpoint is always there."""
    for survived in range(100):
        folder = tmp_path / str(survived)
        save(folder, 0)
        save(folder, 1)
        if not _dies_after(survived, folder, step, monkeypatch):
            assert survived > 8  # five files and the folder are flushed, then published and pruned
            return
        loaded = checkpoint.latest(folder)
        assert loaded is not None and loaded.step in (0, 1, 2)
        assert_whole(loaded, loaded.step)
        save(folder, 3)  # the restarted run goes on and clears away what was left
        assert_whole(checkpoint.latest(folder), 3)
        assert not list(folder.glob(".tmp-*"))
    pytest.fail("the save never completed")


def _dies_after(survived: int, folder: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Save, and stop instead of making system call number `survived`; whether that call was reached."""
    calls = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > survived:
                raise Killed
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(writing.Saver, "wait", lambda self: None)
        patch.setattr(writing._WriterThread, "start", writing._WriterThread.run)  # in this thread, as a kill ends all
        for module, name in ((os, "fsync"), (os, "rename"), (shutil, "rmtree")):
            patch.setattr(module, name, counted(getattr(module, name)))
        try:
            save(folder, step)
        except Killed:
            return True
    return False


def _save_forever(folder: Path, behind: bool) -> None:
    loaded = checkpoint.latest(folder)
    step = 0 if loaded is None else loaded.step
    saver = checkpoint.Saver(folder, 2, ONE_PROCESS, shared=True)
    while True:
        step += 1
        saver.save(step, contents(step), state(step))
        if not behind:
            saver.wait()


def newest(folder: Path) -> int:
    return max((int(path.name.removeprefix("step_")) for path in folder.glob("step_*")), default=0)


def test_kill_9_leaves_a_whole_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "safetensors.torch", "lockstep.run.checkpoint"])
    delays = random.Random(0)
    reached = 0
    for turn in range(5):
        process = context.Process(target=_save_forever, args=(tmp_path, turn % 2 == 0), daemon=True)
        process.start()
        wait_for(lambda: newest(tmp_path) > reached)  # noqa: B023 (called at once)
        time.sleep(delays.random() * 0.02)
        process.kill()
        process.join()
        loaded = checkpoint.latest(tmp_path)
        assert loaded is not None and loaded.step > reached
        reached = loaded.step
        assert_whole(loaded, reached)
    assert not caplog.records  # whole, not merely recoverable: nothing was skipped on the way


def test_a_manifest_nested_too_deep_is_damage(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / "manifest.json").write_text("[" * 100_000)
    assert_whole(checkpoint.latest(tmp_path), 1)


def test_a_full_disk_leaves_the_checkpoints_before(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(LockstepError, match=r"could not write checkpoint .*step_2: .*File too large"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert_whole(checkpoint.latest(tmp_path), 1)


@pytest.fixture
def held_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, no file reaches the disk."""
    free, fsync = threading.Event(), os.fsync

    def held(descriptor: int) -> None:
        assert free.wait(60)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", held)
    return free


def test_a_run_goes_on_while_a_checkpoint_is_written(tmp_path: Path, held_disk: threading.Event) -> None:
    """What is saved is what was, whatever is written over it since; the next save waits, and so does the end."""
    saver, live = checkpoint.Saver(tmp_path, 2, ONE_PROCESS, shared=True), contents(1)
    saver.save(1, live, state(1))
    for tensor in (tensor for group in live.values() for tensor in group.values()):
        tensor.fill_(7)
    saver.raise_if_failed()
    assert not list(tmp_path.glob("step_*"))
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(saver.save, 2, contents(2), state(2))
        time.sleep(0.05)
        assert not second.done()
        held_disk.set()
        second.result(60)
    assert_whole(checkpoint.latest(tmp_path, 1), 1)
    saver.wait()
    saver.wait()
    assert_whole(checkpoint.latest(tmp_path), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]
    saver.copies = False  # no memory for one
    saver.save(3, contents(3), state(3))
    assert_whole(checkpoint.latest(tmp_path), 3)


def test_a_checkpoint_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    saver = checkpoint.Saver(tmp_path, 2, ONE_PROCESS, shared=True)
    with pytest.raises(ValueError, match="JSON compliant"):
        saver.save(2, contents(2), {"loss": float("nan")})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for told in (saver.raise_if_failed, saver.wait, lambda: saver.save(3, {}, {})):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
        try:
            saver.save(2, contents(2), state(2))
            with pytest.raises(LockstepError, match=r"could not write checkpoint .*step_2: .*File too large"):
                wait_for(told)  # `look` has nothing to tell at first
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        saver.raise_if_failed()  # told once
        assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert_whole(checkpoint.latest(tmp_path), 1)


class _Together(World):
    """Ranks that are threads."""

    def __init__(self, rank: int, values: list[object], meeting: threading.Barrier) -> None:
        super().__init__(rank, len(values), timeout=60)
        vars(self).update(_values=values, _meeting=meeting)

    def gather(self, value: object, what: str = "") -> list[object]:
        self._values[self.rank] = value
        self._meeting.wait(60)
        found = list(self._values)
        self._meeting.wait(60)
        return found

    def broadcast_from_first(self, make: Callable[[], object]) -> object:
        return self.gather_results(lambda: make() if self.is_first else None)[0]


def _on_two(call: Callable[[World], object]) -> list[object]:
    """What a call returns, or raises, on either of two ranks."""
    meeting, values = threading.Barrier(2), [None, None]
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(call, _Together(rank, values, meeting)) for rank in range(2)]
        return [one.exception(60) or one.result(60) for one in calls]


def test_ranks_write_their_parts_and_are_told_of_one_that_fails(tmp_path: Path) -> None:
    def saved(world: World) -> None:
        saver = checkpoint.Saver(tmp_path, 2, world, shared=True)
        saver.save(1, {f"x.{world.rank}": {"own": torch.full((3,), float(world.rank))}}, {"of": world.rank})
        saver.wait()
        wrong = {f"x.{world.rank}": {"own": torch.zeros(3, dtype=torch.complex64 if world.rank else torch.float32)}}
        saver.save(2, wrong, {})
        while True:
            saver.raise_if_failed()

    assert [type(error) for error in _on_two(saved)] == [ValueError, ValueError]
    loaded = checkpoint.latest(tmp_path)
    assert loaded is not None and loaded.step == 1 and loaded.state == {"of": 0}
    assert [part["own"][:].tolist() for part in loaded.parts("x")] == [[0.0] * 3, [1.0] * 3]
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_leaving_waits_for_the_disk_and_for_no_rank_that_is_lost(
    tmp_path: Path, held_disk: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(world: World) -> None:
        if not world.is_first:  # never writes its part
            world.broadcast_from_first(lambda: None)
            return
        saver = checkpoint.Saver(tmp_path, 2, world, shared=True)
        saver.save(5, {"x.0": {"own": torch.ones(3)}}, {})
        saver.close(PeerLost("gone"))

    with ThreadPoolExecutor(1) as pool:
        saver = checkpoint.Saver(tmp_path, 2, ONE_PROCESS, shared=True)
        saver.save(1, contents(1), state(1))
        left = pool.submit(saver.close, KeyboardInterrupt())
        time.sleep(0.05)
        assert not left.done()
        held_disk.set()
        left.result(60)
    assert_whole(checkpoint.latest(tmp_path), 1)
    held_disk.clear()
    saver.save(2, contents(2), state(2))
    (next(tmp_path.glob(".tmp-step_2-*")) / "state.json").mkdir()  # so that its file is refused
    held_disk.set()
    saver.close(KeyboardInterrupt())
    assert [record.getMessage()[:26] for record in caplog.records] == ["could not write checkpoint"]
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert _on_two(lost) == [None, None]
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
