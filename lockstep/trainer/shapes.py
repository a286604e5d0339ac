"""The few shapes that packed batches are padded to, so that every graph of a run can be made before its first step.

A shape is a function of the batch and of the run's configuration: a resumed run pads alike, and so repeats the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..config import RunConfig
from ..ops import MAX_SEQUENCES

MULTIPLE = 16  # of tokens, where nothing else bounds them: keeps rows aligned for the matrix products
NUM_SHAPES = 7
PROMPT_MARGIN = 2  # prompts may be this many times as long as the longest that was looked at
SHAPES_PER_OCTAVE = 3  # neighbours differ by 2 ** (1 / 3), so at most a fifth of a batch is padding


class BatchShape(NamedTuple):
    """What a batch is padded to: packed tokens T, completion tokens C, segments S; `max_len` bounds a sequence."""

    tokens: int
    completion_tokens: int
    segments: int
    max_len: int


def bucket(n: int) -> int:
    """`n` rounded up to a ladder of four sizes an octave, all multiples of `MULTIPLE`, for batches of no known bounds.

    From 128 on the result is less than 5/4 of `n`, so under a fifth of a bucket is padding.
    """
    n = max(n, 1)
    step = max(MULTIPLE, 1 << max(0, (n - 1).bit_length() - 3))
    return -(-n // step) * step


def fit(needed: BatchShape, shapes: Sequence[BatchShape], max_tokens: int) -> BatchShape:
    """The last of `shapes`, largest first, that holds `needed`; if none does, each of its sizes in a bucket.
    `max_tokens`: a bucket above it is cut to it."""
    for shape in reversed(shapes):
        if all(have >= want for have, want in zip(shape, needed, strict=True)):
            return shape
    tokens, completion_tokens, segments, max_len = map(bucket, needed)
    return BatchShape(
        min(tokens, max_tokens), completion_tokens, min(segments, MAX_SEQUENCES), min(max_len, max_tokens)
    )


def batch_shapes(
    groups: int, samples: int, prompt: int, completion: int, *, max_len: int, max_tokens: int
) -> list[BatchShape]:
    """The shapes of a run, largest first: one that holds a mini-batch, if that fits a micro-batch, and smaller ones.

    Shorter completions shrink a batch's rows but not its number of sequences, so all have the same number of segments.

    Args:
        groups, samples: prompts a mini-batch, and completions of each.
        prompt, completion: tokens of the longest expected prompt, and of the longest completion.
        max_len: bound on a prompt with its completion.
        max_tokens: packed tokens that a micro-batch may have.
    """
    sequences, segments = groups * samples, min(groups + groups * samples, MAX_SEQUENCES)
    tokens = min(groups * prompt + sequences * (completion - 1), max_tokens)
    # A completion's last token takes no row of the pack.
    completion_tokens = min(sequences * completion, tokens + sequences)
    shapes: list[BatchShape] = []
    for i in range(NUM_SHAPES):
        scale = 2 ** (-i / SHAPES_PER_OCTAVE)
        own = _rounded(scale * completion_tokens)
        shape = BatchShape(min(_rounded(scale * tokens), max_tokens), own, segments, max_len)
        if shape not in shapes:
            shapes.append(shape)
    return shapes


def holding(shapes: list[BatchShape], completion_tokens: int) -> list[BatchShape]:
    """The largest of a run's shapes, and those that no micro-batch of so many completion tokens is too large for."""
    return shapes[:1] + [shape for shape in shapes[1:] if shape.completion_tokens >= completion_tokens]


def train_shapes(config: RunConfig, longest_prompt: int, prompt_limit: int) -> list[BatchShape]:
    """What the trainer's batches are padded to, from the longest of the prompts that were looked at and the limit."""
    t, s = config.trainer, config.sampling
    groups, samples = config.shard_groups, s.num_generations
    least = t.prompts_per_step // (t.num_mini_batches * max(1, config.parallel.batch_shards))
    most, expected = (n * samples * s.max_completion_length for n in (groups, least))  # of a shard, if none stops
    one_batch = groups * longest_prompt + most <= t.max_tokens_per_micro_batch
    leaves_out = t.skip_zero_variance or config.loss.dynamic_sampling
    fixed_length = s.ignore_eos and not s.stop and not leaves_out and t.mode == "packed" and config.task.turns == 1
    longest = min(longest_prompt * PROMPT_MARGIN, prompt_limit) + config.max_response_length
    sizes = (1, 1) if t.mode == "per_sample" else (groups, samples)
    bounds = {"max_len": longest, "max_tokens": t.max_tokens_per_micro_batch}
    shapes = batch_shapes(*sizes, longest_prompt, config.max_response_length, **bounds)
    return holding(shapes, expected) if fixed_length and one_batch else shapes


def planned_tokens(config: RunConfig, longest_prompt: int, prompt_limit: int) -> int:
    """Tokens of a prompt with what comes after it that a cache is planned for, from the same two."""
    prompt = config.task.max_prompt_length or longest_prompt * PROMPT_MARGIN
    return min(prompt, prompt_limit) + config.max_response_length


def _rounded(size: float) -> int:
    return -(-int(size) // MULTIPLE) * MULTIPLE
