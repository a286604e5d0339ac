"""Records that cross rooms.

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

# "length": `max_completion_length` cut the turn off; "truncated": no room was left, for it or for what would follow.
FinishReason = Literal["stop", "length", "truncated", "abort"]

# Sampling domains: a part of the identity that keys the random numbers, so that validation or a one-off
# `generate` never consumes or repeats what training draws.
TRAIN_DOMAIN, VALIDATION_DOMAIN, GENERATE_DOMAIN, WARMUP_DOMAIN = 0, 1, 2, 3

# Outputs of a trainer's programs that are held to the generator's, bit by bit; of `trainer.step.Scored`.
COMPARED = "logprob_C", "model_logprob_C", "route_C"

ALIGNMENT = 64  # bytes, of a batch's tensors in their buffer: more than any kernel asks for


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Fields have the meaning they have in TRL and vLLM. `temperature == 0` is greedy.
    Filters apply in the order temperature, top-k, top-p (over what top-k kept), min-p; ties at a filter's edge are all
    kept. `top_k == 0`, `top_p == 1` and `min_p == 0` are off."""

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
    """What a sample's random numbers are keyed by, together with the token's position and nothing else."""

    seed: int
    domain: int
    step: int
    group: int
    sample: int = 0


@dataclass
class Segment:
    """Tokens that stand together in a trajectory: *given* to the model, or *sampled* from it.

    Of a sampled one all per-token lists have the length of `token_ids`. `logprobs` are of the distribution that was
    sampled (temperature and filters applied), `model_logprobs` of the model's own at temperature 1, untruncated; both
    are float32 values held exactly. None: there is nothing to hold parity against (worked examples, which stand for
    what is sampled). `weight_versions` tells what drew each token.

    `route_digests` (None: unknown, or a model without experts) tell which experts each given token went to
    (`ops.route_digest`), and which a sampled one was drawn after. `last_route` tells of a sampled segment which its
    last token went to (-1: unknown, or nothing was sampled after it). `rewards` are what its environment gave this
    turn, by name, which the trajectory's have in them; `wait_s` are the seconds that the environment took to answer it.

    `anew`: a given one that begins a branch: the model was given all of it, and nothing before it is its context.
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
    anew: bool = False


@dataclass
class Trajectory:
    """What one sample was given and what it sampled, in order, and what scoring and the algorithm made of it.

    It begins with a given segment, the prompt; a single turn is two segments. Tokens are never decoded and encoded
    again: the generator and environments append segments, the trainer reads them. Where what was shown before is shown
    in another way (a template leaves out earlier thinking), a branch begins: the model goes on from a new prompt, and
    what was sampled stands in the branch that it was sampled in, once.

    Attributes:
        finish_reason: how its last sampled segment ended; one that ended by "stop" ends with the stop token.
        name: names it in messages, for example "group 3 sample 1".
        rewards: each reward function's value (None: not applicable), and what its environment gave, of all turns
            together; `extra` is what functions logged about it.
        environment: which of several in one run it was played in; empty where there is one.
        loss_weight: multiplies the loss of each sampled token, normalization included.
        part_from: of a part of a trajectory, some branches that a micro-batch has without the others: the sampled
            tokens before it. None: this is whole.
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
    part_from: int | None = None

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
        """All sampled tokens; so with the other values of sampled tokens."""
        return [token for segment in self.segments if segment.sampled for token in segment.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """Of the distribution that was sampled; empty when some tokens came without."""
        return _joined([turn.logprobs for turn in self.turns]) or []

    @property
    def model_logprobs(self) -> list[float]:
        """The model's own; empty when some tokens came without."""
        return _joined([turn.model_logprobs for turn in self.turns]) or []

    @property
    def weight_versions(self) -> list[int]:
        """Of the weights that drew each token."""
        return _joined([turn.weight_versions for turn in self.turns]) or []

    @property
    def route_digests(self) -> list[int] | None:
        """Which experts each sampled token was drawn after; None when that is unknown of some."""
        return _joined([turn.route_digests for turn in self.turns])

    @property
    def prompt_route_digests(self) -> list[int] | None:
        """Which experts each of the prompt's tokens went to."""
        return self.prompt.route_digests

    @property
    def text(self) -> str:
        return "".join(turn.text for turn in self.turns)

    @property
    def branches(self) -> list[list[Segment]]:
        """The segments that are each other's context: a prompt with what follows it, up to the last that was sampled,
        as given tokens after it predict nothing. The first is the only one, but for what is given anew."""
        starts = [0, *(i for i, segment in enumerate(self.segments) if segment.anew), len(self.segments)]
        parts: list[list[Segment]] = []
        for i, j in pairwise(starts):
            while j > i + 1 and not self.segments[j - 1].sampled:
                j -= 1
            parts.append(self.segments[i:j])
        return [part for part in parts if len(part) > 1 or part is parts[0]]

    @property
    def context(self) -> list[int]:
        """All tokens that the model goes on from."""
        begun = max(i for i, segment in enumerate(self.segments) if segment.anew or not i)
        return [token for segment in self.segments[begun:] for token in segment.token_ids]


Completion = Trajectory  # the name that `LLM.generate` has for one of a single turn


def _joined(parts: Sequence[list[Any] | None]) -> list[Any] | None:
    """Lists one after another, one alone as it is; None when there is none, or one is missing."""
    if len(parts) == 1:
        return parts[0]
    whole = [part for part in parts if part is not None]
    return [value for part in whole for value in part] if parts and len(whole) == len(parts) else None


@dataclass
class RolloutGroup:
    """The samples of one prompt, which all begin with it.

    `prompt` is the text or messages, `columns` the data row's other columns. `replaced`: dynamic sampling took another
    prompt's in its place. `without_reward`: no reward applies to one of its samples, or its samples are those whose
    environment failed. Neither is trained on. `sampled_by`: the rank that has all of it, where others may lack some;
    None: all ranks do.
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


@dataclass
class PackedBatch:
    """One micro-batch: packed tokens in a fixed bucket, no batch dimension.

    Segment s occupies rows `cu_seqlens[s]:cu_seqlens[s + 1]`; its tokens have absolute positions starting at
    `prefix_len[s]` and attend to rows `prefix_start[s] : prefix_start[s] + prefix_len[s]` (a shared prompt) and
    causally to their own segment. Unused segments are empty; rows past the last segment are padding.

    Per sampled token c: its logits come from hidden row `logit_rows_C[c]`; padding has `valid_C` False.
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
    sequences: list[Trajectory] = field(default_factory=list)
    support_C: Tensor | None = None  # uint8 [C, ceil(V / 8)], the sampled support, for updates after the first
    old_route_C: Tensor | None = None  # int32, `Segment.route_digests`, where they are to be compared
    old_route_T: Tensor | None = None  # int32, of given tokens the same; -1 where there is nothing to compare
    old_value_C: Tensor | None = None  # float32, the critic's before the step's first update; see `add_values`
    return_C: Tensor | None = None  # float32, what the critic is to say
    cu_completions: Tensor | None = None  # int32 [S + 1]: completion n is rows cu[n]:cu[n + 1]; see `index_sequences`
    ends_cell: bool = False  # its gradient is the last of a cell (`distributed.cells`) that takes several micro-batches
    together: SideBySide | None = field(default=None, init=False, repr=False, compare=False)  # the tensors, after `to`

    def index_sequences(self) -> None:
        """Fill in `cu_completions`, for a loss with terms of whole sequences. `ValueError`: it has parts of some, as it
        was not packed for such a loss (`Packing.whole_sequences`)."""
        if any(sequence.part_from is not None for sequence in self.sequences):
            raise ValueError("the loss has terms of whole sequences; pack with Packing(..., whole_sequences=True)")
        ends = [0, *accumulate(len(sequence.token_ids) for sequence in self.sequences)]
        ends += [ends[-1]] * (len(self.cu_seqlens) - len(ends))
        self.cu_completions = torch.tensor(ends, dtype=torch.int32, device=self.cu_seqlens.device)

    def add_values(self) -> None:
        self.old_value_C, self.return_C = torch.zeros_like(self.weight_C), torch.zeros_like(self.weight_C)

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch with its tensors on `device`, side by side; `sequence_C` stays on the host."""
        moved = side_by_side(self.tensors(), device)
        values: dict[str, Any] = dict(moved)
        batch = replace(self, **values)
        batch.together = moved
        return batch

    def tensors(self) -> Mapping[str, Tensor]:
        """All but `sequence_C`, by name; `together`, if none was replaced, added or taken away since."""
        found = {k: v for k, v in vars(self).items() if isinstance(v, Tensor) and k != "sequence_C"}
        known = self.together
        same = known is not None and found.keys() == known.keys() and all(map(is_, found.values(), known.values()))
        return known if known is not None and same else found


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
