"""Runs that go on through the command line: after kill -9, for longer, from what is damaged; and what is refused."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sysconfig
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from c_library import using
from model_edits import written
from processes import DEADLINE, finished, running_lockstep
from runs import COMMAND, DATA, QUICK, SMALL, SUM, records, saved, tensors_of
from safetensors.torch import load_file

from lockstep.api import load_run_config
from lockstep.cli.main import main
from lockstep.config import LossConfig, OptimizerConfig, yaml_file
from lockstep.errors import InputError
from lockstep.models import Decoder
from lockstep.models.hf import folder as models_folder
from lockstep.models.init import architecture, init_folder, initialize
from lockstep.ops.native import library
from lockstep.run import checkpoint, resume
from lockstep.run.timeline import read_timeline
from lockstep.session.golden import GRADIENT_NORM
from lockstep.trainer import Trainer

pytestmark = pytest.mark.usefixtures("shallow_models")


def launch(*arguments: str, kill_after: tuple[int, float] = (0, 0.0)) -> None:
    """Run to the end or, so many seconds after so many calls of the reward function, until it is killed."""
    command = [*COMMAND, *arguments] if "--resume" not in arguments else [*COMMAND[:4], *arguments]
    calls, seconds = kill_after
    with running_lockstep(command[3:], shallow=True, KILL_AFTER=f"{calls} {seconds}") as process:
        _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == (-signal.SIGKILL if calls else 0), errors


def test_a_run_killed_three_times_ends_in_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    launch("--run-dir", str(whole))
    chance = random.Random(0)
    launch("--run-dir", str(killed), kill_after=(chance.choice([1, 2]), chance.uniform(0, 0.1)))
    for calls in (chance.choice([2, 3]), chance.choice([2, 3])):
        launch("--resume", str(killed), kill_after=(calls, chance.uniform(0, 0.05)))
    launch("--resume", str(killed))

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
    events = json.loads((killed / "timeline.json").read_text())
    last = max(event["pid"] for event in events)
    done = [e["args"]["step"] for e in events if e["pid"] == last and e["name"] == "step"]
    assert last > 1 and done == list(range(8 - len(done), 8)) and events[-1]["name"] == "end"


def test_a_finished_run_goes_on_for_longer_and_a_stopped_one_ends_earlier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, longer = tmp_path / "run", tmp_path / "longer"
    assert main(["train", "--steps", "2", *SMALL[2:], "--run-dir", str(run)]) == 0
    of_two = (run / "model" / "model.safetensors").read_bytes()
    assert main(["train", "--resume", str(run), "--steps", "4"]) == 0
    exported = "--checkpoint.export-interval", "2"
    assert main(["train", "--steps", "4", *SMALL[2:], *exported, "--run-dir", str(longer)]) == 0
    models = [longer / name / "model.safetensors" for name in ("models/step_2", "models/step_4", "model")]
    assert models[0].read_bytes() == of_two != models[1].read_bytes() == models[2].read_bytes()
    capsys.readouterr()
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        ours, theirs = records(run / name), records(longer / name)
        for line in (*ours, *theirs):  # the shorter run validated at its end
            for key in [k for k in line if k.startswith("validation/")]:
                del line[key]
        assert ours == theirs
    (ours, theirs) = (json.loads((r / "checkpoints/step_4/state.json").read_text()) for r in (run, longer))
    assert ours["trainer"] == theirs["trainer"] and theirs["trainer"]["weights_version"] > 8
    assert list(json.loads((run / "summary.json").read_text())["validation"]) == ["0", "2", "4"]
    assert main(["train", "--resume", str(run), "--steps", "4", "--sampling.top-k", "3"]) == 2
    assert "sampling.top_k is 0 there and 3 here" in capsys.readouterr().err
    assert main(["train", "--resume", str(longer), "--steps", "3"]) == 2
    assert "steps is 3, and step_4 has done 4; give as many or more" in capsys.readouterr().err

    shutil.rmtree(longer / "checkpoints" / "step_4")  # as a run of four steps that was stopped after two or three
    shutil.rmtree(longer / "model")
    other = "--checkpoint.keep-last", "1", "--metrics.no-progress"  # which no step depends on
    assert main(["train", "--resume", str(longer), "--steps", "2", *other]) == 0
    assert load_run_config(longer).checkpoint.keep_last == 1
    assert (longer / "model" / "model.safetensors").read_bytes() == of_two
    assert [line["step"] for line in records(longer / "metrics.jsonl")] == [0, 1]
    assert list(json.loads((longer / "summary.json").read_text())["validation"]) == ["0", "2"]


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


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(run: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What `--resume` of `run` says as it refuses, having touched nothing."""
    before = contents(run)
    assert main(["train", "--resume", str(run), *flags]) == 2
    assert contents(run) == before
    return capsys.readouterr().err


