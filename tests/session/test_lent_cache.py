"""A cache in the memory of the trainer's graphs: whatever they leave there, no bit of a run is another one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_recorder import FakeRecorder

from lockstep.config import CompileConfig, LossConfig, RunConfig, SamplingConfig, TaskConfig, TrainerConfig
from lockstep.generator.kv_cache import KVCache
from lockstep.graph import Runtime, Store
from lockstep.graph.check import against_eager, comparison
from lockstep.graph.check.snapshot import Snapshot
from lockstep.rl.loop import Loop
from lockstep.session import build as session_build
from lockstep.session import warm_up as session_warm_up
from lockstep.session.build import TrainingSession, build
from lockstep.types import SampleIdentity, SamplingParams


def config_of(model: Path, verify: str) -> RunConfig:
    """Two prompts a step, in several updates, against a reference."""
    return RunConfig(
        model=str(model),
        device="cpu",
        task=TaskConfig(easy=True, validation_prompts=2),
        sampling=SamplingConfig(num_generations=4, max_completion_length=12, ignore_eos=True),
        trainer=TrainerConfig(prompts_per_step=2, num_iterations=2, skip_zero_variance=False),
        loss=LossConfig(beta=0.1),
        compile=CompileConfig("step", verify=verify),  # type: ignore[arg-type]
    )


def made(
    monkeypatch: pytest.MonkeyPatch, config: RunConfig, lends_cache: bool, loaded: bool = False
) -> TrainingSession:
    def runtime(compile_config: CompileConfig, device: torch.device, *_: Any) -> Runtime:
        recorded = replace(compile_config, cudagraph_mode="full")
        lent: Any = FakeRecorder() if lends_cache else None
        return Runtime(recorded, device, FakeRecorder(), lent, store=Store())  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(session_build, "make_runtime", runtime)
        run = build(config)
    run.runtime.warm_up.kernels_loaded = loaded
    session_warm_up.warm_up(run)
    return run


def stepped(run: TrainingSession) -> list[Any]:
    loop, found = Loop(run.config, run), list[Any]()
    for step in range(2):
        found.append(loop.validate())
        metrics, groups = loop.step(step)
        found += [[r.token_ids for r in g.rollouts] for g in groups]
        found += [
            metrics[name] for name in ("loss", "grad_norm", "kl", "parity/tokens_different", "parity/tokens_checked")
        ]
    return [*found, *(p.detach().clone() for p in run.policy.model.parameters())]


@pytest.fixture(scope="module")
def apart(shallow: Path) -> list[Any]:
    """What steps with a cache in memory of its own find."""
    with pytest.MonkeyPatch.context() as patch:
        run = made(patch, config_of(shallow, "off"), lends_cache=False)
    assert run.engine.cache.borrower is None
    return stepped(run)


@pytest.mark.parametrize(("verify", "loaded"), [("strict", False), ("strict", True), ("off", True)])
def test_a_run_has_the_bits_of_one_whose_cache_lies_apart(
    monkeypatch: pytest.MonkeyPatch, shallow: Path, apart: list[Any], verify: str, loaded: bool
) -> None:
    """Whether graphs are recorded by a run of each, or without, as their kernels are loaded."""
    run = made(monkeypatch, config_of(shallow, verify), lends_cache=True, loaded=loaded)
    one, other = apart, stepped(run)
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    cache = run.engine.cache
    assert cache.borrower.pool_used and cache.k.isnan().any()  # the trainer has had it last
    cache.reclaim()
    assert not cache.k.any() and not cache.v.any() and not cache.borrower.pool_used


@pytest.mark.parametrize("lent", [True, False])
def test_a_pool_begins_as_large_as_planned_and_the_machine_is_checked_in_it(
    monkeypatch: pytest.MonkeyPatch, shallow: Path, lent: bool
) -> None:
    planned, inside = session_build._require_plan, list[bool]()
    monkeypatch.setattr(session_build, "_require_plan", lambda *about: replace(planned(*about), pool=1 << 20))
    check = session_warm_up.machine_check.check

    def noted(*about: Any) -> Any:
        inside.append(run[0].runtime.recorder.inside)
        return check(*about)

    monkeypatch.setattr(session_warm_up.machine_check, "check", noted)
    run = list[TrainingSession]()
    warm_up = session_warm_up.warm_up
    monkeypatch.setattr(session_warm_up, "warm_up", lambda session: (run.append(session), warm_up(session)))
    made(monkeypatch, config_of(shallow, "off"), lent)
    assert inside == [True] and not run[0].runtime.recorder.inside
    assert run[0].runtime.recorder.reserved == 1 << 20


def test_the_check_copies_nothing_of_what_others_left_in_it(monkeypatch: pytest.MonkeyPatch, shallow: Path) -> None:
    taken = list[Snapshot]()

    class Noted(Snapshot):
        def __init__(self, *about: Any) -> None:
            super().__init__(*about)
            taken.append(self)

    for module in (comparison, against_eager):
        monkeypatch.setattr(module, "Snapshot", Noted)
    cache = made(monkeypatch, config_of(shallow, "strict"), lends_cache=True).engine.cache
    ends = [(memory.data_ptr(), memory.data_ptr() + memory.nbytes) for memory in (cache.k, cache.v)]
    copied = [
        sum(part.nbytes for part, _ in one._kept if any(begin <= part.data_ptr() < end for begin, end in ends))
        for one in taken
    ]
    assert copied and not any(copied)


@pytest.mark.parametrize("taken_back", [True, False])
def test_nothing_is_found_again_that_the_trainer_has_overwritten(
    monkeypatch: pytest.MonkeyPatch, shallow: Path, taken_back: bool
) -> None:
    """Of the same weights a prompt's pages would be; where they are, another token follows."""
    run = made(monkeypatch, config_of(shallow, "off"), lends_cache=True)
    prompt, sampling = [*range(1, 40)], SamplingParams(temperature=0.0, max_completion_length=4, ignore_eos=True)
    asked = [prompt], [sampling], [SampleIdentity(0, 0, 0, 0)]
    first = run.engine.generate(*asked)[0][0]
    if not taken_back:
        monkeypatch.setattr(KVCache, "reclaim", lambda _: None)
    run.runtime.recorder.run(lambda _: [torch.zeros(1)], [])
    again = run.engine.generate(*asked)[0][0]
    assert (again.model_logprobs == first.model_logprobs) == taken_back


def test_the_trainer_does_not_run_while_pages_are_held(monkeypatch: pytest.MonkeyPatch, shallow: Path) -> None:
    run = made(monkeypatch, config_of(shallow, "off"), lends_cache=True)
    cache = run.engine.cache
    pages = cache.allocate(1)
    cache.borrower.pool_used = True
    with pytest.raises(AssertionError, match="while sequences were being generated"):
        cache.reclaim()
    cache.release(pages)
    cache.reclaim()
