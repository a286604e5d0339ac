"""The server as OpenAI's own client meets it: the bits of `LLM.generate`, whatever else runs."""

from __future__ import annotations

import gc
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.resources.chat.completions import Completions as Chats
from openai.resources.completions import Completions
from processes import wait_for
from serving import KEY, Running, running

from lockstep.serve import bodies
from lockstep.serve import server as server_module
from lockstep.session.generate import LLM
from lockstep.types import Completion, SamplingParams

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SHORT = SamplingParams(max_completion_length=12)
SENT = {"model": "tiny", "max_tokens": 12, "seed": 7}


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Running]:
    """A server of the tiny random model, which asks for a key."""
    with running(model, api_key=KEY) as found:
        yield found


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, device="cpu", seed=7)


def alone(llm: LLM, prompt: Any, sampling: SamplingParams = SHORT) -> list[Completion]:
    """What `LLM.generate` gives."""
    return llm.generate([prompt], sampling)[0]


def test_a_chat_has_the_bits_of_generate(served: Running, llm: LLM) -> None:
    answer = served.client.chat.completions.create(
        **SENT, messages=HELLO, n=2, logprobs=True, extra_body={"return_token_ids": True}
    )
    expected = alone(llm, HELLO, replace(SHORT, n=2))
    assert answer.prompt_token_ids == llm.policy.encode(HELLO) and answer.seed == 7
    for choice, one in zip(answer.choices, expected, strict=True):
        assert choice.message.content == one.text and choice.finish_reason == one.finish_reason
        assert choice.token_ids == choice.message.token_ids == one.token_ids
        entries = choice.logprobs.content
        assert [entry.logprob for entry in entries] == one.model_logprobs
        assert [entry.sampled_logprob for entry in entries] == one.logprobs
        decoded = [llm.policy.tokenizer.decode([t], skip_special_tokens=False) for t in one.token_ids]
        assert [entry.token for entry in entries] == decoded
        assert all(entry.bytes is None or bytes(entry.bytes).decode() == entry.token for entry in entries)
    assert [c.index for c in answer.choices] == [0, 1] and expected[0] != expected[1]
    sampled = sum(len(one.token_ids) for one in expected)
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (
        sampled,
        sampled + len(answer.prompt_token_ids),
    )


def test_a_streamed_chat_adds_up(served: Running, llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.001, max_completion_length=40, n=3)
    more = {"top_k": 40, "min_p": 0.001, "return_token_ids": True}
    kept = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 40, "n": 3}
    texts, ids, logprobs, reasons = ["", "", ""], [[], [], []], [[], [], []], [None] * 3
    last = None
    for chunk in served.client.chat.completions.create(
        **(SENT | kept), messages=HELLO, stream=True, stream_options={"include_usage": True}, logprobs=True,
        extra_body=more,
    ):  # fmt: skip
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ids[choice.index] += getattr(choice, "token_ids", None) or []
            logprobs[choice.index] += [e.sampled_logprob for e in choice.logprobs.content] if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    expected = alone(llm, HELLO, sampling)
    assert texts == [one.text for one in expected] and ids == [one.token_ids for one in expected]
    assert logprobs == [one.logprobs for one in expected] and reasons == [one.finish_reason for one in expected]
    assert last is not None and last.choices == [] and last.usage.completion_tokens == sum(map(len, ids))


