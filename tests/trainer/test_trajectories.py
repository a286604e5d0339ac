"""Trajectories of several turns in the trainer: sampled tokens are trained and compared, given ones are context.

Loss and gradients are held against a plain computation on logits of `transformers`, one trajectory at a time, which
knows neither packing nor segments: it is told of each token whether it was sampled.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from updates import LR, MAX_TOKENS, WARM, gradients, make_trainer, one_batch

from lockstep.algorithms import ALGORITHMS
from lockstep.config import GeneratorConfig
from lockstep.environments.ranks.rollouts import outline
from lockstep.errors import InputError
from lockstep.generator import Engine, SharedWeights
from lockstep.models import save_model
from lockstep.models.hf.weight_map import weight_map
from lockstep.trainer import Packing, pack, pack_shards
from lockstep.trainer.shapes import BatchShape
from lockstep.types import RolloutGroup, SampleIdentity, SamplingParams, Segment, Trajectory

# Tokens of each segment, given and sampled in turn, of the samples of two prompts. The last given ones predict nothing.
TURNS = [[(70, 3, 5, 40), (70, 1, 80, 1, 2, 9), (70, 30)], [(1, 7, 1, 1), (1, 20, 12)]]


def several_turns(seed: int = 0) -> list[RolloutGroup]:
    """Two groups; log-probabilities at some distance from any model's, so that ratios are not 1."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return rng.choices(range(97), k=count)

    groups = []
    for g, samples in enumerate(TURNS):
        made, prompt = [], Segment(tokens(samples[0][0]))
        for s, (_, *lengths) in enumerate(samples):
            segments = [prompt]
            for i, n in enumerate(lengths):
                logprobs = [rng.gauss(-4, 1) for _ in range(n)] if i % 2 == 0 else None
                segments.append(Segment(tokens(n), i % 2 == 0, logprobs, logprobs))
            made.append(Trajectory(segments, name=f"group {g} sample {s}", advantage=rng.uniform(-1, 1)))
        groups.append(RolloutGroup(made, WARM, group=g))
    return groups


def in_branches(seed: int = 0) -> list[RolloutGroup]:
    """The same with a branch begun at some given segments, and one more in the middle of a trajectory."""
    groups = several_turns(seed)
    of_all(groups)[1].segments[2].begins_branch = True  # the second of three turns goes on in a branch
    of_all(groups)[4].segments[2:2] = [Segment([7, 8], begins_branch=True), Segment([9], True, [-4.0], [-4.0])]
    of_all(groups)[4].segments[4].begins_branch = True
    return groups


def of_all(groups: list[RolloutGroup]) -> list[Trajectory]:
    return [t for group in groups for t in group.rollouts]


def plain_losses(model: Any, groups: list[RolloutGroup], algorithm: str) -> tuple[Tensor, list[Tensor]]:
    """The step's loss in float32, and each trajectory's log-probabilities, of sampled tokens at temperature 1."""
    trajectories, losses, logprobs = of_all(groups), [], []
    for t in trajectories:
        parts: list[list[Segment]] = []
        for segment in t.segments:  # a branch knows nothing of another
            parts += [[]] if segment.begins_branch or not parts else []
            parts[-1].append(segment)
        found, wanted = [], []
        for part in parts:
            ids = torch.tensor([[token for segment in part for token in segment.token_ids]])
            sampled = torch.tensor([segment.sampled for segment in part for _ in segment.token_ids])[1:]
            found.append(model(ids).logits[0, :-1][sampled])
            wanted.append(ids[0, 1:][sampled])
        logits, targets = torch.cat(found), torch.cat(wanted)[:, None]
        logprobs.append(torch.log_softmax(logits, 1).gather(1, targets)[:, 0])
        now = torch.log_softmax(logits / WARM.temperature, 1).gather(1, targets)[:, 0]
        log_ratio = now - torch.tensor([x for segment in t.segments for x in segment.logprobs or ()])
        if algorithm == "gspo":
            log_ratio = log_ratio.mean().expand_as(log_ratio)
        high = 1.28 if algorithm == "dapo" else 1.2
        ratio = log_ratio.exp()
        losses.append(-torch.minimum(ratio * t.advantage, ratio.clamp(0.8, high) * t.advantage))
    if algorithm == "dapo":
        return torch.cat(losses).mean(), logprobs
    return torch.stack([loss.mean() for loss in losses]).mean(), logprobs


