"""A model with its tokenizer: encoding prompts, with and without tools, and decoding completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property, partial
from typing import Any

from ...environments import (
    ChatCodec,
    Environment,
    Problem,
    PromptLimit,
    Task,
    TurnMessage,
    log_notice,
    parse_plain_turn,
)
from ...environments.base import Encode, Prompt
from ...environments.tools import ToolEnvironment, as_chat, begins_with_chat
from ...errors import InputError, PromptTooLong, refuse
from ...models import Decoder, WeightSource
from ...models.tokenizer import (
    TODAY,
    encode_continuation,
    encode_following,
    encode_prompt,
    end_of_answer,
    max_token_bytes,
    require_known,
    require_prompt_fits,
    shows_today,
)
from ...types import Segment
from ...user_functions import as_input_error, is_unicode
from .messages import check_variables
from .tool_calls import Tool, ToolFormat
from .tool_formats import FORMATS, may_use_special_tokens, tool_format

MAX_PROBED_GROUPS = 1024  # at most so many prompts of the first step are measured to plan the KV cache


@dataclass
class Policy:
    """A model in its compute dtype on its device, with its tokenizer. `source`: where its weights come from."""

    model: Decoder
    tokenizer: Any
    source: WeightSource | None = None
    template_variables: dict[str, Any] = field(default_factory=dict)

    def set_variables(self, variables: dict[str, Any], where: str) -> None:
        """Set the chat template's variables. Raises `FieldError`, naming `where`, for one that it does not read."""
        check_variables(self.tokenizer.chat_template, variables, where)
        self.template_variables = variables

    def encode(
        self, prompt: str | list[dict[str, Any]], tools: Sequence[Tool] = (), more: dict[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a prompt: text, or messages shown by the chat template with these tools and `more` variables."""
        require_prompt_fits(prompt, self.model.config.max_position_embeddings, self.max_token_bytes)
        token_ids = encode_prompt(self.tokenizer, prompt, self._variables_with(tools) | (more or {}))
        return token_ids if max(token_ids, default=0) < self.model.config.vocab_size else self.known(token_ids)

    def known(self, token_ids: list[int]) -> list[int]:
        """Return `token_ids` of a text. `InputError`: one of them is beyond the model's vocabulary."""
        return require_known(self.tokenizer, token_ids, self.model.config.vocab_size)

    def _variables_with(self, tools: Sequence[Tool]) -> dict[str, Any]:
        return self.template_variables | ({"tools": list(tools)} if tools else {})

    @cached_property
    def max_token_bytes(self) -> int:
        """An upper bound on the bytes of text that one token stands for."""
        return max_token_bytes(self.tokenizer)

    def encode_completion(self, text: str, in_chat: bool) -> list[int]:
        """Token ids of a completion with the token that ends it: in a chat that of the chat template, else the
        tokenizer's. If it has none, the model's first ends it, or nothing."""
        end = self.end_of_answer if in_chat else self.tokenizer.eos_token_id
        ends = self.model.config.eos_token_ids[:1] if end is None else (end,)
        return [*self.known(self.tokenizer.encode(text, add_special_tokens=False)), *ends]

    @cached_property
    def end_of_answer(self) -> int | None:
        """The token with which the chat template ends an answer; None if neither it nor the tokenizer has one."""
        return end_of_answer(self.tokenizer, self.template_variables, self.model.config.eos_token_ids)

    def encode_following(
        self, messages: list[dict[str, Any]] | None, given: str | list[dict[str, Any]], tools: Sequence[Tool] = ()
    ) -> list[int]:
        """Token ids of what follows an answer, the last of `messages` (None: the prompt was not a chat): plain text, or
        messages rendered by the model's template."""
        require_prompt_fits(given, self.model.config.max_position_embeddings, self.max_token_bytes)
        if isinstance(given, str):
            return self.known(encode_continuation(self.tokenizer, given))
        if messages is None:
            raise InputError("the environment gave messages after a text prompt; give text, or begin with messages")
        ends = [self.tokenizer.decode([token]) for token in self.model.config.eos_token_ids]
        return self.known(encode_following(self.tokenizer, messages, given, self._variables_with(tools), ends))

    @property
    def tokens(self) -> ChatCodec:
        return self.tokens_with(())

    def _parse_turn(self, turn: Segment, tools: Sequence[Tool] = ()) -> TurnMessage:
        assert self.tool_format is not None
        form = replace(self.tool_format, tools=tuple(tools))
        text = self.decode_for(turn.token_ids, form) if form.special_token else turn.text
        message, malformed = form.message(text)
        return TurnMessage(message, malformed, form.in_chat(text, message, malformed))

    def decode_for(self, token_ids: list[int], form: ToolFormat | None) -> str:
        """Text of a completion as `form` parses it: with special tokens if the format uses them."""
        if form is not None and form.special_token:
            return self.decode_with_special_tokens(token_ids)
        return self.decode(token_ids)

    def decode_with_special_tokens(self, token_ids: list[int]) -> str:
        """Text of a completion with special tokens, except a final end-of-sequence token."""
        if token_ids and token_ids[-1] in self.model.config.eos_token_ids:
            token_ids = token_ids[:-1]
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The format of tool calls in the model's chat template; None if it has no known one."""
        return tool_format(self.tokenizer, self.template_variables)

    def tokens_with(self, tools: Sequence[Tool]) -> ChatCodec:
        """`tokens` for a model that may call these tools. Raises `InputError` if its template has no known format."""
        form = self.tool_format if tools or may_use_special_tokens(self.tokenizer) else None
        if tools and form is None:
            raise InputError(
                f"the model's chat template teaches no form of tool calls that is known ({', '.join(FORMATS)}), so it "
                "cannot call tools; use another model, or an environment that reads calls itself"
            )
        encode, following = partial(self.encode, tools=tools), partial(self.encode_following, tools=tools)
        parse = parse_plain_turn
        if tools or (form is not None and form.special_token):
            parse = partial(self._parse_turn, tools=tools)
        return ChatCodec(encode, following, self.tokenizer.decode, parse, self.tokens_with, self.tokenizer)

    def prompt_encoder(self, tools: Sequence[Tool], as_chats: bool) -> Encode:
        """An encoder of a task's prompts with these tools; `as_chats` makes a text a chat, which shows tools."""
        encode = self.tokens_with(tools).encode_prompt
        return (lambda prompt: encode(as_chat(prompt))) if as_chats else encode

    def check_prompts(self, task: Task, environment: type[Environment], limit: PromptLimit, groups: int = 0) -> int:
        """Leave out prompts that exceed the limit with each of the environment's sets of tools, or refuse them, unless
        it begins with others. Returns `longest_prompt`.

        Args:
            groups: in a step; 0: without training.

        Raises:
            InputError: a prompt is too long, or the chat template refuses it.
        """
        encoders = self._prompt_encoders(environment)
        with as_input_error(f"task.environment: {environment.__name__}.begins_with_rows() raised"):
            must_fit = environment.begins_with_rows()
        task.check_lengths(lambda prompt: min((e(prompt) for e in encoders), key=len), limit, groups > 0, must_fit)
        longest = self.longest_prompt(task, environment, limit, groups, must_fit)
        if groups:
            self._note_if_dated(task.train_problem(0, 0).prompt, environment)
        return longest

    def _note_if_dated(self, prompt: Prompt, environment: type[Environment]) -> None:
        """Log that the chat template shows the prompt with today's date, if it does."""
        tools, *_ = environment.toolsets() or ((),)
        if begins_with_chat(environment, prompt) and shows_today(
            self.tokenizer, as_chat(prompt), self._variables_with(tools)
        ):
            log_notice(
                "the chat template shows today's date, so a run that is resumed or repeated on another day has other "
                'prompts; task.chat_template_kwargs %s="%s" keeps the day',
                *(TODAY, date.today()),
            )

    def longest_prompt(
        self, task: Task, environment: type[Environment], limit: PromptLimit, groups: int, must_fit: bool = False
    ) -> int:
        """The tokens of the longest prompt of the first step of `groups` prompts and of validation, tools included; at
        most the limit. Raises `InputError` for a prompt that the chat template refuses, or that `must_fit` and does not
        with any of the environment's sets of tools."""
        problems = [task.train_problem(0, group) for group in range(min(groups, MAX_PROBED_GROUPS))]
        problems += task.validation_problems()
        encoders = self._prompt_encoders(environment)
        sizes = [([self._size(encode, problem) for encode in encoders], problem.origin) for problem in problems]
        least, origin = max((min(of_one), origin) for of_one, origin in sizes)
        refuse(
            must_fit and least > limit.tokens,
            f"{origin + ': ' if origin else ''}a prompt has {least} tokens; at most {limit.tokens} are allowed "
            f"({limit.reason})",
        )
        return min(max(max(of_one) for of_one, _ in sizes), limit.tokens)

    def _prompt_encoders(self, environment: type[Environment]) -> list[Encode]:
        """An encoder for each of the environment's sets of tools. A `ToolEnvironment` always begins with a chat."""
        always = issubclass(environment, ToolEnvironment)
        return [self.prompt_encoder(tools, always or bool(tools)) for tools in environment.toolsets() or ((),)]

    def _size(self, encode: Encode, problem: Problem) -> int:
        """The tokens of a prompt, or the model's context if they are certainly more."""
        try:
            return len(encode(problem.prompt))
        except PromptTooLong:
            return self.model.config.max_position_embeddings
        except InputError as error:
            raise InputError(f"{problem.origin}: {error}" if problem.origin else str(error)) from error

    def decode(self, token_ids: list[int]) -> str:
        """Text of a completion, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def special_token(self, text: str) -> int | None:
        """The id of the special token with this text, which `decode` leaves out; None if there is none."""
        if len(text) > self.max_token_bytes or not is_unicode(text):
            return None
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        is_one = len(ids) == 1 and self.tokenizer.decode(ids, skip_special_tokens=False) == text
        return ids[0] if is_one and not self.decode(ids) else None
