"""Groups to packed micro-batches: a prompt is laid out once, and its responses attend to it as a shared prefix.

A response's rows hold all its tokens but the last, which predicts nothing; its first token is predicted by the prompt's
last row. Only sampled tokens are predicted. Further branches of a trajectory follow it, each with its own prompt, or go
to other micro-batches. Batches are padded to a few shapes (`shapes.py`), so that a few graphs serve every step.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..ops import MAX_SEQUENCES
from ..types import PackedBatch, RolloutGroup, SamplingParams, Segment, Trajectory
from .shapes import BatchShape, fit_shape


class Packing(NamedTuple):
    """How groups become micro-batches; see `pack`. `whole_sequences`: keep all branches of a trajectory in one
    micro-batch, for losses with sums over everything that a trajectory sampled."""

    max_tokens: int
    mode: Literal["packed", "per_sample"] = "packed"
    share_prefix: bool = True
    shapes: Sequence[BatchShape] = ()
    whole_sequences: bool = False


def pack(
    groups: list[RolloutGroup],
    *,
    max_tokens: int,
    mode: Literal["packed", "per_sample"] = "packed",
    check_parity: bool,
    share_prefix: bool = True,
    shapes: Sequence[BatchShape] = (),
) -> list[PackedBatch]:
    """Lay groups out, in order, in micro-batches of at most `max_tokens` packed tokens (next-fit), as CPU tensors.

    A group is split only if it fits no micro-batch, or if filling up micro-batches with parts of groups takes fewer
    rows in total. A group that is split has its prompt in each micro-batch.

    Args:
        shapes: shapes to pad to, largest first. The largest bounds a micro-batch unless one trajectory is longer.
            Without shapes each size is rounded up to its bucket.
        mode: `per_sample` puts one trajectory in a micro-batch.
        check_parity: the sampled tokens' log-probs are the generator's, and the trainer must find the same bits.
        share_prefix: False repeats the prompt for every trajectory; the log-probs' bits are the same.

    Raises:
        InputError: a branch does not fit alone, or a trajectory has an empty prompt or no sampled token.
        ValueError: a trajectory begins with a sampled segment, or log-probs or route digests are missing or of another
            number than its tokens.
    """
    return pack_shards([groups], [0], Packing(max_tokens, mode, share_prefix, shapes), check_parity)


def pack_shards(
    shards: Sequence[list[RolloutGroup]], own: Sequence[int], packing: Packing, check_parity: bool
) -> list[PackedBatch]:
    """`pack` for a step that is dealt into shards; returns the micro-batches of this rank's own shards.

    All shards have the same number of micro-batches, and the i-th ones of all shards have the same shape, so they do
    not depend on which rank owns which shard. Returned are the first of every own shard, in order, then the second of
    each, and so on. A shard that has run out gets micro-batches without a token to train on.

    Args:
        shards: all shards of the step. own: those to return batches of; of the others, only lengths are read.
    """
    plan = _plan(shards, packing, fill_gaps=False)
    if len(plan) > 1:
        filled = _plan(shards, packing, fill_gaps=True)
        plan = min(plan, filled, key=lambda plan: sum(shape.tokens for _, shape in plan))
    packed_tokens = sum(draft.used for drafts, _ in plan for draft in drafts)
    batches = []
    for drafts, shape in plan:
        for shard in own:
            batch = drafts[shard].batch(packing, shape, check_parity, packed_tokens)
            if not drafts[shard].parts:
                _match_graph(batch, next(draft for draft in drafts if draft.parts))
            batches.append(batch)
    return batches


def _plan(
    shards: Sequence[list[RolloutGroup]], packing: Packing, fill_gaps: bool
) -> list[tuple[list[_Draft], BatchShape]]:
    """For each i, the drafts of the shards' i-th micro-batches and the shape that they are padded to."""
    by_shard = [_draft_micro_batches(groups, packing, fill_gaps) for groups in shards]
    plan = []
    for i in range(max(map(len, by_shard))):
        drafts = [of_shard[i] if i < len(of_shard) else _Draft() for of_shard in by_shard]
        needed = BatchShape(*map(max, zip(*(draft.needed for draft in drafts), strict=True)))
        plan.append((drafts, fit_shape(needed, packing.shapes, packing.max_tokens)))
    return plan


