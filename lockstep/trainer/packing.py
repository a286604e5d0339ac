"""Groups to packed micro-batches: a prompt stands once, its completions follow and reach it as a shared prefix.

A completion's segment holds all its tokens but the last, which predicts nothing; the first one's logits come from the
prompt's last row. Shapes are rounded up to a few buckets, so that few graphs serve every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ..config import LossType
from ..errors import InputError
from ..types import PackedBatch, SamplingParams, TrainGroup, TrainSequence

BUCKET_MULTIPLE = 16


def bucket(n: int) -> int:
    """`n` rounded up to a ladder of four sizes an octave, all multiples of `BUCKET_MULTIPLE`.

    From 128 on the result is less than 5/4 of `n`, so under a fifth of a bucket is padding.
    """
    n = max(n, 1)
    step = max(BUCKET_MULTIPLE, 1 << max(0, (n - 1).bit_length() - 3))
    return -(-n // step) * step


def loss_weights(
    loss_type: LossType, lengths: list[int], num_sequences: int, max_completion_length: int
) -> list[float]:
    """What multiplies each token's loss, one weight a sequence, such that the step's loss is the plain sum.

    - `grpo`: the mean over each sequence, then over sequences, 1 / (length * num_sequences): DeepSeekMath, equation 3
      (arXiv 2402.03300).
    - `dr_grpo`: a constant in place of the length, 1 / (max_completion_length * num_sequences): Understanding
      R1-Zero-Like Training, section 3.2 (arXiv 2503.20783).
    - `dapo`, `sft`: the mean over all tokens, 1 / sum(lengths): DAPO, section 3.3 (arXiv 2503.14476).

    Args:
        lengths: completion tokens of each sequence that is trained on in this step, all micro-batches together.
        num_sequences: sequences that the mean is over.
        max_completion_length: the sampling limit (`dr_grpo`).
    """
    if loss_type == "grpo":
        return [1.0 / (length * num_sequences) for length in lengths]
    if loss_type == "dr_grpo":
        return [1.0 / (max_completion_length * num_sequences) for _ in lengths]
    total = sum(lengths)
    return [1.0 / total for _ in lengths]


def pack(
    groups: list[TrainGroup],
    *,
    max_tokens: int,
    mode: Literal["packed", "per_sample"] = "packed",
    check_parity: bool,
    share_prefix: bool = True,
) -> list[PackedBatch]:
    """Lay groups out, in order, in micro-batches of at most `max_tokens` packed tokens (next-fit); CPU tensors.

    A group that fits no micro-batch is split over several, its prompt repeated in each.

    Args:
        mode: `per_sample` puts one sequence in a micro-batch.
        check_parity: the sequences' log-probs are the generator's, and the trainer must find the same bits.
        share_prefix: False repeats the prompt in every segment; the log-probs' bits are the same.

    Raises:
        InputError: a sequence does not fit alone, or its prompt or completion is empty.
        ValueError: log-probs are missing under `check_parity`, or there are not as many as tokens.
    """
    drafts: list[_Draft] = []
    for group in groups:
        for part, tokens in _parts(group, max_tokens, mode == "per_sample", share_prefix):
            if not drafts or mode == "per_sample" or len(drafts[-1].tokens) + tokens > max_tokens:
                drafts.append(_Draft())
            drafts[-1].add(part, share_prefix)
    return [draft.batch(max_tokens, check_parity) for draft in drafts]


def padding_waste(batches: list[PackedBatch]) -> float:
    """The fraction of packed token slots that hold padding."""
    slots = sum(batch.tokens_T.numel() for batch in batches)
    used = sum(int(batch.cu_seqlens[-1]) for batch in batches)
    return 1.0 - used / slots if slots else 0.0


def _parts(
    group: TrainGroup, max_tokens: int, per_sample: bool, share_prefix: bool
) -> Iterator[tuple[TrainGroup, int]]:
    """`group` cut into consecutive parts that each fit a micro-batch, with the packed tokens each takes."""
    part: list[TrainSequence] = []
    used = 0
    for sequence in group.sequences:
        _check(group, sequence, max_tokens)
        alone = _packed_tokens(group, sequence)
        tokens = len(sequence.token_ids) - 1 if part and share_prefix else alone
        if part and (per_sample or used + tokens > max_tokens):
            yield replace(group, sequences=part), used
            part, used, tokens = [], 0, alone
        part.append(sequence)
        used += tokens
    if part:
        yield replace(group, sequences=part), used


def _packed_tokens(group: TrainGroup, sequence: TrainSequence) -> int:
    return len(group.prompt_ids) + len(sequence.token_ids) - 1


def _check(group: TrainGroup, sequence: TrainSequence, max_tokens: int) -> None:
    name = sequence.request or "a sequence"
    prompt, length = len(group.prompt_ids), len(sequence.token_ids)
    if not prompt or not length:
        empty = "completion" if prompt else "prompt"
        raise InputError(f"{name}: its {empty} is empty; training needs at least one token of each")
    if (needed := _packed_tokens(group, sequence)) > max_tokens:
        raise InputError(
            f"{name}: a prompt of {prompt} and a completion of {length} tokens do not fit in "
            f"trainer.max_tokens_per_micro_batch {max_tokens}; it must be at least {needed}"
        )
    for values in (sequence.logprobs, sequence.model_logprobs):
        if values is not None and len(values) != length:
            raise ValueError(f"{name}: {len(values)} log-probs for {length} completion tokens")


class _Draft:
    """A micro-batch in the making: token lists grow by whole segments, the rest is kept a segment or sequence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.segments: list[tuple[int, int, int]] = []  # end row, prefix start, prefix length
        self.logit_rows: list[int] = []
        self.sequences: list[TrainSequence] = []
        self.sampling: list[SamplingParams] = []

    def add(self, group: TrainGroup, share_prefix: bool) -> None:
        prompt = group.prompt_ids
        start = len(self.tokens)
        if share_prefix:
            self._segment(prompt, 0, 0)
        for sequence in group.sequences:
            own = sequence.token_ids[:-1]
            if share_prefix:
                row = len(self.tokens)
                self._segment(own, start, len(prompt))
            else:
                start, row = len(self.tokens), len(self.tokens) + len(prompt)
                self._segment(prompt + own, 0, 0)
            self.logit_rows.append(start + len(prompt) - 1)
            self.logit_rows.extend(range(row, row + len(own)))
            self.sequences.append(sequence)
            self.sampling.append(group.sampling)

    def _segment(self, token_ids: list[int], prefix_start: int, prefix_len: int) -> None:
        self.tokens.extend(token_ids)
        self.positions.extend(range(prefix_len, prefix_len + len(token_ids)))
        self.segments.append((len(self.tokens), prefix_start, prefix_len))

    def batch(self, max_tokens: int, check_parity: bool) -> PackedBatch:
        """The micro-batch in its bucket. A bucket above `max_tokens` is cut to it."""
        T = min(bucket(len(self.tokens)), max_tokens)
        C, S = bucket(len(self.logit_rows)), bucket(len(self.segments))
        ends, prefix_starts, prefix_lens = zip(*self.segments, strict=True)
        longest = max(self.positions) + 1
        lengths = torch.tensor([len(s.token_ids) for s in self.sequences])

        def per_row(values: list, dtype: torch.dtype, fill: float = 0) -> Tensor:
            return _padded(torch.tensor(values, dtype=dtype).repeat_interleave(lengths), C, fill)

        def listed(values: list, size: int, dtype: torch.dtype, fill: float = 0) -> Tensor:
            return _padded(torch.tensor(values, dtype=dtype), size, fill)

        old, old_model = self._old_logprobs(check_parity)
        return PackedBatch(
            tokens_T=listed(self.tokens, T, torch.int64),
            positions_T=listed(self.positions, T, torch.int64),
            cu_seqlens=listed([0, *ends], S + 1, torch.int32, fill=ends[-1]),
            prefix_start_S=listed(list(prefix_starts), S, torch.int32),
            prefix_len_S=listed(list(prefix_lens), S, torch.int32),
            max_len=min(bucket(longest), max_tokens),
            logit_rows_C=listed(self.logit_rows, C, torch.int64),
            targets_C=listed([t for s in self.sequences for t in s.token_ids], C, torch.int64),
            valid_C=listed([True] * len(self.logit_rows), C, torch.bool),
            weight_C=per_row([s.loss_weight for s in self.sequences], torch.float32),
            advantage_C=per_row([s.advantage for s in self.sequences], torch.float32),
            old_logprob_C=listed(old, C, torch.float32),
            old_model_logprob_C=listed(old_model, C, torch.float32),
            ref_logprob_C=torch.zeros(C),
            temperature_C=per_row([p.temperature for p in self.sampling], torch.float32, fill=1),
            top_k_C=per_row([p.top_k for p in self.sampling], torch.int32),
            top_p_C=per_row([p.top_p for p in self.sampling], torch.float32, fill=1),
            min_p_C=per_row([p.min_p for p in self.sampling], torch.float32),
            check_parity=check_parity,
            truncated=any(p.truncated for p in self.sampling),
            sequence_C=per_row(list(range(len(self.sequences))), torch.int64),
            sequences=self.sequences,
        )

    def _old_logprobs(self, required: bool) -> tuple[list[float], list[float]]:
        """The generator's two log-probs a row; zeros for a sequence that came without."""
        old: list[float] = []
        old_model: list[float] = []
        for s in self.sequences:
            if required and (s.logprobs is None or s.model_logprobs is None):
                raise ValueError(f"{s.request or 'a sequence'}: parity cannot be checked without its log-probs")
            old.extend(s.logprobs or [0.0] * len(s.token_ids))
            old_model.extend(s.model_logprobs or [0.0] * len(s.token_ids))
        return old, old_model


def _padded(values: Tensor, size: int, fill: float) -> Tensor:
    return torch.cat((values, values.new_full((size - len(values),), fill)))
