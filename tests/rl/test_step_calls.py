"""How many functions of the package one eager step goes through, and how often it calls them: a reader's way.

`python tests/rl/test_step_calls.py` lists them.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

import pytest

import lockstep
from lockstep.config import CompileConfig, TrainerConfig
from lockstep.config.recipes import sum_digits
from lockstep.models import init
from lockstep.rl.loop import Loop
from lockstep.session.build import build

MOST_CALLS, MOST_FUNCTIONS = 1625, 358
ROOT = os.path.dirname(lockstep.__file__)
KEPT = os.path.join(ROOT, "cache", "tokenizers.py")


def calls_within(run: Callable[[], object]) -> Counter[str]:
    """Calls of the package's functions by "file:name"; comprehensions and lambdas are not counted, and a generator is
    called each time that it goes on. Nor is a kept tokenizer, which takes a library's place from the second start on.
    """
    calls: Counter[str] = Counter()

    def seen(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        of_package = code.co_filename.startswith(ROOT) and code.co_filename != KEPT
        if event == "call" and of_package and not code.co_name.startswith("<"):
            calls[f"{os.path.relpath(code.co_filename, ROOT)}:{code.co_qualname}"] += 1

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def calls_of_a_step() -> Counter[str]:
    """The second step of the first recipe: two prompts, two samples each, four tokens, a model of two layers."""
    config = sum_digits(None)
    config = replace(
        config,
        task=replace(config.task, validation_prompts=0),
        sampling=replace(config.sampling, num_generations=2, max_completion_length=4),
        trainer=TrainerConfig(prompts_per_step=2, skip_zero_variance=False),
        compile=CompileConfig("none"),
    )
    loop = Loop(config, build(config))
    loop.step(0)
    return calls_within(lambda: loop.step(1))


def test_a_step_is_as_short_a_way_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(init.ARCHITECTURES, "tiny", replace(init.ARCHITECTURES["tiny"], num_layers=2))
    calls = calls_of_a_step()
    assert "rl/loop.py:Loop.step" in calls and "generator/engine.py:Engine.advance" in calls
    assert len(calls) <= MOST_FUNCTIONS and calls.total() <= MOST_CALLS, (len(calls), calls.total())


if __name__ == "__main__":
    init.ARCHITECTURES["tiny"] = replace(init.ARCHITECTURES["tiny"], num_layers=2)
    found = calls_of_a_step()
    print(f"{found.total()} calls of {len(found)} functions")
    for name, count in sorted(found.items()):
        print(f"{count:5} {name}")
