"""Turns: what environments give goes on being sampled, with the same bits whenever they answer; limits and faults."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from decimal import Decimal
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from small import CONFIG, FAMILIES, compare, make_model

from lockstep.config import GeneratorConfig, TaskConfig
from lockstep.environments import (
    Branch,
    ChatCodec,
    Collector,
    End,
    Environment,
    Failures,
    Limits,
    Next,
    Problem,
    RewardSet,
    Turn,
)
from lockstep.environments import collect as collecting
from lockstep.environments.calls import run_in_main_thread
from lockstep.environments.collect import Collected
from lockstep.environments.environment import environment_metrics, named_rewards
from lockstep.environments.episodes.answers import reward_error
from lockstep.environments.ranks.leader import broadcast_calls
from lockstep.environments.rewards.reward_set import Reward
from lockstep.errors import InputError, LockstepError
from lockstep.generator import Engine, SharedWeights
from lockstep.generator.request import SharedPrefix
from lockstep.models import Decoder, ModelConfig
from lockstep.models.tokenizer import byte_tokenizer, encode_following, encode_prompt
from lockstep.rl.token_advantages import token_rewards
from lockstep.session.text.policy import Policy
from lockstep.types import TRAIN_DOMAIN, RolloutGroup, SampleIdentity, SamplingParams, Trajectory

STOPS = tuple(range(0, 256, 3))  # ends a turn soon
SAMPLING = SamplingParams(0.9, n=3, max_completion_length=20, ignore_eos=True, stop_token_ids=STOPS)
LIMITS = Limits(response_tokens=400, turns=8)
PROBLEMS = [(0, Problem("a prompt that is longer than a page of the cache holds")), (4, Problem("short"))]
TOKENS = ChatCodec(lambda prompt: list(str(prompt).encode()), lambda messages, given: list(str(given).encode()))


class Talk(Environment):
    """Says what each turn came to; ends with the fourth."""

    instant: ClassVar[bool] = True
    turns = 0
    total = 0

    def step(self, turn: Turn) -> Any:
        self.turns += 1
        self.total += sum(turn.token_ids)
        if self.turns == 4:
            return End({"even": float(self.total % 2 == 0), "turns": 0.1 * self.turns})
        return f"<{self.total} is what turn {self.turns} came to>"


class Slow(Talk):
    instant = False

    def step(self, turn: Turn) -> Any:
        assert sys.getswitchinterval() < 0.001, "the generator is not held up by what tools compute"
        time.sleep(random.random() * 0.02)
        return super().step(turn)


class SlowCoroutine(Talk):
    async def start(self, row: dict[str, Any], seed: int) -> Any:
        await asyncio.sleep(random.random() * 0.02)
        return row["prompt"]

    async def step(self, turn: Turn) -> Any:
        await asyncio.sleep(random.random() * 0.02)
        return super().step(turn)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return make_model(torch.float32)


def engine_of(model: Decoder, cache_tokens: int = 8192, **fields: Any) -> Engine:
    config = GeneratorConfig(**{"page_size": 16, "max_num_seqs": 8, **fields})
    return Engine(SharedWeights(model), config, cache_tokens, lambda ids: " ".join(map(str, ids)))


def collect(
    sampler: Any,
    environment: type[Environment],
    limits: Limits = LIMITS,
    problems: list[tuple[int, Problem]] = PROBLEMS,
    rewards: RewardSet | None = None,
    failures: Failures | None = None,
) -> Collected:
    rewards = rewards or RewardSet([])
    collector = Collector(TOKENS, lambda *_: sampler, rewards, 7, environment, limits, failures or Failures())
    return collector.collect(problems, SAMPLING, TRAIN_DOMAIN, 3, required=False)


def bits(groups: list[RolloutGroup]) -> list[Any]:
    return [
        (
            (g.group, r.identity, r.finish_reason, r.rewards, r.reward),
            [(s.sampled, s.token_ids, s.route_digests) for s in r.segments],
            [x.hex() for x in (*r.logprobs, *r.model_logprobs)],
        )
        for g in groups
        for r in g.rollouts
    ]


@pytest.fixture(scope="module")
def expected(model: Decoder) -> list[Any]:
    groups = collect(engine_of(model), Talk).groups
    turns = [len(r.turns) for g in groups for r in g.rollouts]
    assert [len(g.rollouts) for g in groups] == [3, 3] and max(turns) == 4
    return bits(groups)


class Shared:
    """An engine that others use, too, and that preempts now and then."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.abort, self.launches = engine, engine.abort, 0

    def add_request(self, prompt_ids: list[int], sampling: SamplingParams, identity: SampleIdentity) -> int:
        return self.engine.add_request(prompt_ids, sampling, identity)

    def advance(self) -> Any:
        self.launches += 1
        if self.launches % 3 == 1:
            other = SampleIdentity(9, TRAIN_DOMAIN, 3, self.launches)
            self.engine.add_request([self.launches, 1, 2], replace(SAMPLING, n=2, stop_token_ids=()), other)
        running = self.engine.scheduler.running
        if self.launches % 2 == 0 and running:
            self.engine.scheduler.preempt(running[self.launches % len(running)])
        return self.engine.advance()


