"""Tools, and environments as TRL takes them: what is asked of them, what they answer, and a run that trains on it."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scripted import scripted_folder

from lockstep.config import RunConfig, SamplingConfig, TaskConfig, TrainerConfig
from lockstep.environments import End, Turn, make_environment
from lockstep.environments.calls import ConcurrentCalls, event_loop
from lockstep.environments.tools import tool_environment
from lockstep.errors import InputError
from lockstep.run.train import train


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.

    Returns:
        Their sum.
    """
    return a + b


def timed(query: str) -> list[tuple[str, int]]:
    """Look something up, for a second at most.

    Args:
        query: What to look up.
    """
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(1)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    return [(query, len(query))]


class Counter:
    """As TRL's `environment_factory` takes them: no base class."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.count = 0

    def reset(self, start: int = 0, **row: Any) -> str | None:
        self.count, self.row = start, row
        return f" It is {start}."

    def add(self, a: int, b: int) -> str:
        """Count up.

        Args:
            a: By so much.
            b: And so much.
        """
        self.count += a + b
        if self.count > 20:
            raise ValueError("Too far.")
        return f"now {self.count}"

    async def wait(self, turns: int) -> str:
        """Wait.

        Args:
            turns: So long.
        """
        await asyncio.sleep(0.01 * turns)
        return "waited"

    def _hidden(self) -> None: ...

    @property
    def broken(self) -> int:
        raise AssertionError("nobody asked for it")


class Judge(Counter):
    async def get_reward(self) -> float:
        return self.count / 10


BOTH = {"plain": Counter, "judge": Judge}
TWO = {"plain": Counter, "other": Counter}


def counted(environments: list[Any], completions: list[Any], prompts: list[Any], **kwargs: Any) -> list[float]:
    """What a reward function of TRL's is given: its environments, and conversations."""
    for environment, completion, prompt in zip(environments, completions, prompts, strict=True):
        assert completion[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
        answers = [message["content"] for message in completion if message["role"] == "tool"]
        assert answers[0] == f"now {environment.row['start_']}" and prompt[-1]["content"].endswith(" It is 2.")
        assert completion[-1]["role"] == "assistant" and len(answers) == len(completion) - 1 - len(answers)
    return [float(environment.count) for environment in environments]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def turn(*calls: dict[str, Any], **about: Any) -> Turn:
    return Turn("said", [1], "stop", {"role": "assistant", "content": "said", "tool_calls": list(calls)}, **about)


def made(name: str, tools: tuple[str, ...] = ()) -> Any:
    return make_environment(TaskConfig(environment=f"{__file__}:{name}" if name else None, tools=tools))()


def test_calls_are_answered_and_what_is_wrong_with_them_is() -> None:
    environment = made("Counter", (f"{__file__}:add",))
    begun = environment.start({"prompt": "Count.", "start": 3, "more": 1}, 0)
    assert begun == [{"role": "user", "content": "Count. It is 3."}] and environment.instance.row == {
        "prompt": "Count.",
        "more": 1,
    }
    names = [tool["function"]["name"] for tool in environment.tools]
    assert names == ["add", "add", "wait"] and "hidden" not in str(environment.tools)
    asked = (call("add", a=1, b=2), call("wait", turns=1), call("none"), call("add", a=1), call("add", a=50, b=1))
    answers = environment.step(turn(*asked))
    assert [(message["role"], message["name"]) for message in answers] == [
        ("tool", c["function"]["name"]) for c in asked
    ]
    told = [message["content"] for message in answers]
    assert told[:3] == ["now 6", "waited", "{'error': 'Tool none not found.'}"] and "missing 1 required" in told[3]
    assert told[4] == "{'error': 'Too far.'}"
    (malformed,) = environment.step(turn(malformed=True))
    assert "malformed" in malformed["content"] and environment.step(turn()) == End(completion=environment.completion)
    assert [message["role"] for message in environment.completion] == [
        "assistant",
        *["tool"] * 5,
        "assistant",
        "tool",
    ] + ["assistant"]


def test_an_environment_that_rewards_itself_and_instances_are_reset() -> None:
    kind = make_environment(TaskConfig(environment=f"{__file__}:BOTH"))
    before = Judge.made
    for start in (1, 2):
        environment: Any = kind()
        environment.start({"prompt": "p", "environment": "judge", "start": start}, 0)
        environment.step(turn(call("add", a=0, b=4)))
        assert environment.cut() == End({"Judge": (4 + start) / 10}, True, environment.completion)
        assert [message["role"] for message in environment.completion] == ["assistant"], (
            "an answer without room is taken back"
        )
        environment.instance.get_reward = lambda: None
        assert environment.cut() == End(completion=environment.completion), "a reward that does not apply"
        del environment.instance.get_reward
        environment.close()
    assert Judge.made == before, "one was made to learn its tools, and is reset"
    with pytest.raises(InputError, match="the row's environment is 'other'; it must be one of plain, judge"):
        kind().start({"prompt": "p", "environment": "other"}, 0)


def test_a_function_that_needs_signals_is_called_in_the_main_thread() -> None:
    environment, calls = made("", (f"{__file__}:timed",)), ConcurrentCalls(5.0, False)
    for i in range(2):
        calls.call(i, environment.step, turn(call("timed", query="abc")))
        (answer,) = calls.answers(wait=True)
        assert [message["content"] for message in answer.value] == ["[('abc', 3)]"]
    assert environment.completion[1]["content"] == [("abc", 3)], "for reward functions as it is"


def test_a_coroutine_that_hangs_is_cancelled_and_leaves_no_thread() -> None:
    ended = threading.Event()

    async def stuck() -> None:
        """Hang."""
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    event_loop()
    before, calls = set(threading.enumerate()), ConcurrentCalls(1.0, False)
    calls.call("late", tool_environment([stuck], "task.tools")().step, turn(call("stuck")))
    calls.call("first", lambda: None)
    assert [answer.key for answer in calls.answers(wait=True)] == ["first"]
    (answer,) = calls.answers(wait=True)
    assert answer.key == "late" and "it took longer than task.environment_timeout" in answer.value.reason
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=60)
    assert ended.wait(timeout=60) and set(threading.enumerate()) <= before  # the loop ends it in its own time


