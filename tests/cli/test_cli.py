"""The command line: what flags resolve to, what bad input says, exit codes, and what goes where.

The commands' own work (`lockstep.run.train`, `lockstep.run.evaluate`, `lockstep.session.parity_check`,
`lockstep.models.init`) is replaced by recorders: these tests are about the way there and back. `test_llm.py` and
`test_evaluation.py` run the real ones.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tyro
from processes import finished, unread_pipe

import lockstep
import lockstep.run.replay  # before something stands for what it imports
from lockstep.cli import flags
from lockstep.cli import main as cli_main
from lockstep.cli.main import main
from lockstep.config import LOSS_TYPES, READ_BY, CompileConfig, LossConfig, ParallelConfig, RunConfig, yaml_file
from lockstep.config.recipes import RECIPES
from lockstep.distributed import ONE_PROCESS, World
from lockstep.errors import InputError, LockstepError, ParityError


class Recorder(SimpleNamespace):
    """Stands for `lockstep.run.train`: remembers the calls, returns or raises what the test sets."""

    def __init__(self) -> None:
        super().__init__(calls=[], result={"total_s": 1.5, "note": math.nan, "warmup": None}, error=None)

    def _record(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        print("a library's chatter")
        if self.error is not None:
            raise self.error
        return self.result

    def train(self, config: RunConfig, run_dir: Path, resume: bool, world: World, other_numerics: bool) -> Any:
        assert world is ONE_PROCESS
        result = self._record(config, run_dir, resume)
        yaml_file.save(config, run_dir / "config.yaml")
        return result

    def evaluate(self, config: RunConfig, **arguments: Any) -> Any:
        return self._record(config, arguments)

    def render(self, result: Any) -> str:
        return str(result)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorder:
    monkeypatch.chdir(tmp_path)
    recorder = Recorder()
    for name in ("run.train", "run.evaluate", "session.evaluation"):
        monkeypatch.setitem(sys.modules, f"lockstep.{name}", recorder)
    return recorder


def command(line: str) -> int:
    """The exit code of `lockstep LINE`."""
    return main(line.split())


def resolved(run: Recorder, line: str) -> RunConfig:
    """The configuration that `lockstep train LINE` trains with."""
    assert command(f"train {line}") == 0
    return run.calls[-1][0]


# What flags resolve to


def test_train_alone_is_the_default_recipe(run: Recorder) -> None:
    assert resolved(run, "") == RECIPES["sum-digits"](None)
    _, run_dir, resume = run.calls[0]
    assert run_dir.parent == Path("runs") and run_dir.name.startswith("sum-digits-") and not resume


def test_runs_of_one_second_get_folders_of_their_own(run: Recorder) -> None:
    for _ in range(3):
        assert command("train") == 0
    assert len({call[1] for call in run.calls}) == 3


def test_flags_override_the_recipe(run: Recorder) -> None:
    config = resolved(
        run,
        "gsm8k --steps 7 --seed 3 --model my/model --device cpu --parity warn --data d.jsonl "
        "--sampling.top-p 0.9 --sampling.top_k=5 --loss.loss_type dapo --generator.no-prefix-caching",
    )
    recipe = RECIPES["gsm8k"](None)
    assert config == replace(
        recipe,
        steps=7,
        seed=3,
        model="my/model",
        device="cpu",
        parity="warn",
        task=replace(recipe.task, data="d.jsonl"),
        sampling=replace(recipe.sampling, top_p=0.9, top_k=5),
        loss=replace(recipe.loss, loss_type="dapo"),
        generator=replace(recipe.generator, prefix_caching=False),
    )


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("name", RECIPES)
def test_every_algorithm_trains_on_every_recipe(
    run: Recorder, capsys: pytest.CaptureFixture[str], name: str, loss_type: str
) -> None:
    """What a recipe sets for its own algorithm falls away with it, and that is said."""
    rows = {"gsm8k": "--data d", "dataset": "--data d --reward math"}.get(name, "")
    begin = RECIPES[name](None)
    fallen = [
        field
        for field, readers in READ_BY.items()
        if loss_type not in readers and getattr(begin.loss, field) != getattr(LossConfig(), field)
    ]
    config = resolved(run, f"{name} {rows} --steps 3 --loss.loss-type {loss_type}")
    assert config.loss == replace(
        begin.loss, loss_type=loss_type, **{field: getattr(LossConfig(), field) for field in fallen}
    )
    assert config.trainer == begin.trainer and config.steps == 3
    said = capsys.readouterr().err
    assert ("left out" in said) == bool(fallen) and all(f"loss.{field}" in said for field in fallen)


@pytest.mark.parametrize("flag", ["--loss.overlong-buffer 4", "--loss.overlong_buffer=4", "--loss.overlong-buffer 0"])
def test_a_flag_that_the_algorithm_does_not_read_is_not_left_out(
    run: Recorder, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert command(f"train --loss.loss-type gspo {flag}") == 2 and not run.calls
    assert "loss.overlong_buffer has no effect on loss_type gspo; use dapo" in capsys.readouterr().err


def test_a_replayed_run_takes_another_algorithm(run: Recorder) -> None:
    resolved(run, "--run-dir first")
    config = resolved(run, "--config first/config.yaml --loss.loss-type rloo --run-dir second")
    assert config.loss == LossConfig(loss_type="rloo")


@pytest.mark.parametrize("prefix", ["--", "--task."])
def test_short_and_long_names_of_data_and_reward(run: Recorder, prefix: str) -> None:
    config = resolved(run, f"dataset {prefix}data d.jsonl {prefix}reward m:f p.py:g")
    assert config.task.data == "d.jsonl" and config.task.reward == ("m:f", "p.py:g")


def test_the_recipe_may_stand_anywhere_before_a_list(run: Recorder) -> None:
    assert resolved(run, "--steps 2 gsm8k --data d").recipe == "gsm8k"


def test_config_replays_and_flags_override_it(run: Recorder, tmp_path: Path) -> None:
    saved = replace(RECIPES["sum-digits"](None), seed=11, steps=4)
    yaml_file.save(saved, tmp_path / "my.yaml")
    assert resolved(run, "--config my.yaml") == saved
    assert resolved(run, "--config my.yaml --steps 9") == replace(saved, steps=9)


def test_a_home_folder_that_the_shell_did_not_expand(
    run: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    first = resolved(run, "--run-dir=~/r --seed 5")
    assert run.calls[-1][1] == tmp_path / "home" / "r"
    assert resolved(run, "--resume=~/r") == resolved(run, "--config=~/r/config.yaml") == first
    lockstep.train(first, "~/other")
    assert run.calls[-1][1] == tmp_path / "home" / "other" and not Path("~").exists()


def test_flags_are_parsed_again_where_a_run_begins_from_something_else(
    run: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed, parse = [], tyro.cli
    monkeypatch.setattr(tyro, "cli", lambda *given, **named: parsed.append(1) or parse(*given, **named))
    own = RECIPES["sum-digits"](None)
    for name, config in {"same": own, "model": replace(own, model="own"), "seed": replace(own, seed=3)}.items():
        yaml_file.save(config, tmp_path / f"{name}.yaml")
    for line, model, seed, times in (
        ("gsm8k --data d.jsonl", "Qwen/Qwen3-0.6B", 0, 1),
        ("gsm8k --data d.jsonl --model other --seed 5", "other", 5, 1),
        ("--model other", "other", 0, 2),
        ("--config same.yaml", None, 0, 1),
        ("--config model.yaml", "own", 0, 2),
        ("--config model.yaml --model other", "other", 0, 2),
        ("--config seed.yaml --model other", "other", 3, 2),
    ):
        config = resolved(run, line)
        assert (config.model, config.seed, len(parsed)) == (model, seed, times), line
        assert config.recipe == ("gsm8k" if "gsm8k" in line else "sum-digits")
        parsed.clear()


def test_resume_goes_on_with_the_run_and_may_raise_steps(run: Recorder, tmp_path: Path) -> None:
    first = resolved(run, "--run-dir r --seed 5 --steps 3")
    assert resolved(run, "--resume r") == first
    assert run.calls[-1][1:] == (Path("r"), True)
    assert resolved(run, "--resume r --steps 8 --seed 5") == replace(first, steps=8)


def test_eval(run: Recorder) -> None:
    flags = "eval --model m --task gsm8k --data test.jsonl --prompts 50 --max-completion-length 64 --dtype float32"
    assert command(flags) == 0
    config, arguments = run.calls[0]
    assert arguments.pop("progress") is not None
    settings = {"n": 1, "k": (), "temperature": None, "pass_reward": None, "pass_threshold": 1.0}
    assert arguments == settings
    assert (config.model, config.dtype, config.sampling.max_completion_length) == ("m", "float32", 64)
    task = config.task
    assert (task.name, task.data, task.validation_data, task.validation_prompts) == ("gsm8k", *["test.jsonl"] * 2, 50)
    assert command("eval --model m --task sum-digits --no-easy") == 0
    assert run.calls[1][0].task.easy is False
    assert (
        command("eval --model m --task sum-digits --n 8 --k 1 8 --temperature 0.5 --pass-reward tagged --seed 3") == 0
    )
    template = "--system-prompt brief --chat-template-kwargs enable_thinking=false"
    assert command(f"eval --model m --task dataset --data d --reward math {template}") == 0
    task = run.calls[3][0].task
    assert (task.system_prompt, task.chat_template_kwargs) == ("brief", ("enable_thinking=false",))
    assert command("eval --model m --task word-arithmetic --environment calculator --max-turns 3") == 0
    assert (run.calls[4][0].task.environment, run.calls[4][0].task.turns) == ("calculator", 3)
    config, arguments = run.calls[2]
    assert config.seed == 3
    chosen = {"n": 8, "k": (1, 8), "temperature": 0.5, "pass_reward": "tagged"}
    assert {name: arguments[name] for name in chosen} == chosen


@pytest.mark.parametrize("identical", [True, False])
def test_parity(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], identical: bool) -> None:
    calls = []

    def check_model(*arguments: Any) -> Any:
        calls.append(arguments)
        return SimpleNamespace(identical=identical, render=lambda: "PASS", to_dict=lambda: {"identical": identical})

    monkeypatch.setitem(sys.modules, "lockstep.session.parity_check", SimpleNamespace(check_model=check_model))
    assert command("parity --model m --tokens 12") == (0 if identical else 1)
    assert calls == [("m", 12, 0, "auto", "auto", "native", None, CompileConfig(), ParallelConfig())]
    assert capsys.readouterr().out == "PASS\n"
    command("parity --model m --json")
    assert json.loads(capsys.readouterr().out) == {"identical": identical}


def test_init(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def init_folder(*arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        return {"parameters": 12}

    monkeypatch.setitem(sys.modules, "lockstep.models.init", SimpleNamespace(init_folder=init_folder))
    assert command("init tiny --out m --seed 4 --vocab-size 600 --json") == 0
    assert calls == [("tiny", Path("m"), 4, None, 600)]
    assert json.loads(capsys.readouterr().out) == {"parameters": 12}


# What goes where


def test_json_prints_one_object_and_nothing_else(run: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train --json") == 0
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert Path(summary.pop("run_dir")).parent == Path("runs")
    assert summary == {"total_s": 1.5, "note": "NaN", "warmup": None} and printed.out.count("\n") == 1
    assert "a library's chatter" in printed.err


def test_without_json_what_was_learned_and_what_comes_next(run: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    run.result = {
        "learned": "held-out correct 77.5 % -> 98 %",
        "parity": {"identical": True, "tokens_checked": 1357517, "tokens_different": 0},
        "next": "lockstep generate --model r/model",
        "startup/task": 0.0001127,
    }
    assert command("train --run-dir r") == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("run folder: r\n")
    assert printed.out == (
        "learned    held-out correct 77.5 % -> 98 %\n"
        "identical  yes: 1,357,517 tokens compared between generator and trainer, 0 different\n"
        "report     r/report.html\n"
        "next       lockstep generate --model r/model\n"
    )


def test_without_json_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = {"out": "m", "parameters": 12, "total_s": 1.5, "note": None, "list": [1]}
    monkeypatch.setitem(sys.modules, "lockstep.models.init", SimpleNamespace(init_folder=lambda *_: made))
    assert command("init tiny --out m") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["out", "m"] and ["total_s", "1.5"] in [line.split() for line in lines]
    assert "None" not in " ".join(lines)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--version") == 0
    assert capsys.readouterr().out == f"lockstep {lockstep.__version__}\n"


NOT_READ = {  # flags of sections that a command reads in part
    "generate": ("--parallel.fsdp", "--compile.recompute"),
    "eval": ("--parallel.cell", "--compile.bucket-collectives"),
    "chat": ("--compile.inductor",),
    "parity": ("--parallel.batch-shards",),
}


@pytest.mark.parametrize("name", ["", "train", "generate", "chat", "eval", "parity", "init", "report"])
def test_help_says_what_there_is(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert command(f"{name} --help") == 0
    said = capsys.readouterr().out
    assert f"usage: lockstep {name}".rstrip() in said
    for flag in NOT_READ.get(name, ()):
        assert flag.partition(".")[0] in said and flag not in said
        assert command(f"{name} --model m {flag}=2") == 2
        assert f"{flag} is for training, and lockstep {name} trains nothing" in capsys.readouterr().err


def test_help_shows_the_defaults_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    command("train gsm8k --help")
    assert f"(default: {RECIPES['gsm8k'](None).steps})" in capsys.readouterr().out


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from lockstep.cli.main import main; main(['train', '--help']); sys.exit('torch' in sys.modules)"
    assert finished([sys.executable, "-c", code]).returncode == 0


def test_a_closed_pipe_is_no_traceback() -> None:
    with unread_pipe() as pipe:
        done = finished([sys.executable, "-m", "lockstep", "--help"], stdout=pipe)
    assert done.returncode == 1 and "Traceback" not in done.stderr


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
@pytest.mark.parametrize("arguments", ["--help", "--version", "report run --json"])
def test_standard_output_that_is_full(tmp_path: Path, arguments: str) -> None:
    (tmp_path / "run").mkdir()
    yaml_file.save(RunConfig(), tmp_path / "run" / "config.yaml")
    with FULL.open("w") as full:
        line = [sys.executable, "-m", "lockstep", *arguments.split()]
        done = finished(line, stdout=full, cwd=tmp_path)
    assert done.returncode == 1
    assert (
        done.stderr.startswith("lockstep: failed: standard output cannot be written") and done.stderr.count("\n") == 1
    )


@pytest.mark.parametrize(("closed", "stream"), [(">&-", "output"), ("<&-", "input")])
def test_streams_that_are_closed(closed: str, stream: str) -> None:
    line = f"exec {shlex.quote(sys.executable)} -m lockstep chat --model m {closed}"
    done = finished(["sh", "-c", line])
    assert done.returncode == 2
    assert done.stderr.startswith(f"lockstep: error: standard {stream} is closed") and done.stderr.count("\n") == 1


def test_a_process_that_may_address_too_little() -> None:
    line = f"ulimit -v 700000; exec {shlex.quote(sys.executable)} -m lockstep generate --model m --prompt x"
    done = finished(["sh", "-c", line])
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert "this process may address 0.67 GiB of memory (ulimit -v)" in done.stderr


def test_a_thread_that_does_not_start_is_told_with_the_limits() -> None:
    stacks = f"import threading; threading.stack_size({1 << 46})"  # which no process may address
    code = f"{stacks}; from lockstep.__main__ import entry; entry()"
    done = finished([sys.executable, "-c", code, "train", "sum-digits", "--steps", "1", "--device", "cpu"])
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1, done.stderr
    begin = "lockstep: error: the system starts no further thread: can't start new thread; this user may have "
    assert done.stderr.startswith(begin) and "(ulimit -u)" in done.stderr and "(ulimit -v)" in done.stderr


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (
            "subprocess.run(['true'])",
            "starts no further process: [Errno 11] Resource temporarily unavailable; this user may have 0 processes "
            "and threads (ulimit -u)",
        ),
        (
            "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 64)); open(os.devnull)",
            "opens no further file: [Errno 24] Too many open files: '/dev/null'; this process may have 0 open "
            "(ulimit -n)",
        ),
    ],
)
def test_what_the_system_refuses_is_told_with_the_limits(wanted: str, said: str, tmp_path: Path) -> None:
    code = f"""