@pytest.mark.parametrize("environment", [Slow, SlowCoroutine])
def test_the_bits_are_those_of_instant_answers(model: Decoder, expected: list[Any], environment: Any) -> None:
    """In whatever order tools answer, with other pages, among others' requests, and after preemption."""
    assert bits(collect(engine_of(model), environment).groups) == expected
    shared = Shared(engine_of(model, page_size=4))
    assert bits(collect(shared, environment, problems=PROBLEMS[::-1]).groups) == expected
    assert shared.engine.scheduler.preemptions > 0


class Silent(Talk):
    """Answers with nothing now and then."""

    def step(self, turn: Turn) -> Any:
        answer = super().step(turn)
        return "" if isinstance(answer, str) and self.turns % 2 else answer


@pytest.mark.parametrize("environment", [Slow, Silent])
@pytest.mark.parametrize("config", [CONFIG, FAMILIES["qwen3_moe"]])
def test_every_sampled_token_of_every_turn_is_the_trainers(config: ModelConfig, environment: Any) -> None:
    groups = collect(engine_of(make_model(torch.float32, config=config)), environment).groups
    result = compare(make_model(torch.float32, config=config), groups)
    sampled = sum(len(r.token_ids) for g in groups for r in g.rollouts)
    assert (result.tokens_checked, result.tokens_different) == (sampled, 0)
    silences = [not s.token_ids for g in groups for r in g.rollouts for s in r.segments if not s.sampled]
    assert any(silences) == (environment is Silent)
    if result.routing is not None:
        given = [s for g in groups for r in g.rollouts for s in r.branches[0][1:] if not s.sampled]
        between = sum(len(s.token_ids) + 1 for s in given)  # and the sampled token before, which draws nothing
        held = sum(len(g.prompt_ids) for g in groups) + between
        assert (result.routing.prompt_tokens_checked, result.routing.prompt_tokens_different) == (held, 0)


def test_a_prompt_is_run_once_and_pages_of_earlier_turns_are_found_again(model: Decoder) -> None:
    engine = engine_of(model, page_size=4)
    run: list[int] = []
    shared: dict[tuple[int, int], set[SharedPrefix | None]] = {}
    start = engine.scheduler.schedule_prefill

    def counted(version: int) -> Any:
        chunks = start(version)
        run.extend(chunk.count for chunk in chunks)
        for sequence in engine.scheduler.running:
            shared.setdefault((sequence.identity.group, sequence.identity.sample), set()).add(sequence.shared)
        return chunks

    engine.scheduler.schedule_prefill = counted  # type: ignore[method-assign]
    groups = collect(engine, Talk).groups
    prompts = sum(len(g.prompt_ids) for g in groups)
    later = [len(s.token_ids) for g in groups for r in g.rollouts for s in r.branches[0][1:] if not s.sampled]
    assert len(later) > 6
    prefixes = {group: set.union(*(shared[group, sample] for sample in range(3))) for group in (0, 4)}
    assert [len(found) for found in prefixes.values()] == [1, 1] and set.isdisjoint(*prefixes.values())
    assert all(p is not None and p.positions == len(p.pages) * 4 for found in prefixes.values() for p in found)
    assert sum(run) <= prompts + sum(later) + (4 + 1) * len(later), "what is new, a page in part and a drawn token"


def test_limits_end_a_trajectory(model: Decoder) -> None:
    class Endless(Talk):
        def step(self, turn: Turn) -> Any:
            self.turns += 1
            return "go on"

        def cut(self) -> End:
            return End({"turns": float(self.turns)})

    contexts = Limits(response_tokens=400, turns=9, context=len(PROBLEMS[0][1].prompt) + 44)
    for limits, turns in (
        (Limits(response_tokens=400, turns=2), 2),
        (Limits(response_tokens=44, turns=9), 9),
        (contexts, 9),
    ):
        for r in (r for g in collect(engine_of(model), Endless, limits).groups for r in g.rollouts):
            assert r.finish_reason == "truncated" or (r.finish_reason == "length" and len(r.turns[-1].token_ids) == 20)
            assert r.rewards == {"turns": len(r.turns)} and r.reward == len(r.turns) <= turns and r.segments[-1].sampled
            assert sum(len(s.token_ids) for s in r.segments[1:]) <= limits.response_tokens
            assert len(r.context) <= (limits.context or 1000)


class Wrong(Talk):
    """Sample 1 of group 4 goes wrong in its second turn; how is a subclass's."""

    made = 0

    def start(self, row: dict[str, Any], seed: int) -> Any:
        self.row, self.number = row, type(self).made
        type(self).made += 1
        return super().start(row, seed)

    def step(self, turn: Turn) -> Any:
        answer = super().step(turn)
        return self.wrong() if self.turns == 2 and self.number == 4 else answer

    def wrong(self) -> Any:
        raise NotImplementedError


class Raises(Wrong):
    def wrong(self) -> Any:
        raise SystemExit("gone")


class Hangs(Wrong):
    instant = False

    def wrong(self) -> Any:
        time.sleep(5)


