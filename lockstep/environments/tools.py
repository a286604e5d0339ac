"""Tools: Python functions that the model may call, described by their docstrings."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ..errors import InputError, ToolUnavailable, refuse
from ..user_functions import is_unicode, safe_str
from .base import Prompt
from .calls import run_coroutine, run_in_main_thread
from .environment import End, Environment, Message, Turn

Tool = Callable[..., Any]

_MALFORMED = {"error": "the call is malformed: it is not in the form that was asked for"}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")  # in the default repr of an object
_NOT_MAIN_THREAD = "signal only works in main thread"  # the beginning of Python's error

_need_main_thread: set[Tool] = set()  # functions that raised that error


def tool_schema(tool: Tool, what: str) -> dict[str, Any]:
    """The JSON schema of a function, from its type hints and its Google style docstring. `InputError`, naming `what`:
    they are incomplete."""
    from transformers.utils import get_json_schema

    try:
        schema = get_json_schema(tool)
    except Exception as error:  # the library raises several types, and the function's own annotations may
        raise InputError(
            f"{what}: {_name(tool)} cannot be described to the model: {error}; give each argument a type hint and a "
            "line under Args in the docstring"
        ) from error
    parameters = inspect.signature(tool).parameters.values()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
    if positional:
        raise InputError(f"{what}: {_name(tool)} takes {positional[0]!r} by position; calls give arguments by name")
    yields = inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool)
    refuse(yields, f"{what}: {_name(tool)} yields; it must return what the model is to see")
    return schema


class ToolEnvironment(Environment):
    """Answers a turn's calls with what the functions return; a turn without a call is the last. The task's reward
    functions score the conversation. A function that raises, is unknown, or is called wrongly is answered with the
    error; `ToolUnavailable` fails the trajectory, which is left out."""

    functions: ClassVar[Sequence[Tool]] = ()
    schemas: ClassVar[Sequence[Mapping[str, Any]]] = ()

    def __init__(self) -> None:
        self.completion: list[Message] = []  # all messages after the prompt

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self.schemas

    @classmethod
    def toolsets(cls) -> Sequence[Sequence[Mapping[str, Any]]]:
        return (cls.schemas,)

    @classmethod
    def begins_with_rows(cls) -> bool:
        return cls.start is ToolEnvironment.start

    def callables(self) -> dict[str, Tool]:
        """The functions that the model may call, by name."""
        return {_name(tool): tool for tool in self.functions}

    def start(self, row: dict[str, Any], seed: int) -> Any:
        return as_chat(row["prompt"])

    def step(self, turn: Turn) -> Any:
        self.completion.append(turn.message)
        calls = turn.message.get("tool_calls", [])
        if not calls and not turn.malformed:
            return self.make_end()
        if turn.last:
            return ""  # the trajectory is cut, so the model reads no answer
        results = self._call_tools([call["function"] for call in calls])
        if turn.malformed:
            results.append(("", str(_MALFORMED)))
        messages = [{"role": "tool", "name": name, "content": content} for name, content in results]
        self.completion += messages
        return [{**message, "content": _text(message["content"])} for message in messages]

    def cut(self) -> Any:
        while self.completion and self.completion[-1]["role"] == "tool":  # these did not fit
            self.completion.pop()
        return self.make_end()

    def make_end(self) -> End:
        """The end of the trajectory, with the conversation for the reward functions."""
        return End(completion=self.completion)

    def _call_tools(self, calls: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
        """The name and result of each call, in order; coroutines run concurrently."""
        tools = self.callables()
        results = [_call_tool(tools.get(call["name"]), call) for call in calls]
        coroutines = {i: result for i, result in enumerate(results) if inspect.iscoroutine(result)}

        async def gather() -> list[Any]:
            return await asyncio.gather(*coroutines.values(), return_exceptions=True)

        if coroutines:
            for i, result in zip(coroutines, run_coroutine(gather()), strict=True):
                if isinstance(result, ToolUnavailable):
                    raise result
                results[i] = {"error": safe_str(result)} if isinstance(result, BaseException) else result
        return [(call["name"], _content(call["name"], result)) for call, result in zip(calls, results, strict=True)]


def _call_tool(tool: Tool | None, call: Mapping[str, Any]) -> Any:
    """What the tool returns, or its coroutine, or its error in the form that the model sees."""
    if tool is None:
        return {"error": f"Tool {call['name']} not found."}
    function = getattr(tool, "__func__", tool)  # of a bound method
    try:
        if function in _need_main_thread:
            return run_in_main_thread(lambda: tool(**call["arguments"]))
        return tool(**call["arguments"])
    except ToolUnavailable:
        raise
    except Exception as error:
        if not safe_str(error).startswith(_NOT_MAIN_THREAD) or function in _need_main_thread:
            return {"error": safe_str(error)}
        _need_main_thread.add(function)
        return _call_tool(tool, call)


def _name(tool: Tool) -> str:
    return getattr(tool, "__name__", type(tool).__name__)


def _content(tool: str, result: Any) -> Any:
    """A result as reward functions see it: lists unchanged, anything else as text; an error if that fails, or would
    differ from run to run."""
    try:
        text = str(result)
        kind = _varying_type(result)
        if kind is not None:
            may = "text, numbers, lists or dicts of these, or an object whose __str__ says what is in it"
            return str({"error": f"{tool} returned a {kind}, shown in other words in each run; it may return {may}"})
    except Exception as error:
        return str({"error": f"{type(error).__name__} when the result was shown"})
    texts = [str(part.get("text")) for part in result if isinstance(part, dict)] if isinstance(result, list) else []
    if not all(map(is_unicode, (text, *texts))):
        return str({"error": "the result is no valid Unicode"})
    return result if isinstance(result, list) else text


def _varying_type(result: Any) -> str | None:
    """The type of a result, or part of one, whose text differs from run to run: it has an address, or is a set, whose
    order depends on hashes."""
    if isinstance(result, str):
        return None
    if isinstance(result, (list, tuple, dict)):
        parts = result.items() if isinstance(result, dict) else result
        return next((kind for part in parts if (kind := _varying_type(part)) is not None), None)
    varies = isinstance(result, (set, frozenset)) or _ADDRESS.search(str(result))
    return type(result).__name__ if varies else None


def _text(content: Any) -> str:
    """Content as text for the chat template. Raises `InputError` for parts that are not text, such as images."""
    if isinstance(content, str):
        return content
    if not content or not all(isinstance(part, dict) and "type" in part for part in content):
        return str(content)
    other = next((part["type"] for part in content if part["type"] != "text"), None)
    refuse(other is not None, f"a tool returned a part of type {other}; only text can be shown to the model")
    return "".join(str(part.get("text", "")) for part in content)


def begins_with_chat(environment: type[Environment], prompt: Prompt) -> bool:
    """Whether the model is given a row's prompt as a chat: its messages, or a text beside tools, which a chat shows."""
    return isinstance(prompt, list) or issubclass(environment, ToolEnvironment) or any(environment.toolsets())


def as_chat(prompt: Any) -> list[Message]:
    """A prompt as messages: a text becomes a user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def tool_environment(tools: Sequence[Tool], what: str) -> type[ToolEnvironment]:
    """A `ToolEnvironment` with these functions. `InputError`: as from `tool_schema`, or two have the same name."""
    schemas, names = [tool_schema(tool, what) for tool in tools], list(map(_name, tools))
    twice = sorted({name for name in names if names.count(name) > 1})
    refuse(bool(twice), f"{what}: there are several tools of the name {', '.join(twice)}; rename one")
    return type("Tools", (ToolEnvironment,), {"functions": tuple(tools), "schemas": schemas})
