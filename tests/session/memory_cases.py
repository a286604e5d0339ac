"""Workloads of models of known size, for the tests of what is planned."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.config import CompileConfig, RunConfig, SamplingConfig, TrainerConfig
from lockstep.config.run import resolve_parallel
from lockstep.config.sections.compile import resolve_compile
from lockstep.models.init import architecture
from lockstep.session.memory import Workload

GIB = 1 << 30
H200 = 141 * GIB


def workload(arch: str, ranks: int, compile: CompileConfig | None = None, **trainer: int) -> Workload:
    """64 prompts of 256 tokens, 8 samples of 512."""
    config = RunConfig(
        sampling=SamplingConfig(num_generations=8, max_completion_length=512),
        trainer=TrainerConfig(**({"prompts_per_step": 64} | trainer)),  # type: ignore[arg-type]
        compile=resolve_compile(compile or CompileConfig(), True),
    )
    limits = {"longest_prompt": 256, "prompt_limit": 32768}
    return Workload(architecture(arch), resolve_parallel(config, ranks), ranks, torch.bfloat16, **limits)


# Parameters of Qwen3: embedding (and head) V D, a layer D (2 A H + 2 K H) + 3 D F + 2 D + 2 H, and a norm D.
PARAMETERS = {
    "qwen3-0.6b": 151936 * 1024 + 28 * (1024 * 6144 + 3 * 1024 * 3072 + 2 * 1024 + 256) + 1024,
    "qwen3-8b": 2 * 151936 * 4096 + 36 * (4096 * 10240 + 3 * 4096 * 12288 + 2 * 4096 + 256) + 4096,
    "qwen3-14b": 2 * 151936 * 5120 + 40 * (5120 * 12288 + 3 * 5120 * 17408 + 2 * 5120 + 256) + 5120,
    "qwen3-32b": 2 * 151936 * 5120 + 64 * (5120 * 18432 + 3 * 5120 * 25600 + 2 * 5120 + 256) + 5120,
}


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