class HangsInALoop(Wrong):
    async def step(self, turn: Turn) -> Any:
        answer = super().step(turn)
        await asyncio.sleep(5 if answer == "wait" else 0)
        return answer

    def wrong(self) -> Any:
        return "wait"


class Garbage(Wrong):
    def wrong(self) -> Any:
        return {"role": "tool"}


class NotANumber(Wrong):
    def wrong(self) -> Any:
        return End({"a": 1.0, "b": float("nan")})


class ItsProcessIsKilled(Wrong):
    def wrong(self) -> Any:
        return subprocess.run(["sh", "-c", "kill -9 $$"], check=True)


class RewardTooLarge(Wrong):
    def wrong(self) -> Any:
        return End(10**400)


def cyclic() -> list[dict[str, Any]]:
    """A message that contains itself."""
    message: dict[str, Any] = {"role": "tool", "content": "on"}
    message["calls"] = [message]
    return [message]


class CyclicBranch(Wrong):
    def wrong(self) -> Any:
        return Branch(cyclic())


class CyclicCompletion(Wrong):
    def wrong(self) -> Any:
        return End(completion=cyclic())


class CyclicColumn(Wrong):
    def wrong(self) -> Any:
        return End(columns={"rows": cyclic()})


class ColumnOfAnArgument(Wrong):
    def wrong(self) -> Any:
        return End(columns={"completions": 1})


class ColumnOfANumber(Wrong):
    def wrong(self) -> Any:
        return End(columns={1: 1})  # type: ignore[dict-item]


class CompletionOfNumbers(Wrong):
    def wrong(self) -> Any:
        return End(completion=[3])  # type: ignore[list-item]


class RewardOfHalfAName(Wrong):
    def wrong(self) -> Any:
        return End({"\ud800": 1.0})


class Hotter(Wrong):
    asked = -1

    def until(self, sampling: SamplingParams) -> SamplingParams:
        self.asked += 1
        return replace(sampling, temperature=2.0) if (self.asked, self.number) == (1, 4) else sampling

    def wrong(self) -> Any:
        return "on"


class Longer(Hotter):
    def until(self, sampling: SamplingParams) -> SamplingParams:
        asked = super().until(sampling)
        return asked if asked is sampling else replace(sampling, max_completion_length=21)


class CannotSay(Hotter):
    def until(self, sampling: SamplingParams) -> SamplingParams:
        if super().until(sampling) is not sampling:
            raise KeyError("until")
        return sampling


class RewardsOfAnInfiniteSum(Wrong):
    def wrong(self) -> Any:
        return End({"a": 1.0, "b": 1e308, "c": 1e308})


class RewardOfNoName(Wrong):
    def wrong(self) -> Any:
        return Next("on", {1: 0.5})  # type: ignore[dict-item]


class ColumnsOfNothing(Wrong):
    def wrong(self) -> Any:
        return End(0.5, columns=None)  # type: ignore[arg-type]


class RaisesWithoutText(Wrong):
    instant = False

    class Error(Exception):
        def __str__(self) -> str:
            raise ValueError

    def wrong(self) -> Any:
        raise self.Error


class RewardsByNothing(Wrong):
    def wrong(self) -> Any:
        return Next("on", {"a": float("inf")})


class GarbageInNext(Wrong):
    def wrong(self) -> Any:
        return Next(3, 1.0)  # type: ignore[arg-type]


class HalfACharacter(Wrong):
    def wrong(self) -> Any:
        return "\ud83d"


class HalfACharacterInAMessage(Wrong):
    def wrong(self) -> Any:
        return [{"role": "tool", "content": "\udcff"}]


class NoRole(Wrong):
    def wrong(self) -> Any:
        return [{}]


FORMS = "text, messages with role and content, token ids, a Branch of these, Next(given, reward) or an End"


