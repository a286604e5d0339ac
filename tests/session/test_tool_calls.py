"""Calls of tools: read out of what templates teach, whole and in pieces, and left as text where they are none."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.models.tokenizer import byte_tokenizer
from lockstep.serve.batcher import Update
from lockstep.serve.text import GrowingText, visible
from lockstep.session.text.tool_calls import CODER, HERMES, LLAMA, ToolCall, ToolFormat, tool_format
from lockstep.types import Segment, Trajectory

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "all": {}}}
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
    ],
)  # fmt: skip
def test_calls_are_read(form: ToolFormat, text: str, kept: str, calls: list[ToolCall]) -> None:
    assert form.parser(text, [TOOL]) == (kept, calls)


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
        (HERMES, '<tool_call>{"name": "f"}'),
        (HERMES, '</tool_call>{"name": "f"}<tool_call>'),
        (HERMES, "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        (CODER, '<tool_call>{"name": "f"}</tool_call>'),
        (CODER, "<tool_call><function=f>rest</function></tool_call>"),
        (CODER, "<tool_call><function=f><parameter=x>1</function></tool_call>"),
        (CODER, "<tool_call><function=></function></tool_call>"),
        (LLAMA, "{}"),
        (LLAMA, '{"name": "f", "parameters": {}} and more'),
        (LLAMA, 'Well: {"name": "f", "parameters": {}}'),
        (LLAMA, '{"name": "f", "parameters": {}'),
        (LLAMA, ""),
    ],
)
def test_what_is_no_call_stays_text(form: ToolFormat, text: str) -> None:
    assert form.parser(text, [TOOL]) == (text, [])


CALL_TEXTS = (
    *("<tool_call>", "</tool_call>", "<tool", '{"name": "f"}', '{"name": "weather", "parameters": {"days": 3}}', " "),
    *("<function=weather>", "<parameter=city>", "x", "</parameter>", "</function>", "é", "{", "}", ";", "STOP", "ST"),
)


@given(st.sampled_from([HERMES, CODER, LLAMA]), st.lists(st.sampled_from(CALL_TEXTS), max_size=12), st.integers(1, 7))
def test_pieces_add_up_to_the_whole(form: ToolFormat, texts: list[str], size: int) -> None:
    """Of any text, cut at any bytes, with a stop string besides; what was shown is never taken back."""
    text = "".join(texts)
    ids = list(text.encode())

    def decode(token_ids: list[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    growing, shown = GrowingText(decode, ("STOP",), form), ""
    for start in range(0, len(ids), size):
        piece, calls = growing.feed(Update(0, ids[start : start + size], [], [], None))
        shown += piece
        assert not calls
    whole = Trajectory([Segment([0]), Segment(ids, sampled=True, text=text)])
    piece, calls = growing.feed(Update(0, [], [], [], whole))
    assert (shown + piece, calls) == visible(text, ("STOP",), form)
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)


def templates() -> Path:
    """Chat templates of published models, which TRL has."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl is not installed")
    return Path(spec.origin).parent / "chat_templates"


PUBLISHED: dict[str, ToolFormat | None] = {
    "qwen2_5": HERMES,
    "qwen3": HERMES,
    "qwen3_instruct_2507": HERMES,
    "qwen3_vl": HERMES,
    "qwen3_6": CODER,
    "llama3_1": LLAMA,
    "llama3_2": LLAMA,
    "llama3": None,
    "glm4moe": None,
    "gptoss": None,
    "gemma3": None,
    "phi3": None,
    "deepseekv3": None,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_formats_of_published_templates(name: str) -> None:
    """The format is the one that reads a call out of what the template makes of it."""
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = (templates() / f"{name}.jinja").read_text(encoding="utf-8")
    if name.startswith("llama"):
        tokenizer.eos_token = "<|eot_id|>"
    assert tool_format(tokenizer) == PUBLISHED[name]


def test_a_tokenizer_without_a_template_has_no_format() -> None:
    tokenizer: Any = byte_tokenizer()
    assert tool_format(tokenizer) is None
    tokenizer.chat_template = None
    assert tool_format(tokenizer) is None
