"""The warm-up: the machine is checked first, kernels that it replaced reach the graphs, and a rehearsal may fail."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.cache import user_folder
from lockstep.config import CompileConfig, RunConfig, SamplingConfig, TaskConfig, TrainerConfig
from lockstep.distributed import ONE_PROCESS, World
from lockstep.errors import LockstepError
from lockstep.graph import GraphError, PassedChecks
from lockstep.models import Decoder
from lockstep.models.init import ARCHITECTURES, architecture
from lockstep.ops.linear import choice as linear_choice
from lockstep.ops.machine_check import check as machine_check
from lockstep.rl.loop import Loop
from lockstep.session import kernel_lists
from lockstep.session import warm_up as session_warm_up
from lockstep.session.build import Session, TrainingSession, build
from lockstep.timings import Timings
from lockstep.types import SamplingParams


def config_of(parity: str = "strict", captured: bool = False, model: Path | None = None) -> RunConfig:
    return RunConfig(
        model=model and str(model),
        parity=parity,  # type: ignore[arg-type]
        device="cpu",
        task=TaskConfig(easy=True, validation_prompts=1),
        sampling=SamplingConfig(num_generations=2, max_completion_length=4),
        trainer=TrainerConfig(prompts_per_step=1),
        compile=CompileConfig("step", verify="off") if captured else CompileConfig(),
    )


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which every shape breaks the contract."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    monkeypatch.setattr(machine_check, "_check_shape", lambda *_: "broken")


def test_strict_parity_does_not_start_on_a_machine_that_breaks_the_contract(broken: None) -> None:
    config = config_of()
    run = build(config)
    with pytest.raises(LockstepError, match="does not keep the bitwise contract for .*linear.*; use --parity warn"):
        session_warm_up.warm_up(run)
    assert run.timings.seconds["gate"] > 0


def test_warn_says_so_and_off_does_not_look(broken: None, caplog: pytest.LogCaptureFixture) -> None:
    for parity, said in (("off", False), ("warn", True)):
        config = config_of(parity)
        session_warm_up.warm_up(build(config))
        assert ("does not keep the bitwise contract" in caplog.text) == said


def test_beside_a_kernel_from_outside_graphs_are_checked_anew(monkeypatch: pytest.MonkeyPatch, shallow: Path) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(session_warm_up, "check_against_eager", lambda *given: kept.append(given[3]) or [])
    monkeypatch.setattr("lockstep.cache.loaded_code.find_difference", lambda: None)  # of what the line before replaced
    config = replace(config_of(captured=True, model=shallow), compile=CompileConfig("step"))
    for registered in ({}, {"toy": lambda *_: []}):
        monkeypatch.setattr(linear_choice, "registered", registered)
        session_warm_up.warm_up(build(config))
    assert isinstance(kept[0], PassedChecks) and kept[1] is None


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, shallow: Path) -> Path:
    """A folder of the graphs of such a run, made once."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_CACHE", str(folder))
        session_warm_up.warm_up(build(config_of(captured=True, model=shallow)))
    return folder / "graphs"