class AnotherVocabulary(Wrong):
    def wrong(self) -> Any:
        return [1 << 70, -1]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (HalfACharacter, "step returned text that is no valid Unicode"),
        (HalfACharacterInAMessage, "step returned text that is no valid Unicode"),
        (NoRole, "step returned list [{}]; it must be text, messages with role and content"),
        (AnotherVocabulary, f"after what step returned: prompt 5: token id {-1} is outside the model's vocabulary"),
        (ItsProcessIsKilled, "died with <Signals.SIGKILL: 9>"),
        (RewardsByNothing, "its reward is {'a': inf}; it must be a finite number, or several by name"),
        (RewardTooLarge, "its reward is 1000000"),
        (
            RewardsOfAnInfiniteSum,
            "'b': 1e+308, 'c': 1e+308}; it must be a finite number, or several by name (at most 1e+38",
        ),
        (CyclicBranch, "what step returned cannot be given: it contains itself, or is nested too deep"),
        (CyclicCompletion, "its End's completion contains itself, or is nested too deep"),
        (CyclicColumn, "one of its End's columns contains itself, or is nested too deep"),
        (ColumnOfAnArgument, "its End has the column 'completions', which is the name of a reward argument; rename it"),
        (ColumnOfANumber, "its End has columns={1: 1}; they must be values by name"),
        (CompletionOfNumbers, "its End has completion=[3]; it must be messages with role and content"),
        (RewardOfHalfAName, "it must be a finite number, or several by name"),
        (Hotter, "; it may lower max_completion_length and add stop_token_ids to what it is given"),
        (Longer, "; it may lower max_completion_length and add stop_token_ids to what it is given"),
        (CannotSay, "task.environment: CannotSay.until raised KeyError: 'until'"),
        (RewardOfNoName, "its reward is {1: 0.5}; it must be a finite number, or several by name"),
        (ColumnsOfNothing, "its End has columns=None; they must be values by name"),
        (RaisesWithoutText, "Error: (a Error that has no text)"),
        (
            GarbageInNext,
            f"step returned int 3; it must be {FORMS}",
        ),
        (Raises, "SystemExit: gone"),
        (Hangs, "it took longer than task.environment_timeout, 1.5 s"),
        (HangsInALoop, "it took longer than task.environment_timeout, 1.5 s"),
        (
            Garbage,
            f"step returned dict {{'role': 'tool'}}; it must be {FORMS}",
        ),
        (NotANumber, "its reward is {'a': 1.0, 'b': nan}; it must be a finite number"),
    ],
)
def test_a_failure_leaves_its_trajectory_out(
    model: Decoder, expected: list[Any], environment: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is counted and checked, and no other is touched."""
    environment.made = 0
    timeout = 1.5 if environment in (Hangs, HangsInALoop) else 60.0  # the others answer within it on a busy machine too
    found = collect(engine_of(model), environment, Limits(response_tokens=400, turns=8, timeout=timeout))
    assert found.counts["environment/errors"] == 1
    ((failed,),) = [g.rollouts for g in found.without_reward]
    assert (failed.identity.group, failed.identity.sample, len(failed.turns)) == (4, 1, 2)
    assert bits(found.groups) == [e for e in expected if e[0][1] != failed.identity]
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.splitlines()[-1].startswith("step 4 group 4 sample 1: its environment failed: ") and message in told
    assert compare(model, found.without_reward).tokens_different == 0


def test_many_failures_in_a_row_end_the_run_with_the_first_ones_traceback(
    model: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the traceback once, as all are equal."""

    class Broken(Talk):
        def step(self, turn: Turn) -> Any:
            return self.nothing["there"]  # type: ignore[attr-defined]

    failures, engine = Failures(), engine_of(model)
    rounds = 0
    most = TaskConfig.max_environment_failures
    pattern = rf"failed for {most} trajectories in a row.*\(task.max_environment_failures\).*the first: AttributeError"
    with pytest.raises(LockstepError, match=pattern) as ended:
        while rounds < most:
            assert collect(engine, Broken, failures=failures).counts["environment/errors"] == 6
            rounds += 1
    assert rounds == 2 and not engine.scheduler.busy
    (traceback,) = ended.value.__notes__
    assert "return self.nothing" in traceback and len(str(ended.value).splitlines()) == 1
    told = failures.take_messages()
    assert len(told) == most and failures.take_messages() == []
    assert all(traceback in one for one in told)
    assert [traceback in one for one in caplog.messages] == [True] + [False] * (most - 1)
    assert all(" sample " in one.splitlines()[-1] for one in told), "what happened stands last"
    with pytest.raises(LockstepError, match=r"failed for 1 trajectories in a row; the first: Attr"):
        collect(engine, Broken, failures=Failures(allowed=0, setting=""))


def test_a_start_that_fails_costs_its_own_sample_alone(model: Decoder, expected: list[Any]) -> None:
    class Once(Talk):
        def start(self, row: Any, seed: int) -> Any:
            if next(starts) == 3:
                raise ConnectionError("once")
            return super().start(row, seed)

    starts = itertools.count()
    found = collect(engine_of(model), Once, failures=Failures(allowed=2))
    others = bits(found.groups + found.without_reward)
    assert found.counts["environment/errors"] == 1 and len(others) == len(expected) - 1
    assert all(other in expected for other in others)

    class Twice(Talk):
        def start(self, row: Any, seed: int) -> Any:
            return 1 / 0 if next(starts) < 2 else super().start(row, seed)

    starts = itertools.count()
    (left_out,) = collect(engine_of(model), Twice).without_reward
    assert len(left_out.rollouts) == 1 and left_out.prompt == PROBLEMS[0][1].prompt


def test_a_cut_trajectory_went_well_between_failures(model: Decoder) -> None:
    """Each is cut by the limit of turns, or fails: never two failures in a row for long."""

    class Half(Talk):
        def step(self, turn: Turn) -> Any:
            self.count = next(calls)
            assert self.count % 3
            return "on"

    calls, failures, engine = itertools.count(), Failures(allowed=5), engine_of(model)
    for _ in range(4):
        assert collect(engine, Half, replace(LIMITS, turns=1), failures=failures).counts["environment/errors"] == 2


@pytest.mark.parametrize("grades", [[1.0, math.nan, 3.0], None])
def test_a_failed_grader_is_no_zero_beside_an_environments_reward(model: Decoder, grades: list[float] | None) -> None:
    class Both(Talk):
        def step(self, turn: Turn) -> Any:
            return End(0.5, functions=True)

    def grade(completions: list[str]) -> list[float | None]:
        return [None] * len(completions) if grades is None else grades * (len(completions) // 3)

    found = collect(engine_of(model), Both, rewards=RewardSet([Reward("grade", grade)], on_error="skip"))
    if grades is None:  # it does not apply
        assert [r.reward for g in found.groups for r in g.rollouts] == [0.5] * 6
    else:
        assert not found.groups and found.counts["groups_without_reward"] == 2


def test_what_functions_log_is_a_mean_over_what_they_scored(model: Decoder) -> None:
    """Whatever the rounds or processes that scored it, and how many of their trajectories failed."""

    class Unscored(Raises):
        def step(self, turn: Turn) -> Any:
            return End() if isinstance(super().step(turn), End) else "on"

    logged: list[float] = []

    def logs(completions: list[str], log_metric: Any) -> list[float]:
        lengths = [float(len(text)) for text in completions]
        logged.extend(lengths)
        log_metric("length", sum(lengths) / len(lengths))
        return lengths

    rewards, Unscored.made = RewardSet([Reward("logs", logs)]), 0
    rounds = [collect(engine_of(model), Unscored, problems=[problem], rewards=rewards) for problem in PROBLEMS]
    assert [part.counts.get("environment/errors", 0) for part in rounds] == [0, 1] and len(logged) == 5
    assert collecting.merge_counts(rounds)["logged/length"] == pytest.approx(sum(logged) / 5)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda: 0.5, "cut returned float 0.5; it must be an End"),
    ],
)
def test_a_cut_trajectory_whose_worth_is_unknown_is_left_out(model: Decoder, cut: Any, message: str) -> None:
    """And is no zero."""

    class Uncut(Talk):
        def cut(self) -> Any:
            return cut()

    failures = Failures()
    found = collect(engine_of(model), Uncut, replace(LIMITS, turns=1), failures=failures)
    assert found.groups == [] and found.counts["environment/errors"] == 6 == len(failures.messages)
    assert sum(len(g.rollouts) for g in found.without_reward) == 6 and message in failures.messages[0]


