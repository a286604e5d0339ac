"""Calls of tools: read out of what templates teach, whole and in pieces, and left as text where they are none."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import MISTRALS, templates

from lockstep.environments.codec import with_call_ids
from lockstep.errors import HistoryRewritten
from lockstep.models.tokenizer import byte_tokenizer, encode_following, render_chat
from lockstep.serve.batcher import Update
from lockstep.serve.text import StopStrings, StreamedText, split_answer
from lockstep.session.text.tool_calls import ToolCall, ToolFormat
from lockstep.session.text.tool_formats import FORMATS, tool_format
from lockstep.types import Segment, Trajectory

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "all": {}}}
HERMES, CODER, GLM, LLAMA, HARMONY, MISTRAL = FORMATS.values()
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}}
CITY = ToolCall("weather", '{"city": "Bogotá"}')


@pytest.mark.parametrize(
    ("form", "text", "kept", "calls"),
    [
        (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"city": "Bogotá"}}\n</tool_call>', "", [CITY]),
        (HERMES, 'a<tool_call>{"name":"f"}</tool_call>b', "ab", [ToolCall("f", "{}")]),
        (HERMES, '<tool_call>{"name":"f","arguments":"{\\"x\\":1}"}</tool_call>', "", [ToolCall("f", '{"x": 1}')]),
        (HERMES, '<tool_call> <tool_call>{"name":"f"}</tool_call>', "<tool_call> ", [ToolCall("f", "{}")]),
        (HERMES, '<tool_call>{"name":"f"}</tool_call><tool_call>{bad}</tool_call>', "<tool_call>{bad}</tool_call>",
         [ToolCall("f", "{}")]),
        (CODER, "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>"
         "\n</function>\n</tool_call>", "", [ToolCall("weather", '{"city": "12", "days": 3}')]),
        (CODER, "<tool_call><function=weather><parameter=all>two\nlines</parameter></function></tool_call>", "",
         [ToolCall("weather", '{"all": "two\\nlines"}')]),
        (CODER, "<tool_call><function=weather><parameter=all>null</parameter></function></tool_call>", "",
         [ToolCall("weather", '{"all": null}')]),
        (CODER, "<tool_call><function=now></function></tool_call>", "", [ToolCall("now", "{}")]),
        (LLAMA, ' {"name": "weather", "parameters": {"city": "Bogotá"}}', "", [CITY]),
        (LLAMA, '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', "",
         [ToolCall("a", "{}"), ToolCall("b", "{}")]),
        (GLM, "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n"
         "<arg_value>3</arg_value>\n</tool_call>", "", [ToolCall("weather", '{"city": "12", "days": 3}')]),
        (GLM, "a<tool_call>now</tool_call><tool_call>now\n</tool_call>", "a", [ToolCall("now", "{}")] * 2),
        (HARMONY, "<|channel|>analysis<|message|>Call to=functions.f?<|end|><|start|>assistant<|channel|>commentary "
         'to=functions.weather <|constrain|>json<|message|>{"city": "Bogotá"}<|call|>', "", [CITY]),
        (HARMONY, ' to=functions.weather<|channel|>commentary json<|message|>{"city":"Bogotá"}', "", [CITY]),
        (HARMONY, "<|channel|>analysis<|message|>no<|end|><|start|>assistant<|channel|>final<|message|>A.", "A.", []),
        (HARMONY, '<|channel|>analysis to=functions.f<|message|>{}<|end|>', "", []),
        (MISTRAL, 'Yes [TOOL_CALLS] [{"name": "a", "arguments": {}, "id": "123456789"}, {"name": "b"}]', "Yes ",
         [ToolCall("a", "{}"), ToolCall("b", "{}")]),
        (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Bogotá"}[TOOL_CALLS]b[CALL_ID]123456789[ARGS]{}', "",
         [CITY, ToolCall("b", "{}")]),
    ],
)  # fmt: skip
def test_calls_are_read(form: ToolFormat, text: str, kept: str, calls: list[ToolCall]) -> None:
    assert form.parser(text, [TOOL]) == (kept, calls)


NULL = {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "given", "read"),
    [
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "1.5", "1.5"),
        ({"anyOf": [{"type": "string"}, NULL]}, '{"a": 1}', '{"a": 1}'),
        ({"oneOf": [{"type": ["string", "number"]}, NULL]}, "12", 12),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"anyOf": [{"type": "boolean"}, NULL]}, "true", True),
        ({"type": [{}], "anyOf": "string", "oneOf": [3]}, "12", 12),
        (True, "12", 12),
    ],
)
@pytest.mark.parametrize(
    ("form", "text"),
    [
        (CODER, "<tool_call><function=f><parameter=x>{}</parameter></function></tool_call>"),
        (GLM, "<tool_call>f<arg_key>x</arg_key><arg_value>{}</arg_value></tool_call>"),
    ],
)
def test_an_argument_is_of_a_type_that_its_schema_allows(
    form: ToolFormat, text: str, schema: Any, given: str, read: Any
) -> None:
    """Where it may be a string, the template shows strings without quotes: 12 may be one."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
    assert form.parser(text.replace("{}", given), [tool]) == ("", [ToolCall("f", json.dumps({"x": read}))])