def test_completions_of_texts_and_of_tokens(served: Running, llm: LLM) -> None:
    prompts = ["one", "another prompt"]
    expected = llm.generate(prompts, replace(SHORT, n=2))
    flat = [one for group in expected for one in group]
    answer = served.client.completions.create(**SENT, prompt=prompts, n=2, logprobs=0)
    assert [choice.text for choice in answer.choices] == [one.text for one in flat]
    assert [choice.logprobs.token_logprobs for choice in answer.choices] == [one.model_logprobs for one in flat]
    as_ids = {"return_tokens_as_token_ids": True, "spaces_between_special_tokens": False}
    by_tokens = served.client.completions.create(
        **SENT, prompt=[llm.policy.encode(p) for p in prompts], n=2, logprobs=0, extra_body=as_ids
    )
    names = [[f"token_id:{token}" for token in one.token_ids] for one in flat]
    assert [choice.logprobs.tokens for choice in by_tokens.choices] == names
    assert [choice.text for choice in by_tokens.choices] == [one.text for one in flat]
    texts, offsets = [""] * 4, [list[int]() for _ in range(4)]
    for chunk in served.client.completions.create(**SENT, prompt=prompts, n=2, logprobs=0, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [one.text for one in flat]
    assert offsets == [choice.logprobs.text_offset for choice in answer.choices]
    short = served.client.completions.create(model="tiny", prompt="one", seed=7)
    assert short.usage.completion_tokens <= 16


def test_tokens_in_and_out(served: Running, llm: LLM) -> None:
    """As training clients of verifiers post them."""
    ids = llm.policy.encode(HELLO)
    sampling = {"max_tokens": 12, "temperature": 0.7, "top_p": 0.95, "seed": 7, "stop_token_ids": [258, 300]}
    more = {"logprobs": 1, "skip_special_tokens": False, "routed_experts_prompt_start": 0, "top_k": -1}
    body = {"model": "tiny", "token_ids": ids, "sampling_params": {**sampling, **more}, "cache_salt": "x"}
    answer = served.http.post("/inference/v1/generate", json=body).json()
    (choice,) = answer["choices"]
    wanted = SamplingParams(temperature=0.7, top_p=0.95, max_completion_length=12, stop_token_ids=(258, 300))
    (one,) = alone(llm, HELLO, wanted)
    assert choice["token_ids"] == one.token_ids and choice["finish_reason"] == one.finish_reason
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{t}" for t in one.token_ids]
    assert [entry["logprob"] for entry in content] == one.logprobs
    assert [entry["model_logprob"] for entry in content] == one.model_logprobs


def test_stop_strings_are_left_out_in_pieces_as_in_whole(served: Running, llm: LLM) -> None:
    long = replace(SHORT, max_completion_length=60)
    text = alone(llm, "one", long)[0].text
    stop = next(text[i : i + 2] for i in range(12, len(text)) if text.find(text[i : i + 2]) == i)
    kept = {**SENT, "max_tokens": 60, "prompt": "one", "stop": [stop, "never this"]}
    (choice,) = served.client.completions.create(**kept).choices
    assert choice.finish_reason == "stop" and choice.text == text[: text.index(stop)]
    pieces = [c.text for chunk in served.client.completions.create(**kept, stream=True) for c in chunk.choices]
    assert "".join(pieces) == choice.text and len(pieces) > 2
    kept["extra_body"] = {"include_stop_str_in_output": True}
    assert served.client.completions.create(**kept).choices[0].text == choice.text + stop
    pieces = [c.text for chunk in served.client.completions.create(**kept, stream=True) for c in chunk.choices]
    assert "".join(pieces) == choice.text + stop


def test_special_tokens_are_text_where_they_are_asked_for(served: Running) -> None:
    """But for the one that ends an answer."""
    kept: dict[str, Any] = {**SENT, "max_tokens": 250, "n": 4, "messages": HELLO}
    more = {"return_token_ids": True, "skip_special_tokens": False}
    decode, create = served.llm.policy.tokenizer.decode, served.client.chat.completions.create
    texts = {}
    for choice in create(**kept, extra_body=more).choices:
        ended = choice.finish_reason == "stop"
        texts[choice.index] = choice.message.content
        assert choice.message.content == decode(choice.token_ids[: len(choice.token_ids) - ended])
    assert "<|im_start|>" in "".join(texts.values())
    pieces = dict.fromkeys(texts, "")
    for chunk in create(**kept, extra_body=more, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert pieces == texts
    sent: dict[str, Any] = {**SENT, "max_tokens": 100, "n": 2, "prompt": "one"}
    for choice in served.client.completions.create(**sent, extra_body=more | {"ignore_eos": True}).choices:
        assert choice.text == decode(choice.token_ids)


def test_a_special_token_as_a_stop_string_stops_at_the_token(served: Running, llm: LLM) -> None:
    sent: dict[str, Any] = {**SENT, "max_tokens": 250, "prompt": "one", "n": 4}
    policy, long = served.llm.policy, SamplingParams(max_completion_length=250, n=4)
    whole, expected = alone(llm, "one", long), alone(llm, "one", replace(long, stop=("<|im_start|>", "\ud83d")))
    ids = [one.token_ids for one in expected]
    assert any(257 in one.token_ids for one in whole)
    assert ids == [one.token_ids[: (*one.token_ids, 257).index(257) + 1] for one in whole]
    for special, text_of in ((False, policy.tokenizer.decode), (True, policy.decode)):
        more = {"return_token_ids": True, "skip_special_tokens": special, "stop": ["<|im_start|>"]}
        choices = served.client.completions.create(**sent, extra_body=more).choices
        assert [choice.token_ids for choice in choices] == ids
        for choice, one in zip(choices, expected, strict=True):
            ended = choice.finish_reason == "stop"
            assert choice.finish_reason == one.finish_reason and choice.text == text_of(one.token_ids[: -ended or None])
    assert policy.special_token("<|im_start|>") == 257
    assert [policy.special_token(text) for text in ("<|im_start|>\n", "a", "ab", "<", "x" * 10_000, "\ud83d")] == [
        None
    ] * 6


def test_an_answer_without_a_seed_tells_the_one_that_draws_it_again(served: Running) -> None:
    kept = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "temperature": 1.0}
    first, second = (served.client.chat.completions.create(**kept) for _ in range(2))
    assert first.seed != second.seed and first.choices[0].message.content != second.choices[0].message.content
    again = served.client.chat.completions.create(**kept, seed=first.seed)
    assert again.choices[0].message.content == first.choices[0].message.content


def test_many_at_once_are_neither_lost_nor_crossed(served: Running, model: Path) -> None:
    """48 clients for 16 places, of all routes, each with what it gets alone."""

    def ask(i: int) -> list[Any]:
        kept = {"model": "tiny", "seed": i, "temperature": (0.0, 0.7, 1.0)[i % 3], "max_tokens": 5 + i % 13}
        if i % 4 == 0:
            stream = served.client.completions.create(**kept, prompt=f"prompt {i}", stream=True)
            return ["".join(c.text for chunk in stream for c in chunk.choices)]
        if i % 4 == 1:
            found = served.client.chat.completions.create(**kept, messages=[{"role": "user", "content": f"{i}"}], n=2)
            return [choice.message.content for choice in found.choices]
        return [choice.text for choice in served.client.completions.create(**kept, prompt=f"prompt {i}").choices]

    with ThreadPoolExecutor(48) as pool:
        answers = list(pool.map(ask, range(48)))
    llm = LLM(model, device="cpu")
    for i, texts in enumerate(answers):
        sampling = SamplingParams(temperature=(0.0, 0.7, 1.0)[i % 3], max_completion_length=5 + i % 13, n=len(texts))
        llm.config = replace(llm.config, seed=i)
        prompt: Any = [{"role": "user", "content": f"{i}"}] if i % 4 == 1 else f"prompt {i}"
        assert texts == [one.text for one in alone(llm, prompt, sampling)], i
    wait_for(lambda: served.idle)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages_within_a_second(served: Running, stream: bool) -> None:
    """Nothing is launched once the server knows. Other work may hold it up beyond a second, but not each time."""
    body = {"prompt": "one", "max_tokens": 400, "ignore_eos": True, "n": 4, "stream": stream, "return_token_ids": True}
    content, seconds, left = json.dumps(body).encode(), [], served.metric("lockstep_clients_left_total")
    for turn in range(1, 4):
        assert served.idle
        with served.held(launches=1) as launches:
            with sent(served, content, len(content)) as connection:
                wait_for(lambda: launches.begun == 2)  # noqa: B023 (called at once)
                assert not served.idle and (not stream or b"data: " in received(connection, b"data: "))
                began = time.monotonic()
            wait_for(lambda: served.metric("lockstep_clients_left_total") == left + turn)  # noqa: B023
            launches.free.set()
            wait_for(lambda: served.idle)
            seconds.append(time.monotonic() - began)
            assert launches.begun == 2
    assert min(seconds) < 1


BAD: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("chat", {"messages": HELLO, "temperature": "hot"}, "temperature", "valid number"),
    ("chat", {"messages": HELLO, "temperature": -1}, "temperature", "greater than or equal to 0"),
    ("chat", {"messages": HELLO, "top_p": 0}, "top_p", "greater than"),
    ("chat", {"messages": HELLO, "n": 0}, "n", "greater than"),
    ("chat", {"messages": HELLO, "n": 5000}, "n", "has room for"),
    ("chat", {"messages": HELLO, "seed": -1}, "seed", "greater than"),
    ("chat", {"messages": HELLO, "max_tokens": True}, "max_tokens", "valid integer"),
    ("chat", {"messages": HELLO, "max_tokens": 0}, "max_tokens", "greater than"),
    ("chat", {"messages": HELLO, "max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "give one of them"),
    ("chat", {"messages": HELLO, "max_tokens": 600}, "messages", "together they may be 512"),
    ("chat", {"messages": HELLO, "stop": [""]}, "stop[0]", "at least 1 character"),
    ("chat", {"messages": HELLO, "stop": [3]}, "stop[0]", "valid string"),
    ("chat", {"messages": HELLO, "temperature": 1e-45}, "temperature", "or 0 for greedy"),
    ("chat", {"messages": HELLO, "stop_token_ids": [2**63]}, "stop_token_ids", "each below 512"),
    ("generate", {"token_ids": [1], "sampling_params": {"stop_token_ids": [-1]}}, "stop_token_ids", "each below 512"),
    ("chat", {"messages": HELLO, "presence_penalty": 0.5}, "presence_penalty", "is not supported"),
    ("chat", {"messages": HELLO, "logit_bias": {"5": 1}}, "logit_bias", "is not supported"),
    ("chat", {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format", "is not supported"),
    ("chat", {"messages": HELLO, "top_logprobs": 2, "logprobs": True}, "top_logprobs", "must be 0"),
    ("chat", {"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options", "has no effect"),
    ("chat", {"messages": HELLO, "reasoning_effort": "low"}, "reasoning_effort", "does not read it"),
    ("completions", {"prompt": "x" * 60_000}, "prompt", "more than the model's context"),
    ("chat", {"messages": HELLO, "temprature": 0.5}, "temprature", "is no field of this route"),
    ("chat", {"messages": HELLO, "y" * 5000: 0.5}, "y" * 2000, "yyy"),
    ("chat", {"messages": HELLO, "stream_options": {"every": 1}}, "stream_options.every", "is no field"),
    ("chat", {"messages": HELLO, "tools": [{"name": "f"}]}, "tools[0]", "must be"),
    ("chat", {"messages": HELLO, "tool_choice": "required"}, "tool_choice", "must be"),
    ("chat", {"messages": HELLO, "chat_template_kwargs": 3}, "chat_template_kwargs", "valid dictionary"),
    ("chat", {"messages": []}, "messages", "at least one"),
    ("chat", {}, "messages", "required"),
    ("chat", {"messages": ["hello"]}, "messages[0]", "valid dictionary"),
    ("chat", {"messages": [{"role": "bot", "content": ""}]}, "messages[0].role", "must be one of"),
    ("chat", {"messages": [{"role": ["user"], "content": ""}]}, "messages[0].role", "must be one of"),
    ("chat", {"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ("chat", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "must be a string"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "text"),
    ("chat", {"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "together they may be 512"),
    ("chat", {"messages": [{"role": "assistant", "content": "", "token_ids": [999]}]}, "messages[0].token_ids", "512"),
    ("chat", {"messages": [{"role": "user", "content": "", "token_ids": [1]}]}, "messages[0].token_ids", "role user"),
    *[
        (
            "chat",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "must be an object",
        )
        for arguments in ("[1]", '"x"', "null", [1], 3)
    ],
    ("chat", {"messages": [{"role": "assistant", "token_ids": [9], "content": ""}] * 600}, "messages", "more than 512"),
    ("completions", {"prompt": ""}, "prompt", "no tokens"),
    ("completions", {"prompt": []}, "prompt", "must be a string"),
    ("completions", {"prompt": [1, -1]}, "prompt", "outside the model's vocabulary"),
    ("completions", {"prompt": [1, 512]}, "prompt", "outside the model's vocabulary"),
    ("completions", {"prompt": [[1], "x", 3]}, "prompt", "must be a string"),
    ("completions", {"prompt": ["x"] * 2000}, "prompt", "2000 samples are asked for"),
    ("completions", {"prompt": "x", "logprobs": 3}, "logprobs", "must be 0 or null"),
    ("completions", {"prompt": "x", "echo": True}, "echo", "is not supported"),
    ("completions", {"prompt": "x", "best_of": 2}, "best_of", "is not supported"),
    ("completions", {"prompt": "x", "prompt_logprobs": 0}, "prompt_logprobs", "of sampled tokens alone"),
    ("completions", {"prompt": "x", "add_special_tokens": False}, "add_special_tokens", "should be True"),
    ("chat", {"messages": HELLO, "store": True}, "store", "no answer is kept"),
    ("chat", {"messages": HELLO, "parallel_tool_calls": False}, "parallel_tool_calls", "as many calls as the model"),
    ("chat", {"messages": HELLO, "chat_template_kwargs": {"thinkin": 1}}, "chat_template_kwargs.thinkin", "no effect"),
    ("chat", {"messages": HELLO, "chat_template_kwargs": {"messag": 1}}, "chat_template_kwargs.messag", "no effect"),
    ("generate", {"token_ids": []}, "token_ids", "no tokens"),
    ("generate", {"token_ids": ["a"]}, "token_ids[0]", "valid integer"),
    ("generate", {"token_ids": [1], "sampling_params": {"top_p": 2}}, "sampling_params.top_p", "less than"),
    ("generate", {"token_ids": [1], "sampling_params": {"min_tokens": 2}}, "sampling_params.min_tokens", "supported"),
    ("generate", {"token_ids": [1], "sampling_params": {"logprobs": 5}}, "sampling_params.logprobs", "0 or 1"),
    *[
        ("generate", {"token_ids": [1], "sampling_params": {name: 1.5}}, f"sampling_params.{name}", "is not supported")
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "prompt_logprobs", "echo")
    ],
    ("generate", {"token_ids": [1], "features": {}}, "features", "is no field"),
    ("generate", {"token_ids": [1], "stream": True}, "stream", "must be false"),
]
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "generate": "/inference/v1/generate"}


@pytest.mark.parametrize(("route", "body", "param", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_requests_name_the_field(
    served: Running, route: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    response = served.http.post(PATHS[route], content=json.dumps(body))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert message in error["message"] and error["type"] == "invalid_request_error"
    assert served.idle


def test_a_field_that_changes_nothing_is_taken_at_that_value(served: Running) -> None:
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": None, "user": "me", "stop": None}
    more = {"n": None, "response_format": {"type": "text"}, "parallel_tool_calls": True, "stream_options": None}
    more |= {"function_call": "auto", "verbosity": "medium", "store": False, "add_special_tokens": False}
    body = {"messages": HELLO, "max_tokens": 2, "tools": [], **neutral, **more}
    answer = served.http.post(PATHS["chat"], json={**body, "request_id": "mine"})
    assert answer.status_code == 200 and answer.json()["id"] == "chatcmpl-mine"


def test_an_answer_does_not_wait_for_an_ack(served: Running) -> None:
    """Its last packet goes out at once: else each but the first comes 40 ms later over a connection that is kept."""
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        served.http.get("/health")
        seconds.append(time.perf_counter() - began)
    assert min(seconds[1:]) < 0.03


WITHOUT_EFFECT = {"metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
WITHOUT_EFFECT |= {"safety_identifier", "service_tier", "user"}
OF_THE_CALL = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
OF_VLLM = {"repetition_penalty", "min_tokens", "bad_words", "allowed_token_ids", "logits_processors", "guided_json"}
OF_VLLM |= {"structured_outputs", "use_beam_search", "length_penalty", "prompt_logprobs", "truncate_prompt_tokens"}
OF_VLLM |= {"continue_final_message", "chat_template", "documents", "include_reasoning", "add_special_tokens", "top_k"}


@pytest.mark.parametrize(("route", "create"), [("chat", Chats.create), ("completions", Completions.create)])
def test_each_parameter_is_read_or_refused_by_its_name(served: Running, route: str, create: Any) -> None:
    """Those of OpenAI's client and of vLLM's server, at a value that is right nowhere."""
    begin = {"messages": HELLO} if route == "chat" else {"prompt": "x"}
    for name in sorted(({*signature(create).parameters} | OF_VLLM) - OF_THE_CALL):
        response = served.http.post(PATHS[route], json={**begin, "max_tokens": 1, name: {"other": 1}})
        if name in WITHOUT_EFFECT:
            assert response.status_code == 200, name
        else:
            error = response.json()["error"]
            assert response.status_code == 400 and error["param"].partition(".")[0] == name in error["message"], error


def test_tools_go_to_a_template_that_has_some(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "strict": True}}]
    kept = {**SENT, "messages": HELLO, "tools": tools, "extra_body": {"return_token_ids": True}}
    answer: Any = served.client.chat.completions.create(**kept)
    assert json.dumps(tools[0]) in served.llm.policy.decode(answer.prompt_token_ids)
    monkeypatch.setattr(served.server.service, "tool_format", None)
    with pytest.raises(openai.BadRequestError, match="has no tools"):
        served.client.chat.completions.create(**kept)


def test_other_requests_that_get_no_answer(served: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here") as found:
        served.client.chat.completions.create(model="gpt", messages=HELLO)
    assert found.value.param == "model" and found.value.code == "model_not_found"
    bodies = [b"{", b"[]", b"\xff", b"[" * 100_000, b'{"temperature": NaN}', b'{"messages": "\\ud800"}']
    for content in [*bodies, b" " * (17 << 20)]:
        wanted = 413 if len(content) > 16 << 20 else 400
        response = served.http.post(PATHS["chat"], content=content)
        assert response.status_code == wanted and set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert served.http.get("/v1/chat/completions").status_code == 405
    assert served.http.get("/nothing").json()["error"]["message"] == "GET /nothing: Not Found"


def test_a_key_is_asked_for(served: Running) -> None:
    for key in ("wrong", "", KEY + "\u00e9", KEY[:-1]):
        headers = {"authorization": f"Bearer {key}".encode()} if key else {}
        for path in ("/v1/models", "/metrics"):
            response = httpx.get(f"{served.url}{path}", headers=headers)
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert httpx.post(f"{served.url}/inference/v1/generate", headers=headers, json={}).status_code == 401
    assert httpx.get(f"{served.url}/health").status_code == 200
    assert httpx.get(f"{served.url}/v1/models", headers={"authorization": f"bearer {KEY}"}).status_code == 200


def test_models_and_metrics(served: Running) -> None:
    (card,) = served.client.models.list().data
    assert card.id == "tiny" and card.max_model_len == 512 and served.client.models.retrieve("tiny") == card
    begun = served.metric("lockstep_first_token_seconds_count")
    served.client.completions.create(**SENT, prompt="one")
    assert served.metric("lockstep_first_token_seconds_count") == begun, "of answers that are streamed alone"
    page = served.http.get("/metrics").text
    pages = served.engine.cache.num_pages
    assert f"lockstep_kv_pages_free {pages}.0" in page and f"lockstep_kv_pages {pages}.0" in page
    assert 'lockstep_requests_total{route="/v1/completions",status="200"}' in page
    scheduler, long = served.engine.scheduler, {**SENT, "prompt": "x" * 40}
    served.client.completions.create(**long)
    before = scheduler.cached_tokens
    served.client.completions.create(**long)
    assert scheduler.cached_tokens == before + 32, "two pages of 16"
    assert f"lockstep_cached_tokens {before + 32}.0" in served.http.get("/metrics").text
    assert "lockstep_running_samples 0.0" in page and "lockstep_request_seconds_bucket" in page


def sent(served: Running, body: bytes, size: int) -> socket.socket:
    """A connection that has sent a body, or the first bytes of one of `size`."""
    host, port = served.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: {size}\r\n\r\n"
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(head.encode() + body)
    return connection


def partly_sent(served: Running, size: int) -> socket.socket:
    return sent(served, b'{"prompt": ', size)


def received(connection: socket.socket, until: bytes) -> bytes:
    """What comes, up to the piece with which `until` is there, or to the end."""
    found = b""
    while until not in found and (piece := connection.recv(1 << 16)):
        found += piece
    return found


def test_a_client_that_leaves_within_its_body_costs_nothing(served: Running) -> None:
    counted = '{route="/v1/completions",status="499"}'
    partly_sent(served, 99).close()
    wait_for(lambda: counted in served.http.get("/metrics").text)
    assert served.idle and 'status="500"' not in served.http.get("/metrics").text


def test_a_body_that_does_not_come_is_not_waited_for(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.2)
    with partly_sent(served, 99) as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408") and served.idle


def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(served: Running) -> None:
    """And what of it still comes is read, so that a client which sends it all before it reads has the answer."""
    for size in (17 << 20, 2**64 - 1):
        with partly_sent(served, size) as connection:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413") and served.idle
            connection.sendall(b" " * (1 << 20))
    assert served.http.post(PATHS["chat"], content=b" " * (70 << 20)).status_code == 413


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        *(
            "messages",
            "prompt",
            "token_ids",
            "sampling_params",
            "model",
            "tools",
            "tool_choice",
            "chat_template_kwargs",
        ),
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "max_completion_tokens"),
        *("logprobs", "stream", "stream_options", "return_token_ids", "include_stop_str_in_output"),
        *("skip_special_tokens", "reasoning_effort"),
    ]
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"])},
    optional={"content": JSON, "tool_calls": JSON, "token_ids": JSON, "name": JSON},
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(PATHS)), st.dictionaries(FIELDS, JSON, max_size=3), st.lists(MESSAGE, max_size=3))
def test_any_body_is_answered_or_refused(
    served: Running, route: str, body: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    """Never a fault of the server's; what it refuses is in OpenAI's shape."""
    given = {"messages": messages} if messages and route == "chat" else {}
    small = {"sampling_params": {"max_tokens": 1}} if route == "generate" else {"max_tokens": 1}
    content = json.dumps({**small, **given, **body})
    response = served.http.post(PATHS[route], content=content)
    assert response.status_code in (200, 400, 404), response.text
    assert response.status_code == 200 or response.json()["error"]["message"]


def test_what_is_more_than_may_wait_is_refused_before_it_is_encoded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(model, max_num_seqs=2, max_waiting=2) as small, ThreadPoolExecutor(4) as pool:
        body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "n": 2}
        with small.held(), monkeypatch.context() as encoding:
            others = [pool.submit(small.http.post, "/v1/completions", json=body) for _ in range(2)]
            wait_for(lambda: small.server.service.open_samples == 4)
            encoding.setattr(small.server.service.policy, "encode", None)
            response = small.http.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 429 and response.json()["error"]["code"] == "server_full"
        assert response.headers["retry-after"] == "1"
        assert [other.result().status_code for other in others] == [200, 200]
        assert small.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_many_at_once_are_refused_before_all_of_them_are_encoded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(model, max_num_seqs=2, max_waiting=1) as small, ThreadPoolExecutor(9) as pool:
        policy, encoded, free = small.server.service.policy, list[str](), threading.Event()
        encode = policy.encode
        monkeypatch.setattr(policy, "encode", lambda text: (encoded.append(text), free.wait(60), encode(text))[-1])
        sent = [pool.submit(small.http.post, "/v1/completions", json={"prompt": "x"}) for _ in range(9)]
        wait_for(lambda: sum(one.done() for one in sent) == 6)
        free.set()
        assert sorted(one.result().status_code for one in sent) == [200] * 3 + [429] * 6 and len(encoded) == 3


def test_a_server_that_is_stopped_lets_requests_finish(runs_freeze_gc: None, model: Path, llm: LLM) -> None:
    with running(model) as served, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "one", "max_tokens": 100, "ignore_eos": True, "seed": 7}
        with served.held():
            answer = pool.submit(served.http.post, "/v1/completions", json=body)
            wait_for(lambda: served.server.service.open_samples == 1)
            assert gc.get_freeze_count() > 10_000 and sys.getswitchinterval() < 0.001, "nothing holds the engine up"
            served.server.stop()
        expected = alone(llm, "one", SamplingParams(max_completion_length=100, ignore_eos=True))
        assert answer.result().json()["choices"][0]["text"] == expected[0].text
        served.thread.join(30)
        assert not served.thread.is_alive() and served.idle
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{served.url}/health")


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_is_stopped_ends_what_takes_too_long(model: Path, stream: bool) -> None:
    with running(model, shutdown_seconds=0.2) as served, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "one", "max_tokens": 500, "ignore_eos": True, "n": 16, "stream": stream}
        with served.held(launches=1):
            answer = pool.submit(served.http.post, "/v1/completions", json=body)
            wait_for(lambda: served.server.service.open_samples == 16)
            served.server.stop()
            time.sleep(0.3)
        response = answer.result()
        told = response.text.splitlines()[-2] if stream else response.text
        assert "the server is shutting down" in told and response.status_code == (200 if stream else 503)
        served.thread.join(30)
        assert not served.thread.is_alive() and served.idle


def test_a_server_that_is_stopped_answers_whose_body_has_not_come(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "SEND_TIMEOUT_S", 0.0)
    with running(model, shutdown_seconds=0.0) as served, partly_sent(served, 100) as client:
        assert served.http.get("/health").status_code == 200  # the other has been taken up by then
        served.server.stop()
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 503 ") and b"the server is shutting down" in answer
    assert "Exception in ASGI application" not in caplog.text


@pytest.mark.parametrize("call", ["advance", "add_request"])
def test_an_engine_that_fails_is_told_and_tried_again(model: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    with running(model) as served:
        works = getattr(served.engine, call)

        def failing(*_: Any) -> Any:
            monkeypatch.setattr(served.engine, call, works)
            raise RuntimeError("of the device")

        monkeypatch.setattr(served.engine, call, failing)
        response = served.http.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 500 and "the engine failed: RuntimeError" in response.text
        assert served.idle and served.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
