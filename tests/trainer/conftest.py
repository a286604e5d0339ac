"""Tiny models, and groups whose log-probs are what the operators give on another packing, as a generator's are."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import small
import torch

from lockstep import ops
from lockstep.models import Decoder, ModelConfig, PackedAttention
from lockstep.trainer import pack
from lockstep.types import PackedBatch, RolloutGroup, SamplingParams

VOCABULARY = 97


@pytest.fixture
def make_model() -> Callable[..., Decoder]:
    """`make_model(dtype=float32, seed=0, tie=True)`: two layers, logits far from uniform."""

    def make(dtype: torch.dtype = torch.float32, seed: int = 0, tie: bool = True) -> Decoder:
        config = ModelConfig(VOCABULARY, 64, 96, 2, 4, 2, 16, rope_theta=1e4, tie_word_embeddings=tie, family="qwen3")
        return small.make_model(dtype, seed, config, scale=8)

    return make


@pytest.fixture
def make_groups() -> Callable[..., list[RolloutGroup]]:
    """`make_groups(sampling=None, seed=0)`: three groups, completions of 1 token to more than an attention tile."""

    def make(sampling: SamplingParams | None = None, seed: int = 0) -> list[RolloutGroup]:
        rng = random.Random(seed)
        groups = []
        for g, (prompt, lengths) in enumerate([(70, (3, 1, 40)), (1, (7, 90)), (65, (64, 2, 5))]):
            sequences = [
                small.completed(
                    token_ids=rng.choices(range(VOCABULARY), k=n),
                    advantage=rng.uniform(-1, 1),
                    loss_weight=rng.uniform(0.001, 0.01),
                    name=f"group {g} sample {s}",
                )
                for s, n in enumerate(lengths)
            ]
            prompt_ids = rng.choices(range(VOCABULARY), k=prompt)
            groups.append(small.train_group(prompt_ids, sequences, sampling or SamplingParams()))
        return groups

    return make


@pytest.fixture
def hidden_rows() -> Callable[[Decoder, PackedBatch], torch.Tensor]:
    """The hidden states that predict a batch's completion tokens, [C, D]."""

    def run(model: Decoder, b: PackedBatch) -> torch.Tensor:
        attend = PackedAttention(ops.Packed(b.cu_seqlens, b.prefix_start_S, b.prefix_len_S, b.max_len))
        return ops.gather_rows(model(b.tokens_T, b.positions_T, attend), b.logit_rows_C)

    return run


@pytest.fixture
def score(hidden_rows) -> Callable[[Decoder, PackedBatch], ops.TokenLogprobs]:
    """The log-probs of a batch's completion tokens."""

    def run(model: Decoder, b: PackedBatch) -> ops.TokenLogprobs:
        with torch.no_grad():
            return ops.token_logprobs(
                hidden_rows(model, b),
                model.lm_head,
                b.targets_C,
                ops.Filters(b.temperature_C, b.top_k_C, b.top_p_C, b.min_p_C),
                truncated=b.truncated,
            )

    return run


@pytest.fixture
def record(score) -> Callable[[Decoder, list[RolloutGroup]], list[RolloutGroup]]:
    """`record(model, groups)` fills in each sequence's log-probs, one sequence a batch, and returns the groups."""

    def run(model: Decoder, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        batches = pack(groups, max_tokens=1 << 12, mode="per_sample", check_parity=False)
        for batch in batches:
            (sequence,) = batch.sequences
            scores, n = score(model, batch), len(sequence.token_ids)
            (turn,) = sequence.turns
            turn.logprobs = scores.logprob_C[:n].tolist()
            turn.model_logprobs = scores.model_logprob_C[:n].tolist()
        return groups

    return run
