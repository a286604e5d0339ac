"""`LLM`, the commands on it and `lockstep parity` with captured graphs: the same bits, stored graphs used again."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import finished

from lockstep import evaluate
from lockstep.cli.main import main
from lockstep.config import CompileConfig, GeneratorConfig, RunConfig, SamplingConfig, TaskConfig
from lockstep.errors import InputError
from lockstep.generator import sizes
from lockstep.session import parity_check
from lockstep.session.generate import LLM
from lockstep.session.parity_check import check_model
from lockstep.trainer import Trainer
from lockstep.types import PackedBatch, SampleIdentity, SamplingParams

STEP = CompileConfig("step")
SMALL = GeneratorConfig(max_num_seqs=8, max_num_batched_tokens=256)
SHORT = SamplingParams(max_completion_length=12, n=2)
PROMPTS = ["one", "another, longer prompt", [{"role": "user", "content": "hello"}]]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Graphs that one test made serve the others."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model(shallow: Path) -> Path:
    """Two layers are traced as four are, in half the time."""
    return shallow


@pytest.fixture(autouse=True)
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(cache))


def loaded(model: Path, compile: CompileConfig | None = STEP) -> LLM:
    return LLM(model, device="cpu", seed=3, config=SMALL, compile=compile)


def test_graphs_give_the_bits_of_the_model_called(model: Path) -> None:
    plain = loaded(model, None)
    assert not plain.runtime.compiles and plain.compile_report() == {}
    kinds = (SHORT, replace(SHORT, top_p=0.9), replace(SHORT, n=1, temperature=0.0))
    with loaded(model) as llm:
        for kind in kinds:
            assert llm.generate(PROMPTS, kind) == plain.generate(PROMPTS, kind)
        pieces, expected = ([*one.stream(PROMPTS, SHORT, seed=2)] for one in (llm, plain))
        assert pieces == expected and sum(len(piece.text) for piece in pieces) > 0
        launches = llm.compile_report()["functions"]
        assert min(launches[name]["launches"] for name in ("decode", "mixed")) > 9
        assert {about["level"] for about in launches.values()} == {"captured"}


def test_samples_that_share_a_prompt_are_grouped_whatever_was_sampled_before(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "MIN_SAVED", 100)
    monkeypatch.setattr(sizes, "LEAST_SAVED", ())
    prompt, alone, together = "a prompt of a page and more, " * 4, replace(SHORT, n=1), replace(SHORT, n=4)
    plain = loaded(model, None)
    with loaded(model) as llm:
        engines = []
        for prompts, params, grouped in (
            ([prompt] * 4, alone, False),
            ([prompt], together, True),
            ([prompt], alone, True),
        ):
            assert llm.generate(prompts, params) == plain.generate(prompts, params)
            engines.append(llm._engine)
            assert any(engines[-1].runner._sizes.groups.values()) == grouped
        assert engines == [engines[0]] * 3 and llm.runtime.recompiles == 0


def test_another_process_loads_the_stored_graphs(model: Path) -> None:
    with loaded(model) as llm:
        expected = llm.generate("one", SHORT)
    script = (
        "import sys, lockstep\n"
        "from lockstep.config import CompileConfig, GeneratorConfig\n"
        "config = GeneratorConfig(max_num_seqs=8, max_num_batched_tokens=256)\n"
        "llm = lockstep.LLM(sys.argv[1], device='cpu', seed=3, config=config, compile=CompileConfig('step'))\n"
        # Another prompt, of another length: the room is the same.
        "first, second = (lockstep.SamplingParams(max_completion_length=c, n=2) for c in (12, 9))\n"
        "tokens = [c.token_ids for c in llm.generate('one', first)[0]]\n"
        "llm.generate('three', second)\n"
        "report = llm.compile_report()\n"
        "print([tokens, report['traces'], report['loaded'], report['refused']])\n"
    )
    done = finished([sys.executable, "-c", script, str(model)])
    assert done.returncode == 0, done.stderr
    tokens, traces, found, refused = json.loads(done.stdout.replace("'", '"'))
    assert tokens == [c.token_ids for c in expected[0]] and (traces, refused) == (0, []) and found > 0


def test_a_larger_group_and_a_new_kind_of_sampling_bring_graphs_of_their_own(model: Path) -> None:
    plain = loaded(model, None)
    with loaded(model) as llm:
        for count, kind in ((1, SHORT), (5, SHORT), (1, replace(SHORT, max_completion_length=200)), (2, SHORT)):
            prompts = [f"prompt {i}" for i in range(count)]
            before = llm.runtime
            assert llm.generate(prompts, kind) == plain.generate(prompts, kind)
            assert (llm.runtime is before) == (count == 2)  # the room does not shrink
        ids = [[1, 2, 3], [4, 5], [6]]
        mixed = [SHORT, replace(SHORT, top_k=5), replace(SHORT, n=1, temperature=0.0)]
        who = [SampleIdentity(3, 0, 0, i) for i in range(3)]
        results = [one.engine(ids, mixed).generate(ids, mixed, who) for one in (llm, plain)]
        assert results[0] == results[1]


def test_closing_frees_the_graphs_and_a_later_call_makes_them_anew(model: Path) -> None:
    with loaded(model) as llm:
        first = llm.generate("one", SHORT)
        engine, graphs = weakref.ref(llm.engine([[1]], [SHORT])), llm.compile_report()["graphs"]
        caches = weakref.ref(engine().cache)  # type: ignore[union-attr]
    gc.collect()
    assert graphs > 0 and llm.compile_report()["graphs"] == 0 and engine() is None and caches() is None
    assert llm.generate("one", SHORT) == first
    llm.close()
    llm.close()


def test_nothing_is_made_for_a_request_that_is_refused(model: Path) -> None:
    llm = loaded(model)
    for prompt, message in (("x" * 3000, "prompt 2: prompt of 3000 tokens plus 12"), ("", "prompt 2: the prompt has")):
        with pytest.raises(InputError, match=message):
            llm.generate(["fine", prompt], SHORT)
    assert llm.compile_report()["graphs"] == 0


def test_layers_compiled_one_by_one_outlive_the_engine(model: Path) -> None:
    expected = loaded(model, None).generate(PROMPTS, SHORT)
    with loaded(model, CompileConfig("layer")) as llm:
        assert llm.generate(PROMPTS, SHORT) == expected
        runtime = llm.runtime
        assert runtime.layers is not None and runtime.captures > 0
        made = runtime.captures
        llm.close()
        assert llm.generate(PROMPTS, SHORT) == expected and llm.runtime is runtime and runtime.captures == made


def test_parity_holds_the_generators_graphs_against_the_one_that_trains(model: Path) -> None:
    plain = check_model(str(model), 64, 5, "cpu", "float32")
    report = check_model(str(model), 64, 5, "cpu", "float32", compile=STEP)
    assert report.compared == "the graphs decode (captured) and mixed (captured) with forward_backward (captured)"
    assert plain.compared == "the model, called by both roles"
    assert report == replace(plain, compared=report.compared) and report.identical and report.tokens_checked >= 512


def test_parity_finds_what_differs_in_the_graph_that_trains(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Differs(Trainer):
        def forward_backward(self, batch: PackedBatch, *arguments: Any, **named: Any) -> None:
            if batch.sequences and batch.sequences[0].name:  # not of the warm-up
                batch.old_model_logprob_C[7] += 1e-3
            super().forward_backward(batch, *arguments, **named)

    monkeypatch.setattr(parity_check, "Trainer", Differs)
    report = check_model(str(model), 64, 5, "cpu", "float32", compile=STEP)
    assert not report.identical and report.tokens_different == 1


def test_the_commands_take_the_settings_of_train(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*arguments: str) -> Any:
        assert main([*arguments, "--model", str(model), "--device", "cpu", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    for command in (
        ["generate", "--prompt", "one", "--n", "2", "--max-completion-length", "8"],
        ["eval", "--task", "sum-digits", "--prompts", "2", "--max-completion-length", "8"],
        ["parity", "--tokens", "64", "--seed", "5"],
    ):
        plain, captured = printed(*command), printed(*command, "--compile.capture", "step")
        if command[0] == "parity":
            assert plain.pop("compared") != captured.pop("compared")
        assert captured == plain


def test_a_runs_configuration_evaluates_its_model(model: Path) -> None:
    task = TaskConfig(easy=True, validation_prompts=2)
    config = RunConfig(model=str(model), device="cpu", task=task, sampling=SamplingConfig(max_completion_length=8))
    of_run = replace(config, compile=CompileConfig("joint", recompute=("full",), backend="inductor"))
    assert evaluate(of_run) == evaluate(config)


@pytest.mark.parametrize(
    "command", [["generate", "--prompt", "x"], ["eval", "--task", "sum-digits"], ["parity"], ["chat"]]
)
@pytest.mark.parametrize(
    ("flags", "message", "trains"),
    [
        ("--compile.capture none --compile.backend eager", "it has no graph to run; set compile.capture", True),
        ("--compile.capture step --compile.cudagraph-mode full", "CUDA graphs need a GPU, use none", True),
        ("--compile.capture layer --attention flex", "flex attention has a window a layer", True),
        ("--compile.capture step --compile.recompute full", "--compile.recompute is for training", False),
        ("--compile.capture step --compile.backend inductor", "compile.backend is inductor: it is for the tr", False),
        ("--compile.capture joint", "compile.capture is joint: it is for the trainer's graphs", False),
    ],
)
def test_settings_that_cannot_work_are_refused(
    model: Path, capsys: pytest.CaptureFixture[str], command: list[str], flags: str, message: str, trains: bool
) -> None:
    if command == ["parity"] and not trains:
        return  # there is a trainer: they have an effect
    assert main([*command, "--model", str(model), "--device", "cpu", *flags.split()]) == 2
    assert message in capsys.readouterr().err
