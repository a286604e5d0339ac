"""Conversations with tools, and over several turns, whose sampled tokens are never encoded again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import (
    ADD,
    BRACKETS,
    CHANNELS,
    MALFORMED,
    MISTRALS,
    PLAIN,
    SPECIAL,
    TWO,
    UNCLOSED,
    following,
    scripted_folder,
    templates,
)
from serving import Running, running
from small import CONFIG, make_model

from lockstep.errors import PromptTooLong
from lockstep.models.tokenizer import byte_tokenizer
from lockstep.serve.chat_prompt import ChatPrompt, encode_chat
from lockstep.serve.service import Service
from lockstep.serve.settings import Settings
from lockstep.session.generate import LLM
from lockstep.session.text.messages import normalize_chat
from lockstep.session.text.policy import Policy
from lockstep.types import SamplingParams

ADDS = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOLS: Any = [{"type": "function", "function": ADDS}]
ASK: Any = [{"role": "user", "content": "add"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model that says what `scripted.SCRIPTS` has."""
    folder = tmp_path_factory.mktemp("scripted") / "model"
    with running(scripted_folder(folder)) as found:
        yield found


def ask(served: Running, messages: Any = ASK, lead: str = "", tools: Any = TOOLS, **more: Any) -> Any:
    extra = {"chat_template_kwargs": {"lead": lead}, "return_token_ids": True}
    return served.client.chat.completions.create(
        model="tiny", temperature=0, messages=messages, tools=tools, extra_body=extra, **more
    )


