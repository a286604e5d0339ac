"""Records that cross rooms.

Shape suffixes: T packed tokens, C completion tokens, S segments (packed sequences).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]

# Sampling domains: a part of the identity that keys the random numbers, so that validation or a one-off
# `generate` never consumes or repeats what training draws.
TRAIN_DOMAIN, VALIDATION_DOMAIN, GENERATE_DOMAIN, WARMUP_DOMAIN = 0, 1, 2, 3

ALIGNMENT = 64  # bytes, of a batch's tensors in their buffer: more than any kernel asks for


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Fields have the meaning they have in TRL and vLLM.

    `temperature == 0` is greedy. Filters apply in the order temperature, top-k, top-p (over what top-k kept),
    min-p; ties at a filter's edge are all kept. `top_k == 0`, `top_p == 1` and `min_p == 0` are off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_completion_length: int = 128
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    @property
    def truncated(self) -> bool:
        """Whether a filter removes tokens from the support (greedy aside)."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True)
class SampleIdentity:
    """What a sample's random numbers are keyed by, together with the token's position and nothing else."""

    seed: int
    domain: int
    step: int
    group: int
    sample: int = 0


@dataclass
class Completion:
    """One sampled continuation, exactly as the generator produced it.

    `logprobs` are of the distribution that was sampled (temperature and filters applied), `model_logprobs` of the
    model's own at temperature 1, untruncated; both are float32 values held exactly. `route_digests` (None: a model
    without experts) tell which experts the token was drawn after (`ops.route_digest`), and `prompt_route_digests` which
    each token of the prompt went to. All other per-token lists have the length of `token_ids`, which ends with the stop
    token when one was sampled.
    """

    token_ids: list[int]
    logprobs: list[float]
    model_logprobs: list[float]
    weight_versions: list[int]
    text: str
    finish_reason: FinishReason
    identity: SampleIdentity
    route_digests: list[int] | None = None
    prompt_route_digests: list[int] | None = None


@dataclass
class Rollout:
    """A completion with what scoring made of it. `rewards`: each function's value (None: not applicable); `extra`: what
    functions logged about it."""

    completion: Completion
    rewards: dict[str, float | None]
    reward: float
    advantage: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutGroup:
    """The samples of one prompt. `prompt` is the text or messages, `columns` the data row's other columns."""

    group: int
    prompt: Any
    prompt_ids: list[int]
    rollouts: list[Rollout]
    sampling: SamplingParams
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrainSequence:
    """One completion to train on. `loss_weight` multiplies each of its tokens' loss, normalization included."""

    token_ids: list[int]
    advantage: float
    loss_weight: float
    logprobs: list[float] | None = None  # None: nothing to hold parity against (supervised steps)
    model_logprobs: list[float] | None = None
    request: str = ""  # names the sample in messages, for example "group 3 sample 1"
    route_digests: list[int] | None = None  # as in `Completion`


@dataclass
class TrainGroup:
    """A prompt and the completions that share it in the pack."""

    prompt_ids: list[int]
    sequences: list[TrainSequence]
    sampling: SamplingParams
    route_digests: list[int] | None = None  # of the prompt, as in `Completion`

    @classmethod
    def sampled(
        cls, name: str, prompt_ids: list[int], completions: list[Completion], sampling: SamplingParams
    ) -> TrainGroup:
        """A prompt's completions, to be held against what the generator recorded; nothing is learned from them yet."""
        sequences = [
            TrainSequence(
                *(c.token_ids, 0.0, 0.0, c.logprobs, c.model_logprobs),
                *(f"{name} sample {c.identity.sample}", c.route_digests),
            )
            for c in completions
        ]
        return cls(prompt_ids, sequences, sampling, completions[0].prompt_route_digests)


