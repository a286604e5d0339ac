"""Parameters that are frozen, or have a rate or a decay of their own, by patterns of their names."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import small
import torch
from fake_recorder import FakeRecorder
from small import stepped

from lockstep.config import CompileConfig, LossConfig, OptimizerConfig
from lockstep.errors import InputError
from lockstep.graph import EAGER, Runtime
from lockstep.graph.ir.captured import op_name
from lockstep.models import Decoder, select_by_pattern
from lockstep.trainer import Trainer, pack

LR = 1e-2
GROUPED = OptimizerConfig(
    weight_decay=0.1,
    freeze=("model.embed_tokens", "model.layers.0.post_attention_layernorm.weight"),
    lr_scales=("*=0.5", "model.layers.1.*=2", "model.layers.1.mlp.down_proj=0.25"),
    weight_decays=("model.layers.*.self_attn.*_proj=0.3", "model.norm=0.05"),
)
FROZEN = {"embed", "layers.0.mlp_norm"}


def group_of(name: str) -> tuple[float, float]:
    """The rate's factor and the decay that `GROUPED` gives a parameter, by hand."""
    scale = 0.5 if not name.startswith("layers.1.") else 0.25 if name == "layers.1.down" else 2.0
    if name.endswith((".qkv", ".o")):
        return scale, 0.3
    return scale, 0.05 if name == "norm" else 0.1 if name.endswith((".gate_up", ".down", "lm_head")) else 0.0


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_equals_torch(make_model: Callable[..., Decoder], tie: bool, max_grad_norm: float) -> None:
    model, plain = make_model(tie=tie), dict(make_model(tie=tie).named_parameters())
    trainer = Trainer(model, replace(GROUPED, max_grad_norm=max_grad_norm), LossConfig())
    flat, ours = trainer.flat, trainer.optimizer
    assert set(flat.names) == plain.keys() - FROZEN and len(ours.groups) > 4
    groups = [
        {"params": [plain[name]], "lr": LR * group_of(name)[0], "weight_decay": group_of(name)[1]}
        for name in flat.names
    ]
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    trained = [plain[name] for name in flat.names]
    for step in range(5):
        draw = torch.Generator().manual_seed(step)
        for parameter, grad in zip(trained, flat.grads, strict=True):
            grad.copy_(10.0 ** (step - 3) * torch.randn(grad.shape, generator=draw))
            parameter.grad = grad.clone()
        expected = torch.nn.utils.clip_grad_norm_(trained, max_grad_norm or math.inf)
        norm, applied = stepped(ours, LR)
        theirs.step()
        assert applied and torch.allclose(norm, expected, rtol=1e-6) and not flat.grad.any()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, plain[name], rtol=1e-6, atol=1e-6 * 2 * LR)
    assert ours.steps.tolist() == [5, 5]


def test_a_refused_update_changes_no_bit(make_model: Callable[..., Decoder]) -> None:
    trainer = Trainer(make_model(torch.bfloat16), GROUPED, LossConfig())
    trainer.flat.grad.fill_(1.0)
    stepped(trainer.optimizer, LR)
    before = [t.clone() for t in (trainer.flat.data, *trainer.optimizer.state().values())]
    trainer.flat.grad.fill_(1.0)
    assert not stepped(trainer.optimizer, LR, False)[1]
    assert all(map(torch.equal, before, (trainer.flat.data, *trainer.optimizer.state().values())))
    assert trainer.optimizer.steps.tolist() == [1, 1] and not trainer.flat.grad.any()


def steps(model: Decoder, optimizer: OptimizerConfig, groups: Any, record: Any, runtime: Runtime = EAGER) -> list[Any]:
    """Gradients by name, and results, of two updates; the weights."""
    trainer = Trainer(model, optimizer, LossConfig(), runtime=runtime)
    seen: list[Any] = []
    for _ in range(2):
        for batch in pack(record(model, groups), max_tokens=160, check_parity=True):
            trainer.forward_backward(batch)
        seen.append(dict(zip(trainer.flat.names, (g.clone() for g in trainer.flat.grads), strict=True)))
        seen.append(trainer.optim_step(LR))
        assert seen[-1].applied and seen[-1].tokens_different == 0
    return [*seen, {name: p.detach().clone() for name, p in model.named_parameters()}]


def test_what_is_frozen_keeps_its_bits_and_the_others_their_gradients(make_model, make_groups, record) -> None:
    start = dict(make_model().named_parameters())
    every, *_ = steps(make_model(), OptimizerConfig(), make_groups(), record)
    grads, result, *_, weights = steps(make_model(), GROUPED, make_groups(), record)
    assert grads.keys() == every.keys() - FROZEN
    assert all(torch.equal(grads[name], every[name]) for name in grads)
    assert result.grad_norm == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in grads.values())), rel=1e-5)
    assert {name for name in weights if torch.equal(weights[name], start[name])} == FROZEN