import os, resource, subprocess, sys, types
from lockstep.cli.main import main
def train(*_, **__):
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    os.setuid(os.getuid() or 65534)  # root may have any number
    {wanted}
sys.modules["lockstep.run.train"] = types.SimpleNamespace(train=train)
sys.exit(main(["train", "--run-dir", {str(tmp_path / "run")!r}]))
"""
    done = finished([sys.executable, "-c", code])
    *before, last = done.stderr.splitlines()
    assert (done.returncode, done.stdout, before) == (2, "", [f"run folder: {tmp_path / 'run'}"]), done.stderr
    assert last.startswith(f"lockstep: error: the system {said}")


def test_no_folder_for_temporary_files_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a container with a root that is read-only; torch's import wants one."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/dev/null"])
    monkeypatch.setitem(cli_main.COMMANDS, flags.Replay, lambda _: tempfile.gettempdir())
    assert main(["replay", "run", "--trajectory", "0/0/0"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("lockstep: error: no temporary file can be written: [Errno 2] No usable temporary directory")
    assert said.endswith("; set TMPDIR to a folder that is neither full nor read-only")


def test_a_reader_that_goes_away_does_not_end_a_run(run: Recorder, tmp_path: Path) -> None:
    """`lockstep train 2>&1 >/dev/null | head -1`: what is said after that goes nowhere, and the run ends well."""
    code = f"""