def test_an_id_that_no_template_takes_is_left_out() -> None:
    """The model chose it: a template that refuses it would end the conversation."""
    for named, told in (("abcdefghi", "abcdefghi"), ("1", ""), ("abcdefghij", "")):
        text = f'[TOOL_CALLS] [{{"name": "a", "arguments": {{}}, "id": "{named}"}}]'
        assert [call.id for call in MISTRAL.parser(text, [TOOL])[1]] == [told]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "no call"),
        (HERMES, "<tool_call>{}</tool_call>"),
        (HERMES, '<tool_call>{"name": ""}</tool_call>'),
        (HERMES, '<tool_call>{"name": 3}</tool_call>'),
        (HERMES, '<tool_call>["name"]</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": "\\ud83d"}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "\\ud83d"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": %s}}</tool_call>' % ("[" * 100 + "]" * 100)),
        (HARMONY, ' to=functions.f<|channel|>commentary<|message|>{"x": "\\ud83d"}'),
        (LLAMA, '{"name": "f", "parameters": {"x": -1e999}}'),
        (HERMES, '<tool_call>{"name": "f"}'),
        (HERMES, '</tool_call>{"name": "f"}<tool_call>'),
        (HERMES, "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        (CODER, '<tool_call>{"name": "f"}</tool_call>'),
        (CODER, "<tool_call><function=f>rest</function></tool_call>"),
        (CODER, "<tool_call><function=f><parameter=x>1</function></tool_call>"),
        (CODER, "<tool_call><function=></function></tool_call>"),
        (GLM, '<tool_call>{"name": "f"}</tool_call>'.replace("{", "<")),
        (GLM, "<tool_call>two words</tool_call>"),
        (GLM, "<tool_call>f<arg_key>x</arg_key></tool_call>"),
        (HARMONY, " to=functions.f<|channel|>commentary<|message|>[1]"),
        (HARMONY, ' to=functions.f<|channel|>commentary<|message|>{"x": '),
        (MISTRAL, '[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": 3}]'),
        (MISTRAL, '[TOOL_CALLS]a[ARGS]{"x": 1'),
        (MISTRAL, "[TOOL_CALLS] []"),
        (LLAMA, "{}"),
        (LLAMA, '{"name": "f", "parameters": {}} and more'),
        (LLAMA, 'Well: {"name": "f", "parameters": {}}'),
        (LLAMA, '{"name": "f", "parameters": {}'),
        (LLAMA, ""),
    ],
)
def test_what_is_no_call_stays_text(form: ToolFormat, text: str) -> None:
    assert form.parser(text, [TOOL]) == (text, [])


def test_a_channel_that_no_message_follows_is_read_in_time() -> None:
    text, began = "<|channel|>" + "a" * 20_000, time.process_time()
    assert (
        HARMONY.parse(text) == (text, []) and HARMONY.stable_text(text) == "" and HARMONY.extract_thinking(text) == ""
    )
    assert time.process_time() - began < 2, "it was searched again from each of its characters"


THINKING = replace(HERMES, opens_thought=True)
CALL = '<tool_call>{"name":"f"}</tool_call>'