def test_a_run_with_relative_paths_says_where_to_resume_it_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (begun := tmp_path / "begun").mkdir()
    monkeypatch.chdir(begun)
    init_folder("tiny", Path("m"), 0)
    Path("rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    shutil.copy(DATA / "rewards.py", "own.py")
    given = "--model", "m", "--data", "rows.jsonl", "--reward", "own.py:spread", "--checkpoint.interval", "1"
    run = begun / "runs" / "r"
    assert main(["train", "dataset", *QUICK, *given, "--run-dir", str(run)]) == 0
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    for name in ("m", "rows.jsonl", "own.py"):
        told = f"if {name} is a relative path, it starts where the command runs: resume the run from "
        assert f"{told}{begun}, which has it\n" in refused(run, capsys, "--steps", "3")
        (begun / name).rename(begun / "kept")
        assert f"{told}where it was begun\n" in refused(run, capsys, "--steps", "3")
        (begun / "kept").rename(begun / name)
        (elsewhere / name).symlink_to(begun / name)
    assert main(["train", "--resume", str(run), "--steps", "3"]) == 0
    assert "relative path" not in refused(run, capsys, "--steps", "2")


@pytest.mark.parametrize("saved", [False, True])
def test_a_run_with_steps_and_no_whole_checkpoint_is_not_begun_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: bool
) -> None:
    run = tmp_path / "run"
    assert main(["train", *SUM, "--checkpoint.interval", str(int(saved)), "--run-dir", str(run)]) == 0
    for state in run.glob("checkpoints/*/state.json"):
        state.write_text("")
    assert "the run has 2 steps and no whole checkpoint" in refused(run, capsys)
    (run / "metrics.jsonl").unlink()
    assert "no whole checkpoint" in refused(run, capsys)  # it has a model
    (run / "metrics.jsonl").mkdir()
    assert "metrics.jsonl is not a regular file" in refused(run, capsys)


def test_a_run_without_a_step_starts_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", *SUM, "--run-dir", str(tmp_path / "other")]) == 0
    run.mkdir()
    (run / "config.yaml").write_text((tmp_path / "other" / "config.yaml").read_text())
    assert main(["train", "--resume", str(run)]) == 0
    assert "starting over" in capsys.readouterr().err
    assert records(run / "metrics.jsonl") == records(tmp_path / "other" / "metrics.jsonl")


def test_what_changed_under_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, data = tmp_path / "run", tmp_path / "rows.jsonl"
    init_folder("tiny", tmp_path / "tiny", seed=0)
    data.write_text('{"prompt": "hello"}\n' * 4)
    arguments = [
        "dataset",
        *QUICK,
        "--model",
        str(tmp_path / "tiny"),
        "--data",
        str(data),
        "--checkpoint.interval",
        "1",
    ]
    assert main(["train", *arguments, "--reward", f"{DATA / 'rewards.py'}:spread", "--run-dir", str(run)]) == 0
    config = run / "config.yaml"
    kept = config.read_text()
    config.write_text(kept.replace("temperature: 1.0", "temperature: 0.5"))
    assert "sampling.temperature was 1.0 when step_2 was saved and is 0.5 in config.yaml" in refused(run, capsys)
    config.write_text(kept.replace("steps: 2\n", "steps: 1\n", 1))
    assert "steps is 1, and step_2 has done 2" in refused(run, capsys)
    config.write_text(kept)
    data.write_text('{"prompt": "hello"}\n' * 3)
    assert f"task.data {data} was 80 bytes" in refused(run, capsys)
    data.unlink()
    assert "is no file or folder" in refused(run, capsys)
    data.write_text('{"prompt": "hello"}\n' * 4)
    assert main(["train", "--resume", str(run), "--steps", "3"]) == 0


