"""The server of a run: rollouts played over HTTP have the bits of those in process, and what is wrong is refused."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from decimal import Decimal
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from datasets import Dataset
from openai import APIStatusError, OpenAI
from scripted import scripted_folder

from lockstep import evaluate
from lockstep.config import RunConfig, SamplingConfig, TaskConfig, TrainerConfig
from lockstep.environments import End, Environment, Turn, make_environment
from lockstep.environments.remote import RolloutRegistry, TurnRefused
from lockstep.errors import InputError, LockstepError
from lockstep.run.replay import replay
from lockstep.run.train import train
from lockstep.serve.batcher import Job
from lockstep.serve.bodies import CompletionBody
from lockstep.serve.rollouts import server as rollout_server
from lockstep.serve.routes.common import TextRequest
from lockstep.types import SampleIdentity, SamplingParams

CUT: list[str] = []  # rollouts that were asked for too much
VERSIONS: list[int] = []  # of weights, that answers told of
FOLLOWING = {"role": "user", "content": "Is it 5"}


class InProcess(Environment):
    """Asks twice more, and rewards what was said last."""

    def start(self, row: dict[str, Any], seed: int) -> Any:
        self.left = 2
        return row["prompt"]

    def step(self, turn: Turn) -> Any:
        self.left -= 1
        return [FOLLOWING] if self.left and turn.finish_reason == "stop" else End(worth(turn.text))


def worth(text: str) -> float:
    return sum(text.encode()) % 7


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return held.getsockname()[1]


def config(folder: Path, environment: str, steps: int = 1, **task: Any) -> RunConfig:
    rows = [{"prompt": [{"role": "user", "content": f"Row {i}."}], "n": i} for i in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = {"environment_timeout": 120.0, "max_turns": 3, "max_response_length": 100, "validation_prompts": 0, **task}
    return RunConfig(
        steps=steps,
        model=str(folder / "model") if (folder / "model").exists() else str(scripted_folder(folder / "model")),
        task=TaskConfig("dataset", str(folder / "rows.jsonl"), environment=environment, **given),
        sampling=SamplingConfig(temperature=18.0, num_generations=2, max_completion_length=12),
        trainer=TrainerConfig(prompts_per_step=2, skip_zero_variance=False, max_idle_steps=4),
    )


def samples(folder: Path) -> list[Any]:
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    found = [(line["step"], line["group"], sample) for line in lines for sample in line["samples"]]
    return [(s, g, *(sample[name] for name in ("token_ids", "reward", "finish_reason"))) for s, g, sample in found]


@cache
def openai() -> OpenAI:
    return OpenAI(base_url="http://none", api_key="none", max_retries=0)


Player = Callable[[str, dict[str, Any], httpx.Client], dict[str, Any]]


def chats(url: str, told: dict[str, Any], http: httpx.Client) -> dict[str, Any]:
    """A chat client that sends messages alone back, as most do."""
    client = openai().with_options(base_url=told["base_url"])
    messages, text = list(told["row"]["prompt"]), ""
    for _ in range(2):
        answer = client.chat.completions.create(model=told["model"], messages=messages, logprobs=True)
        said, text = answer.choices[0].message, answer.choices[0].message.content or ""
        VERSIONS.append(answer.choices[0].weights_version)
        messages += [{"role": "assistant", "content": said.content or ""}, FOLLOWING]
        if answer.choices[0].finish_reason == "length":
            break
    return {"reward": worth(text)}


def play(url: str, player: Player, over: threading.Event, count: list[Any]) -> None:
    """Take rollouts and play them, one after another, until the run is over."""
    with httpx.Client(base_url=url, timeout=60) as http:
        while not over.is_set():
            try:
                answer = http.post("/rollouts", json={"wait": 0.2})
            except httpx.TransportError:  # not yet, or not any more
                over.wait(0.02)
                continue
            if answer.status_code == 200:
                told = answer.json()
                count.append(http.post(f"/rollouts/{told['id']}/end", json=player(url, told, http)).status_code)
            else:
                assert answer.status_code == 503 and answer.headers["retry-after"] == "1"


@contextmanager
def played(player: Player) -> Iterator[tuple[str, list[Any]]]:
    """The address that somebody plays at, and what came of each rollout."""
    url, over, count = f"http://127.0.0.1:{free_port()}", threading.Event(), list[Any]()
    thread = threading.Thread(target=play, args=(url, player, over, count))
    thread.start()
    try:
        yield url, count
    finally:
        over.set()
        thread.join(60)


def trained(folder: Path, run: str, player: Player, **asked: Any) -> list[Any]:
    with played(player) as (url, count):
        train(config(folder, url, **asked), folder / run, resume=False)
    return count


def test_a_rollout_over_http_has_the_bits_of_one_in_process(tmp_path: Path) -> None:
    train(config(tmp_path, f"{__file__}:InProcess", 2), tmp_path / "in-process", resume=False)
    assert trained(tmp_path, "http", chats, steps=2) == [200] * 8
    certificate = json.loads((tmp_path / "http" / "parity.json").read_text())
    found = samples(tmp_path / "http")
    assert certificate["identical"] and certificate["tokens_checked"] == sum(len(one[2]) for one in found) > 0
    assert found == samples(tmp_path / "in-process") and len(found) == 8
    assert sorted(VERSIONS) == VERSIONS and set(VERSIONS) == {0, 1} and len(VERSIONS) > 8


def test_turns_that_stop_strings_ended_are_gone_on_from_as_in_process(tmp_path: Path) -> None:
    """Their text, which the player sends back, ends before the stop string."""

    def run(name: str, environment: str) -> list[Any]:
        asked = config(tmp_path, environment)
        asked = replace(asked, sampling=replace(asked.sampling, stop=("a", "e", " ")))
        train(asked, tmp_path / name, resume=False)
        return [(s, g, ids, reason) for s, g, ids, _, reason in samples(tmp_path / name)]

    with played(chats) as (url, count):
        over_http = run("http", url)
    assert over_http == run("in-process", f"{__file__}:InProcess") and count == [200] * 4
    assert not json.loads((tmp_path / "http" / "metrics.jsonl").read_text()).get("environment/branches")


def test_an_evaluation_over_http_is_that_of_one_in_process_and_a_replay_asks_again(tmp_path: Path) -> None:
    def measured(environment: str) -> Any:
        return evaluate(config(tmp_path, environment, validation_prompts=3))

    with played(chats) as (url, count):
        over_http = measured(url)
        assert count == [200] * 3
        train(config(tmp_path, url), tmp_path / "run", resume=False)
        again = replay(tmp_path / "run", "0/1/1", call_tools=True)
        assert not again.difference and again.logprobs_compared and again.turns > 0
    clock = "environment/wait_s"
    assert {k: v for k, v in over_http.items() if k != clock} == {
        k: v for k, v in measured(f"{__file__}:InProcess").items() if k != clock
    }


def refuses(url: str, told: dict[str, Any], http: httpx.Client) -> dict[str, Any]:
    """Asks for what cannot be, and then plays a turn in tokens, twice, and one that is cut short."""
    ask, base = told["base_url"].removesuffix("/v1") + "/inference/v1/generate", told["base_url"]

    def refused(status: int, code: str | None, param: str | None, **fields: Any) -> None:
        answer = http.post(ask, json={"token_ids": [5, 6], **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error

    refused(400, None, "sampling_params.temperature", sampling_params={"temperature": 0.5})
    refused(400, None, "sampling_params.stop", sampling_params={"stop": ["x"]})
    refused(400, None, "seed", sampling_params={"seed": 4})
    refused(400, None, "stop_token_ids", sampling_params={"stop_token_ids": [2**63]})
    refused(400, None, "token_ids", token_ids=[])
    refused(400, "context_length_exceeded", "token_ids", token_ids=[5] * 3000)
    refused(400, "context_length_exceeded", None, token_ids=[5] * 250)  # no room for what would come after it
    refused(404, "model_not_found", "model", model="another")
    assert http.post("/rollouts/none/v1/chat/completions", json={"messages": FOLLOWING}).status_code in (400, 410)
    assert http.post("/rollouts/none/end", json={"reward": 1}).json()["error"]["code"] == "rollout_over"
    for reward in ("a", [1], {"a": None}, {"a": "b"}):
        error = http.post(f"/rollouts/{told['id']}/end", json={"reward": reward}).json()["error"]
        assert error["param"] == "reward" and "must be a finite number, or several by name" in error["message"]
    both = http.post(f"/rollouts/{told['id']}/end", json={"reward": 1, "error": "crashed"}).json()["error"]
    assert both["param"] == "reward" and "no effect beside error" in both["message"]
    with pytest.raises(APIStatusError, match="there are 2 prompts"):
        openai().with_options(base_url=base).completions.create(model="", prompt=["a", "b"])
    asked = {"token_ids": list(b"Is it 5"), "sampling_params": {"logprobs": 1, "stop_token_ids": [258, 511]}}
    first = http.post(ask, json=asked).json()["choices"]
    again = http.post(ask, json=asked).json()["choices"]
    assert first == again and len(first[0]["token_ids"]) == len(first[0]["logprobs"]["content"])
    if first[0]["finish_reason"] == "stop":
        CUT.append(told["id"])
        longer = {"token_ids": [5, 7, 8], "sampling_params": {"max_tokens": 1}}
        cut = http.post(ask, json=longer).json()["choices"][0]
        assert cut["finish_reason"] == "length" and len(cut["token_ids"]) == 1
        following = longer["token_ids"] + cut["token_ids"] + [9]
        refused(400, "context_length_exceeded", None, token_ids=following)
        refused(400, "context_length_exceeded", None, token_ids=following)
    return {"reward": {"first": 1.0, "second": told["row"]["n"]}}


def test_what_a_rollout_cannot_be_asked_is_refused_and_a_turn_is_sampled_once(tmp_path: Path) -> None:
    assert trained(tmp_path, "run", refuses, max_prompt_length=200) == [200] * 4
    found = samples(tmp_path / "run")
    assert len(found) == 4 and CUT and {one[4] for one in found} <= {"truncated", "length"}
    certificate = json.loads((tmp_path / "run" / "parity.json").read_text())
    assert certificate["identical"] and certificate["tokens_checked"] == sum(len(one[2]) for one in found)
    step = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert step["environment/branches"] == len(CUT) / 4, "other tokens than before"
    branched = next(i for i, one in enumerate(found) if one[4] == "truncated")
    again = replay(tmp_path / "run", f"0/{branched // 2}/{branched % 2}")
    assert again.turns == 2 and not again.difference and again.logprobs_compared


def test_an_answer_that_the_player_left_out_is_not_taken_for_a_later_one(tmp_path: Path) -> None:
    """Each turn is one random token, of which many are no text that is encoded as the same."""

    def tries_again(url: str, told: dict[str, Any], http: httpx.Client) -> dict[str, Any]:
        create = openai().with_options(base_url=told["base_url"]).chat.completions.create
        extra = {"return_token_ids": True, "stop_token_ids": list(range(512))}
        messages = [*told["row"]["prompt"], {"role": "user", "content": "Again."}]
        create(model="", messages=told["row"]["prompt"], extra_body=extra)
        for _ in range(2):
            answer = create(model="", messages=messages, extra_body=extra)
            kept.append((answer.prompt_token_ids, answer.choices[0].token_ids))
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, FOLLOWING]
        return {"reward": 1.0}

    kept: list[tuple[list[int], list[int]]] = []
    with played(tries_again) as (url, count):
        asked = config(tmp_path, url)
        asked = replace(asked, sampling=replace(asked.sampling, temperature=1000.0, num_generations=8))
        train(asked, tmp_path / "run", resume=False)
    assert count == [200] * 16 and any(127 < said[0] < 256 for _, said in kept[::2])
    for (prompt, said), (following, _) in zip(kept[::2], kept[1::2], strict=True):
        assert following[: len(prompt) + 1] == prompt + said
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["environment/branches"] == 1.0


def test_an_answer_is_not_taken_for_a_later_one_that_has_its_text_within(tmp_path: Path) -> None:
    """The first turn is one random token, whose text many of the turns after it have too."""

    def tries_later(url: str, told: dict[str, Any], http: httpx.Client) -> dict[str, Any]:
        create = openai().with_options(base_url=told["base_url"]).chat.completions.create
        extra = {"return_token_ids": True, "stop_token_ids": list(range(512))}
        first = create(model="", messages=told["row"]["prompt"], extra_body=extra)
        messages = [*told["row"]["prompt"], {"role": "assistant", "content": first.choices[0].message.content}]
        left_out = create(model="", messages=[*messages, FOLLOWING], extra_body={"stop_token_ids": [*range(128)]})
        texts.append((first.choices[0].message.content, left_out.choices[0].message.content))
        again = [*messages, {"role": "user", "content": "Again."}]
        following = create(model="", messages=again, extra_body=extra).prompt_token_ids
        kept.append((first.prompt_token_ids + first.choices[0].token_ids, following))
        return {"reward": 1.0}

    kept: list[tuple[list[int], list[int]]] = []
    texts: list[tuple[str, str]] = []
    with played(tries_later) as (url, count):
        asked = config(tmp_path, url, max_response_length=500)
        sampling = replace(asked.sampling, temperature=1000.0, num_generations=8, max_completion_length=64)
        asked = replace(asked, sampling=sampling)
        train(asked, tmp_path / "run", resume=False)
    assert count == [200] * 16 and any(one.strip() in other and one.strip() != other.strip() for one, other in texts)
    assert all(following[: len(first)] == first for first, following in kept)


def fails(url: str, told: dict[str, Any], http: httpx.Client) -> dict[str, Any]:
    """Every other row's rollouts end with an error before their first turn."""
    return {"error": "the game crashed"} if told["row"]["n"] % 2 else chats(url, told, http)