@pytest.mark.parametrize(
    ("form", "text", "kept", "calls", "malformed"),
    [
        (HERMES, f"<think>Perhaps {CALL}?</think>No.", f"<think>Perhaps {CALL}?</think>No.", 0, False),
        (HERMES, f"\n<think>Perhaps {CALL}", f"\n<think>Perhaps {CALL}", 0, False),
        (HERMES, f"<think>{CALL}</think>{CALL}", f"<think>{CALL}</think>", 1, False),
        (HERMES, f"Perhaps {CALL}</think>", "Perhaps </think>", 1, False),
        (THINKING, f"Perhaps {CALL}</think>", f"Perhaps {CALL}</think>", 0, False),
        (THINKING, f"Hm.</think>{CALL}", "Hm.</think>", 1, False),
        (HERMES, "<think>x</think><tool_call>{bad}", "<think>x</think><tool_call>{bad}", 0, True),
        (HERMES, f"{CALL}<tool_call>{{bad}}</tool_call>", "<tool_call>{bad}</tool_call>", 1, True),
        (LLAMA, '<think>x</think>{"name": "f", "parameters": {}}', "<think>x</think>", 1, False),
        (HARMONY, "to=functions.f<|channel|>commentary<|message|>", "to=functions.f<|channel|>commentary<|message|>", 0,
         True),
        (MISTRAL, "[TOOL_CALLS]f", "[TOOL_CALLS]f", 0, True),
    ],
)  # fmt: skip
def test_a_call_within_a_thought_is_none(form: ToolFormat, text: str, kept: str, calls: int, malformed: bool) -> None:
    message, found = form.message(text)
    assert (message["content"], len(message.get("tool_calls", [])), found) == (kept, calls, malformed)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HARMONY, ' to=functions.f<|channel|>commentary<|message|>{}'),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{}'),
    ],
)  # fmt: skip
def test_without_tools_nothing_is_called(form: ToolFormat, text: str) -> None:
    assert form.parser(text, []) == (text, []) and form.parser(text, [TOOL])[1]
    assert HERMES.for_tools([]) is None and form.for_tools([]) == form


CALL_TEXTS = (
    *("<|channel|>", "analysis", "commentary", "final", "<|message|>", "<|end|>", "<|start|>assistant", "<|call|>"),
    *(" to=functions.f", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "[TOOL_CALLS]", "[ARGS]"),
    *("<think>", "</think>", "<arg_key>", "weather"),
    *("<tool_call>", "</tool_call>", "<tool", '{"name": "f"}', '{"name": "weather", "parameters": {"days": 3}}', " "),
    *("<function=weather>", "<parameter=city>", "x", "</parameter>", "</function>", "é", "{", "}", ";", "STOP", "ST"),
)


@given(
    st.sampled_from([HERMES, CODER, LLAMA, GLM, replace(HERMES, opens_thought=True), HARMONY, MISTRAL]),
    st.lists(st.sampled_from(CALL_TEXTS), max_size=12),
    st.sampled_from([(), (TOOL,)]),
    st.integers(1, 7),
)
def test_pieces_add_up_to_the_whole(form: ToolFormat, texts: list[str], tools: tuple[Any, ...], size: int) -> None:
    """Of any text, cut at any bytes, with a stop string besides; what was shown is never taken back."""
    form = replace(form, tools=tools)
    text = "".join(texts)
    ids = list(text.encode())

    def decode(token_ids: list[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    growing, shown = StreamedText(decode, StopStrings(("STOP",)), form), ""
    for start in range(0, len(ids), size):
        piece, calls = growing.feed(Update(0, ids[start : start + size], [], [], None))
        shown += piece
        assert not calls
    whole = Trajectory([Segment([0]), Segment(ids, sampled=True, text=text)])
    piece, calls = growing.feed(Update(0, [], [], [], whole))
    assert (shown + piece, calls) == split_answer(text, StopStrings(("STOP",)), form)
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)


PUBLISHED: dict[str, ToolFormat | None] = {
    "qwen2_5": HERMES,
    "qwen3": HERMES,
    "qwen3_instruct_2507": HERMES,
    "qwen3_vl": HERMES,
    "qwen3_6": replace(CODER, opens_thought=True),
    "llama3_1": LLAMA,
    "llama3_2": LLAMA,
    "llama3": None,
    "glm4moe": GLM,
    "gptoss": HARMONY,
    "gemma3": None,
    "phi3": None,
    "deepseekv3": None,
}


def tokenizer_of(name: str) -> Any:
    """The byte-level tokenizer with a published template, whose turns end as that model's do."""
    tokenizer: Any = byte_tokenizer()
    text = MISTRALS if name == "mistral" else (templates() / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer.chat_template = text
    ends = {"llama": "<|eot_id|>", "mistral": "</s>", "glm": "<|endoftext|>", "gptoss": "<|return|>"}
    tokenizer.eos_token = next((end for begin, end in ends.items() if name.startswith(begin)), tokenizer.eos_token)
    return tokenizer


@pytest.mark.parametrize("name", [*PUBLISHED, "mistral"])
def test_formats_of_published_templates(name: str) -> None:
    """The format is the one that reads a call out of what the template makes of it."""
    assert tool_format(tokenizer_of(name)) == {**PUBLISHED, "mistral": MISTRAL}[name]


ARGUMENTS = {"city": 'Bogotá "D.C."\nnorth', "days": 3, "all": [1, {"k": True}, None, 1.5]}
ASK = [{"role": "user", "content": "And?"}]
ENDS = ("<|im_end|>", "<|eot_id|>", "</s>", "<|call|>", "<|return|>", "<|observation|>")


@pytest.mark.parametrize("name", [*(name for name, form in PUBLISHED.items() if form is not None), "mistral"])
def test_what_a_template_renders_is_read_back_and_gone_on_from(name: str) -> None:
    """An answer with calls, two of them where the template renders as many, is read as what it was; and what follows is
    what the template itself has there."""
    tokenizer = tokenizer_of(name)
    found = tool_format(tokenizer)
    assert found is not None
    form = replace(found, tools=(TOOL,), opens_thought=False)
    made = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    calls = [{**made, "id": f"{i:09d}"} for i in range(1 if name in ("gptoss",) or name.startswith("llama") else 2)]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "name": "weather", "content": f"rain {i}"} for i in range(len(calls))]
    shown = render_chat(tokenizer, ASK, {"tools": [TOOL]})
    whole = render_chat(tokenizer, [*ASK, answer, *with_call_ids(answer, results)], {"tools": [TOOL]})
    said = whole[len(shown) :] if whole.startswith(shown) else whole.rpartition("And?")[2].partition("assistant")[2]
    end = min((place, end) for end in ENDS if (place := said.find(end)) >= 0)
    sampled = said[: end[0]]
    message, malformed = form.message(sampled)
    told = [call["function"] for call in message["tool_calls"]]
    assert told == [call["function"] for call in calls] and not malformed
    chat = [*ASK, form.in_chat(sampled, message, malformed)]
    following = encode_following(tokenizer, chat, with_call_ids(chat[-1], results), {"tools": [TOOL]}, ENDS)
    assert tokenizer.decode(following) == said[end[0] :]


