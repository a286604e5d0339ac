"""`LLM`, the commands on it and `lockstep parity` with captured graphs: the same bits, stored graphs used again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.config import CompileConfig, GeneratorConfig
from lockstep.errors import InputError
from lockstep.graph import LayerCompiler
from lockstep.llm import LLM
from lockstep.parity import check_model
from lockstep.types import SamplingParams

STEP = CompileConfig("step")
SMALL = GeneratorConfig(max_num_seqs=8, max_num_batched_tokens=256)
SHORT = SamplingParams(max_completion_length=12, n=2)
PROMPTS = ["one", "another, longer prompt", [{"role": "user", "content": "hello"}]]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Graphs that one test made serve the others."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(cache))


def loaded(model: Path, compile: CompileConfig | None = STEP) -> LLM:
    return LLM(model, device="cpu", seed=3, config=SMALL, compile=compile)


def test_graphs_give_the_bits_of_the_model_called(model: Path) -> None:
    plain = loaded(model, None)
    assert plain.compiler is None and plain.compile_report() == {}
    kinds = (SHORT, replace(SHORT, top_p=0.9), replace(SHORT, n=1, temperature=0.0))
    with loaded(model) as llm:
        for kind in kinds:
            assert llm.generate(PROMPTS, kind) == plain.generate(PROMPTS, kind)
        pieces, expected = ([*one.stream(PROMPTS, SHORT, step=2)] for one in (llm, plain))
        assert pieces == expected and sum(len(piece.text) for piece in pieces) > 0
        launches = llm.compile_report()["functions"]
        assert min(launches[name]["launches"] for name in ("decode", "mixed")) > 10
        assert {about["level"] for about in launches.values()} == {"captured"}
