"""The few shapes that packed batches are padded to, so that all graphs of a run can be made before its first step.

A shape is a function of the batch and the run's configuration, so a resumed run pads alike and repeats the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..config import RunConfig
from ..ops import MAX_SEQUENCES

MULTIPLE = 16  # sizes are multiples of this unless a limit cuts them, for aligned matrix products
NUM_SHAPES = 7
PROMPT_MARGIN = 2  # prompts may be this many times as long as the longest one inspected
SHAPES_PER_OCTAVE = 3  # neighbours differ by 2 ** (1 / 3), so about a fifth of a batch at most is padding


class BatchShape(NamedTuple):
    """The sizes a batch is padded to: packed tokens T, completion tokens C, segments S, and the length of sequences."""

    tokens: int
    completion_tokens: int
    segments: int
    max_len: int


def round_to_bucket(n: int) -> int:
    """`n` rounded up to one of four sizes per octave, all multiples of `MULTIPLE`; for batches without known bounds.

    From 128 on the result is less than 5/4 of `n`, so under a fifth of a bucket is padding.
    """
    n = max(n, 1)
    step = max(MULTIPLE, 1 << max(0, (n - 1).bit_length() - 3))
    return -(-n // step) * step


def fit_shape(needed: BatchShape, shapes: Sequence[BatchShape], max_tokens: int) -> BatchShape:
    """The smallest of `shapes` (which are sorted, largest first) that holds `needed`; if none does, each size is
    rounded up to its bucket, or to `max_tokens` where the bucket is larger."""
    for shape in reversed(shapes):
        if all(have >= want for have, want in zip(shape, needed, strict=True)):
            return shape
    tokens, completion_tokens, segments, max_len = map(round_to_bucket, needed)
    return BatchShape(
        min(tokens, max_tokens), completion_tokens, min(segments, MAX_SEQUENCES), min(max_len, max_tokens)
    )


def batch_shapes(
    groups: int, samples: int, prompt: int, completion: int, *, max_len: int, max_tokens: int
) -> list[BatchShape]:
    """The shapes of a run, largest first; the first one holds a mini-batch, as far as that fits a micro-batch.

    Shorter completions mean fewer rows but as many sequences, so all shapes have the same number of segments.

    Args:
        groups, samples: prompts in a mini-batch, and completions of each.
        prompt, completion: tokens of the longest expected prompt, and of the longest completion.
        max_len: the limit of a prompt with its completion.
        max_tokens: the limit of packed tokens in a micro-batch.
    """
    sequences, segments = groups * samples, min(groups + groups * samples, MAX_SEQUENCES)
    tokens = min(groups * prompt + sequences * (completion - 1), max_tokens)
    # A completion's last token takes no row of the pack.
    completion_tokens = min(sequences * completion, tokens + sequences)
    shapes: list[BatchShape] = []
    for i in range(NUM_SHAPES):
        scale = 2 ** (-i / SHAPES_PER_OCTAVE)
        own = _round_up(scale * completion_tokens)
        shape = BatchShape(min(_round_up(scale * tokens), max_tokens), own, segments, max_len)
        if shape not in shapes:
            shapes.append(shape)
    return shapes


def shapes_holding(shapes: list[BatchShape], completion_tokens: int) -> list[BatchShape]:
    """The largest of a run's shapes, and those that hold `completion_tokens`."""
    return shapes[:1] + [shape for shape in shapes[1:] if shape.completion_tokens >= completion_tokens]


def train_shapes(config: RunConfig, longest_prompt: int, prompt_limit: int) -> list[BatchShape]:
    """The shapes of the trainer's batches, given the longest prompt inspected and the limit on prompts."""
    t, s = config.trainer, config.sampling
    groups, samples = config.shard_groups, s.num_generations
    least = t.prompts_per_step // (t.num_mini_batches * max(1, config.parallel.batch_shards))
    most, expected = (n * samples * s.max_completion_length for n in (groups, least))  # in a shard, if none stops
    one_batch = groups * longest_prompt + most <= t.max_tokens_per_micro_batch
    leaves_out = t.skip_zero_variance or config.loss.dynamic_sampling
    fixed_length = s.ignore_eos and not s.stop and not leaves_out and t.mode == "packed" and config.task.turns == 1
    longest = min(longest_prompt * PROMPT_MARGIN, prompt_limit) + config.max_response_length
    sizes = (1, 1) if t.mode == "per_sample" else (groups, samples)
    bounds = {"max_len": longest, "max_tokens": t.max_tokens_per_micro_batch}
    shapes = batch_shapes(*sizes, longest_prompt, config.max_response_length, **bounds)
    return shapes_holding(shapes, expected) if fixed_length and one_batch else shapes


def planned_tokens(config: RunConfig, longest_prompt: int, prompt_limit: int) -> int:
    """The tokens of a prompt with its response that the KV cache is planned for, given the same two."""
    prompt = config.task.max_prompt_length or longest_prompt * PROMPT_MARGIN
    return min(prompt, prompt_limit) + config.max_response_length


def _round_up(size: float) -> int:
    return -(-max(1, int(size)) // MULTIPLE) * MULTIPLE