def test_rewards_of_turns_add_up_and_stand_at_their_tokens(model: Decoder, expected: list[Any]) -> None:
    class Rewarding(Talk):
        def step(self, turn: Turn) -> Any:
            answer = super().step(turn)
            return answer if isinstance(answer, End) else Next(answer, {"turns": 0.25, "early": -1.0})

        def cut(self) -> End:
            return End({"turns": 0.5, "cut": 1.0})

    class Unended(Rewarding):
        def cut(self) -> End:
            return End()

    two = replace(LIMITS, turns=2)
    found = [r for g in collect(engine_of(model), Rewarding).groups for r in g.rollouts]
    assert [[s.token_ids for s in r.segments] for r in found] == [[s[1] for s in e[1]] for e in expected]
    found += [r for g in collect(engine_of(model), Rewarding, two).groups for r in g.rollouts]
    assert [r.cut_off for r in found] == [False] * 6 + [True] * 6
    for r in found:
        *earlier, last = r.turns
        before, given = len(earlier), {"turns": 0.25, "early": -1.0}
        if r.cut_off:  # its last turn was rewarded, too
            assert last.rewards == {"turns": 0.75, "early": -1.0, "cut": 1.0}
            assert r.rewards == {"turns": 0.25 * before + 0.75, "early": -before - 1.0, "cut": 1.0}
        else:
            assert r.rewards == {"turns": 0.25 * before + 0.4, "early": -before, "even": last.rewards["even"]}
        assert all(turn.rewards == given for turn in earlier) and r.reward == pytest.approx(sum(r.rewards.values()))
        tokens, ends = token_rewards(r, 0.0, None), list(accumulate(len(turn.token_ids) for turn in r.turns))
        assert [tokens[end - 1] for end in ends[:-1]] == [-0.75] * before
        assert tokens[-1] == pytest.approx(sum(last.rewards.values())) and sum(map(bool, tokens)) <= len(ends)
    lengths = RewardSet([Reward("length", lambda completions, **_: [1.0 for _ in completions])])
    for r in (r for g in collect(engine_of(model), Unended, two, rewards=lengths).groups for r in g.rollouts):
        assert r.rewards == {"length": 1.0, "turns": 0.25 * len(r.turns), "early": -len(r.turns)}
        assert r.reward == 1.0 - 0.75 * len(r.turns), "functions are asked where the end has no reward, and added"


def test_samples_of_a_group_begin_alike(model: Decoder) -> None:
    class Odd(Talk):
        def start(self, row: dict[str, Any], seed: int) -> Any:
            return f"{id(self)}"

    class None_(Talk):
        def start(self, row: dict[str, Any], seed: int) -> Any:
            return None

    class Array(Talk):
        def start(self, row: dict[str, Any], seed: int) -> Any:
            return np.array([1, 2])

    for environment, message in (
        (Odd, "other prompts for samples of one group"),
        (Array, "start returned ndarray array([1, 2]); it must be text"),
        (None_, "start returned NoneType None"),
    ):
        failures = Failures()
        assert collect(engine_of(model), environment, failures=failures).groups == []
        assert failures.first is not None and message in failures.first.reason


