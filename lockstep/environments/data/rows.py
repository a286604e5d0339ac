"""From data rows to problems: which column is the prompt, its format, and its length in tokens."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeGuard

from ...config import TaskConfig
from ...errors import FieldError, InputError, PromptTooLong, did_you_mean, refuse
from ...json_file import to_json
from ...machine import torchrun_launch
from ...user_functions import is_unicode
from ..base import Encode, Problem, Prompt, PromptLimit, RowSource
from ..rewards.calls import RESERVED_NAMES
from .sources import Row, open_source

# Common names of prompt columns in data of other layouts.
USUAL_PROMPT_COLUMNS = ("messages", "conversation", "question", "problem", "instruction", "query", "input", "text")

GSM8K_INSTRUCTION = "Reason step by step. End with the final number alone after ####, like this: #### 42"

ROLES = "system", "developer", "user", "assistant", "tool", "function"  # templates may know others
_log = logging.getLogger("lockstep.environments.data")


@dataclass(frozen=True)
class RowFormat:
    """How a row becomes a prompt: the prompt's column, and a system prompt for rows that have none."""

    prompt_column: str
    system_prompt: str | None

    def problem(self, row: Row, origin: str) -> Problem:
        """The row's problem, with the other columns for the rewards. Raises `InputError` naming `origin`."""
        for name in RESERVED_NAMES:
            if name in row and name != self.prompt_column:
                raise InputError(f"{origin}: column {name!r} has the name of a reward argument; rename it")
        if self.prompt_column in row:
            hidden = {"prompt", *RESERVED_NAMES} & {self.prompt_column}  # functions get it as `prompts`
            columns = {name: value for name, value in row.items() if name not in hidden}
            prompt = _checked_prompt(row[self.prompt_column], f"{origin}: {self.prompt_column}")
        elif self.asks_question(row):
            if not _is_text(row["question"]):
                raise InputError(f"{origin}: question must be a text that is not empty")
            columns = row
            prompt = [{"role": "user", "content": f"{row['question']}\n\n{GSM8K_INSTRUCTION}"}]
        else:
            guess = next((f", perhaps {name}," for name in USUAL_PROMPT_COLUMNS if name in row), "")
            raise InputError(
                f"{origin} has {', '.join(row) or 'no columns'}; it needs {self.prompt_column}, or question and answer "
                f"(name the prompt's column{guess} with task.prompt_column or --prompt-column)"
            )
        return Problem(self.with_system(prompt), columns, origin=origin)

    def asks_question(self, row: Row) -> bool:
        """Whether the row has no prompt, but a question to ask (GSM8K)."""
        return self.prompt_column not in row and "question" in row and "answer" in row

    def with_system(self, prompt: Prompt) -> Prompt:
        """`prompt` with the system prompt, unless it has one; a text becomes a user message."""
        if self.system_prompt is None:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if any(message["role"] == "system" for message in messages):
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]


class Problems(Sequence[Problem]):
    """Problems of some rows of a source, in order, each read on access."""

    def __init__(self, source: RowSource, form: RowFormat, columns: tuple[str, ...], rows: Sequence[int], label: str):
        self.label, self.columns = label, columns  # "task.data rows.jsonl"
        self._source, self._form, self._rows = source, form, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        """The problem at `index`, or for a slice, the problems of those rows. Columns that a row lacks are None."""
        if isinstance(index, slice):
            return Problems(self._source, self._form, self.columns, self._rows[index], self.label)
        row = self._rows[index]
        problem = self._form.problem(self._source.row(row), self._source.origin(row))
        return Problem(problem.prompt, {name: problem.columns.get(name) for name in self.columns}, None, problem.origin)

    def filter_overlong(self, encode: Encode, limit: PromptLimit, leave_out: bool, use: str = "training") -> Problems:
        """These problems without those whose prompts exceed the limit. A warning counts and names them; without
        `leave_out`, or if none is left, that is an `InputError`. `use` says in messages what the problems are for."""
        kept, examples = array("Q"), list[str]()
        template_tokens = cache(partial(_template_tokens, encode, limit.tokens))
        for row, problem in zip(self._rows, self, strict=True):
            size = _size_if_over(encode, problem, limit.tokens, template_tokens(isinstance(problem.prompt, str)))
            if size is None:
                kept.append(row)
            elif len(examples) < 3:
                examples.append(f"{problem.origin} ({size})")
        overlong = len(self) - len(kept)
        if not overlong:
            return self
        message = (
            f"{overlong} of {len(self)} {use} prompts of {self.label} have more than {limit.tokens} tokens "
            f"({limit.reason}): {', '.join(examples)}{', ...' if overlong > len(examples) else ''}"
        )
        refuse(not leave_out, f"{message}; shorten them, or leave them out with task.filter_overlong_prompts")
        refuse(not kept, f"{message}; none is left")
        log_notice("left out: %s", message)
        return Problems(self._source, self._form, self.columns, kept, self.label)


def log_notice(message: str, *arguments: object) -> None:
    """Log something about the data, which every process reads: the first process says it for all."""
    if torchrun_launch().rank == 0:
        _log.warning(message, *arguments)


