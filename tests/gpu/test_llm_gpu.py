"""`LLM` and `lockstep parity` run as CUDA graphs by default, with the bits of the model called."""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path

import pytest
import torch

from lockstep.config import CompileConfig
from lockstep.models.init import init_folder
from lockstep.session.generate import LLM
from lockstep.session.parity_check import check_model
from lockstep.types import SamplingParams

CALLED = CompileConfig("none")
PROMPTS = ["one", "another, longer prompt", "12 34="]
KINDS = [
    SamplingParams(max_completion_length=60, n=3, ignore_eos=True),
    SamplingParams(max_completion_length=60, n=3, top_p=0.9, ignore_eos=True),
    SamplingParams(max_completion_length=60, temperature=0.0, ignore_eos=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llm") / "model"
    init_folder("tiny", folder, seed=0)
    return folder


def test_by_default_graphs_are_replayed_and_kept(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    called = LLM(folder, seed=3, compile=CALLED)
    expected = [called.generate(PROMPTS, kind) for kind in KINDS]
    called.close()
    for start in ("cold", "warm"):
        began = time.perf_counter()
        with LLM(folder, seed=3) as llm:
            assert [llm.generate(PROMPTS, kind) for kind in KINDS] == expected
            report = llm.compile_report()
            decode = report["functions"]["decode"]
            assert decode["level"] == "full" and decode["replays"] > 100
            if start == "warm":
                assert report["traces"] == 0 and report["refused"] == []
            print(f"\n{start}: {time.perf_counter() - began:.2f} s, pool {report['pool_gib']:.3f} GiB")


def test_a_larger_group_is_served_and_closing_gives_memory_back(folder: Path) -> None:
    called, llm = LLM(folder, seed=3, compile=CALLED), LLM(folder, seed=3)
    left: list[int] = []
    for _ in range(3):
        for count in (1, 20):
            prompts = [f"prompt {i}" for i in range(count)]
            assert llm.generate(prompts, KINDS[0]) == called.generate(prompts, KINDS[0])
        held = torch.cuda.memory_allocated()
        called.close()
        llm.close()
        gc.collect()
        left.append(torch.cuda.memory_allocated())
        assert left[-1] < held
    assert left[2] <= left[1]  # the second time may meet a shape, and a workspace of the library, for the first time


def test_parity_compares_the_recorded_graphs(folder: Path) -> None:
    report = check_model(str(folder), 1000, 0, "auto", "auto")
    print(json.dumps(report.to_dict())[:200])
    assert report.compared == "the graphs decode (full) and mixed (full) with forward_backward (full)"
    assert report.identical and report.tokens_checked >= 1000
    assert check_model(str(folder), 200, 0, "auto", "auto", compile=CALLED).identical
