"""Reward functions in processes of their own: crashes, endless loops, and results that do not depend on the count."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
from processes import finished, wait_for

from lockstep.environments.rewards.calls import Failed
from lockstep.environments.rewards.loading import load_rewards
from lockstep.environments.rewards.reward_set import Completions, Reward, RewardSet, Scoring
from lockstep.environments.rewards.workers import RewardWorkers
from lockstep.errors import InputError

SOURCE = """
import asyncio, ctypes, os, signal, subprocess, sys, time
import numpy

def process(completions, **_):
    print("this goes to standard error")
    return numpy.array([float(os.getpid())] * len(completions))

def length(completions, **_):
    return [len(c) for c in completions]

async def later(completions, **_):
    await asyncio.sleep(0)
    return [len(c) for c in completions]

def count(completions, **_):
    return [len(completions)] * len(completions)

def interrupted(completions, **_):
    raise KeyboardInterrupt

def forks(completions, **_):
    if (child := os.fork()) == 0:
        time.sleep(600)
    started = subprocess.Popen(["sleep", "600"])
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    started.terminate()
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), started.wait()]
    return [codes.count(-signal.SIGTERM)] * len(completions)

def fragile(completions, **_):
    if "segfault" in completions: ctypes.string_at(0)
    if "exit" in completions: os._exit(7)
    if "sys.exit" in completions: sys.exit(3)
    if "loop" in completions: time.sleep(600)
    if "raise" in completions: raise ValueError("of course")
    return [1.0] * len(completions)

def killed(completions, **_):
    if os.fork() == 0:  # as a pool does, whose process keeps the worker's connection
        time.sleep(60)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)

def with_torch(completions, **_):
    return ["torch" in sys.modules] * len(completions)

def optional(completions, log_metric=None, log_extra=None, environments=7, **_):
    return [log_metric is None and log_extra is None and environments] * len(completions)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def workers() -> Iterator[RewardWorkers]:
    pool = RewardWorkers(2, timeout=60)
    yield pool
    pool.close()


TEXTS = ["a", "bb", "ccc", "dddd", "e", "ff"]


def score(rewards: RewardSet, texts: list[str] = TEXTS, groups: tuple[int, ...] = (0, 0, 1, 1, 2, 2)):
    rows = [{"n": index} for index in range(len(texts))]
    origins = [f"rows line {group}" for group in groups]
    return rewards.score(
        Completions(["p"] * len(texts), texts, [[1]] * len(texts), rows), Scoring("step 3", origins, groups)
    )


def test_results_come_in_order_from_other_processes(source: Path, workers: RewardWorkers) -> None:
    names = ("length", "later", "process", "count", "with_torch")
    rewards = load_rewards([f"{source}:{name}" for name in names], workers=workers)
    values = score(rewards).values
    assert [row["length"] for row in values] == [row["later"] for row in values] == [1, 2, 3, 4, 1, 2]
    assert [row["count"] for row in values] == [2.0] * 6  # a call has one prompt's completions
    assert [row["with_torch"] for row in values] == [0.0] * 6  # which takes long to import, and 200 MB
    processes = {row["process"] for _ in range(3) for row in score(rewards).values}
    assert 1 <= len(processes) <= 2 and os.getpid() not in processes  # they stay


def test_a_function_keeps_its_defaults_for_what_another_process_cannot_get(
    source: Path, workers: RewardWorkers
) -> None:
    rewards = load_rewards([f"{source}:optional"], workers=workers)
    rewards.check_columns(["n"])
    assert score(rewards).totals == [7.0] * 6


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("segfault", "ended its process .signal SIGSEGV."),
        ("exit", "ended its process .exit code 7."),
        ("sys.exit", "raised SystemExit: 3 in my_rewards.py line 35"),
        ("raise", "raised ValueError: of course in my_rewards.py line 37"),
    ],
)
def test_a_failing_call_costs_its_own_group_only(source: Path, workers: RewardWorkers, text: str, reason: str) -> None:
    texts = ["a", "b", "c", text, "e", "f"]
    spec = f"{source}:fragile"
    scores = score(load_rewards([spec], on_error="skip", workers=workers), texts)
    assert scores.totals == [1.0, 1.0, None, None, 1.0, 1.0] and scores.errors == {"fragile": 2}
    message = f"reward fragile {reason} .for the 2 completions of step 3, group 1, rows line 1."
    with pytest.raises(InputError, match=message):
        score(load_rewards([spec], workers=workers), texts)


def test_a_killed_worker_is_noticed_though_what_it_forked_lives(source: Path, workers: RewardWorkers) -> None:
    began = time.monotonic()
    with pytest.raises(InputError, match=r"reward killed ended its process \(signal SIGKILL\)"):
        score(load_rewards([f"{source}:killed"], workers=workers), ["a"], (0,))
    assert time.monotonic() - began < 30