def test_the_thoughts_of_gpt_oss_are_kept_within_a_round_of_tools_and_left_out_after_it() -> None:
    tokenizer = tokenizer_of("gptoss")
    found = tool_format(tokenizer)
    assert found is not None
    form = replace(found, tools=(TOOL,))
    thought = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
    asked = f"{thought}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{{}}"
    said = f"{thought}<|channel|>final<|message|>Rain."
    first, last = (form.in_chat(text, *form.message(text)) for text in (asked, said))
    assert first["thinking"] == last["thinking"] == "Let me see." and (first["content"], last["content"]) == (
        "",
        "Rain.",
    )
    result = {"role": "tool", "name": "weather", "content": "rain"}
    after = tokenizer.decode(encode_following(tokenizer, [*ASK, first], [result], {"tools": [TOOL]}, ENDS))
    start = "<|call|><|start|>functions.weather to=assistant<|channel|>commentary<|message|>"
    assert after == f'{start}"rain"<|end|><|start|>assistant'
    chat = [*ASK, first, result, last]
    with pytest.raises(HistoryRewritten, match="leaves out the thinking") as raised:
        encode_following(tokenizer, chat, ASK, {"tools": [TOOL]}, ENDS)
    assert [m.get("thinking") for m in raised.value.messages] == [None] * 4
    again = encode_following(tokenizer, raised.value.messages, ASK, {"tools": [TOOL]}, ENDS)
    assert tokenizer.decode(again) == "<|end|><|start|>user<|message|>And?<|end|><|start|>assistant"


@pytest.mark.parametrize("name", ["gptoss", "mistral"])
def test_a_malformed_call_is_answered_where_templates_want_calls(name: str) -> None:
    tokenizer = tokenizer_of(name)
    form = tool_format(tokenizer)
    assert form is not None
    text = {"gptoss": " to=functions.f<|channel|>commentary<|message|>{", "mistral": "[TOOL_CALLS]f"}[name]
    message, malformed = form.message(text)
    chat = [*ASK, form.in_chat(text, message, malformed)]
    error = with_call_ids(chat[-1], [{"role": "tool", "name": "", "content": "malformed"}])
    after = tokenizer.decode(encode_following(tokenizer, chat, error, {"tools": [TOOL]}, ENDS))
    assert (
        malformed and after.startswith(("<|call|><|start|>functions.", "</s>[TOOL_RESULTS]")) and "malformed" in after
    )


def test_the_random_models_template_teaches_tools_and_others_may_not() -> None:
    tokenizer: Any = byte_tokenizer()
    assert tool_format(tokenizer) == HERMES
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert tool_format(tokenizer) is None
    tokenizer.chat_template = None
    assert tool_format(tokenizer) is None
