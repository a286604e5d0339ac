"""A GPU's state in the host's memory: what updates bring from there, and the copy that a checkpoint is made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import stepped

from lockstep.config import LossConfig, OptimizerConfig
from lockstep.distributed import ONE_PROCESS
from lockstep.models import Decoder
from lockstep.models.init import architecture
from lockstep.run import checkpoint
from lockstep.trainer import Trainer, optimizer


def trainer(offload: bool) -> Trainer:
    """Of a few million parameters, the same each time."""
    torch.manual_seed(0)
    model = Decoder(replace(architecture("qwen3-100m"), num_layers=2), torch.bfloat16, "cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    return Trainer(model, OptimizerConfig(weight_decay=0.1, offload=offload), LossConfig())


def update(one: Trainer, seed: int, ok: bool = True) -> None:
    for grad in one.flat.grads:
        grad.normal_(generator=torch.Generator("cuda").manual_seed(seed))
    stepped(one.optimizer, 1e-3, ok)


def bits(of: Trainer) -> list[torch.Tensor]:
    return [tensor.cpu() for tensor in (*of.optimizer.local_state().values(), of.flat.data)]


@pytest.mark.parametrize("kept", [0.0, 0.3])
def test_updates_have_the_bits_of_a_state_on_the_device(monkeypatch: pytest.MonkeyPatch, kept: float) -> None:
    """Many small chunks one behind the other, so that copies of one meet the update of the next, and of those that stay
    on the device."""
    monkeypatch.setattr(optimizer, "CHUNK", 1 << 18)
    plain, apart = trainer(False), trainer(True)
    apart.optimizer.keep_on_device(int(kept * 12 * apart.flat.layout.size))
    assert len(apart.optimizer._copied) > 20 and (apart.optimizer.kept_bytes > 0) == (kept > 0)
    for step in range(6):
        for one in (plain, apart):
            update(one, step, step != 2)
    assert all(map(torch.equal, bits(plain), bits(apart))) and apart.optimizer.exp_avg.is_pinned()
    again = trainer(True)
    again.load_state(*apart.state())
    assert all(map(torch.equal, bits(plain), bits(again)))


@pytest.mark.parametrize("offload", [False, True])
def test_a_checkpoint_is_what_was_when_the_step_went_on(tmp_path: Path, offload: bool) -> None:
    one = trainer(offload)
    saver = checkpoint.Saver(tmp_path, 2, ONE_PROCESS, shared=True)
    for step in range(2):  # the second time in the same memory
        update(one, step)
        before = {name: tensor.cpu().clone() for name, tensor in one.state()[0].items()}
        saver.save(step, {"trainer": one.state()[0]}, {})
        for tensor in one.optimizer.local_state().values():
            tensor.fill_(7)
        saver.wait()
        loaded = checkpoint.latest(tmp_path)
        assert loaded is not None and loaded.step == step
        found = {name: tensor[:] for name, tensor in loaded.slices("trainer").items()}
        assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