def test_a_coroutine_that_blocks_is_told_from_those_that_wait_for_it() -> None:
    release, calls = threading.Event(), ConcurrentCalls(0.2, False)

    async def blocks() -> None:
        release.wait(60)

    async def waits() -> None:
        await asyncio.sleep(0)

    for function in (blocks, waits):
        calls.call(function.__name__, function)
    told = [answer.value for _ in range(2) for answer in calls.answers(wait=True)]
    release.set()
    assert len(told) == 2 and all("release.wait(60)" in one.traceback for one in told)
    assert told[0].reason.endswith("0.2 s; an async function, which should await, blocks all others")


def test_a_task_that_exits_does_not_end_the_event_loop() -> None:
    calls = ConcurrentCalls(0.2, False)

    async def exits() -> None:
        raise SystemExit

    async def begins_it() -> None:
        task = asyncio.create_task(exits())
        await asyncio.sleep(60)
        await task

    async def answers() -> int:
        return 3

    for function in (begins_it, answers):
        calls.call(function.__name__, function)
        (answer,) = calls.answers(wait=True)
        told = answer.value if function is answers else answer.value.reason
        assert told == (3 if function is answers else "it took longer than task.environment_timeout, 0.2 s")
    gc.collect()  # asyncio reports the task's exception now, not within whatever another test is doing


def test_what_a_tool_returns_can_be_shown_or_is_an_error() -> None:
    class Unshown:
        def __str__(self) -> str:
            raise KeyError("no")

    class WithoutText(Unshown, Exception):
        pass

    def odd(kind: int) -> object:
        """Odd.

        Args:
            kind: Which.
        """
        if kind == 4:
            raise WithoutText
        return [Unshown(), "\udcff", 3, [{"type": "text", "text": "\ud800"}]][kind]

    environment = tool_environment([odd], "task.tools")()
    calls = [{"name": "odd", "arguments": {"kind": kind}} for kind in range(5)]
    found = [content for _, content in environment._call_tools(calls)]
    unicode = "{'error': 'the result is no valid Unicode'}"
    raised = "{'error': '(a WithoutText that has no text)'}"
    assert found == ["{'error': 'KeyError when the result was shown'}", unicode, "3", unicode, raised]


class Bare:
    """Without a text of its own."""


@dataclass
class Holds:
    value: Any


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (Bare(), "Bare"),
        (["a", {"at": (1, Bare())}], "Bare"),
        ({Bare(): 1}, "Bare"),
        (Holds(Bare()), "Holds"),
        (map(str, "ab"), "map"),
        (Bare.__init__.__get__(Bare()), "method-wrapper"),
        ([{"a", "b"}], "set"),
        (Holds([1, "x"]), None),
        ({"a": [1.5, None, (True,)], 2: "<Bare object at 0x7f00>"}, None),
        ("<Bare object at 0x7f00>", None),
    ],
)
def test_what_would_be_shown_in_other_words_in_each_run_is_an_error(result: Any, kind: str | None) -> None:
    def odd() -> object:
        """Odd."""
        return result

    ((_, found),) = tool_environment([odd], "task.tools")()._call_tools([{"name": "odd", "arguments": {}}])
    if kind is None:
        assert found == str(result)
    else:
        assert found.startswith(f"{{'error': 'odd returned a {kind}, shown in other words in each run; it may return t")


