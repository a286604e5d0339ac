"""Collecting groups: what `generate` is asked, how its answers are scored, and which prompts are refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import wait_for

from lockstep.distributed import World
from lockstep.environments import ChatCodec, Environment, Limits
from lockstep.environments.base import Problem
from lockstep.environments.collect import Collected, Collector
from lockstep.environments.rewards.loading import load_rewards
from lockstep.environments.rewards.reward_set import Reward, RewardSet
from lockstep.environments.rewards.workers import RewardWorkers
from lockstep.environments.tasks.sum_digits import SumDigits
from lockstep.errors import InputError, LockstepError
from lockstep.types import (
    TRAIN_DOMAIN,
    VALIDATION_DOMAIN,
    RolloutGroup,
    SampleIdentity,
    SamplingParams,
    Segment,
    Trajectory,
)

SAMPLING = SamplingParams(max_completion_length=32, n=2)


def encode(prompt: str | list[dict[str, Any]]) -> list[int]:
    return list(prompt.encode()) if isinstance(prompt, str) else [0, *prompt[-1]["content"].encode()]


class Answering:
    """A generator whose sample s of any prompt is `texts[s]`; keeps what it was asked."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.asked, self._new = texts, list[tuple[list[int], SamplingParams, SampleIdentity]](), list[Any]()

    def __call__(self, prompt_ids: list[list[int]], sampling: list[SamplingParams]) -> Answering:
        self.planned = prompt_ids
        return self

    def add_request(self, prompt_ids: list[int], sampling: SamplingParams, identity: SampleIdentity) -> int:
        self.asked.append((prompt_ids, sampling, identity))
        for s in range(sampling.n):
            own = replace(identity, sample=identity.sample + s)
            made = _completion(prompt_ids, self.texts[own.sample], own)
            self._new.append(SimpleNamespace(request_id=len(self.asked), identity=own, completion=made))
        return len(self.asked)

    def advance(self) -> list[Any]:
        new, self._new = self._new, []
        return new

    def abort(self, request_id: int) -> list[Trajectory]:
        return []


def _completion(prompt_ids: list[int], text: str, identity: SampleIdentity) -> Trajectory:
    ids = list(text.encode())
    turn = Segment(ids, True, [-1.0] * len(ids), [-1.0] * len(ids), [0] * len(ids), text=text)
    return Trajectory([Segment(prompt_ids), turn], "stop", identity)


def tokens(encode: Any) -> ChatCodec:
    return ChatCodec(encode, lambda messages, given: encode(given))


def run(problems: list[tuple[int, Problem]], texts: list[str], rewards: RewardSet, **options: Any):
    generator = Answering(texts)
    collector = Collector(tokens(encode), generator, rewards, 7, limits=Limits(**options))
    groups, without, counts, _ = collector.collect(problems, SAMPLING, TRAIN_DOMAIN, 3)
    assert counts.get("groups_without_reward", 0) == len(without) == len(problems) - len(groups)
    return groups, generator


def test_groups_are_generated_once_and_scored() -> None:
    task = SumDigits(seed=42, validation_seed=99, validation_prompts=0, easy=True)
    problems = [(g, task.train_problem(3, g)) for g in (0, 1, 4)]
    right = f"<answer>{problems[1][1].columns['answer']}</answer>"
    groups, generator = run(problems, [right, "none"], task.rewards)
    prompt_ids, sampling, identities = map(list, zip(*generator.asked, strict=True))
    assert generator.planned == prompt_ids
    assert prompt_ids == [list(problem.prompt.encode()) for _, problem in problems]
    assert sampling == [SAMPLING] * 3
    assert identities == [SampleIdentity(7, TRAIN_DOMAIN, 3, group) for group in (0, 1, 4)]
    assert [group.group for group in groups] == [0, 1, 4]
    assert [rollout.reward for rollout in groups[1].rollouts] == [1.3, 0.0]
    assert groups[1].rollouts[0].rewards == {"correct": 1.0, "tagged": 1.0}
    assert groups[1].rollouts[1].identity == SampleIdentity(7, TRAIN_DOMAIN, 3, 1, 1)
    assert groups[1].prompt_ids == prompt_ids[1] and groups[1].columns == problems[1][1].columns
    assert groups[1].sampling is SAMPLING