def test_an_interrupt_of_the_functions_own_is_a_failure(source: Path, workers: RewardWorkers) -> None:
    scores = score(load_rewards([f"{source}:interrupted"], on_error="skip", workers=workers))
    assert scores.totals == [None] * 6
    with pytest.raises(InputError, match="reward interrupted raised KeyboardInterrupt"):
        score(load_rewards([f"{source}:interrupted"], workers=workers))


def test_signals_for_all_processes_are_the_runs(source: Path) -> None:
    """What a function forks or starts has the defaults, by which it is ended."""
    pool = RewardWorkers(1)
    (process,) = score(load_rewards([f"{source}:process"], workers=pool), ["a"], (0,)).totals
    began = pool.begin((f"{source}:forks", {"completions": ["a"]}, 1))
    while not began.done():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(int(process), number)
        time.sleep(0.01)
    assert began.result() == [2.0]
    assert score(load_rewards([f"{source}:process"], workers=pool), ["a"], (0,)).totals == [process]
    pool.close()


def test_a_call_that_takes_too_long_is_stopped(source: Path) -> None:
    pool = RewardWorkers(1, timeout=1.5)  # a call that is answered at once has to be so within it on a busy machine too
    try:
        scores = score(load_rewards([f"{source}:fragile"], on_error="zero", workers=pool), ["a", "loop"], (0, 1))
        assert scores.totals == [1.0, 0.0]
        with pytest.raises(InputError, match=r"gave no answer within 1.5 s \(task.reward_timeout\) and was stopped"):
            score(load_rewards([f"{source}:fragile"], workers=pool), ["loop"], (0,))
    finally:
        pool.close()


def test_an_interrupt_ends_a_call_that_hangs(source: Path, tmp_path: Path) -> None:
    """Without a limit of time, with further calls waiting; the processes can be used again."""
    pool = RewardWorkers(2)
    ready = score(load_rewards([f"{source}:process"], workers=pool)).totals

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before, began = signal.signal(signal.SIGALRM, interrupt), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            score(load_rewards([f"{source}:fragile"], workers=pool), ["loop"] * 6)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 30 and not any(runs(int(process)) for process in ready)
    assert score(load_rewards([f"{source}:length"], workers=pool)).totals == [1.0, 2.0, 3.0, 4.0, 1.0, 2.0]
    pool.close()


def test_a_call_of_another_thread_fails_with_its_process(source: Path) -> None:
    """At any time of it, and the connection that it waits at is its own until then."""
    pool, loop = RewardWorkers(2), f"{source}:fragile"
    given = {"prompts": ["p"], "completions": ["loop"], "completion_ids": [[0]]}
    for seconds in (0.0, 0.01, 0.5, 1.0):
        running = [pool.begin((loop, given, 1)) for _ in range(2)]
        time.sleep(seconds)
        while wait(running, 0.1).not_done:
            pool.close()
        outcomes = [one.result() for one in running]
        assert all(isinstance(one, Failed) and "ended its process" in one.reason for one in outcomes), outcomes
    assert not any(worker._process or not worker._channel.closed for worker in pool._workers if worker._channel)


def test_a_function_that_cannot_be_loaded_there_is_named(source: Path, workers: RewardWorkers) -> None:
    rewards = load_rewards([f"{source}:length"], on_error="skip", workers=workers)
    source.unlink()
    with pytest.raises(InputError, match="reward length cannot be loaded in its process: .*does not exist"):
        score(rewards)


def test_a_function_without_a_name_cannot_go_there(workers: RewardWorkers) -> None:
    with pytest.raises(InputError, match="task.reward_workers: reward mine has no module:function name"):
        RewardSet([Reward("mine", lambda completions: [0.0])], workers=workers)


def test_what_cannot_be_sent_is_a_failure(source: Path, workers: RewardWorkers) -> None:
    call = f"{source}:length", {"completions": [lambda: None]}, 1
    (outcome,) = workers.outcomes([workers.begin(call)])
    assert isinstance(outcome, Failed) and "cannot be sent to its process" in outcome.reason


def test_a_worker_does_not_outlive_its_parent(source: Path, tmp_path: Path) -> None:
    code = f"""
import os, signal
from lockstep.environments.rewards.workers import RewardWorkers
pool = RewardWorkers(1)
print(int(pool.begin(({str(source) + ":process"!r}, {{"completions": ["a"]}}, 1)).result()[0]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = finished([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    wait_for(lambda: not runs(int(done.stdout)))


def runs(process: int) -> bool:
    """Whether there is such a process, other than one that has ended and that nobody has asked about."""
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