def calls_of(message: Any) -> list[tuple[str, dict]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


@pytest.mark.parametrize(
    ("lead", "content", "calls"),
    [
        ("", "I add.", [("add", {"a": 1, "b": 2})]),
        ("2", None, [("one", {}), ("two", {"x": "é"})]),
        ("3", "".join(MALFORMED), []),
        ("4", "".join(UNCLOSED), []),
        ("5", "".join(PLAIN), []),
    ],
)
def test_calls_of_tools_whole_and_streamed(
    served: Running, lead: str, content: str | None, calls: list[tuple[str, dict]]
) -> None:
    (choice,) = ask(served, lead=lead).choices
    assert choice.message.content == content and calls_of(choice.message) == calls
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    text, found, reason = "", [], None
    for chunk in ask(served, lead=lead, stream=True):
        (part,) = chunk.choices
        text += part.delta.content or ""
        found += part.delta.tool_calls or []
        reason = part.finish_reason or reason
    assert text.strip() == (content or "") and reason == choice.finish_reason
    assert [(c.index, c.function.name, json.loads(c.function.arguments)) for c in found] == [
        (i, *call) for i, call in enumerate(calls)
    ]
    assert all(len(call.id) == 9 and call.type == "function" for call in found)


@pytest.mark.parametrize("more", [{"tools": []}, {"tool_choice": "none"}])
def test_without_tools_a_call_is_text(served: Running, more: dict[str, Any]) -> None:
    answer = ask(served, **more)
    assert answer.choices[0].message.content == "".join(ADD) and not answer.choices[0].message.tool_calls
    assert answer.prompt_token_ids == served.llm.policy.encode(ASK)


def test_sampled_tokens_come_back_as_they_are(served: Running) -> None:
    """The call was sampled with two spaces that no template writes; the next prompt has them."""
    first = ask(served)
    result = {"role": "tool", "tool_call_id": first.choices[0].message.tool_calls[0].id, "content": "3"}
    messages = [*ASK, first.choices[0].message, result]
    second = ask(served, messages)
    so_far = first.prompt_token_ids + first.choices[0].token_ids
    assert second.prompt_token_ids[: len(so_far)] == so_far
    tokenizer = served.llm.policy.tokenizer
    given = "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    assert second.prompt_token_ids[len(so_far) :] == tokenizer.encode(given, add_special_tokens=False)
    messages += [second.choices[0].message, {"role": "user", "content": "and?"}]
    third = ask(served, messages, lead="5")  # which only a generation prompt has
    so_far = second.prompt_token_ids + second.choices[0].token_ids
    assert third.prompt_token_ids[: len(so_far)] == so_far and third.choices[0].message.content == "".join(PLAIN)
    messages += [third.choices[0].message, {"role": "user", "content": "and?"}]
    fourth = ask(served, messages, lead="5")
    kept = third.prompt_token_ids[:-1] + third.choices[0].token_ids
    assert fourth.prompt_token_ids[: len(kept)] == kept
    without = [{"role": m["role"], "content": m["content"]} for m in messages[2:] if isinstance(m, dict)]
    ask(served, [*ASK, {**first.choices[0].message.model_dump(), "content": "other"}, *without])
    page = served.http.get("/metrics").text
    assert 'lockstep_sampled_turns_total{as="kept"} 6.0' in page
    assert 'lockstep_sampled_turns_total{as="encoded_again"} 1.0' in page


def test_a_cut_turn_goes_on_with_the_end_that_the_template_gives(served: Running) -> None:
    first = ask(served, lead="", tools=[], max_tokens=2)
    assert first.choices[0].finish_reason == "length"
    messages = [*ASK, first.choices[0].message, {"role": "user", "content": "go on"}]
    second = ask(served, messages, tools=[])
    so_far = first.prompt_token_ids + first.choices[0].token_ids
    ending = "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    assert second.prompt_token_ids == so_far + served.llm.policy.tokenizer.encode(ending, add_special_tokens=False)


@pytest.mark.parametrize("lead", ["", "5"])  # the text ends before the stop string, with a call before that or none
def test_a_turn_that_a_stop_string_ended_keeps_its_tokens(served: Running, lead: str) -> None:
    stop = ["</tool_call>", "<b>"]
    first = ask(served, lead=lead, stop=stop)
    (choice,) = first.choices
    assert choice.finish_reason == ("stop" if lead else "tool_calls") and "<b>" not in (choice.message.content or "")
    second = ask(served, [*ASK, choice.message, *ASK], stop=stop)
    kept = first.prompt_token_ids[: len(first.prompt_token_ids) - len(lead)] + choice.token_ids
    decode = served.llm.policy.tokenizer.decode
    assert second.prompt_token_ids[: len(kept)] == kept
    assert decode(second.prompt_token_ids[len(kept) :]).startswith("<|im_end|>\n<|im_start|>user\nadd<|im_end|>")
    assert "<b>" not in decode(ask(served, [*ASK, choice.message, *ASK]).prompt_token_ids)


def test_a_cut_turn_ends_as_the_chat_template_ends_answers() -> None:
    """By Gemma's and Phi's templates that is not the tokenizer's own end of sequence."""
    tokenizer: Any = byte_tokenizer()
    one = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|endoftext|>{% endfor %}"
    tokenizer.chat_template = one + "{% if add_generation_prompt %}assistant:{% endif %}"
    policy = Policy(make_model(torch.float32, config=replace(CONFIG, eos_token_ids=(256, 258))), tokenizer)
    cut = {"role": "assistant", "content": "ab", "token_ids": [97, 98]}
    prompt = encode_chat(policy, [*ASK, cut, *ASK], {}, None)
    assert (prompt.kept, prompt.encoded_again) == (1, 0)
    assert tokenizer.decode(prompt.token_ids).count("ab<|endoftext|>user") == 1


def test_what_a_client_changed_is_text(served: Running) -> None:
    first = ask(served, tools=[])
    message = {"role": "assistant", "content": "I changed it.", "token_ids": first.choices[0].token_ids}
    messages = normalize_chat([*ASK, message, {"role": "user", "content": "?"}])
    told = [{k: v for k, v in m.items() if k != "token_ids"} for m in messages]
    prompt = encode_chat(served.llm.policy, messages, {}, None)
    assert prompt == ChatPrompt(served.llm.policy.encode(told), kept=0, encoded_again=1)


def test_what_no_prompt_can_hold_is_not_encoded(served: Running) -> None:
    """Tools and calls count, not the contents of messages alone; and an answer that nothing came before is text."""
    call = {"function": {"name": "add", "arguments": json.dumps({"a": "x" * 300_000})}}
    messages = normalize_chat([*ASK, {"role": "assistant", "tool_calls": [call]}])
    with pytest.raises(PromptTooLong):
        encode_chat(served.llm.policy, messages, {}, None)
    policy = LLM(served.llm.config.model, device="cpu").policy
    policy.tokenizer = byte_tokenizer()
    policy.tokenizer.chat_template = "{{ messages[0].content }}<|im_end|>{{ messages[0].role + '!' }}"
    first = {"role": "assistant", "content": "hm", "token_ids": [104, 109, 258]}
    assert encode_chat(policy, normalize_chat([first]), {}, None).encoded_again == 1


def test_the_servers_own_variables_decide_how_tools_are_called(served: Running) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% if calling %}" + str(tokenizer.chat_template) + "{% endif %}"
    for variables in ({}, {"calling": True}):
        policy = replace(served.llm.policy, tokenizer=tokenizer, template_variables=variables)
        found = Service(policy, served.engine, Settings(), 512, seed=0).tool_format
        assert (found is not None) == bool(variables)