@pytest.fixture
def small_run(tmp_path: Path) -> Path:
    """The folder of a run of two steps, each with a checkpoint, from the model in `tiny`, which is its reference."""
    init_folder("tiny", tmp_path / "tiny", seed=0)
    arguments = ["--model", str(tmp_path / "tiny"), "--loss.beta", "0.1", "--checkpoint.interval", "1"]
    assert main(["train", *SUM, *arguments, "--run-dir", str(tmp_path / "run")]) == 0
    return tmp_path / "run"


def test_a_changed_model_folder_is_refused(small_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_run.parent / "tiny"
    kept = contents(model)
    weights = kept["model.safetensors"]
    changes = {
        "model.safetensors": weights[:-1] + bytes([weights[-1] ^ 1]),
        "tokenizer.json": kept["tokenizer.json"] + b" ",
        "chat_template.jinja": b"{{ messages }}",
        "config.json": None,
    }
    for name, content in changes.items():
        written(name, content)(model)
        errors = refused(small_run, capsys)
        before = f"{len(kept[name]):,} bytes with SHA-256 " if name in kept else "no file or folder when step_2"
        assert f"model {model}: {name} was {before}" in errors and "put it back" in errors
        written(name, kept.get(name))(model)
    written(".hidden", b"")(model)
    assert main(["train", "--resume", str(small_run), "--steps", "3"]) == 0
    assert "compared" not in capsys.readouterr().err


def test_the_hubs_revision_is_recorded_and_compared(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "0123abcd"
    monkeypatch.setattr(models_folder, "resolve_folder", lambda model: snapshot)
    config = replace(yaml_file.load(small_run / "config.yaml"), model="org/name")
    then = resume.identify_inputs(config)
    assert then["model"] == {"revision": "0123abcd"}
    now = {**then, "model": {"revision": "89"}}
    loaded = checkpoint.LoadedCheckpoint(tmp_path / "step_2", 2, {"inputs": then}, ())
    with pytest.raises(
        InputError, match="model org/name was the hub's revision 0123abcd when .* the hub's revision 89"
    ):
        resume.require_same(small_run, loaded, now)


def test_chat_templates_that_an_earlier_version_did_not_record(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates = tmp_path / "model" / "additional_chat_templates"
    templates.mkdir(parents=True)
    monkeypatch.setattr(models_folder, "file_names", lambda folder: [f"{templates.name}/tools.jinja"])
    monkeypatch.setattr(
        models_folder, "hash_files", lambda folder, names: {name: {"size": 1, "sha256": "0"} for name in names}
    )
    now = resume.identify_inputs(replace(yaml_file.load(small_run / "config.yaml"), model=str(tmp_path / "model")))
    numerics = {"words": {GRADIENT_NORM: []}}

    def going_on(recorded: dict[str, Any]) -> list[str]:
        state = {"inputs": {**now, "model": recorded}, "numerics": numerics, "packing": "fewest rows"}
        loaded = checkpoint.LoadedCheckpoint(tmp_path / "step_2", 0, state, ())
        resume.require_same(small_run, loaded, now)
        return resume.remarks(small_run, loaded)

    assert going_on({"files": {}}) == [f"step_2 does not record {templates}: its files were not compared"]
    assert going_on(now["model"]) == []
    with pytest.raises(InputError, match=r"additional_chat_templates/tools\.jinja was no file or folder when"):
        going_on({"files": {}, "additional_chat_templates": True})


def test_experts_that_an_earlier_version_balanced_by_other_loads() -> None:
    config, words = {"optimizer.router_bias_rate": 0.01}, {"words": {GRADIENT_NORM: []}}

    def said(numerics: dict[str, Any], config: dict[str, float]) -> list[str]:
        return resume.describe_redefinitions(
            {"numerics": numerics, "packing": "fewest rows", "inputs": {"config": config}}
        )

    (remark,) = said(words, config)
    assert "experts became balanced by" in remark
    balanced = OptimizerConfig(router_bias_rate=0.01)
    trainer = Trainer(initialize(Decoder(architecture("tiny-glm4-moe"), torch.float32), 0), balanced, LossConfig())
    assert said(trainer.numerics() | words, config) == said(words, {}) == []


def test_groups_that_an_earlier_version_never_split(small_run: Path) -> None:
    loaded = checkpoint.latest(small_run / "checkpoints")
    assert loaded is not None and resume.describe_redefinitions(loaded.state) == []
    del loaded.state["packing"]
    (remark,) = resume.describe_redefinitions(loaded.state)
    assert remark.endswith("may add its gradients in another order")
    loaded.state["inputs"]["config"]["loss.router_aux_loss_coef"] = 0.01
    assert resume.describe_redefinitions(loaded.state)[0].endswith("and balances experts over other micro-batches")
    loaded.state["inputs"]["config"]["trainer.mode"] = "per_sample"
    assert resume.describe_redefinitions(loaded.state) == []


def test_the_device_that_a_run_was_on_is_compared_not_what_chose_it(small_run: Path) -> None:
    loaded = checkpoint.latest(small_run / "checkpoints")
    assert loaded is not None
    then, now = loaded.state["inputs"], resume.identify_inputs(yaml_file.load(small_run / "config.yaml"))
    for before, after in (("auto", "cpu"), ("cpu", "auto")):
        then["config"]["device"], now["config"]["device"] = before, after
        resume.require_same(small_run, loaded, now)
    then["config"]["device"], now["config"]["device"] = "auto", "cpu"
    loaded.state["numerics"]["operators"] = "cuda"  # it was a GPU
    with pytest.raises(InputError, match="device was 'auto' when step_2 was saved and is 'cpu'"):
        resume.require_same(small_run, loaded, now)


@pytest.fixture(scope="module")
def other_exp(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The C library with one digit of exp's polynomial changed, which no version or name tells."""
    folder = tmp_path_factory.mktemp("native")
    for path in Path(library.__file__).parent.glob("*.[ch]"):
        shutil.copy(path, folder)
    header = (folder / "vector.h").read_text()
    assert header.count("8.3334519073e-3f") == 1
    (folder / "vector.h").write_text(header.replace("8.3334519073e-3f", "8.3334619073e-3f"))
    checksum = zlib.crc32(b"".join(path.read_bytes() for path in sorted(folder.glob("*.[ch]"))))
    command = ["cc", "-O1", "-march=native", "-ffp-contract=off", "-Wno-psabi", "-fPIC", "-shared", "-lm"]
    command += [f"-DSOURCE_CHECKSUM={checksum}u", f"-I{sysconfig.get_paths()['include']}", "-o", str(folder / "k.so")]
    if library.built is None or shutil.which("cc") is None:
        pytest.skip("the C library cannot be built")
    assert finished([*command, *map(str, sorted(folder.glob("*.c")))]).returncode == 0
    return library.load(folder / "k.so")


def test_other_arithmetic_is_refused_or_said_in_the_certificate(
    small_run: Path, other_exp: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    note = small_run / "crash.txt"
    note.write_text("of the process before")
    with using(other_exp):
        errors = refused(small_run, capsys)
        assert note.read_text() == "of the process before"
        assert (
            "since step_2 was saved, exp, " in errors and "of fixed numbers have other words (c_library was" in errors
        )
        assert "--resume-with-other-numerics" in errors
        assert main(["replay", str(small_run), "--trajectory", "1/0/0"]) == 2
        assert capsys.readouterr().err.endswith("Go on where the run began (OMP_NUM_THREADS sets the threads)\n")
        more = ["--steps", "3", "--resume-with-other-numerics"]
        assert main(["train", "--resume", str(small_run), *more]) == 0
    assert not note.exists()
    settings = json.loads((small_run / "parity.json").read_text())["settings"]
    (resumed,) = settings["resumed_with_other_numerics"]
    assert resumed["steps_done"] == 2 and resumed["changed"][0].startswith("exp, ")
    assert "resume-with-other-numerics has no effect without --resume" in bad(["train", *SUM, more[2]], capsys)


def bad(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err


def test_equal_words_go_on_whatever_the_version(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert main(["train", "--resume", str(small_run), "--steps", "3"]) == 0
    assert "resumed_with_other_numerics" not in json.loads((small_run / "parity.json").read_text())["settings"]


def saved_before(run: Path) -> None:
    """Make the newest checkpoint as an earlier version would have written it."""
    loaded = checkpoint.latest(run / "checkpoints")
    assert loaded is not None
    state = loaded.state
    for name in ("words", "c_library"):
        del state["numerics"][name]
    del state["inputs"]["model"], state["inputs"]["config"]["sampling.min_p"]
    saved(run / "checkpoints", loaded.step, {"trainer": tensors_of(loaded, "trainer")}, state, 2)


def test_what_an_earlier_version_did_not_record_is_said(small_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_before(small_run)
    kept = (small_run / "config.yaml").read_text()
    (small_run / "config.yaml").write_text(kept.replace("min_p: 0.0", "min_p: 0.5"))
    assert "sampling.min_p was 0.0 when step_2 was saved and is 0.5" in refused(small_run, capsys)
    (small_run / "config.yaml").write_text(kept)
    assert main(["train", "--resume", str(small_run), "--steps", "3"]) == 0
    errors = capsys.readouterr().err
    assert f"step_2 does not record the files of model {small_run.parent / 'tiny'}: they were not compared" in errors
    assert "step_2 does not record words of its arithmetic: versions and names were compared" in errors
    assert "step_2 does not know sampling.min_p: they are what they were without a setting" in errors
    config = (small_run / "config.yaml").read_text()
    (small_run / "config.yaml").write_text(config.replace("  use_bias_correction_kl: true\n", ""))
    assert not load_run_config(small_run).loss.use_bias_correction_kl  # its default is another
    (small_run / "config.yaml").write_text(config)
    saved_before(small_run)
    state = checkpoint.latest(small_run / "checkpoints")
    assert state is not None and state.step == 3 and state.state["numerics"]["torch"] == torch.__version__


def test_versions_are_compared_where_no_words_are(
    small_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_before(small_run)
    version = torch.__version__
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert f"torch was '{version}' and is '2.99.0'" in refused(small_run, capsys)


def test_metrics_that_were_cut_are_said(small_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = small_run / "metrics.jsonl"
    first, second = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(first[:40])
    assert main(["train", "--resume", str(small_run), "--steps", "3"]) == 0
    errors = capsys.readouterr().err
    assert f"{metrics} lacks 2 of the 2 steps before step_2, the first of them step 0: curves and means" in errors
    assert [record["step"] for record in records(metrics)] == [2]
    assert json.loads((small_run / "summary.json").read_text())["steps_done"] == 3
    metrics.write_text(second + metrics.read_text())
    assert main(["train", "--resume", str(small_run), "--steps", "4"]) == 0
    assert "lacks 1 of the 3 steps before step_3, the first of them step 0" in capsys.readouterr().err


def test_seconds_of_a_resumed_run_cover_all_of_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["train", *SUM, "--checkpoint.interval", "1", "--run-dir", str(run)]) == 0
    checkpoint = json.loads((run / "checkpoints" / "step_2" / "state.json").read_text())["seconds"]
    assert checkpoint["total_s"] > checkpoint["startup_s"] > 0
    assert main(["train", "--resume", str(run), "--steps", "3"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["startup_s"] > checkpoint["startup_s"]
    assert summary["total_s"] > checkpoint["total_s"] + summary["startup_s"] - checkpoint["startup_s"]
    assert summary["total_s"] > sum(summary[name] for name in ("startup_s", "generator_s", "trainer_s"))
    phases = {name: seconds for name, seconds in summary.items() if name.startswith("startup/")}
    assert {"startup/load", "startup/state", "startup/restore", "startup/gate", "startup/other"} <= phases.keys()
    assert sum(phases.values()) == pytest.approx(summary["startup_s"])  # those of both processes
    assert summary["startup/load"] > checkpoint["startup/load"] > 0
    timeline = list(read_timeline(run / "timeline.json"))
    assert [s.facts["step"] for _, s in timeline if s.name == "step"] == [0, 1, 2]
    assert {"load", "gate", "validation", "step", "log", "checkpoint", "save_model"} <= {s.name for _, s in timeline}
    assert [process for process, s in timeline if s.name == "restore"] == [2]
    ends = [s.began + s.seconds for process, s in timeline if process == 1]
    assert max(ends) < min(s.began for process, s in timeline if process == 2)
    assert summary["learned"].startswith("nothing: no update was made in any step")
    (run / "metrics.jsonl").unlink()  # so nobody knows which steps made updates
    assert main(["train", "--resume", str(run), "--steps", "4"]) == 0
    assert json.loads((run / "summary.json").read_text())["learned"] == "reward -1, of one step"
