"""The optimizer's state in the host's memory: every bit that it has on the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from small import stepped
from test_parameter_groups import GROUPED
from updates import LR, bits, one_batch, same

from lockstep.config import CompileConfig, LossConfig, OptimizerConfig, RunConfig
from lockstep.errors import InputError
from lockstep.graph import EAGER, Runtime
from lockstep.models import Decoder
from lockstep.session.build import resolve
from lockstep.session.memory import Workload, terms
from lockstep.trainer import BatchShape, Trainer, optimizer
from lockstep.types import SamplingParams


@pytest.mark.parametrize("config", [OptimizerConfig(weight_decay=0.1), GROUPED], ids=["one group", "groups"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [0.0, 0.5, 1.0])
def test_updates_have_the_bits_of_a_state_on_the_device(
    make_model: Callable[..., Decoder],
    monkeypatch: pytest.MonkeyPatch,
    config: OptimizerConfig,
    dtype: torch.dtype,
    kept: float,
) -> None:
    """Updates that are applied, refused and not finite; the state goes from either to the other in between. Of the
    state on the host a part, or all of it, may stay on the device."""
    monkeypatch.setattr(optimizer, "CHUNK", 7 * 1024)
    kinds = (config, replace(config, offload=True))

    def make(kind: OptimizerConfig, seed: int = 0) -> Trainer:
        made = Trainer(make_model(dtype, seed=seed), kind, LossConfig())
        size = made.flat.layout.size * (8 if dtype == torch.float32 else 12)
        made.optimizer.keep_on_device(int(kept * size))
        if kind.offload:
            assert kept * size - 12 * 7 * 1024 < made.optimizer.kept_bytes <= kept * size
        return made

    plain, apart = map(make, kinds)
    assert len(apart.optimizer._pieces) > max(5, len(plain.optimizer.groups))
    for step in range(6):
        for trainer in (plain, apart):
            draw = torch.Generator().manual_seed(step)
            trainer.flat.grad.copy_(10.0 ** (step - 3) * torch.randn(trainer.flat.grad.shape, generator=draw))
            if step == 3:
                trainer.flat.grad[-5] = torch.inf
        found = [stepped(t.optimizer, LR, step != 2) for t in (plain, apart)]
        assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1] == (step not in (2, 3))
        assert same(bits(plain), bits(apart)) and not apart.flat.grad.any()
        if step == 4:
            again = [make(kind, seed=1) for kind in reversed(kinds)]
            for trainer, other in zip(again, (plain, apart), strict=True):
                trainer.load_state(*other.state())
            apart, plain = again
    plain.optimizer.reset()
    apart.optimizer.reset()
    assert same(bits(plain), bits(apart)) and not apart.optimizer.exp_avg.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_counts_what_is_held(
    make_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    for module in (optimizer, terms):
        monkeypatch.setattr(module, "CHUNK", 7 * 1024)
    config, model = RunConfig(optimizer=OptimizerConfig(offload=True)), make_model(dtype)
    held, w = Trainer(model, config.optimizer, LossConfig()).optimizer, Workload(model.config, config, 1, dtype)
    assert terms.host(w, False)[terms.STATE_ON_HOST] == sum(part.nbytes for part in held._host)
    assert terms.offloaded_chunks(w) == sum(chunk.nbytes for chunk in held._chunks)


def test_whole_steps_of_graphs_have_the_bits_of_a_state_on_the_device(
    make_model: Callable[..., Decoder], make_groups: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And making the graphs neither waits for the host's memory nor changes the state, also between updates."""
    monkeypatch.setattr(optimizer, "CHUNK", 7 * 1024)
    found = []
    for offload, runtime in ((False, EAGER), (True, Runtime(CompileConfig("step"), torch.device("cpu")))):
        config = OptimizerConfig(weight_decay=0.1, offload=offload)
        trainer = Trainer(make_model(torch.bfloat16), config, LossConfig(), enforce_parity=False, runtime=runtime)
        for seed in range(4):
            if seed in (0, 2):  # new graphs also run, or are only recorded
                with runtime.warm_up.make_graphs() if seed else nullcontext():
                    trainer.warm_up([BatchShape(96 + seed, 48, 8, 40)], SamplingParams(), check_parity=False)
            assert not offload or (seed == 0) == (trainer.optimizer._memory is not None)
            trainer.forward_backward(one_batch(make_groups(seed=seed), check_parity=False))
            assert trainer.optim_step(LR).applied
            found.append(bits(trainer))
    assert all(map(same, found[:4], found[4:]))


def test_it_is_refused_where_it_would_save_nothing() -> None:
    config = RunConfig(device="cpu", optimizer=OptimizerConfig(offload=True))
    with pytest.raises(
        InputError, match="optimizer.offload is on, and the device is a CPU, whose memory is the host's"
    ):
        resolve(config)