@dataclass
class PackedBatch:
    """One micro-batch: packed tokens in a fixed bucket, no batch dimension.

    Segment s occupies rows `cu_seqlens[s]:cu_seqlens[s + 1]`; its tokens have absolute positions starting at
    `prefix_len[s]` and attend to rows `prefix_start[s] : prefix_start[s] + prefix_len[s]` (a shared prompt) and
    causally to their own segment. Unused segments are empty; rows past the last segment are padding.

    Per completion token c: its logits come from hidden row `logit_rows_C[c]`; padding has `valid_C` False.
    """

    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64
    cu_seqlens: Tensor  # int32 [S + 1]
    prefix_start_S: Tensor  # int32
    prefix_len_S: Tensor  # int32
    max_len: int  # bound on prefix + own length over the segments
    logit_rows_C: Tensor  # int64
    targets_C: Tensor  # int64
    valid_C: Tensor  # bool
    weight_C: Tensor  # float32, includes the loss's normalization
    share: Tensor  # float32 [1], of the packed tokens that are trained on together: those of this micro-batch
    advantage_C: Tensor  # float32
    old_logprob_C: Tensor  # float32, of the sampled distribution
    old_model_logprob_C: Tensor  # float32, temperature 1, untruncated
    ref_logprob_C: Tensor  # float32, the frozen reference's, temperature 1
    temperature_C: Tensor  # float32
    top_k_C: Tensor  # int32
    top_p_C: Tensor  # float32
    min_p_C: Tensor  # float32
    check_parity: bool  # old log-probs are the generator's and must be equal
    truncated: bool  # some row has a filter on
    sequence_C: Tensor  # int64 (host side), index into `sequences` for messages
    sequences: list[TrainSequence] = field(default_factory=list)
    support_C: Tensor | None = None  # uint8 [C, ceil(V / 8)], the sampled support, for updates after the first
    old_route_C: Tensor | None = None  # int32, `Completion.route_digests`, where they are to be compared
    old_route_T: Tensor | None = None  # int32, of the prompts' tokens the same; -1 where there is nothing to compare
    old_value_C: Tensor | None = None  # float32, the critic's before the step's first update; see `add_values`
    return_C: Tensor | None = None  # float32, what the critic is to say
    cu_completions: Tensor | None = None  # int32 [S + 1]: completion n is rows cu[n]:cu[n + 1]; see `index_sequences`
    together: SideBySide | None = field(default=None, init=False, repr=False, compare=False)  # the tensors, after `to`

    def __setattr__(self, name: str, value: Any) -> None:
        """A tensor that is replaced, added or taken away leaves the others no longer `together`."""
        super().__setattr__(name, value)
        if name not in _APART:
            super().__setattr__("together", None)

    def index_sequences(self) -> None:
        """Fill in `cu_completions`, for a loss with terms of whole sequences."""
        ends = [0, *accumulate(len(sequence.token_ids) for sequence in self.sequences)]
        ends += [ends[-1]] * (len(self.cu_seqlens) - len(ends))
        self.cu_completions = torch.tensor(ends, dtype=torch.int32, device=self.cu_seqlens.device)

    def add_values(self) -> None:
        """Make room for a critic's values and returns."""
        self.old_value_C, self.return_C = torch.zeros_like(self.weight_C), torch.zeros_like(self.weight_C)

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch with its tensors on `device`, side by side; `sequence_C` stays on the host."""
        moved = side_by_side(self.tensors(), device)
        values: dict[str, Any] = dict(moved)
        batch = replace(self, **values)
        batch.together = moved
        return batch

    def tensors(self) -> Mapping[str, Tensor]:
        """All but `sequence_C`, by name."""
        if self.together is not None:
            return self.together
        return {k: v for k, v in vars(self).items() if isinstance(v, Tensor) and k != "sequence_C"}


_APART = {"together", "max_len", "check_parity", "truncated", "sequence_C", "sequences"}


class SideBySide(dict[str, Tensor]):
    """Contiguous tensors by name that are all of one buffer; not to be changed.

    Attributes:
        buffer: uint8, of its memory the whole.
        layout: the same text for the same names, dtypes, shapes and places in a buffer on the same device.
    """

    def __init__(self, tensors: Mapping[str, Tensor], buffer: Tensor) -> None:
        super().__init__(tensors)
        self.buffer = buffer
        parts = "; ".join(f"{name} {t.dtype} {list(t.shape)}" for name, t in tensors.items())
        self.layout = sys.intern(f"{parts} on {buffer.device}")


def side_by_side(tensors: Mapping[str, Tensor], device: torch.device) -> SideBySide:
    """Contiguous tensors of the host on `device`, as parts of one buffer that one copy brings there."""
    gap = torch.zeros(ALIGNMENT, dtype=torch.uint8)
    pieces = [p for t in tensors.values() for p in (t.view(-1).view(torch.uint8), gap[: -t.nbytes % ALIGNMENT])]
    sizes = [piece.numel() for piece in pieces]
    staged = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    moved = torch.cat(pieces, out=staged).to(device, non_blocking=True)  # the host does not wait
    parts = zip(tensors.items(), moved.split(sizes)[::2], strict=True)
    return SideBySide({name: part.view(t.dtype).view(t.shape) for (name, t), part in parts}, moved)
