"""Whole models on a GPU against `transformers` in float32 on a CPU, about as near as its own bfloat16 on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import load_model
from torch import Tensor

from lockstep import ops
from lockstep.models import Decoder, PackedAttention

transformers = pytest.importorskip("transformers")

DEVICE = torch.device("cuda")
LENGTH, VOCABULARY = 300, 1000
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
}
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, GQA),
    "qwen3, tied": (transformers.Qwen3Config, GQA | {"tie_word_embeddings": True}),
    "qwen3, wide heads": (transformers.Qwen3Config, WIDE | {"tie_word_embeddings": False}),
    "qwen3, a window": (
        transformers.Qwen3Config,
        GQA | {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1},
    ),
    "qwen3 with experts": (transformers.Qwen3MoeConfig, GQA | EXPERTS),
}


def random_model(name: str) -> torch.nn.Module:
    """In bfloat16, with weights that make distributions far from flat."""
    torch.manual_seed(0)
    make, sizes = MODELS[name]
    model = transformers.AutoModelForCausalLM.from_config(make(**SIZES, **sizes)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.06) if parameter.dim() > 1 else parameter.data.uniform_(0.5, 1.5)
    return model.bfloat16()


def their_logprobs(model: torch.nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each token after the first and the embedding's gradient of their mean."""
    logits = model(tokens[None].to(model.device)).logits[0, :-1]
    logprobs = torch.log_softmax(logits.double(), -1).gather(1, tokens[1:, None].to(model.device)).squeeze(1)
    (gradient,) = torch.autograd.grad(logprobs.mean(), model.get_input_embeddings().weight)
    return logprobs.detach().cpu(), gradient.double().cpu()


def our_logprobs(model: Decoder, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The same of ours."""
    device = model.embed.device
    tokens, rows = tokens.to(device), len(tokens) - 1
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    lengths = torch.tensor([0, len(tokens)], dtype=torch.int32, device=device)
    attend = PackedAttention(ops.Packed(lengths, zero, zero, len(tokens)), model.masks)
    hidden = model(tokens, torch.arange(len(tokens), device=device), attend)[:-1]
    one, off = torch.ones(rows, device=device), torch.zeros(rows, device=device)
    found = ops.token_logprobs(hidden, model.lm_head, tokens[1:], ops.Filters(one, off.int(), one, off))
    (gradient,) = torch.autograd.grad(found.model_logprob_C.mean(), model.embed)
    return found.model_logprob_C.detach().double().cpu(), gradient.double().cpu()


@pytest.mark.parametrize("name", MODELS)
def test_as_near_to_float32_as_transformers(name: str, tmp_path: Path) -> None:
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(0, VOCABULARY, (LENGTH,))
    ours, our_gradient = our_logprobs(load_model(tmp_path, torch.bfloat16, DEVICE), tokens)
    half, half_gradient = their_logprobs(theirs.to(DEVICE), tokens)
    exact, gradient = their_logprobs(theirs.cpu().float(), tokens)
    assert exact.std() > 0.5, "a flat distribution shows nothing"
    # Medians: of experts, rounding sends a few tokens elsewhere, in transformers as here.
    off, half_off = (float((found - exact).abs().median()) for found in (ours, half))
    assert off <= 2.5 * half_off and off <= 0.03
    near, half_near = (
        float(torch.cosine_similarity(found.flatten(), gradient.flatten(), 0))
        for found in (our_gradient, half_gradient)
    )
    assert near > 0.995 and half_near > 0.995