def test_what_cannot_be_described_is_refused(tmp_path: Path) -> None:
    def moves(way: str) -> str:
        """Moves.

        Args:
            way: Where to.
        """
        return way

    def by_position(way: str, /) -> str:
        """Moves.

        Args:
            way: Where to.
        """
        return way

    def any_number(*ways: str) -> str:
        """Moves.

        Args:
            ways: Where to.
        """
        return "".join(ways)

    def yields(way: str) -> Any:
        """Moves.

        Args:
            way: Where to.
        """
        yield way

    for tool, why in ((by_position, "takes 'way' by position"), (any_number, "takes 'ways' by position")):
        with pytest.raises(InputError, match=f"task.tools: {tool.__name__} {why}; calls give arguments by name"):
            tool_environment([tool], "task.tools")
    with pytest.raises(InputError, match=r"task\.tools: yields yields; it must return what the model is to see"):
        tool_environment([yields], "task.tools")
    moves.__name__ = "move"
    with pytest.raises(InputError, match="there are several tools of the name move; rename one"):
        tool_environment([moves, moves], "task.tools")
    (tmp_path / "other.py").write_text("def bare(x): return x\ndef make(): raise OSError('no server')\nnone = {}\n")
    with pytest.raises(InputError, match="has no method step, which says what follows a turn"):
        make_environment(TaskConfig(environment="lockstep.environments:Environment"))
    with pytest.raises(InputError, match="task.environment is empty; give one"):
        TaskConfig("word-arithmetic", environment="").validate()
    with pytest.raises(InputError, match="other.py:none' is an empty dict; it must have a factory for each"):
        make_environment(TaskConfig(environment=f"{tmp_path / 'other.py'}:none"))
    with pytest.raises(InputError, match="task.tools: bare cannot be described to the model: .*; give each argument"):
        make_environment(TaskConfig(tools=(f"{tmp_path / 'other.py'}:bare",)))
    with pytest.raises(InputError, match="making one raised OSError: no server"):
        make_environment(TaskConfig(environment=f"{tmp_path / 'other.py'}:make"))


def test_a_run_trains_on_calls_that_the_model_made(tmp_path: Path) -> None:
    """Every sampled token of every turn is compared, none is encoded again, and functions see the conversation."""
    rows = [{"prompt": [{"role": "user", "content": f"Row {i}."}], "start": 2, "start_": 5} for i in range(4)]
    rows = [{**row, "environment": list(TWO)[i % 2]} for i, row in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = RunConfig(
        steps=2,
        model=str(scripted_folder(tmp_path / "scripted")),
        task=TaskConfig(
            name="dataset",
            data=str(tmp_path / "rows.jsonl"),
            environment=f"{__file__}:TWO",
            reward=(f"{__file__}:counted",),
            max_turns=2,
            validation_prompts=0,
        ),
        sampling=SamplingConfig(num_generations=2, max_completion_length=24),
        trainer=TrainerConfig(prompts_per_step=2, skip_zero_variance=False),
    )
    train(config, tmp_path / "run", resume=False)
    certificate = json.loads((tmp_path / "run" / "parity.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    samples = [sample for line in lines for sample in line["samples"]]
    assert certificate["identical"] and certificate["tokens_checked"] == sum(len(s["token_ids"]) for s in samples)
    assert [len(sample["segments"]) for sample in samples] == [4] * 8
    assert all("\ntool\nnow 5" in f"\n{sample['segments'][2]['text']}".replace(": ", "\n") for sample in samples)
    assert {sample["reward"] for sample in samples} == {5.0} and "Call with <tool_call>" not in str(lines[0]["prompt"])
    played = {sample["environment"] for line in lines for sample in line["samples"]}
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert played == set(TWO) and sum(step.get("environment/other/trajectories", 0) for step in steps) == 4
    for step in steps:
        names = [name for name in TWO if f"environment/{name}/turns" in step]
        assert sum(step[f"environment/{name}/trajectories"] for name in names) == 4
        assert all(step[f"environment/{name}/reward/mean"] == 5.0 for name in names) and step["environment/turns"] == 2
