"""Records that several subpackages share.

Shape suffixes: T packed tokens, C completion tokens, S segments (packed sequences).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import is_
from typing import Any, Literal

import torch
from torch import Tensor

# "length": cut off by `max_completion_length`; "truncated": the context had no room for the turn, or for what follows.
FinishReason = Literal["stop", "length", "truncated", "abort"]

# Sampling domains: part of the identity that keys random numbers, so that validation or a one-off `generate` never
# repeats training's draws.
TRAIN_DOMAIN, VALIDATION_DOMAIN, GENERATE_DOMAIN, WARMUP_DOMAIN = 0, 1, 2, 3

# Outputs of the trainer's programs (`trainer.step.Scored`) that are compared bitwise with the generator's.
COMPARED_OUTPUTS = "logprob_C", "model_logprob_C", "route_C"

ALIGNMENT = 64  # bytes, of a batch's tensors in their buffer: more than any kernel needs


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Fields mean the same as in TRL and vLLM. `temperature == 0` is greedy. Filters apply
    in the order temperature, top-k, top-p (over what top-k kept), min-p; ties at a filter's threshold are all kept.
    `top_k == 0`, `top_p == 1` and `min_p == 0` are off."""

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
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True)
class SampleIdentity:
    """The key of a sample's random numbers, together with the token's position and nothing else."""

    seed: int
    domain: int
    step: int
    group: int
    sample: int = 0


@dataclass
class Segment:
    """Consecutive tokens of a trajectory: *given* to the model, or *sampled* from it.

    In a sampled segment all per-token lists have the length of `token_ids`. `logprobs` are those of the distribution
    that was sampled (after temperature and filters), `model_logprobs` the model's own at temperature 1, unfiltered;
    both hold exact float32 values. None: there is no parity to check (worked examples in place of sampled turns).
    `weight_versions`: the version of the weights that sampled each token.

    `route_digests` (None: unknown, or a model without experts): for each given token a digest of the experts it was
    routed to (`ops.route_digest`); for each sampled one that of the token before it, which predicted it. `last_route`:
    the digest of a sampled segment's last token (-1: unknown, or nothing was sampled after it). `rewards`: the
    environment's rewards for this turn, by name, included in the trajectory's. `wait_s`: seconds it took to answer.

    `begins_branch`: this given segment is the whole prompt of a new branch, with nothing before it as context.
    """

    token_ids: list[int]
    sampled: bool = False
    logprobs: list[float] | None = None
    model_logprobs: list[float] | None = None
    weight_versions: list[int] | None = None
    route_digests: list[int] | None = None
    text: str = ""
    wait_s: float = field(default=0.0, compare=False)
    last_route: int = -1
    rewards: Mapping[str, float] | None = None
    begins_branch: bool = False