def test_a_player_that_fails_is_left_out_and_told_of(tmp_path: Path) -> None:
    trained(tmp_path, "run", fails, steps=2)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(step.get("environment/errors", 0) for step in steps) == 4
    assert (
        "its environment failed: LockstepError: the game crashed"
        in (tmp_path / "run" / "environment_errors.txt").read_text()
    )
    assert len(samples(tmp_path / "run")) == 4


def test_turns_of_all_rollouts_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(rollout_server, "RolloutService", lambda *arguments: given.extend(arguments))
    run = SimpleNamespace(config=SimpleNamespace(model="m"), world=SimpleNamespace(rank=0))
    rollout_server.RolloutServer(run, SimpleNamespace(registry=SimpleNamespace(address=("127.0.0.1", 0))))
    assert given[2].max_waiting >= 100_000


def test_a_player_that_waits_is_told_when_the_run_ends(tmp_path: Path) -> None:
    url, said = f"http://127.0.0.1:{free_port()}", list[int]()

    def wait_and_play() -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            while not said or said[-1] == 200:
                try:
                    answer = http.post("/rollouts", json={"wait": 60})
                except httpx.TransportError:  # not yet
                    time.sleep(0.02)
                    continue
                said.append(answer.status_code)
                if answer.status_code == 200:
                    told = answer.json()
                    http.post(f"/rollouts/{told['id']}/end", json=chats(url, told, http))
            assert said[-1] == 503 and "shutting down" in answer.text

    with ThreadPoolExecutor(1) as pool:
        playing = pool.submit(wait_and_play)
        train(config(tmp_path, url), tmp_path / "run", resume=False)
        playing.result(10)
    assert said == [200] * 4 + [503]