def test_functions_score_what_an_environment_leaves_to_them(model: Decoder) -> None:
    class Unscored(Talk):
        def step(self, turn: Turn) -> Any:
            answer = super().step(turn)
            return End() if isinstance(answer, End) and self.total % 2 else answer

    rewards = RewardSet([Reward("length", lambda completions, **_: [float(len(text.split())) for text in completions])])
    found = collect(engine_of(model), Unscored, rewards=rewards)
    parts = TOKENS, lambda *_: engine_of(model), RewardSet([]), 7, Unscored, LIMITS
    with pytest.raises(InputError, match=r"step 4: the environment ended with End\(\), .* are none; give End"):
        Collector(*parts, needs_rewards=True).collect(PROBLEMS, SAMPLING, TRAIN_DOMAIN, 3)
    kinds = {tuple(r.rewards) for g in found.groups for r in g.rollouts}
    assert kinds <= {("even", "turns"), ("length",)} and ("length",) in kinds


def test_what_an_environment_names_for_some_trajectories_is_0_for_the_others(model: Decoder) -> None:
    class Solves(Talk):
        def step(self, turn: Turn) -> Any:
            answer = super().step(turn)
            solved = {"solved": 1.0} if self.total % 2 else 0.5
            return End(solved, functions=True) if isinstance(answer, End) else answer

    length = Reward("length", lambda completions, **_: [1.0 for _ in completions])
    rollouts = [r for g in collect(engine_of(model), Solves, rewards=RewardSet([length])).groups for r in g.rollouts]
    solved = [r.rewards["solved"] for r in rollouts]
    assert {tuple(r.rewards) for r in rollouts} == {("length", "solved", "reward")} and {*solved} == {0.0, 1.0}
    assert all(
        r.rewards["reward"] == 0.5 * (1 - s) and r.reward == 1.5 + 0.5 * s
        for r, s in zip(rollouts, solved, strict=True)
    )
    with pytest.raises(InputError, match=r"both name a reward 'solved'; rename one"):
        collect(engine_of(model), Solves, rewards=RewardSet([replace(length, name="solved")]))


def test_text_tokens_and_the_seed_are_as_given(model: Decoder) -> None:
    seeds: dict[str, set[int]] = {}

    class Tokens_(Talk):
        def start(self, row: dict[str, Any], seed: int) -> Any:
            seeds.setdefault(row["prompt"], set()).add(seed)
            return [1, 2, 3, row["extra"]]

        def step(self, turn: Turn) -> Any:
            self.turns += 1
            return [7, 8, 9] if self.turns == 1 else End(1.0)

    problems = [(0, Problem("a", {"extra": 5})), (1, Problem("b", {"extra": 6}))]
    groups = collect(engine_of(model), Tokens_, problems=problems).groups
    assert [g.prompt_ids for g in groups] == [[1, 2, 3, 5], [1, 2, 3, 6]]
    assert [g.prompt for g in groups] == ["[1, 2, 3, 5]", "[1, 2, 3, 6]"]
    several = [r for g in groups for r in g.rollouts if len(r.turns) == 2]
    assert several and all([s.token_ids for s in r.segments if not s.sampled][1:] == [[7, 8, 9]] for r in several)
    assert [len(found) for found in seeds.values()] == [1, 1] and len(set.union(*seeds.values())) == 2


def test_messages_go_on_from_the_sampled_tokens(model: Decoder) -> None:
    """Of a chat nothing sampled is encoded again: what the template closes an answer with is sampled, or given."""
    tokenizer = byte_tokenizer()
    asked: list[Any] = []

    def following(messages: Any, given: Any) -> list[int]:
        asked.append([message["role"] for message in messages])
        return encode_following(tokenizer, messages, given)

    class Chat(Talk):
        def step(self, turn: Turn) -> Any:
            answer = super().step(turn)
            return answer if isinstance(answer, End) else [{"role": "tool", "content": answer}]

    stops = replace(SAMPLING, n=4, ignore_eos=False, stop_token_ids=(258, *STOPS), temperature=3.0)
    problems = [(g, Problem([{"role": "user", "content": f"hi {g}"}])) for g in range(4)]
    parts = ChatCodec(lambda prompt: encode_prompt(tokenizer, prompt), following), lambda *_: engine_of(model)
    collector = Collector(*parts, RewardSet([]), 7, Chat, LIMITS)
    groups = collector.collect(problems, stops, TRAIN_DOMAIN, 3).groups
    after = [r.segments[i : i + 2] for g in groups for r in g.rollouts for i in range(1, len(r.segments) - 1, 2)]
    for turn, given in after:
        text = tokenizer.decode(turn.token_ids[-1:] + given.token_ids)
        assert ("<|im_end|>\n<|im_start|>tool\n<" in text) and text.count("<|im_end|>") == 2
    assert {turn.token_ids[-1] == 258 for turn, _ in after} == {True, False}
    assert ["user", "assistant", "tool", "assistant"] in asked and all(roles[-1] == "assistant" for roles in asked)


