"""Random-weight models of named architectures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from .config import ModelConfig
from .decoder import Decoder
from .hf import save_model
from .rope import RopeScaling

INITIALIZER_RANGE = 0.02


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int = 8, tied: bool = False) -> ModelConfig:
    return ModelConfig(151936, hidden, ffn, layers, heads, kv_heads, 128, tie_word_embeddings=tied)


def _llama3(
    layers: int, hidden: int, ffn: int, heads: int, head_dim: int = 128, factor: float = 0.0, tied: bool = False
) -> ModelConfig:
    """Llama 3; with a `factor` its frequencies are scaled (3.1 on) and the context is 131,072."""
    scaling = RopeScaling("llama3", factor) if factor else None
    context = 131072 if factor else 8192
    return ModelConfig(
        128256, hidden, ffn, layers, heads, 8, head_dim, context, 1e-5, 500000.0, tied, family="llama",
        rope_scaling=scaling,
    )  # fmt: skip


_TINY = ModelConfig(512, 128, 384, 4, 4, 2, 32, max_position_embeddings=2048, rope_theta=10000.0)

ARCHITECTURES: dict[str, ModelConfig] = {
    "tiny": _TINY,
    "tiny-llama": replace(
        _TINY,
        family="llama",
        rope_scaling=RopeScaling("llama3", 8.0, original_max_position_embeddings=256),
        tie_word_embeddings=False,
    ),
    "llama3-8b": _llama3(32, 4096, 14336, 32),
    "llama3.1-8b": _llama3(32, 4096, 14336, 32, factor=8.0),
    "llama3.1-70b": _llama3(80, 8192, 28672, 64, factor=8.0),
    "llama3.2-1b": _llama3(16, 2048, 8192, 32, 64, 32.0, tied=True),
    "llama3.2-3b": _llama3(28, 3072, 8192, 24, factor=32.0, tied=True),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64),
}


def architecture(name: str) -> ModelConfig:
    """The named configuration; `InputError` lists the names when there is none."""
    if name not in ARCHITECTURES:
        raise InputError(f"arch {name!r} is unknown; choose from {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def initialize(model: Decoder, seed: int) -> Decoder:
    """Fill in place: norms 1, matrices N(0, `INITIALIZER_RANGE`), the same values on any device."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.empty(parameter.shape).normal_(0, INITIALIZER_RANGE, generator=generator))
    return model


def init_folder(arch: str, out: Path, seed: int, tokenizer: str | None = None, vocab_size: int | None = None) -> dict:
    """Write a random-weight Hugging Face folder (bfloat16; float32 for the tiny ones) with a tokenizer.

    Args:
        tokenizer: folder to take the tokenizer from; a byte-level one is made otherwise.
        vocab_size: overrides the architecture's; at least the tokenizer's.

    Returns:
        A summary: arch, out, parameters, vocab_size, dtype.
    """
    from ..tokenizer import byte_tokenizer, check_vocabulary, load_tokenizer, save_tokenizer

    config = architecture(arch)
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise InputError(f"--out {out}: the folder exists and is not empty")
    config = replace(config, vocab_size=vocab_size or config.vocab_size)
    tok: Any = load_tokenizer(Path(tokenizer)) if tokenizer else byte_tokenizer()
    check_vocabulary(tok, config.vocab_size, f"arch {arch}")
    config = replace(config, eos_token_ids=(tok.eos_token_id,), pad_token_id=tok.pad_token_id)
    dtype = torch.float32 if arch.startswith("tiny") else torch.bfloat16
    model = initialize(Decoder(config, dtype), seed)
    save_model(model, out)
    save_tokenizer(tok, out)
    return {
        "arch": arch,
        "out": str(out),
        "parameters": config.num_parameters,
        "vocab_size": config.vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
    }
