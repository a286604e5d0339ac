"""Branches: where the past is shown in another way, what was sampled before stays what it was, and is trained once."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from small import CONFIG, FAMILIES, compare, make_model
from test_episodes import LIMITS, PROBLEMS, SAMPLING, Talk, bits, collect, engine_of

from lockstep.environments import Branch, ChatCodec, End, Environment, Limits, Problem, Turn, worked_trajectories
from lockstep.models import ModelConfig
from lockstep.models.tokenizer import byte_tokenizer, encode_following, encode_prompt
from lockstep.rl.resample import RecordedEnvironment
from lockstep.run.metrics import rollout_records
from lockstep.types import Trajectory


class Forgets(Talk):
    """Begins anew after the second turn, with what that came to."""

    def step(self, turn: Turn) -> Any:
        answer = super().step(turn)
        return Branch(f"anew: {answer}") if self.turns == 2 and not isinstance(answer, End) else answer


class ForgetsSlowly(Forgets):
    instant = False

    def step(self, turn: Turn) -> Any:
        time.sleep((sum(turn.token_ids) % 7) * 0.003)
        return super().step(turn)


def all_of(groups: Any) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.rollouts]


@pytest.mark.parametrize("config", [CONFIG, FAMILIES["qwen3_moe"]])
def test_each_sampled_token_is_compared_once(config: ModelConfig) -> None:
    model = make_model(torch.float32, config=config)
    groups = collect(engine_of(model), Forgets).groups
    branched = [t for t in all_of(groups) if len(t.branches) == 2]
    assert len(branched) > 2 and {len(t.branches) for t in all_of(groups)} <= {1, 2}
    for share_prefix in (True, False):
        result = compare(make_model(torch.float32, config=config), groups, share_prefix)
        assert result.tokens_checked == sum(len(t.token_ids) for t in all_of(groups))
        assert result.tokens_different == 0
        if result.routing is not None:
            begun = sum(len(s.token_ids) for t in branched for s in t.segments if s.begins_branch)
            assert result.routing.prompt_tokens_checked > begun and result.routing.prompt_tokens_different == 0
    assert Forgets.metrics(all_of(groups))["environment/branches"] == len(branched) / 6
    for t in branched:
        begun = next(i for i, segment in enumerate(t.segments) if segment.begins_branch)
        assert t.branches[1][0].token_ids == list(t.segments[begun].text.encode())
        alone = engine_of(make_model(torch.float32, config=config))
        identity = replace(t.identity, domain=t.identity.domain + 256)
        ((again,),) = alone.generate([t.branches[1][0].token_ids], [replace(SAMPLING, n=1)], [identity])
        assert again.token_ids == t.segments[begun + 1].token_ids and again.logprobs == t.segments[begun + 1].logprobs


def test_bits_do_not_depend_on_who_answers_first_and_a_record_repeats_them() -> None:
    model = make_model(torch.float32)
    groups = collect(engine_of(model), Forgets).groups
    assert bits(collect(engine_of(model, page_size=4), ForgetsSlowly, problems=PROBLEMS[::-1]).groups) == bits(groups)
    (record, _) = rollout_records(3, groups)
    samples = record["samples"]
    assert any(segment.get("anew") for sample in samples for segment in sample["segments"])

    class SaysNothing(Forgets):
        def step(self, turn: Turn) -> Any:
            answer = super().step(turn)
            return "" if self.turns == 1 and not isinstance(answer, End) else answer

    class Replayed(RecordedEnvironment):
        def __init__(self) -> None:
            segments = next(played).segments
            self._given = iter([(s.token_ids, s.begins_branch) for s in segments if not s.sampled])
            self._turns = iter(())

    for made in (groups[:1], collect(engine_of(model), SaysNothing, problems=PROBLEMS[:1]).groups):
        played = iter(all_of(made))
        found = collect(engine_of(model), Replayed, problems=PROBLEMS[:1]).groups
        assert [[(s.token_ids, s.logprobs, s.begins_branch) for s in t.segments] for t in all_of(found)] == [
            [(s.token_ids, s.logprobs, s.begins_branch) for s in t.segments] for t in all_of(made)
        ]
    assert any(s.token_ids == [] for trajectory in all_of(made) for s in trajectory.segments)


def test_a_branch_has_other_random_numbers_and_keeps_to_the_limits(caplog: pytest.LogCaptureFixture) -> None:
    """Of the same prompt it samples something else; and what has no room ends the trajectory."""

    class Repeats(Talk):
        def step(self, turn: Turn) -> Any:
            answer = super().step(turn)
            return answer if isinstance(answer, End) else Branch(PROBLEMS[0][1].prompt)

    model = make_model(torch.float32)
    (group, *_) = collect(engine_of(model), Repeats, problems=PROBLEMS[:1]).groups
    turns = [[segment.token_ids for segment in t.turns] for t in group.rollouts]
    assert all(len(of_one) == 4 and len({tuple(ids) for ids in of_one}) > 2 for of_one in turns)
    rows = 3 * len(group.prompt_ids)
    for limits in (Limits(400, 6, 8), replace(LIMITS, packed_tokens=rows)):
        (group, *_) = collect(engine_of(model), Repeats, limits, PROBLEMS[:1]).groups
        for t in group.rollouts:
            packed = sum(len(s.token_ids) for branch in t.branches for s in branch) - len(t.branches)
            most = max(6, len(t.turns[0].token_ids))
            assert packed <= rows if limits.packed_tokens else len(t.token_ids) <= most
        assert all(t.finish_reason == "truncated" for t in group.rollouts)
    (told,) = caplog.messages  # once, of the limit that nobody expects
    assert f"trainer.max_tokens_per_micro_batch, {rows}, must hold them all" in told and "sample" in told


# Thinking is shown of what follows the last message of a user, as Qwen3's template has it.
THINKING = (
    "{% set last = namespace(i=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.i = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < last.i %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


class Asks(Environment):
    """Answers with a tool's message, and with a user's after every second turn."""

    turns = 0

    @classmethod
    def worked_turns(cls, row: dict[str, Any], worked_example: str) -> list[str]:
        return [f"<think>thought {i}</think>said {i}" for i in range(5)]

    def step(self, turn: Turn) -> Any:
        self.turns += 1
        role = "tool" if self.turns % 2 else "user"
        return End(1.0) if self.turns == 5 else [{"role": role, "content": f"{role} {self.turns}"}]


def test_a_template_that_rewrites_its_past_makes_branches() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING
    tokens = ChatCodec(
        lambda prompt: encode_prompt(tokenizer, prompt),
        lambda messages, given: encode_following(tokenizer, messages, given),
        tokenizer.decode,
    )

    def encode(text: str, in_chat: bool) -> list[int]:
        assert in_chat
        return [*tokenizer.encode(text), tokenizer.eos_token_id]

    problem = Problem([{"role": "user", "content": "begin"}], worked_example="")
    (made,) = worked_trajectories(Asks, [problem], tokens, encode, Limits(turns=8))
    texts = [[tokenizer.decode([t for s in branch for t in s.token_ids])] for branch in made.branches]
    said = [f"<think>thought {i}</think>said {i}<|im_end|>" for i in range(5)]
    assert [tokenizer.decode(turn.token_ids) for turn in made.turns] == said
    past = [
        [("user", "begin")],
        [("user", "begin"), ("assistant", "said 0"), ("tool", "tool 1"), ("assistant", "said 1"), ("user", "user 2")],
    ]
    past.append([*past[1], ("assistant", "said 2"), ("tool", "tool 3"), ("assistant", "said 3"), ("user", "user 4")])
    turn = "<|im_start|>{}\n{}<|im_end|>\n"
    begun = ["".join(turn.format(*m) for m in of_one) + "<|im_start|>assistant\n" for of_one in past]
    tool = "\n" + turn.format("tool", "tool {}") + "<|im_start|>assistant\n"
    assert texts == [
        [begun[0] + said[0] + tool.format(1) + said[1]],
        [begun[1] + said[2] + tool.format(3) + said[3]],
        [begun[2] + said[4]],
    ]
