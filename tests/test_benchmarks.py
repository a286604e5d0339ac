"""Every benchmark script can be started, some run to their end at a small size, and the driver loses nothing."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from calls import wrong_calls
from processes import DEADLINE, finished, on_ranks, running, said_by_a_script, wait_for

FOLDER = Path(__file__).parents[1] / "benchmarks"
NO_SCRIPTS = {"common", "http_clients", "lengths", "linear_tiles", "ops_common", "ops_attention", "parts", "targets"}
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in NO_SCRIPTS)


def run(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join((str(FOLDER.parent), *filter(None, sys.path)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **more}
    return finished([sys.executable, *command], env=environment)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_every_script_explains_itself(
    scripts: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    for command in (*SCRIPTS, *(f"run {path.stem}" for path in (FOLDER / "cases").glob("*.py"))):
        monkeypatch.setattr(sys, "argv", [*command.split(), "--help"])
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(sys.argv[0]).main()
        text = capsys.readouterr().out
        assert not ended.value.code and ("--json" in text or command in ("all", "run", "learning_page")), command


def test_scripts_run_and_the_driver_keeps_their_figures(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    names = ("cpu-tests", "cpu-decode_layer")
    folders = str(tmp_path / "one"), str(tmp_path / "two")
    done = run(str(FOLDER / "all.py"), "--device", "cpu", "--budget", "450", "--only", *names, "--out", *folders)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "one" / "results.json").read_text())
    assert sorted(results) == sorted(names) and results == json.loads((tmp_path / "two" / "results.json").read_text())
    assert all(r["status"] == "done" and r["json"]["complete"] for r in results.values())
    assert {"commit", "torch", "date", "device"} <= results["cpu-tests"]["json"].keys()
    assert "18 skipped" in done.stdout and "2 sequences, over library calls: " in done.stdout


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("benchmarks_all", FOLDER / "all.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


SAVE = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'benchmark': 'none', 'device': 'NVIDIA H200', "


def test_a_part_that_hangs_and_one_that_fails_cost_only_themselves(
    driver: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = "import subprocess, time; subprocess.Popen(['sleep', '31.7']); time.sleep(60)"
    parts = [
        driver.Part("hangs", ("-c", f"{SAVE}'rows': 3}})); {child}", "{json}"), 1, 4),
        driver.Part("fails", ("-c", "print('a line'); raise RuntimeError('no memory')"), 1, 30),
        driver.Part("misses", ("-c", f"{SAVE}'complete': True}})); sys.exit(1)", "{json}"), 1, 30),
        driver.Part("works", ("-c", f"{SAVE}'complete': True}}))", "{json}"), 1, 30),
        driver.Part("long", ("-c", "raise SystemExit"), 500, 600),
    ]
    results = driver.Results([tmp_path])
    began = time.monotonic()
    driver.run_all(parts, results, 60, skip_done=False)
    assert time.monotonic() - began < 55  # what hangs would take 60
    kept = json.loads((tmp_path / "results.json").read_text())
    assert [kept[name]["status"] for name in ("fails", "misses", "works")] == [
        "failed, exit code 1", "done, exit code 1", "done",
    ]  # fmt: skip
    assert kept["hangs"]["status"].startswith("killed after") and kept["hangs"]["json"]["rows"] == 3
    assert "RuntimeError: no memory" in kept["fails"]["tail"][-1] and "long" not in kept
    assert not any("31.7" in line for line in _running_commands()), "its child is ended with it"
    log = (tmp_path / "log.txt").read_text()
    assert "long: not begun, needs 500 s" in log and "  | RuntimeError: no memory" in log
    assert log.strip() == capsys.readouterr().out.strip()

    again = driver.Results([tmp_path])
    done_again = [driver.Part(p.name, ("-c", "raise SystemExit(3)"), 1, 30) for p in parts[:4]]
    driver.run_all(done_again, again, 60, skip_done=True)
    assert again.parts["works"]["status"] == "done" and again.parts["misses"]["status"] == "done, exit code 1"
    assert again.parts["fails"]["status"] == again.parts["hangs"]["status"] == "failed, exit code 3"


def test_a_driver_that_is_ended_says_what_it_was_at(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    results = tmp_path / "results.json"
    command = [sys.executable, str(FOLDER / "all.py"), "--device", "cpu", "--only", "cpu-ops", "--out", str(tmp_path)]
    with running(command, PYTHONPATH=str(FOLDER.parent)) as process:
        wait_for(results.exists, process)
        process.terminate()
        process.wait(DEADLINE)
    assert json.loads(results.read_text())["cpu-ops"]["status"].startswith("killed after")
    assert "cpu-ops" in (tmp_path / "log.txt").read_text()


def test_results_are_unpacked_by_part_and_device(driver: ModuleType, tmp_path: Path) -> None:
    records = {
        "ops-linear": {"status": "done", "json": {"device": "NVIDIA H200", "rows": 1}},
        "growth": {"status": "killed after 9 s", "json": {"device": "NVIDIA H200"}},
        "tests-latent": {"status": "failed, exit code 1", "json": None},
    }
    (tmp_path / "results.json").write_text(json.dumps(records))
    written = driver.unpack(tmp_path / "results.json", tmp_path)
    assert [path.name for path in written] == ["ops_linear-h200.json", "growth-h200.json"]
    assert json.loads(written[0].read_text()) == {"device": "NVIDIA H200", "rows": 1}
    assert json.loads(written[1].read_text())["note"] == "incomplete: killed after 9 s"


def test_the_page_of_real_runs_has_their_figures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    page = importlib.import_module("learning_page")
    held_out = {"9": 0.5, "10": 0.75, "0": 0.25}  # in no order
    group = {"prompt": "Rules.\n\n1 + 2?\n", "samples": [{"text": "3", "reward": 1.3}]}
    figures = {
        "flags": ["sum-digits", "--steps", "10"], "device": "a GPU", "date": "today", "torch": "2", "steps_done": 10,
        "summary": {"warmup": {"steps": 7}, "warmup_s": 4.4, "total_s": 61.0, "reward_first_10": 0.5,
                    "reward_last_10": 1.0},
        "certificate": {"tokens_checked": 12345, "tokens_different": 0},
        "validation": {step: {page.SOLVED: v, page.REWARD: v + 0.3} for step, v in held_out.items()},
        "rollouts": {"first": [group], "last": [group]},
    }  # fmt: skip
    found = page.filled(f"above\n\n{page.BEGIN}\n\nold\n\n{page.END}\nbelow\n", [page.section("digits", figures)])
    words = " ".join(found.split())
    assert "lockstep train sum-digits --steps 10" in found and "old" not in found and "Rules" not in found
    assert "7 supervised steps in 4 s, 10 of reinforcement learning, 61 s in all" in words
    assert "25.0% were solved before and 75.0% after; their mean reward went from 0.550 to 1.050" in words
    assert "12,345 tokens checked, 0 different" in words and "```text\n1 + 2?\n3\n```" in found
    assert page.filled(found, [page.section("digits", figures)]) == found, "again changes nothing"
    assert page.name_of(Path("learning_words-h200.json")) == "words"
    with pytest.raises(SystemExit, match="the page has no"):
        page.filled("nothing", [])


def test_figures_stand_beside_their_targets(driver: ModuleType) -> None:
    cost = {"benchmark": "parity_cost", "cost": {"decode": 1.01, "RL step": 1.2}}
    assert driver.key_figures(cost) == ["decode: 1.01, at most 1.05", "RL step: 1.2, at most 1.05  MISSED"]
    assert driver.key_figures({"benchmark": "parity_cost"}) == ["incomplete (KeyError: 'cost')"]
    assert driver.key_figures(None) == []


def test_every_result_is_a_parts_or_says_its_command(driver: ModuleType) -> None:
    parts = {part.name.removeprefix("cpu-").replace("-", "_") for part in driver.PARTS}
    for path in (FOLDER / "results").glob("*.json"):
        figures = json.loads(path.read_text())
        if "benchmark" in figures:  # `tests/matrix.py` says how its files are made
            assert path.stem.rpartition("-")[0] in parts or figures["command"], path.name
            assert not [line for line in driver.key_figures(figures) if line.startswith("incomplete")], path.name


def test_figures_say_how_they_are_made_again(scripts: None) -> None:
    words = ["/here/benchmarks/run.py", "turns", "--json", "/there/turns.json", "--flags", "--seed 1", "/tmp/tree"]
    assert importlib.import_module("common").command(words) == "python benchmarks/run.py turns --flags '--seed 1' tree"


def test_tests_of_gpus_are_gone_on_with_and_run_in_shards(
    scripts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_tests, path = importlib.import_module("gpu_tests"), tmp_path / "tests.json"
    nothing = gpu_tests.passed_before(None)
    assert not any(nothing.values()) and gpu_tests.passed_before(path) == nothing
    outcomes = {"0": "passed", "4": "passed", "5": "failed", "6": "skipped"}
    about = {"sources": gpu_tests.sources(), "tests": {name: {"outcome": found} for name, found in outcomes.items()}}
    gpu_tests.save("gpu_tests", {**about, "failures": {"5": "why"}, "words": {"all": [7, 0]}}, path)
    before = gpu_tests.passed_before(path)
    passed = {name: about["tests"][name] for name in ("0", "4")}
    assert before == {**nothing, "passed": 2, "tests": passed, "words": {"all": [7, 0]}}

    class Item(NamedTuple):
        nodeid: str

    run, others = [], []
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: others.extend(items)))
    for shard in ("1/3", "2/3", "3/3"):
        items = [Item(str(i)) for i in range(8)]
        gpu_tests.Saved(None, before["tests"], shard).pytest_collection_modifyitems(config, items)
        run.append("".join(item.nodeid for item in items))
    assert run == ["12", "35", "67"] and len(others) == 3 * 8 - 6
    [whole] = gpu_tests.parts_of("fold", 1, "", "")
    assert (whole.shard, [part.shard for part in gpu_tests.parts_of("families", 1, "", "")]) == ("1/1", ["1/2", "2/2"])
    apart = [(part.gpus, part.expression) for part in gpu_tests.parts_of("fsdp", 2, "bits", "not timed")]
    assert apart == [(2, f"bits and {part}") for part in gpu_tests.PARTS["fsdp"]] and len(apart) == 4
    sizes = {name: [part.gpus for part in gpu_tests.parts_of(name, 8, "", "")] for name in ("push", "tp")}
    assert sizes == {"push": [2, 8], "tp": [2, 4, 8]}
    tests = {"fold": {"0": False}, "tp": {"4": False, "9": True}, "ops": {"8": False, "7": True}}
    monkeypatch.setattr(gpu_tests, "listed", lambda names: tests)
    for share, first, timed in ((1, ["tp", "tp", "tp", "ops"], []), (3, ["ops"], [["tp", "ops"]] * 2)):
        parts, last = gpu_tests.work(list(tests), 2, share, "", before)
        assert [part.files for part in parts] == [[name] for name in first] and [part.files for part in last] == timed
    assert len(gpu_tests.work(list(tests), 2, 1, "", nothing)[0]) == 5
    for other in ({"sources": "others"}, {"device": "another GPU"}):
        gpu_tests.save("gpu_tests", {**json.loads(path.read_text()), "sources": gpu_tests.sources()} | other, path)
        assert gpu_tests.passed_before(path) == nothing
    for lacking in (["--gpus", "1"], ["--json", str(path)]):
        monkeypatch.setattr(sys, "argv", ["gpu_tests.py", "--go-on", *lacking])
        with pytest.raises(SystemExit) as ended:
            gpu_tests.main()
        assert ended.value.code == 2


def test_every_part_names_a_script_and_an_unknown_part_is_refused(driver: ModuleType) -> None:
    assert len({part.name for part in driver.PARTS}) == len(driver.PARTS)
    for part in driver.PARTS:
        assert (FOLDER.parent / part.command[0]).is_file() and part.need_s <= part.cap_s <= 600
        assert "{json}" in part.command
    smallest = {word for part in driver.PARTS if part.device == "cpu" for word in part.command}
    cases = {path.stem for path in (FOLDER / "cases").glob("*.py")} - {"environments"}  # of other packages
    assert cases <= smallest, "every case is run on a CPU too"
    listed = [name for part in driver.PARTS if part.name.startswith("tests-") for name in part.command[1:-2]]
    there = [path.stem.removeprefix("test_").removesuffix("_gpu") for path in (FOLDER / "../tests/gpu").glob("test_*")]
    assert sorted(listed) == sorted(there), "every file of tests/gpu is in one part"
    with pytest.raises(SystemExit, match="no part is called nothing; there are seed_workload"):
        driver.chosen(["nothing"], "cpu")


def test_the_command_line_takes_the_runs_that_cases_begin(
    scripts: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lockstep.cli.resolve import parse
    from lockstep.config import validate

    fsdp, settings = (importlib.import_module(f"cases.{name}") for name in ("fsdp", "settings"))
    given = argparse.Namespace(device="cuda", processes=2, steps=3)
    ways = itertools.product(fsdp.WAYS, (False, True))
    begun = [fsdp.command(way, tmp_path, argparse.Namespace(**vars(given), ranks_share_gpu=s)) for way, s in ways]
    begun += [settings.command(case, tmp_path, tmp_path, "cuda") for case in settings.CASES.values()]
    alike = {tuple(words[words.index("lockstep") + 1 :]): "torch.distributed.run" in words for words in begun}
    for words, several in alike.items():
        with monkeypatch.context() as launched:
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if several else ():
                launched.setenv(name, "2" if name == "WORLD_SIZE" else "0")
            validate(parse(list(words)).to_config())


@pytest.mark.parametrize("processes", [2, 3, 4, 6, 8])
def test_a_step_of_every_case_is_shared_by_any_number_of_processes(
    scripts: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, processes: int
) -> None:
    from lockstep.cli.resolve import parse
    from lockstep.session.build import resolve_for_device

    fsdp, kills, memory_plan = map(importlib.import_module, ("cases.fsdp", "cases.kills", "memory_plan"))
    cpu = argparse.Namespace(device="cpu", processes=processes, steps=3, ranks_share_gpu=False)
    layouts = [(1, 1), (processes, 1), (1, processes), (processes, processes)]
    more = [argparse.Namespace(**vars(cpu), tp=tp, generator_tp=g, collectives=False) for tp, g in layouts]
    words = [fsdp.command("sharded", tmp_path, cpu), *(["train", *kills.begun(g, tmp_path, tmp_path)] for g in more)]
    words[0] = words[0][words[0].index("lockstep") + 1 :]
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    runs = [*(parse(one).to_config() for one in words), memory_plan.configuration(memory_plan.CASES["cpu"][0], "cpu")]
    for run in runs[: len(runs) - (processes in (3, 6))]:  # the plan's eight prompts
        assert resolve_for_device(run, processes, torch.device("cpu")).parallel.batch_shards in (1, processes)


def test_degrees_that_cannot_be_are_refused_before_processes_start(scripts: None) -> None:
    degrees = importlib.import_module("cases.degrees")
    given = argparse.Namespace(arch="tiny", processes=8, generator=[1, 2], pushed=[], trainer=[1])
    degrees.require_degrees(degrees.first_layers("tiny"), given)
    for wrong in ({"generator": [1, 8]}, {"trainer": [4]}, {"pushed": [3]}):
        with pytest.raises(SystemExit, match="8 processes cannot share tiny by"):
            degrees.require_degrees(degrees.first_layers("tiny"), argparse.Namespace(**vars(given) | wrong))
    for device, processes in itertools.product(degrees.SIZES, (1, 2, 3, 4, 6, 8)):
        prompts, *others = degrees.drawn_size(device, processes)
        assert prompts % processes == 0 and [prompts, *others] >= [*degrees.SIZES[device]["drawn"]]


def test_a_run_that_is_gone_on_with_is_hit_at_what_it_does_itself(scripts: None, tmp_path: Path) -> None:
    kills, run = importlib.import_module("cases.kills"), tmp_path / "killed-0"
    begun, written = tmp_path / "killed-0.log", run / "checkpoints"
    written.mkdir(parents=True)
    begun.write_text("step 4/5  reward 0.1\n")
    (run / "metrics.jsonl").write_text("{}\n" * 4)
    (written / ".tmp-step_4-a").touch()
    made, being_written = kills.made(run), kills.being_written(run)
    assert (made(), being_written()) == (0, 0)
    begun.write_text(f"{begun.read_text()}resumed from step_3\nstep 4/5  reward 0.1\n")
    (written / ".tmp-step_5-b").touch()
    assert (made(), being_written()) == (4, 5)


def test_rates_are_of_the_fewest_processes_in_any_order(scripts: None) -> None:
    scaling = importlib.import_module("cases.scaling")
    of = {8: (2.0, 4.0), 1: (1.0, 3.0), 2: (1.25, 3.0)}
    counts = [{"processes": n, "generate_s": g, "forward_backward_s": fb} for n, (g, fb) in of.items()]
    scaling.add_rates(counts)
    assert [way["rate"] for way in counts] == [
        {"generate": 0.5, "forward_backward": 0.75}, {"generate": 1.0, "forward_backward": 1.0},
        {"generate": 0.8, "forward_backward": 1.0},
    ]  # fmt: skip


def test_a_launcher_that_takes_too_long_ends_with_what_it_has_started(scripts: None, tmp_path: Path) -> None:
    from common import ended

    assert ended(["echo", "all of it"], 60) == "all of it\n"
    with pytest.raises(SystemExit, match="ended with 3\nwhy"):
        ended(["sh", "-c", "echo why; exit 3"], 60)
    launcher = "sleep 47.3 & trap 'kill $!; exit 1' TERM; echo started; wait"
    with pytest.raises(SystemExit, match="not done after 1 s\nstarted"):
        ended(["sh", "-c", launcher], 1)
    assert not any("47.3" in line for line in _running_commands())


CALLED = """
from lockstep import ops
from lockstep.config import CompileConfig, OptimizerConfig, no_such
CompileConfig("step", captured=True)
OptimizerConfig(learning_rate=1e-3)
ops.no_such(*[])
def later(engine):
    from lockstep.trainer import pack
    pack(*[], max_tokens=1)
    pack([], max_tokens=1, check_parity=True, max_token=1)
    engine.unknown()
