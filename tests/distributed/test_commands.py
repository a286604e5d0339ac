"""The commands besides `train` on several processes: what one process prints, in every bit, told once."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_ranks

from lockstep import LLM
from lockstep.cache import loaded_code
from lockstep.cli import main as command_line
from lockstep.config import CompileConfig, ParallelConfig
from lockstep.errors import InputError
from lockstep.run.checkpoint import files
from lockstep.session import generate, parity_check
from lockstep.session.degree import choice, links
from lockstep.session.degree.decode_time import CollectiveTimes
from lockstep.types import SamplingParams

TOGETHER = ["--parallel.generator-tp", "2"]
GENERATE = ["generate", "--prompts", "p.txt", "--n", "2", "--max-completion-length", "9"]
EVAL = ["eval", "--task", "sum-digits", "--prompts", "3", "--n", "2", "--max-completion-length", "6", "--json"]
# An environment of a user's own, which measures words that were sampled.
METERED = """
from lockstep.environments.tasks.calculator import Calculator

def f(completions, **columns):
    return [0.0] * len(completions)

class Metered(Calculator):
    @classmethod
    def metrics(cls, trajectories):
        words = [sum(t.token_ids) + len(t.text) for t in trajectories]
        return super().metrics(trajectories) | {"environment/words": float(sum(words))}