def test_waits_end_whatever_state_they_are_in() -> None:
    async def end_after(turns: int) -> None:
        registry = RolloutRegistry()
        waits = [asyncio.create_task(registry.take(seconds)) for seconds in (0, 60)]
        for _ in range(turns):
            await asyncio.sleep(0)
        registry.end_waits()
        assert await asyncio.wait_for(asyncio.gather(*waits), 10) == [None, None]

    for turns in range(1, 6):  # in one of these the first wait is over and has not returned yet
        asyncio.run(end_after(turns))


def test_a_rollout_that_was_offered_to_who_left_is_offered_again(tmp_path: Path) -> None:
    taken: list[str] = []

    def leaves(url: str, told: dict[str, Any], http: httpx.Client) -> dict[str, Any]:
        taken.append(told["id"])
        if len(taken) == 4:  # the last of the first step
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/rollouts", json={"wait": 60}, timeout=httpx.Timeout(60, read=0.2))
        return chats(url, told, http)

    assert trained(tmp_path, "run", leaves, steps=2, environment_timeout=60.0) == [200] * 8
    assert len(set(taken)) == 8 == len(samples(tmp_path / "run"))


def test_a_row_is_offered_whatever_its_values(tmp_path: Path) -> None:
    """Tables have columns that JSON lacks."""
    values = {"raw": b"\xff", "price": Decimal("1.50"), "ratio": math.nan, "days": [date(2026, 1, 31)], "n": 1 << 62}
    rows = [{"prompt": [{"role": "user", "content": f"Row {i}."}], **values} for i in range(2)]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    offered: list[Any] = []

    def looks(url: str, told: dict[str, Any], http: httpx.Client) -> dict[str, Any]:
        offered.append(told["row"])
        return chats(url, told, http)

    with played(looks) as (url, count):
        asked = config(tmp_path, url)
        task = replace(asked.task, data=str(tmp_path / "rows.parquet"))
        train(replace(asked, task=task), tmp_path / "run", resume=False)
    assert count == [200] * 4
    told = {"raw": "b'\\xff'", "price": "1.50", "ratio": "NaN", "days": ["2026-01-31"], "n": 1 << 62}
    assert all(row == {"prompt": row["prompt"], **told} for row in offered)


