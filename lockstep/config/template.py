"""`task.chat_template_kwargs`: variables for a model's chat template."""

from __future__ import annotations

import json
from typing import Any

from ..errors import InputError

# What rendering a prompt sets itself.
_TEMPLATE_ARGUMENTS = (
    *("messages", "conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    "tokenizer_kwargs",
)


def template_variables(assignments: tuple[str, ...], field: str = "task.chat_template_kwargs") -> dict[str, Any]:
    """What `field` holds as a dict. `InputError` for another form, or a name that the call itself sets."""
    variables: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name.isidentifier() or name in variables:
            raise InputError(
                f"{field} holds {assignment!r}; each must be NAME=VALUE, a name once, such as enable_thinking=false"
            )
        if name in _TEMPLATE_ARGUMENTS:
            raise InputError(f"{field} sets {name}, which is set for every prompt; remove it")
        try:
            variables[name] = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{field}: the value of {assignment!r} is not JSON; write true, false, a number, or "
                "a text in quotes, as in 'name=\"text\"'"
            ) from error
    return variables
