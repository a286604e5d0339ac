"""`lockstep train` on two processes: the run of one process, gone on with by one, and ended by a lost process."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import DEADLINE, PATIENCE, Forked, finished, running_lockstep, wait_for

from lockstep import api
from lockstep.config import (
    CheckpointConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
    yaml_file,
)
from lockstep.distributed import World
from lockstep.errors import InputError
from lockstep.models.init import init_folder
from lockstep.session import processes
from lockstep.session.build import build

TRAIN = ["-m", "lockstep", "train", "--config"]
REWARD = """
def letters(completion_ids, **_):
    "The share of lower-case letters."
    return [sum(97 <= t < 123 for t in ids) / len(ids) for ids in completion_ids]
"""

HANGS = """
import os, pathlib, time
def hangs(completions, trainer_state, **_):
    "In the second step of the second process."
    if trainer_state.global_step == 1 and os.environ["RANK"] == "1":
        pathlib.Path("hangs").touch()
        time.sleep({seconds})
    return [float(len(c)) for c in completions]
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, shallow: Path) -> RunConfig:
    """Six prompts of unequal length in two shards, of several micro-batches each."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "rewards.py").write_text(REWARD)
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": "hello " * (1 + i % 4)}) + "\n" for i in range(9)))
    data, reward = str(folder / "data.jsonl"), f"{folder / 'rewards.py'}:letters"
    return RunConfig(
        recipe="dataset",
        model=str(shallow),
        steps=2,
        task=TaskConfig("dataset", data=data, reward=(reward,), validation_prompts=3, validation_interval=1),
        sampling=SamplingConfig(num_generations=4, max_completion_length=12),
        trainer=TrainerConfig(prompts_per_step=6, max_tokens_per_micro_batch=100),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        checkpoint=CheckpointConfig(interval=2),
        parallel=ParallelConfig(batch_shards=2, timeout=PATIENCE),
    )


@pytest.fixture(scope="module")
def two(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two processes."""
    folder = tmp_path_factory.mktemp("two")
    yaml_file.save(config, folder / "config.yaml")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *TRAIN]
    options = [str(folder / "config.yaml"), "--run-dir", str(folder / "run"), "--json"]
    run = finished([*command, *options], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    assert "terminate called" not in run.stderr and run.stderr.count("step 2/2") == 1
    assert json.loads(run.stdout)["steps_done"] == 2  # of the first rank alone
    return folder / "run"


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def without_times(file: Path) -> list[dict[str, Any]]:
    measured = ("time/", "perf/", "memory/")
    return [{k: v for k, v in line.items() if not k.startswith(measured)} for line in lines(file)]


def sizes(run: Path) -> dict[str, int]:
    """Bytes of the files of the last checkpoint."""
    return {file.name: file.stat().st_size for file in (run / "checkpoints" / "step_2").iterdir()}


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


@contextmanager
def by_hand(arguments: list[str], folders: list[Path]) -> Iterator[list[Forked]]:
    """A process of a run in each of the folders, without `torchrun`, which would end them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(len(folders)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as stack:
        yield [
            stack.enter_context(running_lockstep(arguments, folder, RANK=str(rank), LOCAL_RANK=str(rank), **shared))
            for rank, folder in enumerate(folders)
        ]


def test_two_processes_write_what_one_does_and_one_goes_on(config: RunConfig, two: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    api.train(config, tmp_path / "one")
    for file in ("rollouts.jsonl", "metrics.jsonl"):
        assert without_times(two / file) == without_times(tmp_path / "one" / file)
    assert len(lines(two / "rollouts.jsonl")) == 12 and weights(two) == weights(tmp_path / "one")
    certificates = [json.loads((run / "parity.json").read_text()) for run in (two, tmp_path / "one")]
    assert certificates[0] == certificates[1]
    assert certificates[0]["identical"] and certificates[0]["tokens_checked"] > 500
    saved = {run: sizes(run) for run in (two, tmp_path / "one")}
    whole = saved[tmp_path / "one"]["trainer-00001.safetensors"]
    for rank in range(2):  # each rank has written its part
        assert saved[two][f"trainer.{rank}-00001.safetensors"] < 1.2 * whole / 2
    assert saved[two]["trainer-00001.safetensors"] < 1024  # what all have alike
    both = shutil.copytree(two, tmp_path / "both")
    api.train(replace(config, steps=3), tmp_path / "three")
    api.train(replace(config, steps=3), both, resume=True)
    assert without_times(both / "metrics.jsonl") == without_times(tmp_path / "three" / "metrics.jsonl")
    assert weights(both) == weights(tmp_path / "three") != weights(two)


def test_a_run_goes_on_with_as_many_threads_as_it_had(config: RunConfig, two: Path, tmp_path: Path) -> None:
    torch.set_num_threads(2)
    with pytest.raises(InputError, match=r"threads was 1 and is 2. Resume where the run began \(OMP_NUM_THREADS"):
        api.train(replace(config, steps=3), shutil.copytree(two, tmp_path / "both"), resume=True)
    torch.set_num_threads(1)


def test_what_all_processes_refuse_is_told_once(config: RunConfig, tmp_path: Path) -> None:
    """However long the first takes to leave: the other one waits for its end, and not for a time."""
    wait = f"main._REPORT_SECONDS = main._COMMON_ERROR_SECONDS = {PATIENCE}"
    (tmp_path / "patient.py").write_text(f"import lockstep.cli.main as main\n{wait}\nmain.entry()\n")
    yaml_file.save(replace(config, trainer=replace(config.trainer, prompts_per_step=7)), tmp_path / "config.yaml")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "patient.py")]
    run = finished([*command, *TRAIN[2:], str(tmp_path / "config.yaml"), "--run-dir", str(tmp_path / "run")])
    other, first = re.findall(r"rank +: (\d).*\n +exitcode +: (-?\d+)", run.stderr)  # the root cause stands last
    assert run.returncode == 1 and first == ("0", "2") and other in (("1", "2"), ("1", "143"), ("1", "-15"))  # ended
    assert run.stderr.count("lockstep: error: trainer.prompts_per_step is 7, which 2 shards") == 1
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_data_are_refused(config: RunConfig, tmp_path: Path) -> None:
    yaml_file.save(replace(config, task=replace(config.task, data="data.jsonl")), tmp_path / "config.yaml")
    folders = [tmp_path / name for name in ("here", "there")]
    for folder, prompt in zip(folders, ("one", "other"), strict=True):
        folder.mkdir()
        (folder / "data.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    arguments = [*TRAIN[2:], str(tmp_path / "config.yaml"), "--run-dir", str(tmp_path / "run")]
    with by_hand(arguments, folders) as ranks:
        said = [rank.communicate(timeout=DEADLINE)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert "task.data is '20 bytes with SHA-256" in said[0] and "on rank 1 and '18 bytes" in said[0]
    assert "lockstep:" not in said[1] and not (tmp_path / "run").exists()


def test_processes_compare_the_files_of_their_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(World):
        def require_same(self, what: str, describe: Callable[[], dict[str, Any]]) -> None:
            described.append(describe())

        def close(self, failed: bool = False) -> None:
            pass

    described: list[dict[str, Any]] = []
    monkeypatch.setattr(processes, "join", lambda *_: Two(0, 2))
    for folder, seed in (("a", 0), ("b", 1), ("c", 0)):
        init_folder("tiny", tmp_path / folder / "m", seed)
        monkeypatch.chdir(tmp_path / folder)
        if folder == "c":
            monkeypatch.setattr("lockstep.cache.file_hashes.WHOLE", 1)
            Path("m/config.json").unlink()
            os.truncate("m/model.safetensors", os.stat("m/model.safetensors").st_size - 1)
        with processes.join_processes(RunConfig(model="m")):
            pass
    one, other, damaged = ({n: of for n, of in found.items() if n.startswith("model m: ")} for found in described)
    assert {name for name in one if one[name] != other[name]} == {"model m: model.safetensors"}
    assert one.keys() - damaged.keys() == {"model m: config.json"} and described[0]["steps"] == described[1]["steps"]
    sizes = [int(of["model m: model.safetensors"].split()[0].replace(",", "")) for of in (one, damaged)]
    assert sizes[0] == sizes[1] + 1
    with (
        pytest.raises(InputError, match="there is no such folder"),
        processes.join_processes(RunConfig(model="./nowhere")),
    ):
        pass


def test_ranks_with_other_numerics_are_refused(config: RunConfig) -> None:
    class Others(World):
        def gather(self, value: Any, what: str = "") -> list[Any]:
            return [value] * 2

        def gather_results(self, make: Callable[[], Any], what: str = "") -> list[Any]:
            value = make()
            return [value, {**value, "threads": 99} if isinstance(value, dict) else value]

    torch.set_num_threads(1)
    with pytest.raises(InputError, match="threads is 99 on rank 1 and 1 on rank 0"):
        build(config, Others(0, 2))


def state_of(process: int) -> str:
    """`T` is stopped, `Z` has ended."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_signal_to_one_process_ends_all_behind_the_same_step(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(HANGS.format(seconds=1))
    task = TaskConfig("dataset", data=config.task.data, reward=("rewards.py:hangs",), validation_prompts=0)
    saved = CheckpointConfig(100_000, grace=DEADLINE)
    yaml_file.save(replace(config, steps=100_000, task=task, checkpoint=saved), tmp_path / "config.yaml")
    run = tmp_path / "run"
    with by_hand([*TRAIN[2:], str(tmp_path / "config.yaml"), "--run-dir", str(run)], [tmp_path] * 2) as ranks:
        wait_for((tmp_path / "hangs").exists, ranks[0])
        ranks[1].send_signal(signal.SIGTERM)
        said = [rank.communicate(timeout=DEADLINE)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [143, 143] and "Traceback" not in "".join(said)
    assert len(lines(run / "metrics.jsonl")) == 1  # the second step is given up
    assert "lockstep: ended by SIGTERM" in said[0] and "from    step 1" in said[0]
    assert (run / "checkpoints" / "step_1").is_dir() and not (run / "stacks").exists()


@pytest.mark.parametrize("first", [0, 1])
def test_a_process_whose_time_is_over_ends_the_others_as_a_signal_does(
    config: RunConfig, tmp_path: Path, first: int
) -> None:
    """One hangs in a reward and the other waits for it in a collective, where Python hears of no signal."""
    (tmp_path / "rewards.py").write_text(HANGS.format(seconds=10**6))
    task = TaskConfig("dataset", data=config.task.data, reward=("rewards.py:hangs",), validation_prompts=0)
    saved = CheckpointConfig(100_000, grace=0.2)
    yaml_file.save(replace(config, steps=100_000, task=task, checkpoint=saved), tmp_path / "config.yaml")
    run = tmp_path / "run"
    with by_hand([*TRAIN[2:], str(tmp_path / "config.yaml"), "--run-dir", str(run)], [tmp_path] * 2) as ranks:
        wait_for((tmp_path / "hangs").exists, ranks[0])
        for number in (first, 1)[: 2 - first]:
            ranks[number].send_signal(signal.SIGTERM)
            wait_for(lambda number=number: ranks[number].poll() is not None)
        said = [rank.communicate(timeout=DEADLINE)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [143, 143] and "Traceback" not in "".join(said)
    assert f"lockstep: ended by SIGTERM\nfolder  {run}\n" in said[0] and "from    step 0" in said[0]
    assert not (run / "stacks").exists() and not (run / "crash.txt").exists()


def test_a_killed_process_ends_the_others_and_one_that_is_stopped(config: RunConfig, tmp_path: Path) -> None:
    """Two groups of two that share products: in one a process is stopped, in the other one is killed."""
    made = replace(config, steps=100_000, parallel=replace(config.parallel, tp=2, generator_tp=2))
    yaml_file.save(made, tmp_path / "config.yaml")
    run, host = tmp_path / "run", platform.node()
    arguments = [*TRAIN[2:], str(tmp_path / "config.yaml"), "--run-dir", str(run)]
    with by_hand(arguments, [tmp_path] * 4) as ranks:
        metrics = run / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and len(metrics.read_bytes()) > 0, ranks[0])
        ranks[1].send_signal(signal.SIGSTOP)
        wait_for(lambda: state_of(ranks[1].pid) == "T")  # on a busy machine it goes on for a while
        ranks[2].send_signal(signal.SIGKILL)
        said = {rank: ranks[rank].communicate(timeout=DEADLINE)[1] for rank in (0, 1, 3)}
    assert [rank.returncode for rank in ranks] == [1, 1, -9, 1] and "Traceback" not in "".join(said.values())
    (teller,) = (rank for rank in said if "lockstep: failed" in said[rank])
    assert f"failed: rank {teller} of 4: another process of the run is gone" in said[teller]
    assert said[teller].splitlines()[-3:] == [
        f"rank 1 on {host} (process {ranks[1].pid}) is stopped",
        f"rank 2 on {host} (process {ranks[2].pid}) is gone",
        f"told by rank {teller} on {host} (process {ranks[teller].pid}); the stacks of all ranks are in {run}/stacks",
    ]
    stacks = [(run / "stacks" / f"rank-{rank}.txt").read_text() for rank in range(4)]
    assert f"PeerLost: rank {teller} of 4" in stacks[teller] and "faults.py" in stacks[teller]
    assert all('/lockstep/run/train.py", line ' in stacks[rank] for rank in said)
    assert stacks[2] == f"rank 2 on {host} (process {ranks[2].pid}) is gone\n"
    assert json.loads((run / "summary.json").read_text())["steps_done"] >= 1