"""
CALCULATE = ["eval", "--task", "word-arithmetic", "--environment", "m.py:Metered", "--max-turns", "2", "--prompts", "3"]
CALCULATE += ["--max-completion-length", "5", "--temperature", "1", "--json"]
PARITY = ["parity", "--tokens", "600", "--json"]
RUN = ["--trainer.prompts-per-step", "2", "--trainer.warmup-steps", "0", "--sampling.num-generations", "2"]
RUN += ["--sampling.max-completion-length", "4", "--task.validation-prompts", "0", "--json"]
RUN += ["--compile.capture", "step", "--compile.verify", "off", "--task.easy"]
CHOOSES = ["train", *RUN[:2], *RUN[4:8], "--steps", "1", "--json", "--checkpoint.interval", "1"]
CHOOSES += ["--task.easy", "--parallel.generator-tp", "0"]
CHOOSES += ["--trainer.num-mini-batches", "2"]  # of a prompt each, for two processes
CHOOSES += ["--trainer.warmup-steps", "1", "--trainer.warmup-batch-size", "1"]
COMMANDS = {
    "generate": [*GENERATE, "--json"],
    "generate as text": GENERATE,
    "generate as text together": [*GENERATE, *TOGETHER],
    "eval": EVAL,
    "turns": CALCULATE,
    "turns together": [*CALCULATE, *TOGETHER],
    "parity": [*PARITY, "--parallel.tp", "2", "--parallel.generator-tp", "0"],
    "parity together": [*PARITY, *TOGETHER],
    "precompile": ["precompile", *RUN, *TOGETHER],
    "train": ["train", *RUN, *TOGETHER, "--steps", "1", "--run-dir", "run"],
    "a model that is not there": ["generate", "--model", "no/such", "--prompt", "x", *TOGETHER],
    "of the trainer": ["generate", "--prompt", "x", "--parallel.tp", "2"],
    "chat": ["chat"],
}


# What is said of commands that are not alike, and those of two ranks, each in a folder of its own.
ROWS = ["eval", "--task", "dataset", "--max-completion-length", "4", "--data"]
OWN_ROWS, OWN_REWARD = [*ROWS, "rows.jsonl", "--reward", "../m.py:f"], [*ROWS, "../p.jsonl", "--reward", "f.py:f"]
OWN_TRAINED = ["train", "dataset", *OWN_REWARD[5:], *RUN[:10], "--run-dir", "../own"]
UNEQUAL = {
    "n is 3 on rank 1 and 2 on rank 0": (EVAL, [*EVAL[:6], "3", *EVAL[7:]]),
    "sampling.max_completion_length is 5 on rank 1 and 6 on rank 0": (EVAL, [*EVAL[:8], "5", *EVAL[9:]]),
    "the file of task.data is '22 bytes with": (OWN_ROWS, OWN_ROWS),
    "the file of task.reward f.py:f is '66 bytes with": (OWN_REWARD, OWN_REWARD),
    "the processes of this run: task.reward f.py:f is '66 bytes with": (OWN_TRAINED, OWN_TRAINED),
    "tokens is 900 on rank 1 and 600 on rank 0": (PARITY, ["parity", "--tokens", "900", "--json"]),
    "parallel.timeout is 99.0 on rank 1 and 300.0 on rank 0": (EVAL, [*EVAL, "--parallel.timeout", "99"]),
    "resume_with_other_numerics is True on rank 1 and False on rank 0": (
        ["train", "--resume", "../fast"],
        ["train", "--resume", "../fast", "--resume-with-other-numerics"],
    ),
}


REFUSED = {
    "a model that is not there": "model 'no/such'",
    "of the trainer": "--parallel.tp is for training, and lockstep generate trains nothing; remove it",
    "chat": "lockstep chat works in one process; start it without torchrun",
}


# What is said where the second process sees another checkpoint, whose manifest is the file of this name.
OTHER_CHECKPOINTS = {
    "state.json": r"the hash of .*/fast/checkpoints/step_2 is '\w+' on rank 1 and '\w+' on rank 0; every",
    "none.json": r"fast/checkpoints/step_2 cannot be read: .*No such file or directory.* \(on rank 1, ",
}


def printed(arguments: list[str], model: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    own = [] if {"--model", "--arch", "--resume"} & {*arguments} else ["--model", model]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command_line.main([*arguments, *own, "--device", "cpu"])
    return code, re.sub(r'"environment/wait_s": [^,]*, ', "", out.getvalue()), err.getvalue()


def every_command(folder: str, model: str) -> dict[str, Any]:
    os.chdir(folder)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "_exit_now", lambda code: None)
        patch.setattr(loaded_code, "find_difference", lambda: None)  # of what the line before replaced
        patch.setattr(command_line, "_COMMON_ERROR_SECONDS", 0.0)
        found |= {name: printed(arguments, model) for name, arguments in COMMANDS.items()}
        found["chosen"] = chosen(model)
        found["other checkpoints"] = with_other_checkpoints(model)
        rank = int(os.environ["RANK"])
        with contextlib.chdir(f"of{rank}"):
            found["unequal"] = [printed(of_ranks[rank], model) for of_ranks in UNEQUAL.values()]
        if os.environ["RANK"] == "1":
            patch.setattr(parity_check, "pack_shards", flipped(parity_check.pack_shards))
        found["parity, a bit flipped on one rank"] = printed(COMMANDS["parity together"], model)
    return found | {"from Python": from_python(model), "closed": closed_early(model)}


def chosen(model: str) -> dict[str, Any]:
    """Two runs that choose how many generate together, the second as if links took no time; it goes on without
    measuring."""
    found = {"measured": printed([*CHOOSES, "--run-dir", "measured"], model)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "measure_collectives", lambda *_: CollectiveTimes(0.0, 0.0))
        found["fast"] = printed([*CHOOSES, "--run-dir", "fast"], model)
        patch.setattr(links, "measure_bandwidth", None)
        found["resumed"] = printed(["train", "--resume", "fast", "--steps", "2", "--json"], model)
    return found


def with_other_checkpoints(model: str) -> list[Any]:
    """A run whose checkpoint is another one for the second process, going on."""
    found = []
    for manifest in OTHER_CHECKPOINTS:
        with pytest.MonkeyPatch.context() as patch:
            if os.environ["RANK"] == "1":
                patch.setattr(files, "_MANIFEST", manifest)
            found.append(printed(["train", "--resume", "fast", "--steps", "3"], model))
    return found


def flipped(pack_shards: Any) -> Any:
    """With one bit of one of the generator's log-probabilities another."""

    def packed(*arguments: Any, **named: Any) -> Any:
        batches = pack_shards(*arguments, **named)
        if named["check_parity"]:
            batches[0].old_model_logprob_C.view(torch.int32)[3] ^= 1 << 22
        return batches

    return packed


