"""Balancing experts by their biases: the rule, and when it writes."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.config import LossConfig, OptimizerConfig
from lockstep.errors import InputError
from lockstep.models import Decoder, ModelConfig
from lockstep.models.config import MoEConfig
from lockstep.models.init import initialize
from lockstep.trainer import Packing, Trainer, pack, pack_shards, routing
from lockstep.types import PackedBatch, RolloutGroup, Segment

EXPERTS = MoEConfig(4, 2, 24, sigmoid=True, router_bias=True)
BALANCED = OptimizerConfig(router_bias_rate=0.01)


def model_with(moe: MoEConfig | None) -> Decoder:
    family = "qwen3" if moe is None else "qwen3_moe"
    return initialize(Decoder(ModelConfig(97, 64, 96, 2, 4, 2, 16, family=family, moe=moe), torch.float32), 0)


def test_biases_move_towards_the_mean_load() -> None:
    biases = [torch.tensor([0.5, 0.0, 0.0, -0.5]), torch.zeros(4)]
    loads = torch.tensor([[9, 2, 5, 4], [3, 3, 3, 3]], dtype=torch.float64)
    routing.balance_biases(biases, loads.flatten(), 0.25, torch.tensor(False))
    assert biases[0].tolist() == [0.5, 0.0, 0.0, -0.5]
    routing.balance_biases(biases, loads.flatten(), 0.25, torch.tensor(True))
    assert biases[0].tolist() == [0.25, 0.25, 0.0, -0.25]
    assert biases[1].tolist() == [0.0] * 4


def test_an_update_balances_what_its_batches_counted(make_groups) -> None:
    model = model_with(EXPERTS)
    trainer = Trainer(model, BALANCED, LossConfig())
    for batch in pack(make_groups(), max_tokens=300, check_parity=False):
        trainer.forward_backward(batch)
    loads = trainer._statistics[-8:].clone().view(2, 4)
    assert loads.sum() > 0
    assert trainer.optim_step(1e-3).applied
    for layer, load in zip(model.layers, loads, strict=True):
        torch.testing.assert_close(layer.moe.router_bias, 0.01 * (load.mean() - load).sign().float())


def loads_of(batches: list[PackedBatch], checked: list[PackedBatch]) -> torch.Tensor:
    """What is counted of batches that are trained on and others that are only checked, [L * E]."""
    trainer = Trainer(model_with(EXPERTS), BALANCED, LossConfig())
    for batch in checked:
        trainer.check(batch)
    for batch in batches:
        trainer.forward_backward(batch)
    return trainer._statistics[-8:]


def test_what_is_checked_and_shards_without_prompts_count_for_nothing(make_groups) -> None:
    """Such a shard's micro-batch has a token of its own."""
    groups = make_groups()
    batches = pack(groups, max_tokens=300, check_parity=False)
    found = loads_of(batches, [])
    lengths = [len(t.segments[0].token_ids) + t.length - 1 for group in groups for t in group.rollouts]
    assert found.view(2, 4).sum(1).tolist() == [2 * sum(lengths)] * 2  # two experts a token; the last predicts nothing
    assert torch.equal(found, loads_of(batches, batches[:1]))
    sharded = pack_shards([groups, []], [0, 1], Packing(300), check_parity=False)
    assert len(sharded) == 2 * len(batches) and torch.equal(found, loads_of(sharded, sharded))


@pytest.mark.parametrize(
    "how",
    [Packing(130), Packing(300, "per_sample"), Packing(300, share_prefix=False), Packing(140, whole_sequences=True)],
)
def test_what_is_counted_does_not_depend_on_packing(make_groups, how: Packing) -> None:
    """Where a prompt stands in several micro-batches, once for all of its responses, or before each."""
    groups = make_groups()
    groups[0].rollouts[2].segments += [Segment([1] * 5, begins_branch=True), Segment([2, 3], True)]  # a branch
    (together,) = pack(groups, max_tokens=4096, check_parity=False)
    batches = pack_shards([groups], [0], how, check_parity=False)
    assert len(batches) > 1 and torch.equal(loads_of(batches, []), loads_of([together], []))


def test_no_bias_moves_without_an_update_or_a_rate(make_groups) -> None:
    for optimizer, finite in ((BALANCED, False), (OptimizerConfig(), True)):
        model = model_with(EXPERTS)
        trainer = Trainer(model, optimizer, LossConfig())
        groups: list[RolloutGroup] = make_groups()
        if not finite:
            groups[0].rollouts[0].advantage = math.nan
        for batch in pack(groups, max_tokens=300, check_parity=False):
            trainer.forward_backward(batch)
        assert trainer.optim_step(1e-3).applied == finite
        assert not any(bias.any() for bias in model.buffers())


def test_a_checkpoint_has_the_biases() -> None:
    trained, fresh = (Trainer(model_with(EXPERTS), OptimizerConfig(), LossConfig()) for _ in range(2))
    for bias in trained.model.buffers():
        bias.copy_(torch.randn(4))
    tensors, numbers = trained.state()
    fresh.load_state({name: tensor.clone() for name, tensor in tensors.items()}, numbers)
    pairs = list(zip(trained.model.buffers(), fresh.model.buffers(), strict=True))
    assert len(pairs) == 2 and all(torch.equal(a, b) for a, b in pairs)
    with pytest.raises(ValueError, match=r"'layers\.0\.moe\.router_bias' is missing"):
        fresh.load_state({n: t for n, t in tensors.items() if "layers.0" not in n}, numbers)


@pytest.mark.parametrize("moe", [None, MoEConfig(4, 2, 24)])
def test_a_rate_without_biases_is_refused(moe: MoEConfig | None) -> None:
    with pytest.raises(InputError, match=r"optimizer\.router_bias_rate is 0\.01"):
        Trainer(model_with(moe), BALANCED, LossConfig())
