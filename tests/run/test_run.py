"""Runs through the command line: real data, what a run folder holds, signals, a full disk, bad input."""

from __future__ import annotations

import gc
import json
import resource
import signal
import time
from pathlib import Path
from statistics import pstdev
from typing import Any

import pytest
from processes import DEADLINE, running_lockstep, wait_for
from runs import COMMAND, DATA, SMALL, SUM, records

from lockstep.cli.main import main
from lockstep.rl.loop import Loop
from lockstep.run.recorder import Recorder

UNHURRIED = ["--checkpoint.grace", str(DEADLINE)]
pytestmark = pytest.mark.usefixtures("shallow_models")


def test_a_cache_that_cannot_be_written_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", "/dev/null/cache")
    assert main(["train", *SUM, "--run-dir", str(tmp_path / "run")]) == 0
    assert [message[:50] for message in caplog.messages] == ["the cache /dev/null/cache cannot be written ([Errn"]


def test_a_reward_may_change_the_working_directory(
    runs_freeze_gc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "moves.py").write_text(
        "import os\ndef root(completions, **_):\n    os.chdir('/')\n    return [0.0] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    frozen, step = [gc.get_freeze_count()], Loop.step
    monkeypatch.setattr(Loop, "step", lambda *given: frozen.append(gc.get_freeze_count()) or step(*given))
    assert main(["train", *SUM, "--reward", "moves.py:root", "--run-dir", "run", "--checkpoint.interval", "1"]) == 0
    assert (tmp_path / "run" / "report.html").is_file() and (tmp_path / "run" / "model").is_dir()
    assert min(frozen[1:]) > frozen[0] and not gc.get_freeze_count(), "garbage is looked for in what steps make"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_told_to_end_leaves_its_summary(tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "run"
    command = [*COMMAND[:4], *SUM, "--trainer.max-idle-steps", "100000", "--run-dir", str(run)]
    command[command.index("2")] = "100000"
    with running_lockstep(command[3:]) as process:
        wait_for((run / "metrics.jsonl").exists, process)
        time.sleep(0.2)  # at any point of a step
        process.send_signal(number)
        _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 128 + number
    assert f"lockstep: ended by {number.name}" in errors and "Traceback" not in errors
    assert json.loads((run / "summary.json").read_text())["total_s"] > 0 and (run / "report.html").is_file()


def test_ctrl_c_says_what_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    reward, scored = ["--reward", f"{DATA / 'rewards.py'}:spread"], tmp_path / "scored"
    command = ["train", *SUM, *reward, "--checkpoint.interval", "100000", *UNHURRIED, "--run-dir", str(run)]
    command[command.index("2")] = "100000"
    with running_lockstep(command, PAUSE=f"3 {scored}") as process:
        wait_for(scored.exists, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130 and "Traceback" not in errors
    lines = errors.splitlines()
    assert [line for line in lines if not line.startswith("still ")][0] == f"run folder: {run}"  # on a busy machine
    assert lines[-5:-1] == [
        "lockstep: interrupted",
        f"folder  {run}",
        f"report  {run}/report.html",
        f"go on   lockstep train --resume {run}",
    ]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2  # the third step is given up
    assert sorted(path.name for path in run.glob("checkpoints/*")) == ["step_0", "step_2"]
    assert lines[-1] == "from    step 2"
    assert sum(line.startswith("SIGINT: the run saves the last whole step and ends") for line in lines) == 1


@pytest.mark.parametrize("on_error", ["zero", "raise"])
def test_a_step_whose_rewards_may_have_been_sent_a_signal_too_is_done_again(tmp_path: Path, on_error: str) -> None:
    run, reward = tmp_path / "run", ["--reward", f"{DATA / 'rewards.py'}:spread", "--task.reward-on-error", on_error]
    command = ["train", *SUM, *reward, "--checkpoint.interval", "100", "--loss.dynamic-sampling"]
    command[command.index("2")] = "3"
    with running_lockstep([*command, *UNHURRIED, "--run-dir", str(run)], shallow=True, SPOIL="3") as process:
        _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 143 and "Traceback" not in errors and "lockstep: ended by SIGTERM" in errors
    done = len((run / "metrics.jsonl").read_text().splitlines())
    saved = sorted(path.name for path in run.glob("checkpoints/*"))
    assert done == 2 and saved == (["step_0", f"step_{done}"] if on_error == "zero" else ["step_0"])
    assert (f"step {done + 1} is not saved" in errors) == (on_error == "raise")
    assert main(["train", "--resume", str(run)]) == 0
    assert main([*command, "--run-dir", str(tmp_path / "whole")]) == 0
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert records(run / name) == records(tmp_path / "whole" / name)


@pytest.mark.parametrize("within", [True, False])
def test_a_validation_that_may_have_been_sent_a_signal_too_is_done_when_the_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: bool
) -> None:
    """Or one that was due when it came."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    command = ["train", *SUM, "--checkpoint.interval", "100", "--task.validation-interval", "2", *UNHURRIED]
    command[command.index("--steps") + 1], command[command.index("--task.validation-prompts") + 1] = "3", "2"
    name = "validate" if within else "_pack"
    does = getattr(Loop, name)

    def signalled(loop: Loop, *given: Any) -> Any:
        if loop.prompts_used == 2:
            time.sleep(0.1)  # until what rewards have started would have been told, too
            signal.raise_signal(signal.SIGTERM)
        return does(loop, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, name, signalled)
        assert main([*command, "--run-dir", str(run)]) == 143
    assert sorted(path.name for path in run.glob("checkpoints/*")) == ["step_0", "step_2"]
    assert "validation/reward/mean" not in records(run / "metrics.jsonl")[1]
    assert main(["train", "--resume", str(run)]) == 0
    assert main([*command, "--run-dir", str(whole)]) == 0
    validations = [json.loads((folder / "summary.json").read_text())["validation"] for folder in (run, whole)]
    assert validations[0] == validations[1] and list(validations[0]) == ["0", "2", "3"]
    assert records(run / "metrics.jsonl") == records(whole / "metrics.jsonl")


@pytest.mark.parametrize("late", [0.0, 1e6])
def test_a_step_that_trains_when_a_signal_comes_is_finished_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], late: float
) -> None:
    """Unless what its rewards started may have had it before: a launcher sends it to one process after another."""
    packs = Loop._pack

    def pack(loop: Loop, *groups: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return packs(loop, *groups)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_pack", pack)
        patch.setattr("lockstep.session.signals._LAUNCHER_DELAY", late)
        assert (
            main(["train", *SUM, "--checkpoint.interval", "5", *UNHURRIED, "--run-dir", str(tmp_path / "run")]) == 143
        )
    assert sorted(path.name for path in tmp_path.glob("run/checkpoints/*")) == ["step_0"] + ["step_1"] * (not late)
    assert ("step 1 is not saved" in capsys.readouterr().err) == bool(late)


def test_a_signal_behind_the_last_step_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = Recorder.checkpoint

    def checkpoint(recorder: Recorder, loop: Loop, step: int, last: bool = False) -> None:
        saves(recorder, loop, step, last)
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    command = ["train", *SUM, "--checkpoint.interval", "2", *UNHURRIED, "--run-dir", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "checkpoint", checkpoint)
        assert main(command) == 143
    assert (tmp_path / "run" / "checkpoints" / "step_2").is_dir() and not (tmp_path / "run" / "model").exists()
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0 and (tmp_path / "run" / "model").is_dir()


def test_the_screen_of_a_run_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", "--steps", "2", *SMALL[2:], "--run-dir", str(run)]) == 0
    printed = capsys.readouterr()
    first, *lines = printed.err.splitlines()
    assert first == f"run folder: {run}"
    beginnings = ["tiny, random weights (0.", "warm-up: at most 2", "warm-up: loss", "validation after 0", "step 1/2"]
    beginnings += ["validation after 2", "step 2/2"]
    assert [line for line in lines if not line.startswith("start-up: ")] == [
        next(line for line in lines if line.startswith(beginning)) for beginning in beginnings
    ]
    summary = json.loads((run / "summary.json").read_text())
    tokens = json.loads((run / "parity.json").read_text())["tokens_checked"]
    assert printed.out == (
        f"learned    {summary['learned']}\n"
        f"identical  yes: {tokens:,} tokens compared between generator and trainer, 0 different\n"
        f"report     {run}/report.html\n"
        f"next       {summary['next']}\n"
    )
    spread = [summary["validation"][step]["validation/rewards/spread/mean"] for step in ("0", "2")]
    assert summary["learned"].startswith("held-out spread {:.3g} -> {:.3g}, after 2 steps".format(*spread))
    assert summary["next"].startswith(f"lockstep generate --model {run}/model --prompt '")


@pytest.mark.parametrize(("limit", "file"), [(200, "config.yaml"), (40_000, "checkpoint"), (40_000, "model")])
def test_a_full_disk_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: int, file: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        interval = str(int(file == "checkpoint"))
        assert main(["train", *SUM, "--checkpoint.interval", interval, "--run-dir", str(tmp_path / "run")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    place = {"checkpoint": "checkpoints/step_0", "model": ".new-model"}.get(file, file)
    assert f"{tmp_path / 'run' / place}" in errors and "File too large" in errors
    assert not list((tmp_path / "run").rglob(".tmp-*")) and not list((tmp_path / "run").glob("model/*"))


def test_what_is_open_is_closed_though_the_summary_cannot_be_written(tmp_path: Path, capsys) -> None:
    run, reward = tmp_path / "run", tmp_path / "blocks.py"
    reward.write_text(
        f"import os\ndef it(completions, **_):\n    os.makedirs('{run}/summary.json/in the way', exist_ok=True)\n"
        "    return [0.0] * len(completions)\n"
    )
    assert main(["train", *SUM, "--reward", f"{reward}:it", "--run-dir", str(run)]) == 1
    assert f"could not write {run / 'summary.json'}" in capsys.readouterr().err
    assert json.loads((run / "timeline.json").read_text())[-1]["name"] == "end"


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
    last, samples = records(run / "metrics.jsonl")[-1], [s for r in rollouts[-2:] for s in r["samples"]]
    assert last["epoch"] == 3 * 2 / (len(questions) - 2)  # less those held out
    lengths, correct = [s["tokens"] for s in samples], [s["rewards"]["correct"] for s in samples]
    assert last["response_length/max"] == max(lengths)
    assert last["rewards/correct/std"] == pstdev(correct) and "validation/rewards/correct/std" not in last
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
    compared, *lines = capsys.readouterr().out.splitlines()
    assert compared == "  Compared          : the model, called by both roles"
    assert lines[0].startswith("  Generator log-probs[:5]: [-")
    assert lines[0].split(": ", 1)[1] == lines[1].split(": ", 1)[1]
    assert lines[2] == "  Bitwise identical : True"
    assert lines[4:] == [
        "  Tokens different  : 0",
        "  Max delta         : 0.000000e+00",
        "  Average delta     : 0.000000e+00",
        "  Log-prob diff     : mean 0.000000e+00, max 0.000000e+00",
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
        (["--generator.kv-cache-tokens", "1"], "generator.kv_cache_tokens of 1 (whole pages of 16)"),
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