import sys, types
from lockstep.cli.main import main
def train(config, run_dir, resume, world, other_numerics):
    for _ in range(10000):
        print("a library's chatter")  # standard output is redirected to standard error
    (run_dir / "done").touch()
    return {{}}
sys.modules["lockstep.run.train"] = types.SimpleNamespace(train=train)
sys.exit(main(["train", "--run-dir", {str(tmp_path / "run")!r}, "--json"]))
"""
    with unread_pipe() as pipe:
        done = finished([sys.executable, "-c", code], stderr=pipe)
    assert done.returncode == 0 and json.loads(done.stdout)["run_dir"] and (tmp_path / "run" / "done").exists()


def test_report_says_where_it_is(run: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        Path(name).mkdir()
        yaml_file.save(RunConfig(), Path(name, "config.yaml"))
    assert command("report a") == 0 and Path("a/report.html").is_file()
    assert command("report a b --out both.html --json") == 0 and Path("both.html").is_file()
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["a/report.html", '{"report": "both.html"}']
    assert command("report a b") == 2 and not Path("runs.html").exists()
    assert "2 runs are compared on a page of their own: name it with --out FILE.html" in capsys.readouterr().err


# Bad input: exit code 2, a message that names it, nothing on standard output, nothing run


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ("trian", ["trian", "train, precompile, plan, generate, eval, chat, serve, report, parity, init, replay"]),
        ("train sum-digit", ["unknown recipe 'sum-digit'", "did you mean sum-digits"]),
        ("train zzz", ["unknown recipe 'zzz'", "allowed: sum-digits, word-arithmetic, gsm8k, dataset"]),
        ("train mine.yaml", ["unknown recipe 'mine.yaml'; a file is named by --config mine.yaml; allowed: sum-digits"]),
        ("train sum-digits gsm8k", ["gsm8k"]),
        (
            "train gsm8k data.train_batch_size=8",
            ["data.train_batch_size=8 is no flag; settings are given as --section.key VALUE", "prompts-per-step?)"],
        ),
        (
            "train gsm8k --model none data.train_files=x.parquet",
            ["data.train_files=x.parquet is no flag", "(did you mean --data?)"],
        ),
        ("train trainer.n_gpus_per_node=8", ["VALUE (as many as torchrun starts processes of lockstep)"]),
        ("generate --prompt a.b=c --stop d e.g=f --model none", ["none"]),
        ("train gsm8k --optimizer.lr_scales model.norm=2 lm_head.weight=3", ["task.data is missing"]),
        ("train --stepz 3", ["unknown flag --stepz (did you mean --steps?); lockstep train --help lists"]),
        ("train --batch-size 3", ["unknown flag --batch-size (did you mean --trainer.prompts-per-step?)"]),
        ("generate --repetition-penalty 1.1", ["(there is none here: tokens are drawn from the model's own"]),
        ("generate --presence-penalty 1", ["unknown flag --presence-penalty (there is none here: tokens are drawn"]),
        ("chat --prompt_logprobs 1", ["--prompt-logprobs (there are log-probabilities of sampled tokens alone)"]),
        ("train --use_peft", ["unknown flag --use-peft (there is no LoRA here: all weights are trained)"]),
        ("train --sync_ref_model", ["unknown flag --sync-ref-model (the reference stays the run's first model; a new"]),
        ("train --delta 4", ["unknown flag --delta (no algorithm bounds the ratio twice; docs/algorithms.md has one"]),
        ("train --entropy-coeff 0.001", ["(no algorithm has an entropy bonus; docs/algorithms.md has one to copy"]),
        (
            "train --clip-ratio-high 0.28 --eps-clip 0.2 --init-kl-coef 0.1 --n-samples-per-prompt 4",
            ["--loss.epsilon-high?", "--loss.epsilon?", "--loss.beta?", "--sampling.num-generations?"],
        ),
        ("generate --max-tokens 3", ["unknown flag --max-tokens (did you mean --max-completion-length?)"]),
        (
            "train --max-response-length 3",
            ["(did you mean --sampling.max-completion-length or --task.max-response-length?)"],
        ),
        ("generate --max-response-length 3", ["(did you mean --max-completion-length?)"]),
        ("train --step 3", ["unknown flag --step (did you mean --steps?)"]),
        ("train --optimizer.lr 3", ["unknown flag --optimizer.lr (did you mean --optimizer.learning-rate?)"]),
        ("train --loss.loss-type grpoo", ["loss.loss_type is 'grpoo' (did you mean grpo?); it must be one of grpo"]),
        ("train --sampling.topp 0.5", ["--sampling.topp", "--sampling.top-p"]),
        ("train --top_p=0.5", ["unknown flag --top-p (did you mean --sampling.top-p?)"]),
        ("train --learning-rate 1", ["--learning-rate (did you mean --optimizer.learning-rate?)"]),
        (
            "train --output_dir o --save-steps 5 --report_to wandb",
            ["--run-dir?", "--checkpoint.interval?", "--metrics.trackers?"],
        ),
        ("report a --qq", ["unknown flag --qq; lockstep report --help lists them all"]),
        ("train --steps many", ["--steps", "many"]),
        ("train --steps", ["--steps"]),
        ("train --steps 1 --steps 2", ["--steps is given twice"]),
        ("train --sampling.top-p=1 --sampling.top_p=1", ["--sampling.top-p is given twice"]),
        ("train dataset --data a b --steps 1", ["--data takes one file", "a and b; put files into one folder"]),
        ("train --data a --task.data b", ["--task.data is given twice (as --data before)"]),
        ("train --task.reward y --reward x", ["--reward is given twice (as --task.reward before)"]),
        ("train --task.shuffle --task.no-shuffle", ["--task.no-shuffle is given twice (as --task.shuffle before)"]),
        ("eval --model m --task sum-digits --no-easy --easy", ["--easy is given twice (as --no-easy before)"]),
        (
            "train --parallel.balance_batch no",
            ["takes no value, and is given 'no'; --parallel.no-balance_batch"],
        ),
        ("train --task.easy=false", ["--task.easy takes no value, and is given 'false'; --task.no-easy"]),
        ("parity --model m --compile.no-canonicalize=", ["canonicalize takes no value, and is given ''; --compile"]),
        ("eval --model m --task sum-digits --no-easy true", ["--no-easy takes no value", "; --easy is its opposite"]),
        ("replay done --trajectory ٠/0/0", ["it must be STEP/GROUP/SAMPLE"]),
        ("train --parity perhaps", ["--parity", "perhaps", "strict"]),
        ("train --steps -1", ["steps is -1", "at least 0"]),
        ("train --sampling.top-p 2", ["sampling.top_p is 2.0", "between"]),
        ("train dataset", ["task.data is missing"]),
        ("train --data d.jsonl", ["task.data has no effect on sum-digits"]),
        ("train --config none.yaml", ["none.yaml", "cannot be read"]),
        ("train --config bad.yaml", ["bad.yaml", "unknown key stepz", "did you mean steps"]),
        ("train gsm8k --config good.yaml", ["a recipe and --config"]),
        ("train --config good.yaml --resume done", ["--config and --resume"]),
        ("train --resume nowhere", ["--resume nowhere", "not a run folder"]),
        ("train --resume done --run-dir other", ["--run-dir has no effect with --resume"]),
        ("train --resume done --seed 9", ["--resume done", "seed is 0 there and 9 here", "only --steps"]),
        ("train --resume done --sampling.top-p 0.5", ["sampling.top_p is 1.0 there and 0.5 here"]),
        ("train --resume done --optimizer.freeze model.norm", ["optimizer.freeze is [] there and ['model.norm'] here"]),
        ("train --optimizer.lr-scales model.norm", ["optimizer.lr_scales holds 'model.norm'", "PATTERN=NUMBER"]),
        ("train --optimizer.lr-scales model.norm=0", ["optimizer.lr_scales holds", "named in optimizer.freeze"]),
        ("train --optimizer.weight-decays *=nan", ["optimizer.weight_decays of * is nan", "between 0 and"]),
        ("train --run-dir done", ["--run-dir done is not empty", "--resume done"]),
        ("train --run-dir good.yaml", ["cannot make the run folder", "good.yaml"]),
        ("generate --prompt x", ["--model"]),
        ("eval --model m --task sum-digit", ["unknown task 'sum-digit'", "did you mean sum-digits"]),
        ("eval --model m --task gsm8k", ["task.data is missing"]),
        ("eval --model m --task sum-digits --prompts 0", ["--prompts is 0"]),
        (
            "eval --model m --task sum-digits --max-completion-length 0",
            ["sampling.max_completion_length is 0; it must be at least 1"],
        ),
        ("generate --model m", ["give --prompt TEXT or --prompts FILE"]),
        ("generate --model m --prompt x --prompts f.txt", ["--prompt TEXT or --prompts FILE, one of the two"]),
        ("generate --model m --prompts f.txt", ["--prompts f.txt cannot be read"]),
        ("generate --model m --prompt x --top-p 2", ["sampling.top_p is 2.0"]),
        ("chat --model m --temperature -1", ["sampling.temperature is -1"]),
        ("chat --model m --chat-template-kwargs thinking", ["--chat-template-kwargs holds 'thinking'", "NAME=VALUE"]),
        ("chat --model m --system-prompt=", ["--system-prompt is empty"]),
        ("generate --model m --prompt x --system-prompt=", ["--system-prompt is empty"]),
        ("generate --model m --prompt x --chat-template-kwargs a=1", ["no effect on text", "with --system-prompt"]),
        ("generate --model m --prompt x --system-prompt s --chat-template-kwargs a=b", ["--chat-template-kwargs: the"]),
        ("eval --model m --task sum-digits --system-prompt s", ["task.system_prompt has no effect on sum-digits"]),
        ("eval --model m --task sum-digits --chat-template-kwargs a=1", ["task.chat_template_kwargs has no effect on"]),
        ("report", ["RUN_DIR"]),
        ("report nowhere", ["nowhere is not a run folder"]),
        ("replay nowhere --trajectory 0/0/0", ["nowhere is not a run folder"]),
        ("replay done --trajectory 0/0/0", ["done has no rollouts.jsonl"]),
        ("train --metrics.trackers tensorboard tensorboard", ["metrics.trackers names one twice"]),
        ("train --metrics.trackers mlflow", ["mlflow", "tensorboard"]),
        ("train --metrics.project p", ["metrics.project has no effect without wandb"]),
        ("parity --model m --tokens 0", ["tokens is 0", "between 1 and"]),
        ("parity --model m --tokens 1000000000000000000", ["tokens is 1000000000000000000"]),
        (
            "report done --out done/config.yaml",
            ["done/config.yaml: a page is written to a file whose name ends in .html"],
        ),
        ("report done done --out nosuch/x.html", ["nosuch/x.html: there is no folder nosuch"]),
        ("init tiny", ["--out"]),
        ("", ["train, precompile, plan, generate, eval, chat, serve, report, parity, init, replay"]),
    ],
)
def test_bad_input(run: Recorder, capsys: pytest.CaptureFixture[str], arguments: str, messages: list[str]) -> None:
    Path("done").mkdir()
    yaml_file.save(replace(RECIPES["sum-digits"](None), steps=30), Path("done/config.yaml"))
    Path("good.yaml").write_text("steps: 3\n")
    Path("bad.yaml").write_text("stepz: 3\n")
    assert command(arguments) == 2
    printed = capsys.readouterr()
    said = " ".join(printed.err.replace("│", " ").split())
    for message in messages:
        assert message in said
    assert printed.out == "" and "Traceback" not in printed.err
    assert run.calls == [] and not Path("runs").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("row 3 is bad"), 2),
        (ParityError("row 3 is bad"), 1),
        (LockstepError("row 3 is bad"), 1),
        (KeyboardInterrupt(), 130),
        (RuntimeError("CUDA out of memory, of which row 3 is bad"), 2),
        (MemoryError("row 3 is bad"), 2),
    ],
)
def test_exit_codes(run: Recorder, capsys: pytest.CaptureFixture[str], error: BaseException, code: int) -> None:
    run.error = error
    assert command("train --json") == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert ("row 3 is bad" if code != 130 else "interrupted") in printed.err
    assert not list(Path("runs").iterdir())  # a folder that nothing was written to does not stay


def test_a_process_that_no_launcher_ends_says_which_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli_main, "_wait_for_first_process", lambda *_: None)
    assert cli_main._main(["train", "--stepz", "1"]) == 2
    assert capsys.readouterr().err.startswith("lockstep: rank 1: error: unknown flag --stepz")
    told: list[str] = []
    monkeypatch.setattr(cli_main, "_wait_for_first_process", lambda *_: told.append(capsys.readouterr().err))
    assert cli_main._main(["train", "--parallel.zero-stage", "5"]) == 2
    said = capsys.readouterr().err
    assert told == [""] and said.startswith("lockstep: rank 1: error: wrong flags\n") and "zero-stage" in said


def test_a_bug_is_not_hidden(run: Recorder) -> None:
    run.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        command("train")
