"""Random models of real shapes through both roles in recorded graphs."""

from __future__ import annotations

import torch
from small import generate, requests, train_groups

from lockstep.config import GeneratorConfig, LossConfig, OptimizerConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import Runtime
from lockstep.models import Decoder, ModelConfig
from lockstep.trainer import Trainer, pack


def drawn(config: ModelConfig, device: torch.device) -> Decoder:
    """A model in bfloat16 whose weights are drawn on the device."""
    model = Decoder(config, torch.bfloat16, device)
    draw = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.03, generator=draw) if parameter.dim() > 1 else parameter.fill_(1.0)
        for buffer in model.buffers():  # router biases
            buffer.normal_(0, 0.05, generator=draw)
        if model.embed_factor != 1:  # a head tied to a large embedding says what it read again, whatever an update does
            model.norm.fill_(0.1 - model.norm_offset)
    return model


def assert_roles_agree_over_updates(
    model: Decoder, runtime: Runtime, config: GeneratorConfig, cache_tokens: int
) -> None:
    """The trainer finds the generator's bits, before and after an update; closes the runtime."""
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime)
    weights = SharedWeights(model, lambda: trainer.weights_version)
    engine = Engine(weights, config, cache_tokens, runtime=runtime)
    prompts, sampling = requests(6, length=40)
    tokens = []
    for _ in range(2):
        completions = generate(engine, prompts, sampling)
        for batch in pack(train_groups(prompts, sampling, completions), max_tokens=2048, check_parity=True):
            trainer.forward_backward(batch.to(model.embed.device))
        result = trainer.optim_step(1e-4)
        assert result.tokens_different == 0 and result.mismatches == [] and result.applied
        assert result.tokens_checked == sum(len(c.token_ids) for group in completions for c in group)
        tokens.append([c.token_ids for group in completions for c in group])
    assert tokens[0] != tokens[1]
    assert runtime.replays["decode"] > 10
    runtime.close()
