"""What all tests share."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from small import two_layers

from lockstep import machine
from lockstep.cache import fingerprint, loaded_code
from lockstep.config import GeneratorConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.models import Decoder, save_model
from lockstep.models.init import ARCHITECTURES, architecture, init_folder, initialize
from lockstep.models.tokenizer import byte_tokenizer, save_tokenizer

# What is imported and collected stays; the collector looks through it seldom.
gc.set_threshold(20_000, 20, 50)

# Tests run beside each other and beside other work; threads that spin for each other would be many times slower.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that they start
# What a trace of two layers keeps of them is found anew in less time than it is looked up.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")

# Whoever begins the tests in the background has them ignore Ctrl-C, which some of them are about.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A file that is edited while tests run is not what they are about.
loaded_code.IMPORTED_NS = sys.maxsize

# A run that ends unfreezes all, and every look of the collector would be at pytest and at what was imported.
FREEZE_GC, machine.freeze_gc = machine.freeze_gc, contextlib.nullcontext  # type: ignore[assignment]
loaded_code.record_module(machine)

# How long an example takes says how busy the machine is.
settings.register_profile("lockstep", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lockstep")
settings.register_profile("thorough", max_examples=5000)  # pytest --hypothesis-profile thorough


def pytest_collection_finish() -> None:
    """What was imported and collected stays, so the garbage collector, which a trace starts often, leaves it out; in a
    process that runs many files, with what the first trace and tokenizer would import."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        for name in ("torch.export._trace", "torch._dynamo", "transformers", "lockstep.session.build"):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts on captured graphs are kept for this session's tests alone, and what another test replaced is gone."""
    fingerprint.recheck_code()
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def runs_freeze_gc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs and servers freeze what there is, and at their end unfreeze all, as they do elsewhere; nothing is before."""
    for name in ("lockstep.run.train", "lockstep.serve.server"):
        if importlib.util.find_spec("fastapi") is not None or "serve" not in name:
            monkeypatch.setattr(importlib.import_module(name), "freeze_gc", FREEZE_GC)
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def engine_of() -> Callable[..., Engine]:
    """`engine_of(model, cache_tokens=..., **GeneratorConfig fields)`."""

    def make(model: Decoder, cache_tokens: int = 16384, **fields) -> Engine:
        return Engine(SharedWeights(model), GeneratorConfig(**fields), cache_tokens)

    return make


@pytest.fixture(scope="module")
def shallow_models() -> Iterator[None]:
    """Random models that are made in this process have two layers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, config in two_layers().items():
            patch.setitem(ARCHITECTURES, name, config)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with random weights, to be left as it is."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    init_folder("tiny", folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of two layers, for what is traced."""
    folder, tokenizer = tmp_path_factory.mktemp("models") / "shallow", byte_tokenizer()
    ends = {"eos_token_ids": (tokenizer.eos_token_id,), "pad_token_id": tokenizer.pad_token_id}
    config = replace(architecture("tiny"), num_layers=2, **ends)
    save_model(initialize(Decoder(config, torch.float32), 0), folder)
    save_tokenizer(tokenizer, folder)
    return folder