def test_a_rollout_that_nobody_plays_is_overdue(tmp_path: Path) -> None:
    asked = config(tmp_path, f"http://127.0.0.1:{free_port()}", environment_timeout=0.2)
    with pytest.raises(InputError, match="step 1: the environment failed for 4 trajectories"):
        train(asked, tmp_path / "run", resume=False)


def test_the_last_turn_of_a_rollout_that_is_over_is_answered_again() -> None:
    kind: Any = make_environment(TaskConfig(environment="http://127.0.0.1:9"))
    kind.registry.url = "http://127.0.0.1:9"
    turn = Turn("3", [3], "stop")

    async def played() -> None:
        rollout = kind()
        asked = asyncio.create_task(rollout.turn([1, 2]))
        assert await rollout.start({}, 0) == [1, 2]
        stepped = asyncio.create_task(rollout.step(turn))
        assert await asked is turn
        rollout.end(1.0)
        assert await rollout.turn([1, 2]) is turn and (await stepped).reward == 1.0
        with pytest.raises(TurnRefused, match="the rollout is over"):
            await rollout.turn([1, 2, 3, 4])

    asyncio.run(played())


def test_texts_end_before_the_stop_strings_of_the_run() -> None:
    job = Job([1], SamplingParams(stop=("of the run",)), SampleIdentity(0, 0, 0, 0))
    service: Any = None
    assert TextRequest(service, CompletionBody(prompt="x"), [job], {}).stops.cut("ends of the run") == "ends "


def test_an_address_is_checked(tmp_path: Path) -> None:
    odd = "http://[::1", "http://u:p@h:80", "http://h:80?x", "https://h:80"
    for address in ("http://127.0.0.1", "http://", "http://h:70000", "http://h:80/path", *odd):
        with pytest.raises(InputError, match="must be http://HOST:PORT"):
            make_environment(TaskConfig(environment=address))
    with socket.create_server(("127.0.0.1", 0)) as held, pytest.raises(InputError, match="cannot listen on 127.0.0.1"):
        train(config(tmp_path, f"http://127.0.0.1:{held.getsockname()[1]}"), tmp_path / "run", resume=False)
    kind: Any = make_environment(TaskConfig(environment="http://127.0.0.1:9"))
    with pytest.raises(LockstepError, match="nothing answers there now"):
        kind().start({}, 0).send(None)