def test_state_resumes_without_what_is_frozen(make_model, make_groups, record) -> None:
    one, other = (Trainer(make_model(), GROUPED, LossConfig()) for _ in range(2))

    def update(trainer: Trainer) -> None:
        for batch in pack(record(trainer.model, make_groups()), max_tokens=1 << 12, check_parity=True):
            trainer.forward_backward(batch)
        assert trainer.optim_step(LR).applied

    update(one)
    tensors, numbers = one.state()
    trained = sum(p.numel() for name, p in one.model.named_parameters() if name not in FROZEN)
    assert trained <= len(tensors["master"]) < trained + len(one.flat.names) * 1024  # each padded to a block
    other.load_state({name: tensor.clone() for name, tensor in tensors.items()}, numbers)
    for trainer in (one, other):
        update(trainer)
    assert all(map(torch.equal, one.model.parameters(), other.model.parameters()))
    with pytest.raises(ValueError, match="master"):
        Trainer(make_model(), OptimizerConfig(), LossConfig()).load_state(tensors, numbers)


def test_graphs_have_the_bits_of_eager(make_model, make_groups, record) -> None:
    config = CompileConfig("step", cudagraph_mode="full")
    runtime = Runtime(config, torch.device("cpu"), recorder=FakeRecorder())
    eager = steps(make_model(), GROUPED, make_groups(), record)
    captured = steps(make_model(), GROUPED, make_groups(), record, runtime)
    for a, b in zip(eager, captured, strict=True):
        assert a.keys() == b.keys() and all(map(torch.equal, a.values(), b.values())) if isinstance(a, dict) else a == b


def test_a_graph_has_a_launch_a_group_and_no_product_for_what_is_frozen(make_model, make_groups) -> None:
    def calls(optimizer: OptimizerConfig) -> tuple[int, int, int]:
        """Groups; updates and products of backward passes in the graphs."""
        runtime = Runtime(CompileConfig("step"), torch.device("cpu"))
        trainer = Trainer(make_model(), optimizer, LossConfig(), runtime=runtime)
        for batch in pack(make_groups(), max_tokens=1 << 12, check_parity=False):
            trainer.forward_backward(batch)
        trainer.optim_step(LR)
        nodes = [n for p in runtime.programs for g in p.graphs.values() for n in g.captured.graph.nodes]
        found = Counter(op_name(n) for n in nodes if n.op == "call_function")
        return len(trainer.optimizer.groups), found["lockstep.adamw"], found["lockstep.matmul"]

    layer = OptimizerConfig(freeze=("model.layers.0",))
    (one, update, whole), (_, update_of_layer, less), (groups, updates, _) = map(
        calls, (OptimizerConfig(), layer, GROUPED)
    )
    assert one == update == update_of_layer == 1 and groups == updates > 4
    assert whole - less == 4  # products for the gradients of the first layer's weights


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            OptimizerConfig(freeze=("model.embed_token",)),
            "optimizer.freeze: 'model.embed_token' matches no parameter that is trained, such as model.embed_",
        ),
        (
            OptimizerConfig(freeze=("model.embed_tokens",), lr_scales=("model.embed_tokens=2",)),
            "optimizer.lr_scales: 'model.embed_tokens' matches no parameter that is trained",
        ),
        (
            OptimizerConfig(freeze=("*.q_proj", "*.k_proj")),
            "optimizer.freeze: model.layers.0.self_attn.q_proj.weight and model.layers.0.self_attn.v_proj.weight",
        ),
        (
            OptimizerConfig(weight_decays=("*.gate_proj=0.1", "*.up_proj=0.2")),
            "optimizer.weight_decays: model.layers.0.mlp.gate_proj.weight and model.layers.0.mlp.up_proj.weight are",
        ),
        (OptimizerConfig(freeze=("model.*",)), "optimizer.freeze names every parameter of the model"),
    ],
)
def test_patterns_that_do_not_fit_are_refused(
    make_model: Callable[..., Decoder], optimizer: OptimizerConfig, message: str
) -> None:
    with pytest.raises(InputError) as refused:
        Trainer(make_model(), optimizer, LossConfig())
    assert str(refused.value).startswith(message)


def test_a_pattern_is_of_tensors_or_of_modules_and_the_last_counts() -> None:
    model = small.make_model(torch.float32, config=small.DEEPSEEK)
    given = [("*", 1), ("model.layers.1", 2), ("model.layers.*.mlp.experts", 3), ("*norm.weight", 4)]
    found = select_by_pattern(model, given, "field")
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert found["embed"] == found["layers.0.mla.down"] == 1 and found["layers.1.mla.down"] == 2
    assert found["layers.1.moe.experts.gate_up"] == found["layers.1.moe.experts.down"] == 3
    assert found["norm"] == found["layers.1.mlp_norm"] == found["layers.0.mla.kv_norm"] == 4
    assert select_by_pattern(model, [("model.layers.1.*", 2)], "field", without=found.keys() - {"layers.1.o"}) == {
        "layers.1.o": 2
    }


def test_a_critic_may_have_a_rate_of_its_own(make_model: Callable[..., Decoder]) -> None:
    optimizer = OptimizerConfig(weight_decay=0.1, freeze=("model",), lr_scales=("value_head=10",))
    trainer = Trainer(make_model(tie=False), optimizer, LossConfig("ppo"))
    assert trainer.flat.names == ["lm_head", "value_head"]
    assert [(group.scale, group.weight_decay) for group in trainer.optimizer.groups] == [(1.0, 0.1), (10.0, 0.1)]
