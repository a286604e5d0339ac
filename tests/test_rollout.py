"""Collecting groups: what `generate` is asked, how its answers are scored, and which prompts are refused."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.errors import InputError
from lockstep.rollout import collect
from lockstep.tasks.base import Problem
from lockstep.tasks.rewards import Reward, RewardSet
from lockstep.tasks.sum_digits import SumDigits
from lockstep.types import TRAIN_DOMAIN, Completion, RolloutGroup, SampleIdentity, SamplingParams

SAMPLING = SamplingParams(max_completion_length=32, n=2)


def encode(prompt: str | list[dict[str, Any]]) -> list[int]:
    return list(prompt.encode()) if isinstance(prompt, str) else [0, *prompt[-1]["content"].encode()]


def answering(texts: list[str]):
    """A generate callable whose sample s of any prompt is `texts[s]`, and the list of what it was asked."""
    asked = []

    def generate(
        prompt_ids: list[list[int]], sampling: list[SamplingParams], identities: list[SampleIdentity]
    ) -> list[list[Completion]]:
        asked.append((prompt_ids, sampling, identities))
        return [
            [_completion(texts[s], SampleIdentity(i.seed, i.domain, i.step, i.group, s)) for s in range(params.n)]
            for params, i in zip(sampling, identities, strict=True)
        ]

    return generate, asked


def _completion(text: str, identity: SampleIdentity) -> Completion:
    ids = list(text.encode())
    return Completion(ids, [-1.0] * len(ids), [-1.0] * len(ids), [0] * len(ids), text, "stop", identity)


def run(problems: list[tuple[int, Problem]], texts: list[str], rewards: RewardSet, **options: Any):
    generate, asked = answering(texts)
    groups = collect(problems, encode, generate, SAMPLING, 7, TRAIN_DOMAIN, 3, rewards, **options)
    return groups, asked


def test_groups_are_generated_once_and_scored() -> None:
    task = SumDigits(seed=42, validation_seed=99, validation_prompts=0, easy=True)
    problems = [(g, task.train_problem(3, g)) for g in (0, 1, 4)]
    right = f"<answer>{problems[1][1].columns['answer']}</answer>"
    groups, asked = run(problems, [right, "none"], task.rewards)
    ((prompt_ids, sampling, identities),) = asked
    assert prompt_ids == [list(problem.prompt.encode()) for _, problem in problems]
    assert sampling == [SAMPLING] * 3
    assert identities == [SampleIdentity(7, TRAIN_DOMAIN, 3, group) for group in (0, 1, 4)]
    assert [group.group for group in groups] == [0, 1, 4]
    assert [rollout.reward for rollout in groups[1].rollouts] == [1.3, 0.0]
    assert groups[1].rollouts[0].rewards == {"correct": 1.0, "tagged": 1.0}
    assert groups[1].rollouts[1].completion.identity == SampleIdentity(7, TRAIN_DOMAIN, 3, 1, 1)
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
    groups, _ = run(problems, ["a", "b"], constant(1.0), max_prompt_length=5)
    assert [len(group.prompt_ids) for group in groups] == [4, 5]
    with pytest.raises(InputError, match=r"step 3 group 5 \(rows.jsonl line 9\): the prompt has 5 tokens; at most 4"):
        run(problems, ["a", "b"], constant(1.0), max_prompt_length=4)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="step 3 group 0: the prompt has no tokens"):
        run([(0, Problem(""))], ["a", "b"], constant(1.0))


def test_a_prompt_that_cannot_be_encoded_is_named() -> None:
    def refuse(prompt: Any) -> list[int]:
        raise InputError("no template")

    generate, _ = answering(["a", "b"])
    with pytest.raises(InputError, match=r"step 3 group 2 \(row 8\): no template"):
        problems = [(2, Problem("p", origin="row 8"))]
        collect(problems, refuse, generate, SAMPLING, 7, TRAIN_DOMAIN, 3, constant(0.0))


def test_a_failing_reward_names_the_step_and_groups() -> None:
    with pytest.raises(
        InputError, match="reward constant returned nan for completion 0 of the 4 completions of step 3, groups 0 to 1"
    ):
        run([(0, Problem("p")), (1, Problem("q"))], ["a", "b"], constant(float("nan")))


def test_no_problems_are_no_groups() -> None:
    groups: list[RolloutGroup]
    groups, _ = run([], ["a", "b"], constant(1.0))
    assert groups == []
