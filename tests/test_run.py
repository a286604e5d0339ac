"""Runs through the command line: kill -9 and resume, real data, what a run folder holds, bad input."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.cli import main
from lockstep.models.init import init_folder

DATA = Path(__file__).parent / "data"
SMALL = [
    *("--steps", "8", "--seed", "3", "--trainer.warmup-steps", "6", "--trainer.prompts-per-step", "2"),
    *("--sampling.num-generations", "4", "--checkpoint.interval", "2", "--task.validation-prompts", "4"),
    *("--trainer.warmup-batch-size", "8", "--sampling.top-p", "0.95", "--trainer.num-iterations", "2"),
    *("--sampling.temperature", "0.9", "--reward", f"{DATA / 'rewards.py'}:spread"),
]
COMMAND = [sys.executable, "-m", "lockstep", "train", "sum-digits", *SMALL]
TIMED = ("time/", "perf/", "memory/")


def records(path: Path) -> list[dict]:
    """Lines of a metrics or rollouts file without what depends on the clock."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines]


def launch(*arguments: str) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*COMMAND, *arguments] if "--resume" not in arguments else [*COMMAND[:4], *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait(process: subprocess.Popen) -> None:
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


def kill_at(process: subprocess.Popen, run: Path, steps: int, delay: float) -> None:
    """`kill -9` once `steps` steps have been written, and a little later than that."""
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= steps:
            time.sleep(delay)
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_a_run_killed_three_times_ends_in_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    wait(launch("--run-dir", str(whole)))
    chance = random.Random(0)
    kill_at(launch("--run-dir", str(killed)), killed, chance.choice([0, 1]), chance.uniform(0, 0.3))
    for steps in (chance.choice([2, 3]), chance.choice([5, 6])):
        kill_at(launch("--resume", str(killed)), killed, steps, chance.uniform(0, 0.2))
    wait(launch("--resume", str(killed)))

    assert len(records(whole / "metrics.jsonl")) == 8
    assert all(record["grad_norm"] > 0 for record in records(whole / "metrics.jsonl"))
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert records(killed / name) == records(whole / name)
    mine, theirs = (load_file(run / "model" / "model.safetensors") for run in (killed, whole))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[k].view(torch.int32), theirs[k].view(torch.int32)) for k in mine)
    parity = json.loads((killed / "parity.json").read_text())
    assert parity == json.loads((whole / "parity.json").read_text())
    assert parity["identical"] and parity["steps_checked"] == 8


def test_a_finished_run_can_go_on_for_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, longer = tmp_path / "run", tmp_path / "longer"
    assert main(["train", "--steps", "2", *SMALL[2:], "--run-dir", str(run)]) == 0
    assert main(["train", "--resume", str(run), "--steps", "4"]) == 0
    assert main(["train", "--steps", "4", *SMALL[2:], "--run-dir", str(longer)]) == 0
    capsys.readouterr()
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        ours, theirs = records(run / name), records(longer / name)
        for line in (*ours, *theirs):  # the shorter run validated at its end
            for key in [k for k in line if k.startswith("validation/")]:
                del line[key]
        assert ours == theirs
    assert main(["train", "--resume", str(run), "--steps", "4", "--sampling.top-k", "3"]) == 2
    assert "sampling.top_k is 0 there and 3 here" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", "--steps", "4", *SMALL[2:], "--run-dir", str(run)]) == 0
    before = records(run / "metrics.jsonl")
    newest = run / "checkpoints" / "step_4"
    shard = next(newest.glob("trainer-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    assert main(["train", "--resume", str(run)]) == 0
    assert "resumed from step_2" in capsys.readouterr().err
    assert records(run / "metrics.jsonl") == before


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    init_folder("tiny", folder, seed=0)
    return folder


def test_gsm8k_trains_on_the_real_rows(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    arguments = ["gsm8k", "--data", str(DATA / "gsm8k_sample.jsonl"), "--model", str(model), "--steps", "3"]
    small = ["--trainer.prompts-per-step", "2", "--sampling.num-generations", "2"]
    more = ["--sampling.max-completion-length", "16", "--task.validation-prompts", "2"]
    assert main(["train", *arguments, *small, *more, "--run-dir", str(run), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps_done"] == 3
    questions = [json.loads(line)["question"] for line in (DATA / "gsm8k_sample.jsonl").read_text().splitlines()]
    rollouts = records(run / "rollouts.jsonl")
    assert len(rollouts) == 6
    for record in rollouts:
        assert any(q in json.dumps(record["prompt"], ensure_ascii=False) for q in map(_as_json, questions))
    report = (run / "report.html").read_text()
    assert any(q.split("'")[0][:40] in report for q in questions)
    parity = json.loads((run / "parity.json").read_text())
    assert parity["identical"] and parity["tokens_checked"] == sum(
        len(s["token_ids"]) for r in rollouts for s in r["samples"]
    )


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def test_the_exported_model_loads_in_transformers_and_in_every_command(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    run = tmp_path / "run"
    assert main(["train", "--steps", "1", *SMALL[2:], "--run-dir", str(run)]) == 0
    exported = run / "model"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert theirs.generate(**tokenizer("12 34=", return_tensors="pt"), max_new_tokens=4).shape[1] > 6
    capsys.readouterr()

    assert main(["parity", "--model", str(exported), "--tokens", "500", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["identical"] and report["tokens_checked"] >= 500 and report["max_delta"] == 0

    assert main(["generate", "--model", str(exported), "--prompt", "12 34=", "--n", "2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["completions"]) == 2

    assert main(["eval", "--model", str(exported), "--task", "sum-digits", "--prompts", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 3


def test_parity_prints_its_report(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--model", str(model), "--tokens", "300"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("  Generator log-probs[:5]: [-")
    assert lines[0].split(": ", 1)[1] == lines[1].split(": ", 1)[1]
    assert lines[2] == "  Bitwise identical : True"
    assert lines[4:] == [
        "  Tokens different  : 0",
        "  Max delta         : 0.000000e+00",
        "PASS: generator and trainer log-probs are bitwise identical.",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere/at/all"], "there is no such folder"),
        (["gsm8k", "--model", "MODEL", "--data", "nothing.jsonl"], "nothing.jsonl"),
        (["gsm8k", "--model", "MODEL", "--data", "BROKEN"], "line 2"),
        (["dataset", "--model", "MODEL", "--data", "GOOD", "--reward", "REWARDS:raises"], "raises"),
        (["dataset", "--model", "MODEL", "--data", "GOOD", "--reward", "REWARDS:missing"], "missing"),
        (["--generator.kv-cache-tokens", "16"], "generator.kv_cache_tokens"),
        (["--sampling.max-completion-length", "5000"], "sampling.max_completion_length"),
        (["--arch", "giant"], "arch 'giant' is unknown"),
    ],
)
def test_bad_input_ends_with_exit_code_2(
    arguments: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": \n')
    (tmp_path / "good.jsonl").write_text('{"prompt": "hello"}\n' * 40)
    (tmp_path / "rewards.py").write_text("def raises(completions, **_):\n    raise ValueError('of course')\n")
    names = {"MODEL": model, "BROKEN": tmp_path / "broken.jsonl", "GOOD": tmp_path / "good.jsonl"}
    names["REWARDS"] = tmp_path / "rewards.py"
    for name, path in names.items():
        arguments = [a.replace(name, str(path)) for a in arguments]
    assert (
        main(["train", *arguments, "--steps", "1", "--trainer.warmup-steps", "0", "--run-dir", str(tmp_path / "r")])
        == 2
    )
    errors = capsys.readouterr().err
    assert message in errors and "Traceback" not in errors
