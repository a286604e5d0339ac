"""Random-weight models of named architectures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..config.random_weights import MARK
from ..errors import InputError, refuse
from .blocks.rope import RopeScaling, YarnScaling
from .checks import require_memory
from .config import MLAConfig, ModelConfig, MoEConfig
from .decoder import Decoder
from .folder import all_or_nothing, save_model

INITIALIZER_RANGE = 0.02


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int = 8, tied: bool = False) -> ModelConfig:
    return ModelConfig(151936, hidden, ffn, layers, heads, kv_heads, 128, tie_word_embeddings=tied)


def _llama3(layers: int, hidden: int, ffn: int, heads: int, factor: float = 0.0, tied: bool = False) -> ModelConfig:
    """Llama 3; with a `factor` its frequencies are scaled (3.1 on) and the context is 131,072."""
    scaling = RopeScaling("llama3", factor) if factor else None
    context = 131072 if factor else 8192
    return ModelConfig(
        128256, hidden, ffn, layers, heads, 8, hidden // heads, context, 1e-5, 500000.0, tied, family="llama",
        rope_scaling=scaling,
    )  # fmt: skip


def _deepseek_v3(layers: int, dense: int, experts: int) -> ModelConfig:
    """DeepSeek-V3's widths. The context is 4,096 times YaRN's 40."""
    moe = MoEConfig(
        experts, 8, 2048, tuple(range(dense)), sigmoid=True, groups=8, kept_groups=4, scale=2.5, shared_experts=1,
        router_bias=True,
    )  # fmt: skip
    return ModelConfig(
        129280, 7168, 18432, layers, 128, 1, 64, 163840, rope_theta=10000.0, tie_word_embeddings=False,
        family="deepseek_v3", rope_scaling=YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0), moe=moe,
        mla=MLAConfig(512, 128, 64, 128, 1536),
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
    "tiny-qwen3-moe": replace(_TINY, family="qwen3_moe", moe=MoEConfig(8, 2, 192)),
    "tiny-deepseek-v3": replace(
        _TINY,
        family="deepseek_v3",
        num_kv_heads=1,
        head_dim=16,
        rope_scaling=YarnScaling(8.0, 256, mscale=1.0, mscale_all_dim=1.0),
        tie_word_embeddings=False,
        mla=MLAConfig(64, 32, 16, 32, 96),
        moe=MoEConfig(
            8, 2, 192, (0,), sigmoid=True, groups=4, kept_groups=2, scale=2.5, shared_experts=1, router_bias=True
        ),
    ),
    "deepseek-v3": _deepseek_v3(61, 3, 256),
    "deepseek-v3-3-layers-32-experts": _deepseek_v3(3, 1, 32),
    "llama3-8b": _llama3(32, 4096, 14336, 32),
    "llama3.1-8b": _llama3(32, 4096, 14336, 32, factor=8.0),
    "llama3.1-70b": _llama3(80, 8192, 28672, 64, factor=8.0),
    "llama3.2-1b": _llama3(16, 2048, 8192, 32, 32.0, tied=True),
    "llama3.2-3b": _llama3(28, 3072, 8192, 24, factor=32.0, tied=True),
    "qwen3-100m": ModelConfig(512, 768, 2304, 14, 12, 4, 64, max_position_embeddings=4096, rope_theta=10000.0),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64),
    "qwen3-30b-a3b": replace(_qwen3(48, 2048, 6144, 32, 4), family="qwen3_moe", moe=MoEConfig(128, 8, 768)),
    "qwen3-235b-a22b": replace(_qwen3(94, 4096, 12288, 64, 4), family="qwen3_moe", moe=MoEConfig(128, 8, 1536)),
}


def architecture(name: str) -> ModelConfig:
    """The named configuration; `InputError` lists the names when there is none."""
    refuse(name not in ARCHITECTURES, f"arch {name!r} is unknown; choose from {', '.join(ARCHITECTURES)}")
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
    """Write a random-weight Hugging Face folder (bfloat16; float32 for the tiny ones) with a tokenizer. The weights are
    marked as random, for recipes to know.

    Args:
        tokenizer: folder to take the tokenizer from; a byte-level one is made otherwise.
        vocab_size: overrides the architecture's; at least the tokenizer's.

    Returns:
        A summary: arch, out, parameters, vocab_size, dtype.
    """
    from .tokenizer import byte_tokenizer, check_vocabulary, load_tokenizer, save_tokenizer

    config = architecture(arch)
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out}: {'not empty' if out.is_dir() else 'a file'}; name a new folder")
    refuse(not 0 <= seed < 2**63, f"--seed is {seed}; it must be between 0 and {2**63 - 1}")
    config = replace(config, vocab_size=config.vocab_size if vocab_size is None else vocab_size)
    tok: Any = load_tokenizer(Path(tokenizer)) if tokenizer else byte_tokenizer()
    check_vocabulary(tok, config.vocab_size, f"arch {arch}")
    config = replace(config, eos_token_ids=(tok.eos_token_id,), pad_token_id=tok.pad_token_id)
    dtype = torch.float32 if arch.startswith("tiny") else torch.bfloat16
    require_memory(config, dtype, "cpu", f"arch {arch}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: the folder cannot be made ({error.strerror}); name another") from error
    model = initialize(Decoder(config, dtype), seed)
    with all_or_nothing(out):
        save_model(model, out, metadata=MARK)
        save_tokenizer(tok, out)
    return {
        "arch": arch,
        "out": str(out),
        "parameters": config.num_parameters,
        "vocab_size": config.vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
    }