def _draft_micro_batches(groups: list[RolloutGroup], packing: Packing, fill_gaps: bool) -> list[_Draft]:
    """The micro-batches of a shard. `fill_gaps`: start a group in the room left in the micro-batch before it."""
    drafts: list[_Draft] = []
    limits = _Limits(packing.max_tokens, MAX_SEQUENCES)
    if packing.shapes:
        limits = _Limits(packing.shapes[0].tokens, packing.shapes[0].segments)
    branched = any(segment.begins_branch for group in groups for t in group.rollouts for segment in t.segments)
    if branched and not packing.whole_sequences:
        groups = [part for group in groups for part in _split_branches(group, limits)]
    for group in groups:
        needed = [_rows_and_branches(trajectory, packing.max_tokens) for trajectory in group.rollouts]
        first = _room_left(drafts[-1], needed[0], limits) if fill_gaps and drafts else limits
        parts = _split_by_prompt(group, needed, (first, limits), packing)
        for part, tokens, segments in parts:
            used = drafts[-1].needed if drafts else limits
            full = used.tokens + tokens > limits.tokens or used.segments + segments > limits.segments
            if not drafts or packing.mode == "per_sample" or full:
                drafts.append(_Draft())
            drafts[-1].add(part, packing.share_prefix)
    return drafts


def _match_graph(batch: PackedBatch, other: _Draft) -> None:
    """Make a batch without responses run the same graph as the others."""
    batch.truncated = any(part.sampling.truncated for part in other.parts)
    if batch.check_parity and other.parts[0].rollouts[0].turns[0].route_digests is not None:
        batch.old_route_C = torch.zeros(len(batch.targets_C), dtype=torch.int32)
        batch.old_route_T = torch.full((len(batch.tokens_T),), -1, dtype=torch.int32)


def blank_batch(shape: BatchShape, sampling: SamplingParams, check_parity: bool, routed: bool = False) -> PackedBatch:
    """A batch of `shape` with one completion token, of weight 0; `routed`: for a model with experts."""
    routes = [0] if routed else None
    segments = [Segment([0]), Segment([0], True, [0.0], [0.0], route_digests=routes)]
    groups = [RolloutGroup([Trajectory(segments)], sampling)]
    (batch,) = pack(groups, max_tokens=shape.tokens, check_parity=check_parity, shapes=[shape])
    return batch


def count_slots(batches: list[PackedBatch]) -> tuple[int, int]:
    return sum(b.tokens_T.numel() for b in batches), sum(int(b.cu_seqlens[-1]) for b in batches)


class _Limits(NamedTuple):
    """The limits of a micro-batch."""

    tokens: int
    segments: int


def _split_branches(group: RolloutGroup, limits: _Limits) -> list[RolloutGroup]:
    """A group with its trajectories cut between branches that do not fit together: one group of all first parts, which
    begin with the group's prompt, then a group for each further part. These are not merged by prompt, as all ranks must
    plan alike and know only the lengths of other ranks' prompts."""
    split = [_split_trajectory(trajectory, limits) for trajectory in group.rollouts]
    first, further = [parts[0] for parts in split], [[part] for parts in split for part in parts[1:]]
    return [replace(group, rollouts=rollouts) for rollouts in (first, *further)]


def _split_trajectory(trajectory: Trajectory, limits: _Limits) -> list[Trajectory]:
    """A trajectory cut into runs of branches that fit together, or single branches that do not fit even alone."""
    parts: list[list[list[Segment]]] = []
    used = 0
    for branch in trajectory.branches:
        rows = _num_rows(branch)
        full = bool(parts) and 1 + len(parts[-1]) >= limits.segments
        if not parts or full or used + rows > limits.tokens:
            parts.append([])
            used = 0
        parts[-1].append(branch)
        used += rows
    if len(parts) == 1:
        return [trajectory]
    split, before = [], 0
    for branches in parts:
        (prompt, *rest), *others = branches  # a part's first prompt has nothing before it and so is not `begins_branch`
        segments = [replace(prompt, begins_branch=False), *rest, *(segment for branch in others for segment in branch)]
        split.append(replace(trajectory, segments=segments, part_offset=before))
        before += split[-1].length
    return split