def test_messages_that_cannot_be_given_leave_their_trajectory_out(model: Decoder) -> None:
    """A template refuses them, or there is no room for them; the others go on."""

    class Says(Wrong):
        says: ClassVar[Any]

        def step(self, turn: Turn) -> Any:
            answer = super().step(turn)
            return [{"role": "tool", "content": answer}] if isinstance(answer, str) else answer

        def wrong(self) -> Any:
            return self.says

    refused, huge = [{"role": "tool", "content": [{"type": "text", "text": "parts"}]}], "y" * 50_000
    problems = [(g, Problem([{"role": "user", "content": f"hi {g}"}])) for g in range(2)]
    tokens = Policy(model, byte_tokenizer()).tokens
    for says in (refused, [{"role": "tool", "content": huge}], huge, Branch(huge), Branch(refused)):
        failures, environment = Failures(), type("Now", (Says,), {"made": 0, "says": says})
        parts = tokens, lambda *_: engine_of(model), RewardSet([]), 7
        found = Collector(*parts, environment, LIMITS, failures).collect(problems, SAMPLING, TRAIN_DOMAIN, 3)
        reasons = [r.finish_reason for g in found.groups + found.without_reward for r in g.rollouts]
        assert len(reasons) == 6
        if "parts" in str(says):
            (told,) = failures.messages
            assert found.counts["environment/errors"] == 1 and "sample 1: its environment failed" in told
            assert "what step returned cannot be given: the tokenizer's chat template refuses the messages" in told
        else:
            assert not failures.messages and reasons.count("truncated") == 1


def test_what_contains_itself_is_named(model: Decoder) -> None:
    """Of a row the run ends; of what environments make of it their trajectories are left out."""

    class Starts(Wrong):
        def start(self, row: dict[str, Any], seed: int) -> Any:
            return cyclic() if row["prompt"] == "short" else super().start(row, seed)

    class Steps(Wrong):
        def start(self, row: dict[str, Any], seed: int) -> Any:
            return [{"role": "user", "content": super().start(row, seed)}]

        def step(self, turn: Turn) -> Any:
            answer = super().step(turn)
            return [{"role": "tool", "content": answer}] if isinstance(answer, str) else answer

        def wrong(self) -> Any:
            return cyclic()

    parts = Policy(model, byte_tokenizer()).tokens, lambda *_: engine_of(model), RewardSet([]), 7
    for environment, reason, number in (
        (Starts, "what start returned contains itself, or is nested too deep", 3),
        (Steps, "what step returned cannot be given: it contains itself, or is nested too deep", 1),
    ):
        failures, environment.made = Failures(), 0
        found = Collector(*parts, environment, LIMITS, failures).collect(PROBLEMS, SAMPLING, TRAIN_DOMAIN, 3)
        assert found.counts["environment/errors"] == number
        assert [told.rpartition("failed: ")[2] for told in failures.messages] == [reason] * number
    problems = [(0, Problem("x", {"facts": cyclic()}, origin="rows line 2"))]
    with pytest.raises(
        InputError, match=r"^step 4 group 0 \(rows line 2\): facts contains itself, or is nested too deep"
    ):
        Collector(*parts, Talk, LIMITS).collect(problems, SAMPLING, TRAIN_DOMAIN, 3)


def test_what_an_environment_changes_is_its_own(model: Decoder) -> None:
    """Rows are each sample's, and prompts are what they were when they were given."""

    class Keeps(Talk):
        def start(self, row: dict[str, Any], seed: int) -> Any:
            self.messages = row["prompt"]
            self.messages.insert(0, {"role": "system", "content": "brief"})
            row["answer"].append(4)
            return self.messages

        def step(self, turn: Turn) -> Any:
            self.messages += [turn.message, {"role": "tool", "content": "on"}]
            self.messages[0]["content"] = "other"
            return End() if isinstance(super().step(turn), End) else self.messages[-1:]

    seen: list[Any] = []

    def scored(prompts: Any, answer: Any, **_: Any) -> list[float]:
        seen.extend(zip(prompts, answer, strict=True))
        return [1.0 for _ in prompts]

    problems = [(0, Problem([{"role": "user", "content": "hi"}], {"answer": [3]}))]
    parts = Policy(model, byte_tokenizer()).tokens, lambda *_: engine_of(model), RewardSet([Reward("scored", scored)])
    Collector(*parts, 7, Keeps, LIMITS).collect(problems, SAMPLING, TRAIN_DOMAIN, 3)
    assert seen == [([{"role": "system", "content": "brief"}, {"role": "user", "content": "hi"}], [3])] * 3
    assert problems[0][1].prompt == [{"role": "user", "content": "hi"}]


