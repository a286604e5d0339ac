"""Mixture of experts on a GPU: what is kept of the routing, and both roles over updates, in CUDA graphs and eagerly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep import ops
from lockstep.config import CompileConfig, GeneratorConfig, LossConfig, OptimizerConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import EAGER, Runtime
from lockstep.models import Decoder, ModelConfig
from lockstep.models.config import MoEConfig
from lockstep.models.init import initialize
from lockstep.trainer import Trainer, pack
from lockstep.types import RolloutGroup, SampleIdentity, SamplingParams, Trajectory

DEVICE = torch.device("cuda")
CONFIG = ModelConfig(
    2000, 256, 512, 3, 4, 2, 64, max_position_embeddings=2048, moe=MoEConfig(16, 4, 128), family="qwen3_moe"
)
SAMPLING = SamplingParams(n=8, temperature=0.9, max_completion_length=40, ignore_eos=True)
PROMPTS = [[(7 * i + g) % 2000 for i in range(30 + 40 * g)] for g in range(4)]


@pytest.mark.parametrize("tokens", [1, 40, 513])
def test_digests_and_loads_are_those_of_a_cpu(tokens: int, census) -> None:
    torch.manual_seed(tokens)
    experts, valid = torch.randint(0, 128, (tokens, 384)), torch.rand(tokens) < 0.8
    found = ops.route_digest(experts.to(DEVICE))
    assert census("route digests", found.cpu(), ops.route_digest(experts)) == 0
    loads = ops.expert_loads(experts.to(DEVICE), valid.to(DEVICE), 48, 128)
    assert census("expert loads", loads.cpu(), ops.expert_loads(experts, valid, 48, 128)) == 0
    logits = torch.randn(tokens, 128)
    probabilities = ops.router_probabilities(logits.to(DEVICE), valid.to(DEVICE))
    torch.testing.assert_close(probabilities.cpu(), ops.router_probabilities(logits, valid), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 40, 129, 512])
def test_a_result_has_a_fourth_word_for_the_experts(rows: int) -> None:
    torch.manual_seed(rows)
    state = [
        *(torch.randint(0, 6, (rows,)), torch.randn(rows), torch.randn(rows), torch.randint(-1, 6, (rows, 4))),
        *(torch.randint(0, 6, (rows,)), torch.randint(0, 80, (rows,)), torch.randint(0, 4, (rows,), dtype=torch.int32)),
        *(torch.zeros(rows, 4, 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)),
        torch.randint(0, 2**31 - 1, (rows,), dtype=torch.int32),
    ]
    on_gpu = [t.to(DEVICE) for t in state]
    for _ in range(3):
        for x in (state, on_gpu):
            ops.decode_advance(ops.SampledTokens(*x[:3]), ops.DecodeRows(*x[3:9]), *x[9:])
        assert all(torch.equal(a.cpu(), b) for a, b in zip(on_gpu, state, strict=True))


def test_both_roles_choose_the_same_experts_over_updates(census) -> None:
    eager, captured = rounds(EAGER), rounds(Runtime(CompileConfig("step", "full"), DEVICE))
    for a, b in zip(eager, captured, strict=True):
        assert census("mixture of experts, captured, eager", a, b) == 0


def rounds(runtime: Runtime) -> list[torch.Tensor]:
    """Three updates; the tokens, log-probabilities and digests of each rollout."""
    model = initialize(Decoder(CONFIG, torch.bfloat16, DEVICE), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    loss = LossConfig(router_aux_loss_coef=0.01)
    trainer = Trainer(model, OptimizerConfig(), loss, runtime=runtime)
    weights = SharedWeights(model, lambda: trainer.weights_version)
    engine = Engine(weights, GeneratorConfig(), 32768, runtime=runtime)
    made: list[torch.Tensor] = []
    for step in range(3):
        identities = [SampleIdentity(3, 0, step, g) for g in range(len(PROMPTS))]
        completions = engine.generate(PROMPTS, [SAMPLING] * len(PROMPTS), identities)
        groups = [RolloutGroup([weighted(c, i) for i, c in enumerate(group)], SAMPLING) for group in completions]
        for batch in pack(groups, max_tokens=4096, check_parity=True):
            trainer.forward_backward(batch.to(DEVICE))
        result = trainer.optim_step(1e-3)
        assert result.mismatches == [] and result.applied and result.tokens_checked == 4 * 8 * 40
        assert result.routing and result.routing.choices_checked == 4 * 8 * 40 * 12
        assert result.routing.load_imbalance >= 1 and result.routing.aux_loss
        flat = [c for group in completions for c in group]
        made.append(torch.tensor([[c.token_ids, c.route_digests] for c in flat]))
        made.append(torch.tensor([[c.logprobs, c.model_logprobs] for c in flat]))
    runtime.close()
    return made


def weighted(c: Trajectory, i: int) -> Trajectory:
    return replace(c, advantage=(-1.0) ** i, loss_weight=0.001)
