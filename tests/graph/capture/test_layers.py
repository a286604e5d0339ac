"""Layers through `torch.compile`: the bits of eager in both roles, few variants, and none after the warm-up."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import CONFIG, FAMILIES, make_model
from torch import Tensor, nn
from two_roles import needs_inductor, quick_inductor

from lockstep import ops
from lockstep.config import (
    CompileConfig,
    LossConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
    validate,
)
from lockstep.errors import InputError
from lockstep.graph import EAGER, GraphError, Runtime, compile_report
from lockstep.graph.capture import layers
from lockstep.graph.capture.layers import layer_compiler
from lockstep.graph.torch_private.inductor import compile_module
from lockstep.models.blocks.attention import PagedAttention
from lockstep.models.config import MoEConfig
from lockstep.rl.loop import Loop
from lockstep.session import build as build_room
from lockstep.session import warm_up
from lockstep.trainer import Trainer, pack


def config(capture: str, model: Path | None = None) -> RunConfig:
    return RunConfig(
        model=model and str(model),
        device="cpu",
        compile=CompileConfig(capture),  # type: ignore[arg-type]
        task=TaskConfig(easy=True, validation_prompts=2),
        sampling=SamplingConfig(num_generations=3, max_completion_length=7, top_p=0.9),
        trainer=TrainerConfig(prompts_per_step=2, skip_zero_variance=False),
        optimizer=OptimizerConfig(learning_rate=1e-2),
    )


def train(capture: str, model: Path) -> tuple[list[Any], list[Tensor], build_room.TrainingSession]:
    c = config(capture, model)
    run = build_room.build(c)
    warm_up.warm_up(run)
    loop, seen = Loop(c, run), []
    for step in range(3):
        metrics, groups = loop.step(step)
        kept = {k: v for k, v in metrics.items() if not k.startswith(("time/", "perf/", "memory/"))}
        seen += [kept, [(r.token_ids, r.logprobs) for g in groups for r in g.rollouts]]
    return seen, [p.detach().clone() for p in run.policy.model.parameters()], run


def test_a_run_is_the_eager_run_and_compiles_nothing_late(shallow: Path) -> None:
    eager, eager_weights, _ = train("none", shallow)
    seen, weights, run = train("layer", shallow)
    assert seen == eager and all(map(torch.equal, weights, eager_weights))
    assert [m["recompiles"] for m in seen[::2]] == [0, 0, 0] and seen[-2]["parity/tokens_different"] == 0
    assert run.runtime.layers is not None and 0 < run.runtime.captures <= 5
    assert compile_report(run.runtime)["traces"] == run.runtime.captures


def test_kinds_of_layers_are_variants_and_indices_are_not(rollout) -> None:
    """Three layers, the middle one dense: two kinds, each for training."""

    def gradients(runtime: Runtime) -> Tensor:
        model = make_model(torch.float32, config=moe)
        trainer = Trainer(model, OptimizerConfig(), LossConfig(router_aux_loss_coef=0.01), runtime=runtime)
        for packed in pack(groups, max_tokens=44, check_parity=False):
            trainer.forward_backward(packed)
        return trainer.flat.grad.clone()

    moe = replace(
        CONFIG,
        vocab_size=97,
        num_layers=3,
        family="qwen3_moe",
        moe=MoEConfig(6, 2, 40, dense_layers=(1,)),
        eos_token_ids=(),
    )
    groups = rollout(make_model(torch.float32, config=moe), 0)
    runtime = Runtime(CompileConfig("layer"), torch.device("cpu"))
    assert torch.equal(gradients(runtime), gradients(EAGER)) and runtime.captures == 2


class Scale(nn.Module):
    def __init__(self, power: int) -> None:
        super().__init__()
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        return x.exp() if self.power else x * 2


def test_variants_are_counted_bounded_and_shared_with_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MAX_VARIANTS", 2)
    runtime = Runtime(CompileConfig("layer"), torch.device("cpu"))
    call = runtime.layers
    assert call is not None
    for rows in (4, 2, 9):
        assert torch.equal(call(Scale(0), torch.ones(rows)), torch.full((rows,), 2.0))
    assert (runtime.captures, runtime.recompiles) == (1, 0) and copy.deepcopy(call) is call
    runtime.end_warm_up()
    call(Scale(1), torch.ones(3))
    assert (runtime.captures, runtime.recompiles) == (2, 1)
    with pytest.raises(GraphError, match="compile.capture layer: more than 2 variants of a layer are needed"):
        call(Scale(0), torch.ones(3, dtype=torch.float64))


def test_what_cannot_be_captured_whole_is_an_error_that_names_it() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if float(x.sum()) > 0 else x

    with pytest.raises(
        GraphError, match="compile.capture layer: Reads cannot be compiled whole: .*; use compile.capture none"
    ):
        layer_compiler()(Reads(), torch.ones(3))


@needs_inductor
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_with_inductor_layers_write_their_own_caches(family: str) -> None:
    model, tokens = make_model(torch.float32, config=FAMILIES[family]), torch.arange(20) % 7

    def prefill(call: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        heads, key, value = model.config.kv_cache_sizes
        k_cache, v_cache = (torch.zeros(model.config.num_layers, 3, 16, heads, size) for size in (key, value))
        starts, context = torch.tensor([0, 12, 20]).int(), torch.tensor([12, 8]).int()
        slots = torch.cat((torch.arange(12), 16 + torch.arange(8)))
        paged = ops.Paged(torch.tensor([[0], [1]]).int(), starts, context, 12, 64)
        attend = PagedAttention(ops.KVPages(k_cache, v_cache), slots, paged)
        model.call_layer = call
        with torch.no_grad(), quick_inductor():
            return model(tokens, torch.arange(20), attend), k_cache

    eager, found = prefill(type(model.layers[0]).__call__), prefill(layer_compiler(compile_module))
    assert all(eager[1].any(-1).flatten(1).any(1)), "every layer's cache is written"
    for x, y in zip(eager, found, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-5)


def test_flex_attention_is_refused() -> None:
    with pytest.raises(InputError, match="compile.capture is layer, and flex attention .* use step or joint"):
        validate(replace(config("layer"), attention="flex"))
