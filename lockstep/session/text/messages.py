"""Converts chat messages and tools in the format of OpenAI's API to what chat templates take."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...config import TEMPLATE_ARGUMENTS
from ...environments.data.rows import call_arguments
from ...errors import FieldError
from .tool_calls import Tool

Message = dict[str, Any]
RESERVED_WITH_TOOLS = (*TEMPLATE_ARGUMENTS, "tools")  # reserved variable names where a request has tools of its own
_ROLES = {"system", "developer", "user", "assistant", "tool"}


def normalize_chat(messages: Any, where: str = "messages") -> list[Message]:
    """The messages as chat templates take them: text as one string, arguments of tool calls as objects. Raises
    `FieldError` naming the invalid part."""
    if not isinstance(messages, list) or not messages:
        raise FieldError(where, f"{where} must be a list of at least one message")
    return [_normalize_message(message, f"{where}[{i}]") for i, message in enumerate(messages)]


def validate_tools(tools: Sequence[Any]) -> list[Tool]:
    """The tools, checked to have the form of OpenAI's API. Raises `FieldError` for one that does not."""
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            what = 'must be {"type": "function", "function": {"name": ...}}'
            raise FieldError(f"tools[{i}]", f"tools[{i}] {what}")
    return list(tools)


def check_variables(template: Any, variables: Any, where: str, fixed: Sequence[str] = TEMPLATE_ARGUMENTS) -> None:
    """Raise `FieldError` for a variable that the chat template does not read or whose name is in `fixed`."""
    if not isinstance(variables, Mapping):
        raise FieldError(
            where, f"{where} is of type {type(variables).__name__}; it must be a dict of variables by name"
        )
    for name in variables:
        field = f"{where}.{name}" if where else name
        if name in fixed:
            raise FieldError(field, f"{where} sets {name}, which is no variable of it")
        if not re.search(rf"\b{re.escape(str(name))}\b", str(template)):
            raise FieldError(field, f"{field} has no effect: the model's chat template does not read it")


def _normalize_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise FieldError(where, f"{where} must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise FieldError(
            f"{where}.role", f"{where}.role is {role!r:.40}; it must be one of {', '.join(sorted(_ROLES))}"
        )
    result = {name: value for name, value in message.items() if value is not None}
    result["role"] = "system" if role == "developer" else role
    calls, calls_field = result.get("tool_calls", []), f"{where}.tool_calls"
    if "content" not in result and not (role == "assistant" and calls):
        raise FieldError(f"{where}.content", f"{where}.content is missing")
    result["content"] = _join_text(result.get("content", ""), f"{where}.content")
    if not isinstance(calls, list):
        raise FieldError(calls_field, f"{calls_field} must be a list")
    if calls:
        result["tool_calls"] = [_normalize_tool_call(call, f"{calls_field}[{i}]") for i, call in enumerate(calls)]
    else:
        result.pop("tool_calls", None)
    return result


def _join_text(content: Any, where: str) -> str:
    """The content as one string; a list of parts, which must be text, is joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FieldError(where, f"{where} must be a string, or a list of parts with text")
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise FieldError(f"{where}[{i}]", f"{where}[{i}] must be a part of type text, with its text")
    return "".join(part["text"] for part in content)


def _normalize_tool_call(call: Any, where: str) -> dict[str, Any]:
    """The call with its arguments as an object, which each template formats in its own way."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise FieldError(f"{where}.function", f"{where}.function must be an object with a name")
    arguments = call_arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