def from_python(model: str, ranks: int = 2) -> list[Any]:
    """Completions of graphs for two kinds of sampling, and once more after the processes have left each other; then
    what is said of prompts that differ, and of a second model. All generate together, as one has no room. A model that
    failed to begin is not in the way."""
    compile = CompileConfig("step", verify="off") if ranks > 1 else None
    with pytest.MonkeyPatch.context() as patch, pytest.raises(NameError):
        patch.delattr(generate, "warn_if_library_missing")
        LLM(model, device="cpu")  # raises once it has joined the others, whom it leaves
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "available_memory", lambda *_: 1000)
        llm = LLM(model, device="cpu", compile=compile, parallel=ParallelConfig(generator_tp=0))
    found: list[Any] = []
    for prompts, temperature in ((["one", "two"], 1.0), ("three", 0.0), (["one", "two"], 1.0)):
        sampling = SamplingParams(n=2 if temperature else 1, temperature=temperature, max_completion_length=5)
        if len(found) == 2:
            llm.close()
        found.append([[asdict(one) for one in group] for group in llm.generate(prompts, sampling)])
        assert llm.world.generator_tp == ranks
    for wrong in (lambda: llm.generate(os.environ.get("RANK", "0"), SamplingParams()), lambda: LLM(model)):
        with contextlib.suppress(InputError):
            wrong()
            found.append("nothing was refused")
    llm.close()
    return found


def closed_early(model: str) -> list[str]:
    """Completions after streams that each process closes at its first piece, if it gets one; of the second stream, and
    of the one that is open at the end, one process has the only prompt."""
    sampling = SamplingParams(max_completion_length=9, ignore_eos=True)
    with LLM(model, device="cpu") as llm:
        for prompts in (["one", "two", "three"], ["one"]):
            for _ in llm.stream(prompts, sampling):
                break
        found = [samples[0].text for samples in llm.generate(["one", "two"], sampling)]
        for _ in llm.stream("one", sampling):
            break
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("commands")
    (made / "p.txt").write_text("hello\n1 2 3\nwhat\n")
    (made / "m.py").write_text(METERED)
    (made / "p.jsonl").write_text('{"prompt": "1"}')
    for rank in range(2):  # of as many bytes
        (made / f"of{rank}").mkdir()
        (made / f"of{rank}" / "rows.jsonl").write_text(json.dumps({"prompt": f"1 + {rank} = "}))
        (made / f"of{rank}" / "f.py").write_text(
            f"def f(completions, **columns):\n    return [{rank}.0] * len(completions)"
        )
    return made