@pytest.fixture
def traced(made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A test's own cache, with these graphs in it and nothing else."""
    shutil.copytree(made, tmp_path / "cache" / "graphs")
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


def test_graphs_are_made_again_with_what_the_check_replaced(monkeypatch, traced: None, shallow: Path) -> None:
    monkeypatch.setattr(linear_choice, "overrides", {})
    monkeypatch.setattr(machine_check, "_check_shape", lambda *_: "replaced")
    config = config_of(captured=True, model=shallow)
    run = build(config)
    launches = warm_up(run)
    assert linear_choice.overrides and {"forward_backward", "decode", "mixed"} <= launches.keys()
    again = warm_up(run)  # known by now, so these graphs stay; those before had not been launched twice
    assert again == {name: 2 * n for name, n in launches.items()} and min(launches.values()) > 0


def test_where_nothing_is_recorded_graphs_are_made_and_not_launched(traced: None, shallow: Path) -> None:
    config = config_of(captured=True, model=shallow)
    run = build(config)
    session_warm_up.warm_up(run)
    made = [graph for function in run.runtime.programs for graph in function.graphs.values()]
    assert len(made) >= 5 and not any(graph.launches for graph in made)
    assert run.runtime.warm_up.launch == run.runtime.warm_up._launch
    Loop(config, run).step(0)
    assert run.runtime.recompiles == 0 < sum(graph.launches for graph in made)


def warm_up(run: TrainingSession) -> dict[str, int]:
    """The fewest launches of each function's graphs, as on a device where the first launch of one records it."""
    run.runtime.warm_up.records = True
    session_warm_up.warm_up(run)
    return {f.name: min(g.launches for g in f.graphs.values()) for f in run.runtime.programs if f.graphs}


def test_the_generator_asks_for_the_same_graphs_again(monkeypatch: pytest.MonkeyPatch, shallow: Path) -> None:
    """As a rank does that makes them for others first: for fewer sequences in training than in validation, too."""
    config = config_of(captured=True, model=shallow)
    run = build(replace(config, task=TaskConfig(easy=True, validation_prompts=5)))
    asked: list[Any] = []
    monkeypatch.setattr(run.engine.runner, "_run_mixed", lambda _, sizes, statics: asked.append((sizes, statics)))
    monkeypatch.setattr(
        run.engine.runner, "_decode_program", lambda rows: lambda _, **statics: asked.append((rows, statics))
    )
    passes = []
    for _ in range(2):
        session_warm_up._make_generator_graphs(run)
        passes.append(asked[:])
        asked.clear()
    assert passes[0] == passes[1] and len(passes[0]) > 4
    assert {sizes.rows for sizes, _ in passes[0] if not isinstance(sizes, int)} == {run.engine.runner._sizes.rows[0]}


@pytest.mark.parametrize(("reads_own", "parts"), [(True, 2), (False, 1)])
def test_ranks_make_graphs_side_by_side_where_nothing_is_gathered_between_them(
    monkeypatch: pytest.MonkeyPatch, shallow: Path, reads_own: bool, parts: int
) -> None:
    run, given = build(config_of(captured=True, model=shallow)), list[int]()
    run.trainer.flat.reads_own = reads_own
    monkeypatch.setattr(session_warm_up, "make_ready", lambda _, made, *rest, **more: given.append(len(made)) or [])
    session_warm_up.warm_up(run)
    assert given == [parts]


def precompile(run: TrainingSession) -> None:
    path = kernel_lists.kernel_list(run.shapes, *kernel_lists.step_settings(run.config))
    parts = [
        partial(make, run) for make in (session_warm_up._make_trainer_graphs, session_warm_up._make_generator_graphs)
    ]
    session_warm_up._prepare_kernels(run, path, parts, partial(session_warm_up._rehearse_check, run))


def test_kernels_are_listed_for_each_layout_of_processes() -> None:
    """Ranks' parts are of other shapes: a list of another layout would keep them from being compiled side by side."""
    worlds = [ONE_PROCESS, World(size=2), World(size=2, tp=2), World(size=2, generator_tp=2)]
    worlds.append(World(size=2, generator_tp=2, pushes=True))
    embed = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    policy = SimpleNamespace(model=SimpleNamespace(config=ARCHITECTURES["tiny"], embed=embed))
    lists = [
        Session.kernel_list(SimpleNamespace(policy=policy, world=world, config=RunConfig()), "steps")  # type: ignore[arg-type]
        for world in worlds
    ]
    assert len({*lists}) == len(worlds)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_of_a_hosts_processes_the_first_compiles_ahead_of_validation_too(monkeypatch, local_rank: int) -> None:
    done: list[Any] = []

    @contextmanager
    def rehearsal(compiles: bool) -> Iterator[Any]:
        done.append(compiles)
        yield SimpleNamespace(listed={"kernel": None})

    preload = lambda kernels: done.append([*kernels])  # noqa: E731
    warm_up = SimpleNamespace(rehearsal=rehearsal, make_graphs=nullcontext, preload=preload)
    monkeypatch.setattr(session_warm_up, "_make_validation_graphs", lambda *_: done.append("made"))
    policy = SimpleNamespace(model=SimpleNamespace(embed=SimpleNamespace(is_cuda=True)))
    world = SimpleNamespace(local_rank=local_rank, gather=lambda _: done.append("gathered"))
    runtime = SimpleNamespace(eager=False, warm_up=warm_up)
    run: Any = SimpleNamespace(runtime=runtime, policy=policy, world=world)
    session_warm_up.prepare_validation(run, SamplingParams())
    assert done == [local_rank == 0, "made", "gathered", *[["kernel"]] * local_rank, "made"]


def test_without_a_rehearsal_kernels_are_compiled_at_their_launches(
    monkeypatch, caplog, traced: None, shallow: Path
) -> None:
    config = config_of(captured=True, model=shallow)
    run = build(config)

    def fails(compiles: bool) -> None:
        raise GraphError("no tensors without memory here")

    monkeypatch.setattr(run.runtime.warm_up, "rehearsal", fails)
    with caplog.at_level(logging.WARNING, "lockstep"):
        precompile(run)
    assert "one by one, which takes longer (GraphError: no tensors without memory here)" in caplog.text
    assert min(warm_up(run).values()) > 0


def test_kernels_of_an_earlier_start_are_loaded_without_a_rehearsal(monkeypatch, traced: None, shallow: Path) -> None:
    config = config_of(captured=True, model=shallow)
    run = build(config)
    rehearsed: list[int] = []

    @contextmanager
    def rehearsal(compiles: bool) -> Iterator[Any]:
        rehearsed.append(len(rehearsed))
        yield SimpleNamespace(listed={("module", "kernel", "{}"): None})

    preloaded: list[list[list[str]]] = []
    monkeypatch.setattr(run.runtime.warm_up, "rehearsal", rehearsal)
    load = lambda kernels: preloaded.append(list(kernels)) or len(kernels)  # noqa: E731
    monkeypatch.setattr(run.runtime.warm_up, "preload", load)
    for _ in range(2):
        precompile(run)
    run.config = replace(config, generator=replace(config.generator, page_size=32))
    precompile(run)
    assert rehearsed == [0, 1] and preloaded == [[], [["module", "kernel", "{}"]], []]


def test_the_check_of_graphs_is_given_what_the_engine_lends(monkeypatch, traced: None, shallow: Path) -> None:
    config = replace(config_of(model=shallow), compile=CompileConfig("step"))
    run, lent, given = build(config), [torch.zeros(4)], []
    monkeypatch.setattr(run.engine, "lend", lambda: lent)
    monkeypatch.setattr(session_warm_up, "check_against_eager", lambda *arguments: given.append(arguments[-1]) or [])
    warm_up(run)
    assert len(given) == 1 and given[0] is lent


@pytest.mark.parametrize("local_rank", [0, 1])
def test_of_a_hosts_processes_the_first_compiles_and_the_others_load(monkeypatch, tmp_path, local_rank: int) -> None:
    """The others when it has compiled."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    done: list[Any] = []
    monkeypatch.setattr(session_warm_up, "fingerprint", lambda words: done.append(words.dtype))

    @contextmanager
    def rehearsal(compiles: bool) -> Iterator[Any]:
        done.append(compiles)
        yield SimpleNamespace(listed={"a kernel": None})

    class Others(World):
        def gather(self, value: Any, what: str = "") -> list[Any]:
            done.append("met")
            return [value] * 2

        def broadcast_from_first(self, make: Callable[[], Any]) -> Any:
            return make()

    warm_up = SimpleNamespace(rehearsal=rehearsal, preload=lambda kernels: done.append([*kernels]) or len(kernels))
    policy = SimpleNamespace(model=SimpleNamespace(embed=torch.zeros(1)))
    world, runtime = Others(1, 2, local_rank=local_rank), SimpleNamespace(warm_up=warm_up, eager=True)
    session = SimpleNamespace(runtime=runtime, world=world, policy=policy)
    session_warm_up._prepare_kernels(session, tmp_path / "list", [list], lambda: None)
    assert done == [[], "met", not local_rank, torch.int64, "met", *[["a kernel"]] * local_rank]


@pytest.mark.parametrize("offered", [False, True])
def test_what_was_made_apart_is_rehearsed_by_all_where_kernels_come_from_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, offered: bool
) -> None:
    """Where another process has some, too."""
    done: list[Any] = []

    @contextmanager
    def rehearsal(compiles: bool) -> Iterator[Any]:
        yield SimpleNamespace(listed={"own": None}, add=done.append)

    class Others(World):
        def gather(self, value: Any, what: str = "") -> list[Any]:
            return [value, offered if isinstance(value, bool) else value]

        def broadcast_from_first(self, make: Callable[[], Any]) -> Any:
            return make()

    monkeypatch.setattr(session_warm_up, "build_in_parallel", lambda *_: True)
    warm_up = SimpleNamespace(rehearsal=rehearsal, preload=lambda kernels: 0)
    policy = SimpleNamespace(model=SimpleNamespace(embed=torch.zeros(1)))
    session = SimpleNamespace(world=Others(0, 2), runtime=SimpleNamespace(warm_up=warm_up), policy=policy)
    parts = [partial(done.append, "part")]
    session_warm_up._prepare_kernels(session, tmp_path / "list", parts, lambda: done.append("check"))  # type: ignore[arg-type]
    assert done == [*(["part"] if offered else [["own"], ["own"]]), "check"]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[list[str]]]:
    """Lists whose kernels were loaded on a thread, none of them from a module of the kernels."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    found: list[list[list[str]]] = []
    precompiling = pytest.importorskip("lockstep.ops.precompile")
    monkeypatch.setattr(precompiling, "preload", lambda kernels: found.append(kernels) or len(kernels))
    monkeypatch.setattr("lockstep.cache.loaded_code.find_difference", lambda: None)  # of what the line before replaced
    return found


LISTED = [["module", "kernel", "{}"], ["module", "other", "{}"]]


def test_kernels_of_the_last_start_are_loaded_beside_the_weights(loaded: list) -> None:
    config, timings = config_of(captured=True), Timings()
    path = kernel_lists.kernel_list("what is known after the weights are read")
    assert kernel_lists.preload_async(config, "cuda", 1, timings)() is None and not loaded  # there was no start
    user_folder.write(path, LISTED)
    kernel_lists.remember_kernel_list(config, path)
    for device, ranks in (("cpu", 1), ("cuda", 2)):
        assert kernel_lists.preload_async(config, device, ranks, timings)() is None and not loaded
    changed = replace(config, generator=replace(config.generator, page_size=32))
    assert kernel_lists.preload_async(changed, "cuda", 1, timings)() is None and not loaded
    before = timings.seconds["compile"]
    assert kernel_lists.preload_async(config, "cuda", 1, timings)() == path and loaded == [LISTED]
    assert timings.seconds["compile"] > before


def test_a_first_start_reads_ahead_what_tracing_imports(loaded: list, monkeypatch) -> None:
    began: list[str] = []
    monkeypatch.setattr(kernel_lists, "read_tracer_ahead", lambda: began.append("reading"))
    config, path = config_of(captured=True), kernel_lists.kernel_list()
    kernel_lists.preload_async(config, "cuda", 1, Timings())()
    user_folder.write(path, LISTED)
    kernel_lists.remember_kernel_list(config, path)
    kernel_lists.preload_async(config, "cuda", 1, Timings())()
    assert began == ["reading"]


def test_what_is_read_ahead_is_what_tracing_imports() -> None:
    script = """
        import sys, torch, lockstep.graph
        from lockstep.graph.torch_private import read_ahead, trace
        before = {*sys.modules}
        trace.import_tracer()
        files = {str(folder / name) for folder, names in read_ahead.tracer_sources() for name in names}
        packages = tuple(f"{name.partition('.')[0]}." for name in read_ahead._PACKAGES)
        later = [m for name, m in sys.modules.items() if name not in before and name.startswith(packages)]
        print(len(later), sum(getattr(module, "__file__", None) in files for module in later))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    imported, read = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert imported > 400 and read > 0.95 * imported


def test_a_process_that_ends_while_files_are_read_ahead_says_nothing_of_it() -> None:
    script = """
        import pathlib, time
        from lockstep.graph.torch_private import read_ahead

        def without_end():
            while True:
                time.sleep(0.001)
                yield pathlib.Path(), []

        read_ahead.tracer_sources, read_ahead._read = without_end, lambda *_: time.sleep(0.1)
        read_ahead.read_tracer_ahead()
        time.sleep(0.1)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("listed", [[], [["one"]], {"a": 1}, "text", 3])
def test_a_list_that_cannot_be_loaded_is_left_to_the_warm_up(listed: object, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    config, path = config_of(captured=True), kernel_lists.kernel_list()
    user_folder.write(path, listed)
    kernel_lists.remember_kernel_list(config, path)
    assert kernel_lists.preload_async(config, "cuda", 1, Timings())() is None


def test_a_failure_beside_the_weights_is_left_to_the_warm_up(loaded: list, monkeypatch) -> None:
    def fails(kernels: list) -> int:
        raise RuntimeError("no driver")

    monkeypatch.setattr("lockstep.ops.precompile.preload", fails)
    config, path = config_of(captured=True), kernel_lists.kernel_list()
    user_folder.write(path, LISTED)
    kernel_lists.remember_kernel_list(config, path)
    assert kernel_lists.preload_async(config, "cuda", 1, Timings())() is None


def test_what_was_loaded_beside_the_weights_is_not_loaded_again(monkeypatch, tmp_path: Path, shallow: Path) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    config = config_of(captured=True, model=shallow)
    run = build(config)
    assert run.preloaded is None
    asked: list[object] = []
    monkeypatch.setattr(run.runtime.warm_up, "preload", lambda kernels: asked.append(kernels) or 1)
    path = kernel_lists.kernel_list("its list")
    for preloaded, times in ((path, 0), (path.with_name("another.json"), 1), (None, 2)):
        run.preloaded = preloaded
        session_warm_up.make_ready(run, [lambda: None], list, path)
        assert len(asked) == times


def test_the_products_of_a_model_are_those_of_its_weights() -> None:
    def named(arch: str) -> list[str]:
        return list(map(str, session_warm_up.products(Decoder(architecture(arch), torch.float32, "meta"))))

    dense = ["linear 1x128x128", "linear 1x128x384", "linear 1x256x128", "linear 1x768x128", "linear_fp32 1x512x128"]
    assert named("tiny") == named("tiny-llama") == dense
    assert set(named("tiny-deepseek-v3")) == {
        *("linear 1x176x128", "linear 1x192x96", "linear 1x64x32", "linear 1x32x64", "linear 1x128x128"),
        *("linear 1x768x128", "linear 1x128x384", "linear 1x384x128", "linear 1x128x192"),
        *("linear_fp32 1x8x128", "linear_fp32 1x512x128"),
    }