def test_rewards_see_one_row_a_completion_in_the_prompts_form() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts, completions, completion_ids, tag):
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, tag=tag)
        return [0.0] * len(prompts)

    messages = [{"role": "user", "content": "hi"}]
    problems = [(0, Problem("p", {"tag": "x"})), (1, Problem(messages, {"tag": "y"}))]
    run(problems, ["a", "b"], RewardSet([Reward("reward", reward)]))
    assert seen["prompts"] == ["p", "p", messages, messages]
    assert seen["completions"][:2] == ["a", "b"]
    assert seen["completions"][2:] == [[{"role": "assistant", "content": text}] for text in "ab"]
    assert seen["completion_ids"] == [[97], [98], [97], [98]]
    assert seen["tag"] == ["x", "x", "y", "y"]


def constant(value: float) -> RewardSet:
    return RewardSet([Reward("constant", lambda completions: [value] * len(completions))])


def test_a_prompt_at_the_limit_is_taken_and_one_beyond_is_named() -> None:
    problems = [(0, Problem("four")), (5, Problem("fives", origin="rows.jsonl line 9"))]
    groups, _ = run(problems, ["a", "b"], constant(1.0), prompt_tokens=5)
    assert [len(group.prompt_ids) for group in groups] == [4, 5]
    with pytest.raises(InputError, match=r"step 4 group 5 \(rows.jsonl line 9\): the prompt has 5 tokens; at most 4"):
        run(problems, ["a", "b"], constant(1.0), prompt_tokens=4)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="step 4 group 0: the prompt has no tokens"):
        run([(0, Problem(""))], ["a", "b"], constant(1.0))


def test_a_prompt_that_cannot_be_encoded_is_named() -> None:
    def refuse(prompt: Any) -> list[int]:
        raise InputError("no template")

    generate = Answering(["a", "b"])
    with pytest.raises(InputError, match=r"step 4 group 2 \(row 8\): no template"):
        problems = [(2, Problem("p", origin="row 8"))]
        Collector(tokens(refuse), generate, constant(0.0), 7).collect(problems, SAMPLING, TRAIN_DOMAIN, 3)


def test_a_failing_reward_names_the_step_the_groups_and_the_row() -> None:
    message = r"reward constant returned nan; .* completion 0 of the 4 completions of step 4, groups 0 to 1 \(row 8\)"
    with pytest.raises(InputError, match=message):
        run([(0, Problem("p", origin="row 8")), (1, Problem("q"))], ["a", "b"], constant(float("nan")))


def test_validation_is_called_that() -> None:
    generate = Answering(["a", "b"])
    problems = [(0, Problem("p"))]
    with pytest.raises(InputError, match="of the 2 completions of validation, group 0"):
        Collector(tokens(encode), generate, constant(float("nan")), 7).collect(problems, SAMPLING, VALIDATION_DOMAIN, 0)
    with pytest.raises(InputError, match="^validation group 0: the prompt has no tokens"):
        Collector(tokens(encode), generate, constant(0.0), 7).collect(
            [(0, Problem(""))], SAMPLING, VALIDATION_DOMAIN, 0
        )


def sometimes(completions: list[str], value: list[float | None]) -> list[float | None]:
    return [None if text == "b" else v for text, v in zip(completions, value, strict=True)]


def test_a_group_with_a_completion_without_reward_is_left_out() -> None:
    problems = [(g, Problem("p", {"value": value})) for g, value in enumerate([1.0, None, 2.0])]
    groups, _ = run(problems, ["a", "a"], RewardSet([Reward("sometimes", sometimes)]))
    assert [(group.group, [r.reward for r in group.rollouts]) for group in groups] == [(0, [1.0, 1.0]), (2, [2.0, 2.0])]
    with pytest.raises(
        InputError, match="step 4: every group has a completion that no reward applies to: sometimes"
    ) as raised:
        run(problems, ["a", "b"], RewardSet([Reward("sometimes", sometimes)]))
    assert not raised.value.reported  # by this rank; all others have the same error


def test_reward_errors_are_counted_a_function() -> None:
    def broken(completions: list[str]) -> list[float]:
        raise ValueError

    generate = Answering(["a", "b"])
    rewards = RewardSet([Reward("broken", broken)], on_error="zero")
    found = Collector(tokens(encode), generate, rewards, 7).collect([(0, Problem("p"))], SAMPLING, TRAIN_DOMAIN, 3)
    assert found.counts == {"groups_without_reward": 0, "reward_errors/broken": 2}