@pytest.fixture(scope="module")
def two(folder: Path, shallow: Path) -> list[dict[str, Any]]:
    """What two processes printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_CACHE", str(folder / "cache"))
        return on_ranks(2, every_command, str(folder), str(shallow))


def test_the_first_process_prints_what_one_prints(two: Any, folder: Path, shallow: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(folder)
    for name, arguments in COMMANDS.items():
        if arguments[0] not in ("generate", "eval") or name in REFUSED:
            continue
        alone = arguments[:-2] if arguments[-2:] == TOGETHER else arguments
        code, out, _ = printed(alone, str(shallow))
        assert code == 0 and len(out) > 90
        assert [found[name][:2] for found in two] == [(0, out), (0, "")], (name, two[0][name])


def test_unequal_degrees_are_compared(two: Any, folder: Path, shallow: Path) -> None:
    first, second = two
    one = json.loads(printed(PARITY, str(shallow))[1])
    for name, degrees in {"parity": (1, 2), "parity together": (2, 1)}.items():
        code, out, _ = first[name]
        report = json.loads(out)
        assert code == 0 and second[name][:2] == (0, "")
        assert (report.pop("processes"), report.pop("generator_tp"), report.pop("trainer_tp")) == (2, *degrees)
        assert report == {key: value for key, value in one.items() if key in report} and report["identical"]
        assert report["tokens_checked"] >= 600 and report["average_delta"] == report["logprob_diff_mean"] == 0


def test_a_bit_on_one_rank_fails_on_all(two: Any) -> None:
    first, second = (found["parity, a bit flipped on one rank"] for found in two)
    report = json.loads(first[1])
    assert first[0] == second[0] == 1 and second[1] == ""
    assert not report["identical"] and report["tokens_different"] == 1
    size = report["logprob_diff_max"]
    assert size == report["max_delta"] > 0
    assert report["logprob_diff_mean"] == pytest.approx(size / report["tokens_checked"], rel=1e-9)
    assert abs(report["average_delta"]) == report["logprob_diff_mean"]


def test_a_run_finds_what_precompile_made(two: Any) -> None:
    (code, out, err), (other, nothing, _) = (found["precompile"] for found in two)
    assert (code, other, nothing) == (0, 0, ""), err
    made, run = json.loads(out), json.loads(two[0]["train"][1])
    assert made["processes"] == 2 and made["made"] == len(made["graphs"]) > 5 and made["reused"] == 0
    assert (run["compile"]["traces"], run["compile"]["loaded"]) == (0, made["made"])


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_what_is_refused_has_one_code(two: Any, name: str, message: str) -> None:
    first, second = (found[name] for found in two)
    assert first[:2] == second[:2] == (2, "") and message in first[2]
    assert message not in second[2] or name != "a model that is not there"  # the first tells


def test_commands_that_are_not_alike_are_refused_by_what_differs(two: Any) -> None:
    for message, first, second in zip(UNEQUAL, *(found["unequal"] for found in two), strict=True):
        assert (first[:2], second) == ((2, ""), (2, "", "")) and message in first[2], first[2]


def test_a_model_from_python_generates_with_the_others(two: Any, shallow: Path) -> None:
    one = from_python(str(shallow), 1)
    assert one[0] == one[2] and one[3:] == ["nothing was refused"] * 2
    assert [found["from Python"] for found in two] == [one[:3]] * 2


def test_a_run_goes_on_from_a_checkpoint_that_is_the_same_for_all(two: Any) -> None:
    for message, first, second in zip(
        OTHER_CHECKPOINTS.values(), *(found["other checkpoints"] for found in two), strict=True
    ):
        assert (first[:2], second) == ((2, ""), (2, "", "")) and re.search(message, first[2]), first[2]


def test_a_stream_that_one_process_closes_keeps_no_other_waiting(two: Any, shallow: Path) -> None:
    assert [found["closed"] for found in two] == [closed_early(str(shallow))] * 2


def test_how_many_generate_together_is_chosen_told_and_kept(two: Any, folder: Path) -> None:
    first, second = (found["chosen"] for found in two)
    said = {name: json.loads(out)["parallel"] for name, (_, out, _) in first.items()}
    assert all(ended[0] == 0 for ended in (*first.values(), *second.values()))
    assert [said[name]["generator_tp"] for name in ("measured", "fast", "resumed")] == [1, 2, 2]
    one, several = said["measured"]["considered"]
    assert (one["ranks"], several["ranks"]) == (1, 2) and several["exchanges_ms"] > several["weights_ms"] > 0
    assert said["resumed"] == said["fast"] and said["fast"]["considered"][1]["exchanges_ms"] == 0
    assert "parallel.generator_tp: chose 1 (" in first["measured"][2] and "parallel.gen" not in second["measured"][2]
    assert "parallel.gen" not in first["resumed"][2]
    for name in ("measured", "resumed"):
        told = [found[name][2].count("leave 1 of 2 processes nothing to do; use 1 ") for found in (first, second)]
        assert told == [1, 0]
        told = [found[name][2].count("leave 1 of 2 processes nothing to do; use 2 at") for found in (first, second)]
        assert told == [name == "measured", 0]  # a resumed run has had its warm-up
    assert "generator_tp: 2" in (folder / "fast" / "config.yaml").read_text()
    steps = [(folder / name / "rollouts.jsonl").read_text().splitlines() for name in ("measured", "fast")]
    assert steps[0] == steps[1][: len(steps[0])] and len(steps[1]) == 2 * len(steps[0]) > 0
