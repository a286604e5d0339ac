"""A cache in the memory of the trainer's recorded graphs: what it saves, and that no bit of a run is another one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.config import CompileConfig, LossConfig, RunConfig, SamplingConfig, TaskConfig, TrainerConfig
from lockstep.graph import compile_report
from lockstep.rl.loop import Loop
from lockstep.session import build as session_build
from lockstep.session.build import TrainingSession, build
from lockstep.session.warm_up import warm_up

CONFIG = RunConfig(
    arch="qwen3-100m",
    task=TaskConfig(easy=True, validation_prompts=2),
    sampling=SamplingConfig(num_generations=8, max_completion_length=256, ignore_eos=True),
    trainer=TrainerConfig(prompts_per_step=4, num_iterations=2, skip_zero_variance=False, warmup_steps=0),
    loss=LossConfig(beta=0.1),
    compile=CompileConfig("step", "full"),
)


def made(monkeypatch: pytest.MonkeyPatch, lent: bool) -> TrainingSession:
    planned = session_build._require_plan
    with monkeypatch.context() as patch:
        patch.setattr(session_build, "_require_plan", lambda *about: replace(planned(*about), lends_cache=lent))
        run = build(CONFIG)
    warm_up(run)
    return run


def stepped(run: TrainingSession) -> list[Any]:
    """Two steps of two updates each, with looks at the policy between them; and the weights behind them."""
    loop, found = Loop(CONFIG, run), list[Any]()
    for step in range(2):
        found.append(loop.validate())
        metrics, groups = loop.step(step)
        found += [[r.token_ids for r in g.rollouts] for g in groups]
        found += [metrics[name] for name in ("loss", "grad_norm", "kl", "parity/tokens_different")]
        assert metrics["parity/tokens_checked"] == 4 * 8 * 256 and metrics["parity/tokens_different"] == 0
    return [*found, *(p.detach().cpu() for p in run.policy.model.parameters())]


def test_a_run_has_the_bits_of_one_whose_cache_lies_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found, pools = [], []
    for lent in (False, True):
        run = made(monkeypatch, lent)
        cache, pool = run.engine.cache, compile_report(run.runtime)["pool_gib"]
        assert (cache.borrower is not None) == lent
        found.append(stepped(run))
        pools.append(pool + (0 if lent else (cache.k.nbytes + cache.v.nbytes) / 2**30))
        run.runtime.close()
    apart, within = found
    assert len(apart) == len(within)
    for a, b in zip(apart, within, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    cached = (cache.k.nbytes + cache.v.nbytes) / 2**30
    print(f"\ncache {cached:.3f} GiB; with the pools {pools[0]:.3f} GiB apart, {pools[1]:.3f} in turn")
    assert pools[1] < pools[0] - 0.5 * min(cached, pools[0] - cached)  # most of the smaller one is saved