def test_no_problems_are_no_groups() -> None:
    groups: list[RolloutGroup]
    groups, _ = run([], ["a", "b"], constant(1.0))
    assert groups == []


REWARDS = """
import time
from pathlib import Path

def noted(prompts, completions, more=None, **_):
    with Path(__file__).with_name(prompts[0]).open("a") as file:
        print(more, file=file)
    return [len(c) + (more or 0) for c in completions]

def hangs(completions, **_):
    time.sleep(600)
"""


class OneByOne(Answering):
    """Finishes a prompt's samples at a time; before another's, the file of the one before must be there."""

    def __init__(self, folder: Path) -> None:
        super().__init__(["a", "bb"])
        self.folder, self.finished = folder, list[str]()

    def advance(self) -> list[Any]:
        for name in self.finished:
            wait_for((self.folder / name).exists)
        now = [one for one in self._new if one.request_id == self._new[0].request_id]
        self._new = self._new[len(now) :]
        self.finished.append(bytes(now[0].completion.prompt.token_ids).decode())
        return now


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Callable[[str], RewardSet]]:
    """What makes rewards that a process of their own computes."""
    (tmp_path / "own.py").write_text(REWARDS)
    workers = RewardWorkers(1)
    yield lambda name: load_rewards([f"{tmp_path / 'own.py'}:{name}"], workers=workers)
    workers.close()


def test_workers_score_what_is_finished_while_others_are_sampled(
    elsewhere: Callable[[str], RewardSet], tmp_path: Path
) -> None:
    """Once, and with the columns that all rows have."""
    columns = [{"tag": "x", "more": 5}, {"tag": "y"}, {"tag": "z", "more": 7}]
    problems = [(g, Problem(f"prompt {g}", own)) for g, own in enumerate(columns)]
    generator = OneByOne(tmp_path)
    found = Collector(tokens(encode), generator, elsewhere("noted"), 7).collect(problems, SAMPLING, TRAIN_DOMAIN, 3)
    assert [[r.reward for r in group.rollouts] for group in found.groups] == [[1.0, 2.0]] * 3
    assert generator.finished == [f"prompt {g}" for g in range(3)]
    assert [(tmp_path / name).read_text() for name in generator.finished] == ["None\n"] * 3


def test_a_call_that_hangs_does_not_hold_up_what_fails_beside_it(elsewhere: Callable[[str], RewardSet]) -> None:
    class Fails(Answering):
        def advance(self) -> list[Any]:
            if len(self._new) < 4:
                raise LockstepError("the generator fails")
            return [self._new.pop(0), self._new.pop(0)]

    collector = Collector(tokens(encode), Fails(["a", "b"]), elsewhere("hangs"), 7)
    began = time.monotonic()
    with pytest.raises(LockstepError, match="the generator fails"):
        collector.collect([(0, Problem("p")), (1, Problem("q"))], SAMPLING, TRAIN_DOMAIN, 3)
    assert time.monotonic() - began < 120


class Beside(World):
    """A rank beside another one, whose environments failed."""

    def gather_results(self, make: Any, outline: Any = None) -> list[Any]:
        mine = make()
        return [mine, (Collected([], [], {"environment/errors": 1}), ["group 1: failed there"])][:: 1 - 2 * self.rank]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_keeps_what_failed_on_any(rank: int) -> None:
    class Fails(Environment):
        made = 0

        def step(self, turn: Any) -> Any:
            type(self).made += 1
            return self.fail() if self.made == 1 else "wrong"

        def fail(self) -> Any:
            raise OSError("no tool")

    sampling, problems = replace(SAMPLING, n=3), [(0, Problem("p")), (1, Problem("q"))]
    collector = Collector(
        *(tokens(encode), Answering(["a", "b", "c"]), constant(0.0), 7, Fails, Limits(turns=1)),
        world=Beside(rank, 2, timeout=60.0),
    )
    found = collector.collect(problems, sampling, TRAIN_DOMAIN, 3, required=False)
    told = collector.failures.take_messages()
    assert found.counts["environment/errors"] > 1
    assert [line.splitlines()[-1] for line in told][-1:] == ["group 1: failed there"] * (rank == 0)
    assert any("no tool" in line for line in told) == (rank == 0)