def test_one_turn_is_encoded_as_generate_encodes_it(served: Running) -> None:
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ]
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    assert encode_chat(served.llm.policy, normalize_chat(parts), {}, None).token_ids == served.llm.policy.encode(plain)


def test_the_bits_are_those_of_generate_with_the_same_tokens(served: Running) -> None:
    """A later turn's prompt, by its tokens, through the route of tokens and through `LLM.generate`'s engine."""
    first = ask(served)
    messages = [*ASK, first.choices[0].message, {"role": "tool", "tool_call_id": "0", "content": "3"}]
    second = ask(served, messages, seed=4, logprobs=True)
    body = {"token_ids": second.prompt_token_ids, "sampling_params": {"temperature": 0, "seed": 4}}
    (choice,) = served.http.post("/inference/v1/generate", json=body).json()["choices"]
    assert choice["token_ids"] == second.choices[0].token_ids
    own = [entry["model_logprob"] for entry in choice["logprobs"]["content"]]
    assert own == [entry.logprob for entry in second.choices[0].logprobs.content]


def test_thinking_that_the_template_removes_makes_another_prompt(served: Running) -> None:
    """As Qwen3's template does after the next question: the turn is encoded anew, without its thinking."""
    tokenizer = byte_tokenizer()
    policy = LLM(served.llm.config.model, device="cpu").policy
    policy.tokenizer = tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    )
    said = "<think>hm</think>yes"
    sampled = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
    answer = {"role": "assistant", "content": said, "token_ids": sampled}
    prompt = encode_chat(policy, normalize_chat([*ASK, answer, {"role": "user", "content": "?"}]), {}, None)
    assert (prompt.kept, prompt.encoded_again) == (0, 1) and b"think" not in bytes(
        t for t in prompt.token_ids if t < 256
    )


def test_a_turn_is_not_found_where_an_equal_earlier_one_is(served: Running) -> None:
    """With a template whose rendering of the first answer changes as the conversation grows."""
    policy = LLM(served.llm.config.model, device="cpu").policy
    policy.tokenizer = tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ '...' if m.role == 'assistant' and messages | length < 4 }}"
        "{{ m.content }}<|im_end|>{% endfor %}[assistant]"
    )
    sampled = [*tokenizer.encode("yes", add_special_tokens=False), tokenizer.eos_token_id]
    answer, more = {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}
    messages = [*ASK, {**answer, "token_ids": sampled}, more, {**answer, "token_ids": sampled}, more]
    prompt = encode_chat(policy, normalize_chat(messages), {}, None)
    assert prompt == ChatPrompt(policy.encode([*ASK, answer, more, answer, more]), kept=1, encoded_again=1)


def test_a_scripted_model_says_its_script(served: Running) -> None:
    llm = served.llm
    (one,) = LLM(llm.config.model, device="cpu").generate([ASK], SamplingParams(temperature=0))[0]
    assert one.text == "".join(ADD) and one.token_ids[-1] == llm.policy.tokenizer.eos_token_id
    assert len(TWO) == 2