@dataclass(repr=False)
class Trajectory:
    """The given and sampled segments of one sample, in order, with its rewards, advantage and loss weight.

    It begins with a given segment, the prompt; a single turn is two segments. Tokens are never decoded and re-encoded:
    the generator and environments append segments, and the trainer reads them. When earlier turns are shown differently
    (a template leaves out earlier thinking), a new branch begins: the model continues from a new prompt. Each sampled
    segment appears once, in the branch in which it was sampled.

    Attributes:
        finish_reason: how its last sampled segment ended; after "stop" that ends with the stop token.
        name: names it in messages, for example "group 3 sample 1".
        rewards: the value of each reward function (None: not applicable), and the environment's rewards, over all
            turns. extra: what reward functions logged about it.
        environment: the one it was played in, if the run has several; else empty.
        loss_weight: multiplies the loss of each sampled token; includes normalization.
        part_offset: for a part of a trajectory (some of its branches, packed into one micro-batch without the others),
            the number of sampled tokens before it; None for a whole trajectory.
    """

    segments: list[Segment]
    finish_reason: FinishReason = "stop"
    identity: SampleIdentity = SampleIdentity(0, 0, 0, 0)
    name: str = ""
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float = 0.0
    advantage: float = 0.0
    loss_weight: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)
    environment: str = ""
    part_offset: int | None = None

    def __repr__(self) -> str:
        """What was sampled, without the values of each token, of which there are many."""
        sampled = f"text={self.text!r}, token_ids={self.token_ids}, finish_reason={self.finish_reason!r}"
        return f"{type(self).__name__}(name={self.name!r}, {sampled})"

    @property
    def prompt(self) -> Segment:
        return self.segments[0]

    @property
    def cut_off(self) -> bool:
        return self.finish_reason in ("length", "truncated")

    @property
    def turns(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.sampled]

    @property
    def length(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments if segment.sampled)

    @property
    def token_ids(self) -> list[int]:
        """All sampled tokens; the lists below have one value for each."""
        return [token for segment in self.segments if segment.sampled for token in segment.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """Under the distribution that was sampled; empty if some tokens have none."""
        return _concatenate([turn.logprobs for turn in self.turns]) or []

    @property
    def model_logprobs(self) -> list[float]:
        """The model's own; empty if some tokens have none."""
        return _concatenate([turn.model_logprobs for turn in self.turns]) or []

    @property
    def weight_versions(self) -> list[int]:
        """Of the weights that sampled each token."""
        return _concatenate([turn.weight_versions for turn in self.turns]) or []

    @property
    def route_digests(self) -> list[int] | None:
        """Of the experts for the token before each sampled one; None if some are unknown."""
        return _concatenate([turn.route_digests for turn in self.turns])

    @property
    def prompt_route_digests(self) -> list[int] | None:
        """Of the experts that each token of the prompt was routed to."""
        return self.prompt.route_digests

    @property
    def text(self) -> str:
        return "".join(turn.text for turn in self.turns)

    @property
    def branches(self) -> list[list[Segment]]:
        """The segments, split into branches that do not see each other: each is a prompt with what follows, up to its
        last sampled segment, as no token is predicted from those after it. There is one, unless a
        segment begins a branch."""
        starts = [0, *(i for i, segment in enumerate(self.segments) if segment.begins_branch), len(self.segments)]
        branches: list[list[Segment]] = []
        for start, end in pairwise(starts):
            while end > start + 1 and not self.segments[end - 1].sampled:
                end -= 1
            branches.append(self.segments[start:end])
        return [branch for branch in branches if len(branch) > 1 or branch is branches[0]]

    @property
    def context(self) -> list[int]:
        """All tokens that the model continues from."""
        start = max(i for i, segment in enumerate(self.segments) if segment.begins_branch or i == 0)
        return [token for segment in self.segments[start:] for token in segment.token_ids]


Completion = Trajectory  # what `LLM.generate` calls a trajectory of one turn


def _concatenate(parts: Sequence[list[Any] | None]) -> list[Any] | None:
    """The lists concatenated (a single one is not copied); None if there are none, or one is None."""
    if len(parts) == 1:
        return parts[0]
    known = [part for part in parts if part is not None]
    if not parts or len(known) < len(parts):
        return None
    return [value for part in known for value in part]


@dataclass
class RolloutGroup:
    """The samples of one prompt, which all begin with it.

    `prompt`: the text or messages. `columns`: the data row's other columns. `replaced`: dynamic sampling used another
    prompt's group instead. `without_reward`: no reward applies to one of its samples, or these are samples whose
    environment failed. Neither kind is trained on. `sampled_by`: the rank that has all of the group, while others may
    lack parts; None: all ranks have it.
    """

    rollouts: list[Trajectory]
    sampling: SamplingParams
    group: int = 0
    prompt: Any = None
    columns: dict[str, Any] = field(default_factory=dict)
    replaced: bool = False
    without_reward: bool = False
    sampled_by: int | None = field(default=None, compare=False)

    @property
    def prompt_ids(self) -> list[int]:
        return self.rollouts[0].prompt.token_ids

    def count_passed(self, reward: str, threshold: float = 1.0) -> int | None:
        """The number of samples with at least `threshold` of a reward function; None if one has no value of it."""
        values = [value for r in self.rollouts if (value := r.rewards.get(reward)) is not None]
        return sum(value >= threshold for value in values) if len(values) == len(self.rollouts) else None


@dataclass
class PackedBatch:
    """One micro-batch: packed tokens, padded to the sizes of a bucket, without a batch dimension.

    Segment s occupies rows `cu_seqlens[s]:cu_seqlens[s + 1]`; its tokens have absolute positions starting at
    `prefix_len[s]` and attend to rows `prefix_start[s] : prefix_start[s] + prefix_len[s]` (a shared prompt) and
    causally to their own segment. Unused segments are empty; rows past the last segment are padding.

    The logits of sampled token c come from hidden row `logit_rows_C[c]`; padding has `valid_C` False.
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
    share: Tensor  # float32 [1], this micro-batch's fraction of the packed tokens that are trained on together
    advantage_C: Tensor  # float32
    old_logprob_C: Tensor  # float32, under the sampled distribution
    old_model_logprob_C: Tensor  # float32, temperature 1, unfiltered
    ref_logprob_C: Tensor  # float32, the frozen reference's, temperature 1
    temperature_C: Tensor  # float32
    top_k_C: Tensor  # int32
    top_p_C: Tensor  # float32
    min_p_C: Tensor  # float32
    check_parity: bool  # old log-probs are the generator's, and must be bitwise equal to the trainer's
    truncated: bool  # some row has a filter on
    sequence_C: Tensor  # int64 (on the host), index into `sequences` for messages
    sequences: list[Trajectory] = field(default_factory=list)
    support_C: Tensor | None = None  # uint8 [C, ceil(V / 8)], the sampled support, for updates after the first
    old_route_C: Tensor | None = None  # int32, `Segment.route_digests`, where they are to be compared
    old_route_T: Tensor | None = None  # int32, the same for given tokens; -1 where there is nothing to compare
    old_value_C: Tensor | None = None  # float32, the critic's before the step's first update; see `add_values`
    return_C: Tensor | None = None  # float32, the critic's target
    cu_completions: Tensor | None = None  # int32 [S + 1]: completion n is rows cu[n]:cu[n + 1]; see `index_sequences`
    ends_cell: bool = False  # the last micro-batch of a cell that spans several (`distributed.cells`)
    coalesced: CoalescedTensors | None = field(
        default=None, init=False, repr=False, compare=False
    )  # the tensors, after `to`

    def index_sequences(self) -> None:
        """Fill in `cu_completions`, for a loss with sequence-level terms. `ValueError`: the batch holds parts of
        trajectories, as it was not packed for such a loss (`Packing.whole_sequences`)."""
        if any(sequence.part_offset is not None for sequence in self.sequences):
            raise ValueError("the loss has terms of whole sequences; pack with Packing(..., whole_sequences=True)")
        ends = [0, *accumulate(len(sequence.token_ids) for sequence in self.sequences)]
        ends += [ends[-1]] * (len(self.cu_seqlens) - len(ends))
        self.cu_completions = torch.tensor(ends, dtype=torch.int32, device=self.cu_seqlens.device)

    def add_values(self) -> None:
        """Add zeros as the critic's values and targets."""
        self.old_value_C, self.return_C = torch.zeros_like(self.weight_C), torch.zeros_like(self.weight_C)

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch with its tensors on `device`, in one buffer; `sequence_C` stays on the host."""
        coalesced = coalesce_to(self.tensors(), device)
        fields: dict[str, Any] = dict(coalesced)
        batch = replace(self, **fields)
        batch.coalesced = coalesced
        return batch

    def tensors(self) -> Mapping[str, Tensor]:
        """All tensors but `sequence_C`, by name: `coalesced`, unless one was replaced, added or removed since `to`."""
        current = {k: v for k, v in vars(self).items() if isinstance(v, Tensor) and k != "sequence_C"}
        moved = self.coalesced
        if moved is None or current.keys() != moved.keys() or not all(map(is_, current.values(), moved.values())):
            return current
        return moved


class CoalescedTensors(dict[str, Tensor]):
    """Contiguous tensors by name that are parts of one buffer; not to be changed.

    Attributes:
        buffer: uint8, the whole memory.
        layout: a text, equal for equal names, dtypes, shapes, offsets and devices.
    """

    def __init__(self, tensors: Mapping[str, Tensor], buffer: Tensor) -> None:
        super().__init__(tensors)
        self.buffer = buffer
        parts = "; ".join(f"{name} {t.dtype} {list(t.shape)}" for name, t in tensors.items())
        self.layout = sys.intern(f"{parts} on {buffer.device}")


def coalesce_to(tensors: Mapping[str, Tensor], device: torch.device) -> CoalescedTensors:
    """Copy contiguous host tensors to `device`, as parts of one buffer, in one copy."""
    gap = torch.zeros(ALIGNMENT, dtype=torch.uint8)
    pieces = []
    for tensor in tensors.values():
        pieces += [tensor.view(-1).view(torch.uint8), gap[: -tensor.nbytes % ALIGNMENT]]
    sizes = [piece.numel() for piece in pieces]
    staged = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    moved = torch.cat(pieces, out=staged).to(device, non_blocking=True)  # the host does not wait
    parts = zip(tensors.items(), moved.split(sizes)[::2], strict=True)
    return CoalescedTensors({name: part.view(t.dtype).view(t.shape) for (name, t), part in parts}, moved)
