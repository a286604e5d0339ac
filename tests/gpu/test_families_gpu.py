"""Layers of real models with experts and latent attention, through both roles in recorded graphs: the trainer finds the
generator's bits, before and after an update.
"""

from dataclasses import replace

import pytest
import torch
from small import generate, requests, train_groups

from lockstep.config import CompileConfig, GeneratorConfig, LossConfig, OptimizerConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import Compiler
from lockstep.models import Decoder
from lockstep.models.init import ARCHITECTURES
from lockstep.trainer import Trainer, pack

DEVICE = torch.device("cuda")
MODELS = {
    "qwen3-30b-a3b, 2 layers": replace(ARCHITECTURES["qwen3-30b-a3b"], num_layers=2, vocab_size=4096),
    "deepseek-v3, 3 layers, 32 experts": replace(ARCHITECTURES["deepseek-v3-3-layers-32-experts"], vocab_size=4096),
}


@pytest.mark.parametrize("name", MODELS)
def test_generator_and_trainer_agree_over_updates(name: str) -> None:
    model = Decoder(MODELS[name], torch.bfloat16, DEVICE)
    draw = torch.Generator(DEVICE).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.03, generator=draw) if parameter.dim() > 1 else parameter.fill_(1.0)
        for buffer in model.buffers():  # router biases
            buffer.normal_(0, 0.05, generator=draw)
    compiler = Compiler(CompileConfig("step", "full"), DEVICE)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), compiler=compiler)
    weights = SharedWeights(model, lambda: trainer.weights_version)
    engine = Engine(weights, GeneratorConfig(), 16384, compiler=compiler)
    prompts, sampling = requests(6, length=40)
    tokens = []
    for _ in range(2):
        completions = generate(engine, prompts, sampling)
        for batch in pack(train_groups(prompts, sampling, completions), max_tokens=2048, check_parity=True):
            trainer.forward_backward(batch.to(DEVICE))
        result = trainer.optim_step(1e-4)
        assert result.tokens_different == 0 and result.mismatches == [] and result.applied
        assert result.tokens_checked == sum(len(c.token_ids) for group in completions for c in group)
        tokens.append([c.token_ids for group in completions for c in group])
    assert tokens[0] != tokens[1]
    assert compiler.replays["decode"] > 10
    compiler.close()