def weigh(groups: list[RolloutGroup], algorithm: str) -> None:
    trajectories = of_all(groups)
    lengths = [len(t.token_ids) for t in trajectories]
    for t, weight in zip(trajectories, ALGORITHMS[algorithm]().weights(lengths, len(lengths), 100), strict=True):
        t.loss_weight = weight


def dense(model: Any, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    save_model(model, folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def assert_same_gradients(trainer: Any, other: Any) -> None:
    expected = {name: p.grad for name, p in other.named_parameters()}
    parameters = dict(trainer.model.named_parameters())
    for piece in weight_map(trainer.model.config):
        parameter = parameters[piece.parameter]
        start = parameter.storage_offset()
        grad = trainer.flat.grad[start : start + parameter.numel()].view(parameter.shape)
        have, want = grad[piece.start : piece.start + piece.rows], expected[piece.name]
        assert want is not None and (have - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize(
    ("algorithm", "share_prefix", "branched", "max_tokens"),
    [
        ("grpo", True, False, 300),
        ("dapo", False, False, 300),
        ("gspo", True, False, 300),
        ("gspo", True, True, 300),
        ("dapo", False, True, 300),
        ("grpo", True, True, 120),
    ],
)
def test_loss_and_gradients_are_those_of_sampled_tokens_alone(
    make_model, tmp_path, algorithm, share_prefix, branched, max_tokens
):
    model, groups = make_model(), in_branches() if branched else several_turns()
    other = dense(model, tmp_path)
    loss, _ = plain_losses(other, groups, algorithm)
    loss.backward()
    weigh(groups, algorithm)
    trainer = make_trainer(model, loss_type=algorithm)
    for batch in pack(groups, max_tokens=max_tokens, check_parity=False, share_prefix=share_prefix):
        trainer.forward_backward(batch)
    assert_same_gradients(trainer, other)
    result = trainer.optim_step(LR)
    assert (
        result.loss == pytest.approx(loss.item(), rel=1e-5)
        and result.tokens == 3 + 40 + 1 + 1 + 9 + 30 + 7 + 1 + 20 + branched
    )


def test_given_tokens_that_are_trained_and_sampled_ones_that_are_not_make_another_gradient(make_model, tmp_path):
    """The computation above tells a mistake from what is right."""
    model, groups = make_model(), several_turns()
    other = dense(model, tmp_path)
    plain_losses(other, groups, "grpo")[0].backward()
    for trajectory, index in ((0, 2), (1, 3)):
        wrong = several_turns()
        segments = of_all(wrong)[trajectory].segments
        segments[index].sampled = not segments[index].sampled
        segments[index].logprobs = segments[index].model_logprobs = None
        weigh(wrong, "grpo")
        trainer = make_trainer(model)
        trainer.forward_backward(one_batch(wrong, check_parity=False))
        with pytest.raises(AssertionError):
            assert_same_gradients(trainer, other)


def test_branches_are_packed_each_with_its_own_prompt(make_model):
    groups = in_branches()
    whole = pack(groups, max_tokens=300, check_parity=False)
    rows = sum(len(g.prompt_ids) for g in groups)  # once each; further branches with their own, all but a last token
    for t in of_all(groups):
        rows += sum(len(s.token_ids) for branch in t.branches for s in branch) - len(t.prompt.token_ids)
        rows -= len(t.branches)
    assert sum(int(batch.cu_seqlens[-1]) for batch in whole) == rows
    targets = [t for batch in whole for t in batch.targets_C[batch.valid_C].tolist()]
    assert targets == [token for t in of_all(groups) for token in t.token_ids], "each sampled token once, in order"
    shape = BatchShape(300, 300, 4, 300)
    few = pack(groups, max_tokens=300, check_parity=False, shapes=[shape])
    assert len(few) > len(whole) and all(len(batch.cu_seqlens) == 5 for batch in few), "no more segments than planned"
    whole_sequences = Packing(130, whole_sequences=True)
    with pytest.raises(
        InputError, match="of 70 and a completion of 1 and a prompt of 80 and a completion of 12 tokens"
    ):
        pack_shards([groups], [0], whole_sequences, False)
    empty = in_branches()
    of_all(empty)[1].segments[2].token_ids = []
    with pytest.raises(InputError, match="its prompt is empty"):
        pack(empty, max_tokens=300, check_parity=False)


def test_branches_that_do_not_fit_together_are_in_several_batches(make_model):
    groups = in_branches()
    for shapes, size in (((), 120), ([BatchShape(300, 300, 2, 300)], 300)):  # no room for tokens, or for segments
        batches = pack(groups, max_tokens=size, check_parity=False, shapes=shapes)
        of_name, places = dict[str, list[int]](), dict[str, list[int | None]]()
        for batch in batches:
            targets = iter(batch.targets_C[batch.valid_C].tolist())
            for part in batch.sequences:
                of_name.setdefault(part.name, []).extend(next(targets) for _ in part.token_ids)
                places.setdefault(part.name, []).append(part.part_offset)
        assert of_name == {t.name: t.token_ids for t in of_all(groups)}, "each sampled token once, in order"
        assert places["group 0 sample 0"] == [None]
        assert places["group 0 sample 1"] == [0, 1]
        assert places["group 1 sample 1"] == ([None] if size == 120 else [0, 20])
    batches = pack(groups, max_tokens=120, check_parity=False)
    assert [[s.name[-1] for s in b.sequences] for b in batches[:3]] == [["0", "1"], ["2"], ["1"]], (
        "first what begins alike"
    )
    with pytest.raises(ValueError, match="terms of whole sequences"):
        batches[0].index_sequences()
    trainer = make_trainer(make_model())  # of whose log-probabilities these know nothing
    for batch in pack([replace(groups[0], rollouts=groups[0].rollouts[1:2])], max_tokens=120, check_parity=True):
        trainer.check(batch)
    assert [m.position for m in trainer.finish_check().mismatches] == [0, 0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("max_tokens", [120, 300])
def test_what_other_ranks_have_is_planned_as_they_plan_it(make_model, max_tokens):
    """Of an outline lengths are known, and which prompts of a group are equal."""

    def groups() -> list[RolloutGroup]:
        found = in_branches()
        first, second, third = found[0].rollouts
        prompts = [Segment([*first.prompt.token_ids[:-1], 5]) for _ in range(2)]  # equal, and other than the first
        second.segments, third.segments[0] = [prompts[0], second.segments[1]], prompts[1]
        for one in (first, third):  # branches that begin alike
            again = [Segment([7] * 60, begins_branch=True), Segment([9], True, [-4.0], [-4.0])]
            one.segments = [*one.segments[:2], *again]
        return found

    own, how = in_branches(1), Packing(max_tokens)
    shapes = []
    for others in (groups(), [outline(group) for group in groups()]):
        shapes.append([batch.tokens_T.shape for batch in pack_shards([own, others], [0], how, False)])
    assert shapes[0] == shapes[1] and len(shapes[0]) > 1


def test_a_turn_in_two_pieces_is_packed_as_one(make_model):
    """What stands between two prompts and their completions is words that a single turn has, too."""
    (group, _) = several_turns()
    whole = replace(group, rollouts=group.rollouts[2:])
    prompt, turn = whole.rollouts[0].segments
    pieces = [
        Segment(turn.token_ids[cut], True, turn.logprobs[cut], turn.model_logprobs[cut])
        for cut in (slice(11), slice(11, None))
    ]
    parts = replace(whole, rollouts=[replace(whole.rollouts[0], segments=[prompt, *pieces, Segment([5, 6])])])
    one, two = (one_batch([g]) for g in (whole, parts))
    assert all(torch.equal(value, two.tensors()[name]) for name, value in one.tensors().items())
    model = make_model()
    trainer = make_trainer(model)
    assert torch.equal(gradients(trainer, [one]), gradients(trainer, [two]))


def sampled_in_turns(model: Any, page_size: int = 16) -> list[RolloutGroup]:
    """Three turns of two prompts by the engine, given tokens between them."""
    engine = Engine(SharedWeights(model), GeneratorConfig(page_size=page_size), 4096)
    sampling = SamplingParams(temperature=0.9, top_p=0.95, max_completion_length=11, ignore_eos=True)
    groups = []
    for g, prompt in enumerate([list(range(40)), [3]]):
        segments = [Segment(prompt)]
        for turn in range(3):
            tokens = [token for segment in segments for token in segment.token_ids]
            ((made,),) = engine.generate([tokens], [sampling], [SampleIdentity(5, 0, 0, g)])
            segments += [made.segments[1], Segment([(turn * 7 + i) % 97 for i in range(5 + 30 * g)])]
        groups.append(RolloutGroup([Trajectory(segments, name=f"group {g}", loss_weight=0.1)], sampling))
    return groups


def test_every_sampled_token_of_every_turn_is_compared(make_model):
    model = make_model()
    groups = sampled_in_turns(model)
    trainer = make_trainer(model)
    for options in ({}, {"share_prefix": False}, {"max_tokens": 150}):
        for batch in pack(groups, **{"max_tokens": MAX_TOKENS, "check_parity": True, **options}):
            trainer.check(batch)
        result = trainer.finish_check(66)
        assert (result.tokens_checked, result.tokens_different, result.tokens_not_covered) == (66, 0, 0)


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_one_other_bit_in_any_turn_stops_the_update_and_is_named(make_model, turn):
    model = make_model()
    groups = sampled_in_turns(model)
    logprobs = groups[1].rollouts[0].turns[turn].logprobs
    assert logprobs is not None
    logprobs[10] += 1e-3
    trainer = make_trainer(model)
    trainer.forward_backward(one_batch(groups))
    result = trainer.optim_step(LR, 66)
    assert not result.applied and result.tokens_different == 1
    assert [(m.request, m.position) for m in result.mismatches] == [("group 1", 11 * turn + 10)]


def test_a_sampled_segment_that_is_taken_for_a_given_one_is_not_covered(make_model):
    model = make_model()
    groups = sampled_in_turns(model)
    turn = groups[0].rollouts[0].turns[1]
    turn.sampled, turn.logprobs, turn.model_logprobs = False, None, None
    trainer = make_trainer(model)
    before = trainer.flat.data.clone()
    trainer.forward_backward(one_batch(groups))
    result = trainer.optim_step(LR, 66)
    assert (result.tokens_checked, result.tokens_not_covered, result.applied) == (55, 11, False)
    assert torch.equal(trainer.flat.data, before)


def test_what_is_no_trajectory_is_refused():
    prompt, turn = Segment([1, 2]), Segment([3], True, [0.0], [0.0])
    for segments, message in (
        ([turn, prompt], "begins with a sampled segment"),
        ([prompt, replace(prompt, logprobs=[0.0, 0.0]), turn], "log-probs of given tokens"),
        ([prompt, turn, replace(prompt, route_digests=[1]), turn], "1 route digests for 2 prompt tokens"),
        ([prompt, turn, prompt, replace(turn, logprobs=None)], "without its log-probs"),
    ):
        with pytest.raises(ValueError, match=message):
            one_batch([RolloutGroup([Trajectory(segments)], WARM)])
    with pytest.raises(InputError, match="its completion is empty"):
        one_batch([RolloutGroup([Trajectory([prompt, prompt])], WARM)])


def test_it_is_shown_by_what_was_sampled() -> None:
    segments = [Segment([1, 2]), Segment([3], True, [-1.0], [-1.0], text="a"), Segment([4]), Segment([5, 6], True)]
    shown = repr(Trajectory(segments, "length", name="group 0 sample 1"))
    assert shown == "Trajectory(name='group 0 sample 1', text='a', token_ids=[3, 5, 6], finish_reason='length')"


@pytest.mark.parametrize("share_prefix", [True, False])
def test_no_batch_is_larger_than_allowed_whatever_follows_what(share_prefix: bool) -> None:
    """Branches that nothing was sampled in, and turns without a token, among them."""
    for seed in range(60):
        draw = random.Random(seed)

        def segment(kind: str, draw: random.Random = draw) -> Segment:
            tokens = [draw.randrange(9) for _ in range(draw.randint(kind != "sampled", 5))]
            zeros = [0.0] * len(tokens) if kind == "sampled" else None
            return Segment(tokens, kind == "sampled", zeros, zeros, begins_branch=kind == "anew")

        kinds = [draw.choices(("sampled", "given", "anew"), (3, 1, 1), k=draw.randint(1, 4)) for _ in range(6)]
        made = [Trajectory([Segment([1, 2]), *map(segment, of), Segment([3], True)]) for of in kinds]
        groups, most = [RolloutGroup(made[i::2], SamplingParams()) for i in (0, 1)], draw.randint(30, 45)
        batches = pack(groups, max_tokens=most, check_parity=False, share_prefix=share_prefix)
        assert all(int(batch.cu_seqlens[-1]) <= len(batch.tokens_T) <= most for batch in batches)
        assert sum(int(b.valid_C.sum()) for b in batches) == sum(t.length for group in groups for t in group.rollouts)