def read_problems(
    data: str, config: TaskConfig, check: Callable[[Problem], None] = lambda problem: None, field: str = "task.data"
) -> Problems:
    """Every row of `data` as a problem, in the data's order, each checked once here, also by `check`. A row's other
    columns go to the rewards; for rows with `question` and `answer` instead of a prompt (GSM8K), the prompt asks the
    question. `InputError` names the file and line, or the row, and what is wrong; `field` is the setting that names
    `data`."""
    form = RowFormat(config.prompt_column, config.system_prompt)
    source = open_source(data, config.split, field)
    refuse(not len(source), f"{field} {data} has no rows")
    columns: dict[str, None] = {}
    first_asks = form.asks_question(source.row(0))
    for index, row in enumerate(source):
        problem = form.problem(row, source.origin(index))
        if form.asks_question(row) != first_asks:
            this, first = form.prompt_column, "question and answer"
            if not first_asks:
                this, first = first, this
            raise InputError(f"{problem.origin} has {this} and the first row {first}; all rows must have the same")
        check(problem)
        columns |= dict.fromkeys(problem.columns)
    if first_asks and config.name != "gsm8k":
        log_notice("%s %s has question and answer, which are asked as in GSM8K: %r", field, data, GSM8K_INSTRUCTION)
    return Problems(source, form, tuple(columns), range(len(source)), f"{field} {data}")


def _template_tokens(encode: Encode, limit: int, of_text: bool) -> int:
    """The tokens of an empty text or chat, which are those of tools and the template; `limit` if the template refuses
    it, although it may accept others."""
    try:
        return len(encode("" if of_text else [{"role": "user", "content": ""}]))
    except InputError:
        return limit


def _size_if_over(encode: Encode, problem: Problem, limit: int, template_tokens: int) -> str | None:
    """The size of a prompt, in words, if it has more tokens than `limit`, else None.

    A text cannot have many more tokens than bytes, so short ones are not encoded: twice the bytes allow for
    normalization, 512 and `template_tokens` for the chat template and tools. What this misses is refused when the
    prompt is played.
    """
    if 2 * _bytes(problem.prompt) + 512 + template_tokens <= limit:
        return None
    try:
        count = len(encode(problem.prompt))
    except PromptTooLong as error:
        return f"{error.size:,} bytes"
    except InputError as error:
        raise InputError(f"{problem.origin}: {error}") from error
    return f"{count} tokens" if count > limit else None


def _bytes(prompt: Prompt) -> int:
    """The bytes of a prompt: of messages all that they hold, with calls of tools, since templates show more than
    their contents, and something around each."""
    return len((prompt if isinstance(prompt, str) else to_json(prompt)).encode(errors="replace"))


def _checked_prompt(prompt: Any, where: str) -> Prompt:
    if _is_text(prompt):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        found = "empty" if prompt in ("", []) else f"of type {type(prompt).__name__}"
        if isinstance(prompt, str) and prompt:
            found = "half a surrogate pair, which is no text"
        raise InputError(f"{where} is {found}; it must be a text or a list of chat messages")
    return checked_messages(prompt, where)


def checked_messages(messages: list[Any], where: str) -> list[dict[str, Any]]:
    """Chat messages, at least one, as templates take them: a developer's are the system's, and arguments of calls are
    objects. Raises `InputError`, naming `where` and the message, if one lacks a role or a text, or if the last is the
    assistant's, so that there is nothing to answer."""
    for index, message in enumerate(messages):
        required = ["role"] if _is_silent(message) else ["role", "content"]
        if not isinstance(message, dict) or not all(_is_text(message.get(key)) for key in required):
            content, found = message.get("content") if isinstance(message, dict) else None, ""
            if content == "":
                found = "; its content is empty"
            elif isinstance(content, list):
                found = "; its content is a list of parts"
            raise InputError(f"{where} message {index} must be an object with role and content, both texts{found}")
        role = message["role"]
        if role not in ROLES and (question := did_you_mean(role, ROLES)):
            raise InputError(f"{where} message {index} has the role {role!r}; {question}")
    if messages[-1]["role"] == "assistant":
        raise InputError(f"{where}: the last message is the assistant's; the completion comes there, so remove it")
    return [_normalize(message, f"{where} message {index}") for index, message in enumerate(messages)]


def _normalize(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message without the fields that it has no value for, which tables give to all, in the form of most templates.
    Raises `InputError` for arguments of a call that are no object."""
    result = {
        name: value for name, value in message.items() if value is not None and (name, value) != ("tool_calls", [])
    }
    if _is_silent(message):
        result["content"] = ""
    if message["role"] == "developer":
        result["role"] = "system"
    if isinstance(calls := result.get("tool_calls"), list):
        result["tool_calls"] = [_normalize_call(call, f"{where} tool_calls[{i}]") for i, call in enumerate(calls)]
    return result


def _normalize_call(call: Any, where: str) -> Any:
    """A call with its arguments as an object: templates would show a text of JSON as a text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    arguments = call_arguments(function["arguments"], f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def call_arguments(arguments: Any, field: str) -> dict[str, Any]:
    """The arguments of a call as an object, given as one, as its JSON text or not at all. Raises `FieldError`."""
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise FieldError(field, f"{field} is no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise FieldError(field, f"{field} must be an object, or one as JSON text; it is {arguments!r:.40}")
    return arguments


def _is_silent(message: Any) -> bool:
    """Whether this is an earlier answer without text: it only calls tools, or was cut before its first token."""
    if not isinstance(message, dict) or message.get("content") not in (None, ""):
        return False
    return bool(message.get("tool_calls")) or (message.get("role"), message.get("content")) == ("assistant", "")


def _is_text(value: Any) -> TypeGuard[str]:
    """Whether this is a text, not empty, that UTF-8 can encode (JSON can escape half a surrogate pair)."""
    return isinstance(value, str) and value != "" and is_unicode(value)
