"""The graphs of the tiny model, pinned: a change of what they compute is seen, and must be meant.

One set of pins: torch 2.11, 2.12 and 2.13 trace the same graphs. `python tests/graph/test_digests.py` writes it anew.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from small import completed, train_group

from lockstep.config import CompileConfig, GeneratorConfig, LossConfig, OptimizerConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import Runtime, digest
from lockstep.graph.ir.captured import op_name
from lockstep.models import Decoder
from lockstep.models.init import architecture, initialize
from lockstep.trainer import Trainer, pack
from lockstep.types import SamplingParams

PINS = Path(__file__).with_name("digests.json")
COMMAND = "python tests/graph/test_digests.py"
KEPT = ", logits kept"


def graphs() -> dict[str, dict[str, Any]]:
    """Each function's digest, and how often it calls each operator; logits are computed again, or `KEPT`."""
    found = {}
    for again in (("logits",), ()):
        runtime = Runtime(CompileConfig("step", recompute=again), torch.device("cpu"))
        model = initialize(Decoder(architecture("tiny"), torch.float32), 0)
        trainer = Trainer(model, OptimizerConfig(), LossConfig(), enforce_parity=True, runtime=runtime)
        sequences = [completed([3, 4, 5], 1.0, 0.1, [0.0] * 3, [0.0] * 3) for _ in range(2)]
        (batch,) = pack([train_group([1, 2], sequences, SamplingParams())], max_tokens=64, check_parity=True)
        trainer.forward_backward(batch)
        if again:
            trainer.check(batch)
            trainer.optim_step(0.0)
            Engine(SharedWeights(model), GeneratorConfig(), 1024, runtime=runtime).warm_up(1, 64, SamplingParams())
        for function in runtime.programs:
            for graph in function.graphs.values():
                calls = Counter(op_name(n) for n in graph.captured.graph.nodes if n.op == "call_function")
                about = {"digest": digest(graph.captured), "calls": dict(sorted(calls.items()))}
                found[function.name + KEPT * (not again)] = about
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return graphs()


def test_no_graph_changed_unseen(found: dict[str, dict[str, Any]]) -> None:
    pins = json.loads(PINS.read_text())
    for name, pinned in pins.items():
        for what in ("calls", "digest"):
            assert found[name][what] == pinned[what], f"{name}: other {what}; if that is meant, run `{COMMAND}`"
    assert found.keys() == pins.keys()


def test_the_same_program_gives_the_same_digests(found: dict[str, dict[str, Any]]) -> None:
    """And so with what torch keeps of a trace, which the tests go without."""
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=True):
        assert graphs() == found


if __name__ == "__main__":
    PINS.write_text(json.dumps(graphs(), indent=1) + "\n")