def _room_left(draft: _Draft, needed: tuple[int, int], limits: _Limits) -> _Limits:
    """The limits of a group's first part: the room that `draft` has left, or that of a new micro-batch if the first
    trajectory, which takes `needed`, does not fit there."""
    left = _Limits(limits.tokens - draft.needed.tokens, limits.segments - draft.needed.segments)
    return left if needed[0] <= left.tokens and needed[1] < left.segments else limits


def _split_by_prompt(
    group: RolloutGroup, needed: list[tuple[int, int]], limits: tuple[_Limits, _Limits], packing: Packing
) -> Iterator[tuple[RolloutGroup, int, int]]:
    """`group` cut into consecutive parts with one prompt, or one trajectory, each; with upper bounds of the tokens and
    segments of each. Prompts that the generator routed differently are two. `needed`: `_rows_and_branches` of each
    trajectory. `limits`: of the first part, and of others."""
    part: list[Trajectory] = []
    first: tuple[list[int], list[int] | None] = [], None
    used, segments, room = 0, 1, limits[0]  # one segment for the prompt
    for trajectory, (rows, branches) in zip(group.rollouts, needed, strict=True):
        prompt = trajectory.segments[0].token_ids, trajectory.segments[0].route_digests
        same_prompt = bool(part) and packing.mode != "per_sample" and first == prompt
        tokens = rows - len(prompt[0]) if same_prompt and packing.share_prefix else rows
        if part and not (same_prompt and segments + branches <= room.segments and used + tokens <= room.tokens):
            yield replace(group, rollouts=part), used, segments
            part, used, tokens, segments, room = [], 0, rows, 1, limits[1]
        if not part:
            first = prompt
        part.append(trajectory)
        used += tokens
        segments += branches
    if part:
        yield replace(group, rollouts=part), used, segments


def _num_rows(branch: list[Segment]) -> int:
    """The rows of a branch with its prompt: all tokens but the response's last, which predicts nothing."""
    return max(len(branch[0].token_ids), sum(len(segment.token_ids) for segment in branch) - 1)


def _rows_and_branches(trajectory: Trajectory, max_tokens: int) -> tuple[int, int]:
    """The rows that a trajectory takes with its prompts, and its number of branches. Refuses invalid trajectories."""
    name, branches = trajectory.name or "a trajectory", trajectory.branches
    if branches[0][0].sampled:
        raise ValueError(f"{name}: it begins with a sampled segment; the first is the prompt, which is given")
    if not all(branch[0].token_ids for branch in branches):
        raise InputError(f"{name}: its prompt is empty; training needs at least one token of each")
    if not any(s.sampled and s.token_ids for s in trajectory.segments):
        raise InputError(f"{name}: its completion is empty; training needs at least one token of each")
    if (needed := sum(map(_num_rows, branches))) > max_tokens:
        sizes = [(len(b[0].token_ids), sum(len(s.token_ids) for s in b[1:])) for b in branches]
        tokens = " and ".join(f"a prompt of {prompt} and a completion of {response}" for prompt, response in sizes)
        raise InputError(
            f"{name}: {tokens} tokens do not fit in trainer.max_tokens_per_micro_batch {max_tokens}; it must be at "
            f"least {needed}"
        )
    _check_lengths(name, trajectory)
    return needed, len(branches)


def _check_lengths(name: str, trajectory: Trajectory) -> None:
    for segment in trajectory.segments:
        length, routes = len(segment.token_ids), segment.route_digests
        if routes is not None and len(routes) != length:
            tokens = "completion" if segment.sampled else "prompt"
            raise ValueError(f"{name}: {len(routes)} route digests for {length} {tokens} tokens")
        for values in (segment.logprobs, segment.model_logprobs):
            if values is not None and not segment.sampled:
                raise ValueError(f"{name}: log-probs of given tokens, which nobody sampled")
            if values is not None and len(values) != length:
                raise ValueError(f"{name}: {len(values)} log-probs for {length} completion tokens")