"""


def test_what_only_a_gpu_runs_calls_what_there_is(
    scripts: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    tests = FOLDER.parent / "tests"
    monkeypatch.syspath_prepend(str(tests / "gpu"))
    paths = [*FOLDER.glob("*.py"), *(FOLDER / "cases").glob("*.py"), *(tests / "gpu").glob("*.py")]
    names = {path: f"cases.{path.stem}" if path.parent.name == "cases" else path.stem for path in paths}
    ours = ("lockstep", "cases.", *(path.stem for path in (*paths, *tests.glob("*.py")) if path.stem != "conftest"))
    for path, name in names.items():
        if name != "conftest":  # whose name others have too
            assert wrong_calls(path, importlib.import_module(name), ours) == []
    (tmp_path / "called.py").write_text(CALLED)
    found = wrong_calls(tmp_path / "called.py", ModuleType("called"), ours)
    assert sorted(line.partition(": ")[2] for line in found) == [
        "CompileConfig: got an unexpected keyword argument 'captured'",
        "lockstep.config has no no_such",
        "lockstep.ops has no no_such",
        "pack: got an unexpected keyword argument 'max_token'",
    ]


def test_a_run_on_several_processes_keeps_its_passes(scripts: None, tmp_path: Path) -> None:
    step = {"perf/tokens_per_s_per_gpu": 1.0, "memory/peak_gib": 1.0, "recompiles": 0, "graph_replays": 2}
    summary = {"startup_s": 1.0, "compile": {"passes": {"check": ["trace: 3 calls", "fuse: 1 rotation"]}}}
    certificate = {"tokens_checked": 4, "tokens_different": 0}
    for name, content in (("metrics.jsonl", step), ("summary.json", summary), ("parity.json", certificate)):
        (tmp_path / name).write_text(json.dumps(content) + "\n")
    (tmp_path / "rollouts.jsonl").write_text("")
    assert importlib.import_module("cases.fsdp").outcome(tmp_path)["passes"] == summary["compile"]["passes"]


def test_kernels_of_layers_that_processes_share_are_tuned_beside_pushes(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    found, table = tmp_path / "found.json", tmp_path / "table.json"
    flags = ("--layers", "--arch", "tiny", "--bounds", "8", "--out", str(table), "--json", str(found))
    said = on_ranks(2, said_by_a_script, str(FOLDER / "tune_linear.py"), *flags)
    assert [text.count("kernels compiled") for text in said] == [1, 0], "one process does"
    (measured,) = json.loads(found.read_text())["measured"]
    times = [measured.pop(f"{name}_us") for name in ("before", "after", "without_pushes", "floor")]
    assert (measured["shared_by"], measured["rows"]) == (2, 8) and min(times) > 0
    chosen = measured["after" if times[1] < times[0] else "before"]
    halves = {"qkv": "norm_linear 128x128", "o": "linear_add 64x128", "gate_up": "norm_gate_up 384x128",
              "down": "linear_add 64x384"}  # fmt: skip
    written = json.loads(table.read_text())
    for name, shape in halves.items():
        kind, _, size = shape.partition(" ")
        assert written[kind][size] == [[8, chosen[name]]], name


def test_what_a_run_takes_stands_beside_its_plan(scripts: None) -> None:
    memory_plan = importlib.import_module("memory_plan")
    found = memory_plan.measured(memory_plan.CASES["cpu"][0], "cpu")
    assert {name for name, *_ in memory_plan.compare(found)} >= {"weights", "moments", "gradients", "KV cache"}


def test_plans_near_the_edge_are_on_both_sides_of_it(scripts: None) -> None:
    memory_plan = importlib.import_module("memory_plan")
    found = memory_plan.edge_cases(8, 1, 2)
    assert all(one.accepted == (one.limit >= one.least) for one in found)
    assert {one.accepted for one in found} == {True, False} and {one.ranks for one in found} == {1, 2}


def test_the_floor_of_the_seed_workload_is_bytes_and_operations(scripts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the architecture `tiny`, by hand, on a machine of a byte and an operation a second."""
    common, seed_workload = importlib.import_module("common"), importlib.import_module("cases.seed_workload")
    monkeypatch.setattr(common, "bandwidth", lambda _: 1.0)
    monkeypatch.setattr(common, "product_rate", lambda *_: 1.0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    norms = 4 * (2 * 128 + 2 * 32) + 128
    layers, head = 4 * (128 * 8 * 32 + 4 * 32 * 128 + 3 * 128 * 384) + norms, 512 * 128
    cached = 2 * 2 * 32 * 4 * (100 * 5 * 145 + 40 * 100 * 99 / 2)
    found = seed_workload.floor_s("tiny")
    assert found["generate_s"] == 10 * (4 * (100 * (layers + head) + cached) + 2 * layers * 5 * 145)
    assert found["train_s"] == 10 * 6 * (layers * (5 * 145 + 40 * 99) + head * 4000)


def test_what_does_not_hold_of_a_setting_is_said(scripts: None) -> None:
    settings = importlib.import_module("cases.settings")
    case = settings.Case(same="plain", other="beta")
    good = {"steps": settings.STEPS, "tokens_checked": 9, "tokens_different": 0, "identical": True, "recompiles": 0}
    others = {"plain": {"weights_sha256": "a"}, "beta": {"weights_sha256": "b"}}
    assert settings.wrong(case, {**good, "weights_sha256": "a"}, others) == []
    bad = {**good, "steps": 1, "tokens_different": 2, "recompiles": 3, "weights_sha256": "b"}
    assert settings.wrong(case, bad, others) == [
        "1 steps", "2 of 9 tokens different", "3 recompiles", "the weights of plain are others",
        "the weights of beta, which it was to change",
    ]  # fmt: skip
    assert settings.wrong(case, {"failed": "exit code 1"}, others) == ["exit code 1"]
    assert settings.wrong(case, {**good, "weights_sha256": "a"}, {}) == [
        f"{name} has no weights to compare with" for name in ("plain", "beta")
    ]


@pytest.mark.parametrize(("fails", "differs"), [(False, False), (True, False), (False, True)])
def test_random_runs_that_fail_or_differ_are_told(
    scripts: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool, differs: bool
) -> None:
    soak = importlib.import_module("soak")

    def execute(run: Any, folder: Path, *_: object) -> None:
        (folder / "log").write_text("said")
        run.ended = int(fails and run.ranks > 1)
        run.words = {} if run.ended else {"weights": f"{run.setting} {differs and run.ranks}"}

    figures, logs = tmp_path / "soak.json", tmp_path / "logs"
    monkeypatch.setattr(soak, "execute", execute)
    words = ["--seconds", "60.1", "--only", "tiny", "--logs", str(logs), "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", ["soak.py", *words])
    assert soak.main() == int(fails or differs)
    found = json.loads(figures.read_text())
    assert found["complete"] and {run["ranks"] for run in found["runs"]} == {1, 2} and found["compared"] > 5
    assert (found["failed"] > 0, len(found["differing"]) > 0, logs.exists()) == (fails, differs, fails or differs)


def test_a_random_run_that_learned_nothing_is_not_compared(
    scripts: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And what fails in a worker fails the script."""
    soak = importlib.import_module("soak")
    step = dict.fromkeys(("step", "loss", "grad_norm", "kl", "reward/mean", "entropy"), 0.0)
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(step)}\n" * soak.STEPS)
    with pytest.raises(AssertionError, match="a step learned nothing"):
        soak.words_of(tmp_path)
    monkeypatch.setattr(soak, "execute", lambda *_: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["soak.py", "--seconds", "61", "--only", "tiny"])
    with pytest.raises(ZeroDivisionError):
        soak.main()


def _running_commands() -> list[str]:
    return [path.read_text(errors="replace") for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