@pytest.mark.parametrize(("name", "thought"), [("gptoss", "Let me see."), ("mistral", None)])
def test_calls_between_special_tokens(tmp_path: Path, name: str, thought: str | None) -> None:
    """Whole and streamed, and gone on from with the very tokens; the thought is told apart, and goes back."""
    template = (templates() / "gptoss.jinja").read_text(encoding="utf-8") if name == "gptoss" else MISTRALS
    scripts = CHANNELS if name == "gptoss" else BRACKETS
    folder = following(tmp_path / "model", scripts, template + "{{ lead or '' }}", SPECIAL)
    with running(folder, max_model_len=2048) as served:
        first = ask(served)
        (choice,), decode = first.choices, served.llm.policy.tokenizer.decode
        message = choice.message
        assert (message.content, getattr(message, "reasoning", None)) == (None, thought)
        assert calls_of(message) == [("add", {"a": 1})] and choice.finish_reason == "tool_calls"
        assert message.tool_calls[0].id == "abcdefghi" or name == "gptoss"
        deltas = [chunk.choices[0].delta for chunk in ask(served, stream=True)]
        assert not any(delta.content for delta in deltas)
        assert [thought] * bool(thought) == [delta.reasoning for delta in deltas if hasattr(delta, "reasoning")]
        ((call,),) = [delta.tool_calls for delta in deltas if delta.tool_calls]
        assert (call.index, call.function.name, json.loads(call.function.arguments)) == (0, "add", {"a": 1})
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        without = {k: v for k, v in message.model_dump().items() if k != "reasoning"}
        for answer in (message, without):
            second = ask(served, [*ASK, answer, result], lead="2")
            so_far = first.prompt_token_ids + choice.token_ids
            assert second.prompt_token_ids[: len(so_far)] == so_far
        given = {
            "gptoss": '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"',
            "mistral": "[TOOL_R",
        }
        assert decode(second.prompt_token_ids[len(so_far) :]).startswith(given[name])
        if name == "gptoss":
            last = second.choices[0]
            assert (last.message.content, last.finish_reason) == ("It is so.", "stop")
            assert ask(served, tools=[], lead="2").choices[0].message.content == "It is so."
            pieces = [chunk.choices[0].delta.content or "" for chunk in ask(served, tools=[], lead="2", stream=True)]
            assert "".join(pieces) == "It is so."
        alone = ask(served, tools=[])
        assert not alone.choices[0].message.tool_calls and '{"' in alone.choices[0].message.content


def test_trls_client_of_vllms_server(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through the likeliest tokens of each place, which are the sampled one alone."""
    theirs = pytest.importorskip("trl.generation.vllm_client")
    monkeypatch.setattr(theirs, "is_vllm_available", lambda: True)  # which its weight updates alone need
    client, sampling = theirs.VLLMClient(served.url), {"n": 2, "max_tokens": 12}
    drawn = sampling | {"generation_kwargs": {"seed": 7}}
    ids, form = [served.llm.policy.encode(text) for text in ("one", "two")], {"return_token_ids": True}
    seeded: Any = {"model": "tiny", "seed": 7, "extra_body": form, **sampling}
    texts = served.client.completions.create(**seeded, prompt=ids, logprobs=0).choices
    with_tools: Any = {"messages": ASK, "tools": TOOLS, "tool_choice": "none", "logprobs": True}
    said: Any = served.client.chat.completions.create(**seeded, **with_tools)
    own = [choice.logprobs.token_logprobs for choice in texts]
    told = [[entry.logprob for entry in choice.logprobs.content] for choice in said.choices]
    for answer, prompts, choices, logprobs in (
        (client.generate(ids, **drawn), ids, texts, own),
        (client.chat([ASK], tools=TOOLS, **drawn), [said.prompt_token_ids], said.choices, told),
    ):
        assert answer["prompt_ids"] == prompts and answer["completion_ids"] == [choice.token_ids for choice in choices]
        assert answer["logprob_token_ids"] == [[[token] for token in choice.token_ids] for choice in choices]
        assert answer["logprobs"] == [[[value] for value in values] for values in logprobs]