class _Draft:
    """A micro-batch in the making. Its sizes are known from lengths; `batch` lays out the rows.

    Attributes:
        parts: groups of one prompt each; without any, the micro-batch has one token and no response.
        needed: sizes without padding. used: packed tokens, 0 without a response.
    """

    def __init__(self) -> None:
        self.parts: list[RolloutGroup] = []
        self.needed, self.used = BatchShape(1, 0, 1, 1), 0
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.segments: list[tuple[int, int, int]] = []  # end row, prefix start, prefix length
        self.routes: list[int] = []  # for each token, the digest of its experts where it is to be compared, else -1
        self.logit_rows: list[int] = []
        self.sequences: list[Trajectory] = []
        self.sampling: list[SamplingParams] = []

    def add(self, part: RolloutGroup, share_prefix: bool) -> None:
        first = part.rollouts[0].segments[0]
        sizes = [(len(first.token_ids), 0)] if share_prefix else []  # of each segment: its rows, and its prefix's
        for trajectory in part.rollouts:
            for prompt, *response in trajectory.branches:
                given, own = len(prompt.token_ids), sum(len(segment.token_ids) for segment in response)
                own -= bool(own)  # the last token predicts nothing
                sizes.append((own, given) if share_prefix and prompt is trajectory.segments[0] else (given + own, 0))
        before = self.needed if self.parts else BatchShape(0, 0, 0, 0)
        self.needed = BatchShape(
            before.tokens + sum(rows for rows, _ in sizes),
            before.completion_tokens + sum(trajectory.length for trajectory in part.rollouts),
            before.segments + len(sizes),
            max(before.max_len, *map(sum, sizes)),
        )
        self.used = self.needed.tokens
        self.parts.append(part)

    def _lay_out(self, part: RolloutGroup, share_prefix: bool) -> None:
        start, prompt = len(self.tokens), part.rollouts[0].segments[0]
        if share_prefix:
            self._add_segment(prompt.token_ids, _comparable_routes(prompt), 0, 0)
        for trajectory in part.rollouts:
            first, *others = trajectory.branches
            self._add_branch(first, start if share_prefix else None)
            for branch in others:
                self._add_branch(branch, None)
            self.sequences.append(trajectory)
            self.sampling.append(part.sampling)

    def _add_branch(self, branch: list[Segment], shared: int | None) -> None:
        """Add a prompt with its response, or the response alone if its prompt is at row `shared` already."""
        prompt, *response = branch  # all tokens of a response but the last take rows
        own = [token for segment in response for token in segment.token_ids][:-1]
        routes = [route for segment in response for route in _comparable_routes(segment)][:-1]
        if shared is not None:
            start, row = shared, len(self.tokens)
            self._add_segment(own, routes, start, len(prompt.token_ids))
        else:
            start, row = len(self.tokens), len(self.tokens) + len(prompt.token_ids)
            self._add_segment(prompt.token_ids + own, _comparable_routes(prompt) + routes, 0, 0)
        self._add_predicting_rows(response, start + len(prompt.token_ids) - 1, row)

    def _add_predicting_rows(self, response: list[Segment], first: int, row: int) -> None:
        """Add the rows that predict the sampled tokens: `first` for the response's first token, then `row` and on."""
        rows, at = [first, *range(row, len(self.tokens))], 0
        for segment in response:
            end = at + len(segment.token_ids)
            if segment.sampled:
                self.logit_rows.extend(rows[at:end])
            at = end

    def _add_segment(self, token_ids: list[int], routes: list[int], prefix_start: int, prefix_len: int) -> None:
        self.tokens.extend(token_ids)
        self.routes.extend(routes)
        self.positions.extend(range(prefix_len, prefix_len + len(token_ids)))
        self.segments.append((len(self.tokens), prefix_start, prefix_len))

    def batch(self, packing: Packing, shape: BatchShape, check_parity: bool, packed_tokens: int) -> PackedBatch:
        """The micro-batch, padded to `shape`. `packed_tokens`: the tokens of all micro-batches of the update."""
        for part in self.parts:
            self._lay_out(part, packing.share_prefix)
        if not self.parts:
            self._add_segment([0], [-1], 0, 0)
        assert (len(self.tokens), len(self.logit_rows), len(self.segments)) == self.needed[:3]
        T, C, S, max_len = shape
        ends, prefix_starts, prefix_lens = zip(*self.segments, strict=True)
        turns = [s.turns for s in self.sequences]
        sampled = [sum(len(turn.token_ids) for turn in of_one) for of_one in turns]
        lengths = torch.tensor([*sampled, C - len(self.logit_rows)])  # the last one is padding
        drawn = zip(self.sequences, self.sampling, strict=True)
        floats = [(s.loss_weight, s.advantage, p.temperature, p.top_p, p.min_p) for s, p in drawn] + [(0, 0, 1, 1, 0)]
        of_rows = torch.tensor(floats, dtype=torch.float32).t().repeat_interleave(lengths, 1, output_size=C)
        weight_C, advantage_C, temperature_C, top_p_C, min_p_C = of_rows
        whole = torch.tensor([[*range(len(turns)), 0], [*(p.top_k for p in self.sampling), 0]])
        sequence_C, top_k_C = whole.repeat_interleave(lengths, 1, output_size=C)
        old, old_model = self._old_logprobs(turns, check_parity)
        routes = self._old_routes(turns) if check_parity else None
        return PackedBatch(
            tokens_T=_pad(self.tokens, T, torch.int64),
            positions_T=_pad(self.positions, T, torch.int64),
            cu_seqlens=_pad([0, *ends], S + 1, torch.int32, fill=ends[-1]),
            prefix_start_S=_pad(prefix_starts, S, torch.int32),
            prefix_len_S=_pad(prefix_lens, S, torch.int32),
            max_len=max_len,
            logit_rows_C=_pad(self.logit_rows, C, torch.int64),
            targets_C=_pad([token for s in turns for turn in s for token in turn.token_ids], C, torch.int64),
            valid_C=torch.arange(C) < len(self.logit_rows),
            weight_C=weight_C,
            share=torch.tensor([self.used / packed_tokens]),
            advantage_C=advantage_C,
            old_logprob_C=_pad(old, C, torch.float32),
            old_model_logprob_C=_pad(old_model, C, torch.float32),
            ref_logprob_C=torch.zeros(C),
            temperature_C=temperature_C,
            top_k_C=top_k_C.int(),
            top_p_C=top_p_C,
            min_p_C=min_p_C,
            check_parity=check_parity,
            truncated=any(part.sampling.truncated for part in self.parts),
            sequence_C=sequence_C,
            sequences=self.sequences,
            old_route_C=None if routes is None else _pad(routes, C, torch.int32),
            old_route_T=None if routes is None else _pad(self.routes, T, torch.int32, fill=-1),
        )

    def _old_logprobs(self, turns: list[list[Segment]], required: bool) -> tuple[list[float], list[float]]:
        """The generator's two log-probs for each completion token; zeros where it gave none."""
        old: list[float] = []
        old_model: list[float] = []
        for s, of_one in zip(self.sequences, turns, strict=True):
            for turn in of_one:
                if required and (turn.logprobs is None or turn.model_logprobs is None):
                    raise ValueError(f"{s.name or 'a trajectory'}: parity cannot be checked without its log-probs")
                old.extend(turn.logprobs or [0.0] * len(turn.token_ids))
                old_model.extend(turn.model_logprobs or [0.0] * len(turn.token_ids))
        return old, old_model

    def _old_routes(self, turns: list[list[Segment]]) -> list[int] | None:
        """The generator's route digests; None if no trajectory has any, as of a model without experts."""
        if all(turn.route_digests is None for of_one in turns for turn in of_one):
            return None
        for s, of_one in zip(self.sequences, turns, strict=True):
            if any(turn.route_digests is None for turn in of_one):
                raise ValueError(f"{s.name or 'a trajectory'}: parity cannot be checked without its route digests")
        return [route for of_one in turns for turn in of_one for route in turn.route_digests or ()]


def _comparable_routes(segment: Segment) -> list[int]:
    if segment.route_digests is None:
        return [-1] * len(segment.token_ids)
    return [-1] * (len(segment.token_ids) - 1) + [segment.last_route] if segment.sampled else segment.route_digests


_TYPE_CODES = {torch.int64: "q", torch.int32: "i", torch.float32: "f"}


def _pad(values: Sequence[float], size: int, dtype: torch.dtype, fill: int = 0) -> Tensor:
    """`values` padded to `size`; for many values several times as fast as `torch.tensor`."""
    column = array(_TYPE_CODES[dtype], values)
    column.extend([fill] * (size - len(values)))
    return torch.frombuffer(column, dtype=dtype)