def test_code_beside_the_turns_that_raises_is_named(model: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    class Tools(Talk):
        @property
        def tools(self) -> Any:
            raise KeyError("there")

    class ToolsAsAMethod(Talk):
        def tools(self) -> Any:  # type: ignore[override]
            return []

    class Made(Talk):
        def __init__(self) -> None:
            raise SystemExit("gone")

    class Closes(Talk):
        def close(self) -> None:
            raise SystemExit("closed")

    class Below(Talk):
        def start(self, row: dict[str, Any], seed: int) -> Any:
            return [-1]

    tokens = Policy(model, byte_tokenizer()).tokens
    for environment, message in (
        (Tools, r"task\.environment: Tools\.tools raised KeyError: 'there'"),
        (ToolsAsAMethod, r"task\.environment: ToolsAsAMethod\.tools is <bound method .*>; it must be a property that"),
        (Made, r"task\.environment: Made\(\) raised SystemExit: gone"),
        (Below, r"step 4 group 0: start returned token ids that no model has: \[-1\]"),
    ):
        with pytest.raises(InputError, match=message):
            Collector(tokens, lambda *_: engine_of(model), RewardSet([]), 7, environment, LIMITS).collect(
                PROBLEMS, SAMPLING, TRAIN_DOMAIN, 3
            )
    assert len(collect(engine_of(model), Closes).groups) == 2
    assert "step 4 group 4 sample 2: close raised SystemExit: closed" in caplog.text


def test_a_signal_ends_the_run_wherever_it_comes(model: Decoder) -> None:
    """Within an environment that is called in the main thread, too, or a function that asked for that."""

    class Instant(Talk):
        def step(self, turn: Turn) -> Any:
            signal.raise_signal(signal.SIGINT)

    class InMain(Talk):
        instant = False

        def step(self, turn: Turn) -> Any:
            return run_in_main_thread(lambda: signal.raise_signal(signal.SIGINT))

    for environment in (Instant, InMain):
        with pytest.raises(KeyboardInterrupt):
            collect(engine_of(model), environment)


def test_a_trajectory_that_lacks_sampled_tokens_is_not_handed_on(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is to be compared is what was generated, whatever became of it."""

    def shortened(rollouts: list[Trajectory], *about: Any) -> RolloutGroup:
        for trajectory in rollouts:
            trajectory.segments = trajectory.segments[:2]
        return RolloutGroup(rollouts, *about)

    monkeypatch.setattr(collecting, "RolloutGroup", shortened)
    with pytest.raises(LockstepError, match=r"step 4: \d+ tokens were sampled, and trajectories have \d+$"):
        collect(engine_of(model), Talk)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "returned None; it must return numbers by name"),
        ({"a": "x"}, "returned {'a': 'x'}; it must return numbers by name"),
        ({1: 1.0}, "returned {1: 1.0}; it must return numbers by name"),
        ({"\ud800": 1.0}, "it must return numbers by name"),
        ({"step": 9.0}, "returned {'step': 9.0}; it must return numbers by name, none of them `step`"),
        (KeyError("x"), "raised KeyError: 'x'"),
    ],
)
def test_metrics_of_an_environment_are_numbers_by_name(found: Any, said: str) -> None:
    class Measured(Talk):
        @classmethod
        def metrics(cls, trajectories: Any) -> Any:
            if isinstance(found, Exception):
                raise found
            return found

    with pytest.raises(InputError, match=re.escape(said)) as raised:
        environment_metrics(Measured, [])
    assert str(raised.value).startswith("task.environment: Measured.metrics r")


def test_a_number_of_another_library_is_a_reward() -> None:
    """As it is of a reward function."""
    for number in (np.float32(1), np.bool_(True), np.array(1), torch.tensor(1.0), torch.tensor(True), Decimal("1.0")):
        assert reward_error(number) == reward_error({"a": number}) == ""
        assert named_rewards(number) == {"reward": 1.0} and type(named_rewards(number)["reward"]) is float
    for other in ("1", None, np.ones(1), torch.ones(2), torch.tensor(math.nan), 1j):
        assert "must be a finite number" in reward_error({"a": other})


def test_what_torch_computed_ends_a_trajectory(model: Decoder) -> None:
    class Computes(Talk):
        def step(self, turn: Turn) -> Any:
            return End(torch.tensor(turn.token_ids).float().mean() > 9)  # type: ignore[arg-type]

    found = collect(engine_of(model), Computes)
    assert {r.reward for g in found.groups for r in g.rollouts} <= {0.0, 1.0} and not found.without_reward


@pytest.mark.parametrize(("ends", "told"), [(KeyboardInterrupt, []), (OSError, ["abort", "end"]), (None, ["end"])])
def test_nobody_is_told_by_a_leader_that_was_interrupted(model: Decoder, ends: Any, told: list[str]) -> None:
    """The others were, too: what they were told, and collectives that are theirs as well, would be waited for."""
    heard: list[str] = []
    world = SimpleNamespace(
        generator_group=object(), broadcast_in_group=lambda calls: heard.extend(name for name, *_ in calls)
    )
    world.rolling_deadline = lambda doing: nullcontext(lambda: None)
    with suppress(KeyboardInterrupt, OSError), broadcast_calls(world, lambda *_: engine_of(model), 3) as sampler:  # type: ignore[arg-type]
        leader = sampler([], [])
        request = leader.add_request([1, 2], replace(SAMPLING, n=3), SampleIdentity(0, TRAIN_DOMAIN, 0, 0))
        leader.advance()
        del heard[:]
        try:
            if ends is not None:
                raise ends
        finally:
            if ends is not None:
                leader.abort(request)
    assert heard == told
