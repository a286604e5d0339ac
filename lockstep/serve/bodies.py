"""Request bodies: their fields and allowed values, and fields that are not supported.

A field that would change the answer but is not supported is refused by name, never silently ignored.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal, TypeVar

import orjson
from fastapi import Request
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..config import MAX_SEED, MIN_TEMPERATURE
from ..types import SamplingParams
from .errors import ApiError, bad_field

# Fields that do not affect the answer.
_NO_EFFECT = {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options"}
_NO_EFFECT |= {"prompt_cache_retention", "prediction", "cache_salt", "priority", "routed_experts_prompt_start"}
_NO_EFFECT |= {"skip_special_tokens", "spaces_between_special_tokens", "detokenize"}

_DISTRIBUTION = "tokens are drawn from the model's own distribution, after temperature, top_k, top_p and min_p"
_UNCONSTRAINED = "sampling is not constrained"
_GUIDES = "json", "regex", "choice", "grammar"
_SAMPLED = "there are log-probabilities of sampled tokens alone"
_TEXT = "the model reads and writes text"
_TEMPLATE = "messages go through the model's own chat template, up to its generation prompt"
# Unsupported fields: the values that change nothing, which are accepted, and why no others are.
_UNSUPPORTED: dict[str, tuple[list[Any], str]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens"), ([0], _DISTRIBUTION)),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "logits_processors"), ([[]], _DISTRIBUTION)),
    "repetition_penalty": ([1], _DISTRIBUTION),
    "logit_bias": ([{}], _DISTRIBUTION),
    **dict.fromkeys(("structured_outputs", *(f"guided_{of}" for of in _GUIDES)), ([], _UNCONSTRAINED)),
    "response_format": ([{"type": "text"}], _UNCONSTRAINED),
    "parallel_tool_calls": ([True], f"{_UNCONSTRAINED}: an answer has as many calls as the model makes"),
    "best_of": ([1], "all n samples are answered"),
    "use_beam_search": ([False], "answers are sampled"),
    "length_penalty": ([1], "answers are sampled: no beams are ranked"),
    "echo": ([False], "an answer is what follows the prompt"),
    "suffix": ([""], "an answer is what follows the prompt"),
    "prompt_logprobs": ([], _SAMPLED),
    "truncate_prompt_tokens": ([], "a prompt is read whole"),
    "modalities": ([["text"]], _TEXT),
    "audio": ([], _TEXT),
    "functions": ([[]], "their place is tools"),
    "function_call": (["none", "auto"], "its place is tool_choice"),
    "add_generation_prompt": ([True], _TEMPLATE),
    "continue_final_message": ([False], _TEMPLATE),
    "chat_template": ([], _TEMPLATE),
    "documents": ([[]], f"{_TEMPLATE}; its variables are chat_template_kwargs"),
    "include_reasoning": ([True], "thoughts are no part of content, or are where the model has them"),
    "verbosity": (["medium"], "nothing tells the model of it"),
    "web_search_options": ([], "nothing is searched"),
    "moderation": ([], "nothing is moderated"),
    "store": ([False], "no answer is kept"),
    "include_obfuscation": ([False], "chunks have nothing in them but the answer"),
    "continuous_usage_stats": ([False], "usage comes with the last chunk"),
}


BODY_TIMEOUT_S = 60.0  # the most seconds for receiving a body
DRAIN_FACTOR = 4  # times the limit up to which a body is read to its end: a client that sends reads no answer


def _require_usable_temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"it must be at least {MIN_TEMPERATURE}, or 0 for greedy")
    return value


_as_list = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
_minus_one_is_off = BeforeValidator(lambda value: 0 if value == -1 else value)


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class SamplingFields(_Fields):
    """The sampling fields of all routes. Null counts as absent."""

    temperature: Annotated[float, Field(ge=0, le=1e4), AfterValidator(_require_usable_temperature)] = 1.0
    top_p: Annotated[float, Field(ge=1e-6, le=1)] = 1.0
    top_k: Annotated[int, _minus_one_is_off, Field(ge=0, lt=1 << 31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    n: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED)] = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], _as_list, Field(max_length=64)] = []
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] = []
    ignore_eos: bool = False

    def sampling(self, max_tokens: int) -> SamplingParams:
        """The engine's sampling parameters."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            max_completion_length=max_tokens,
            n=self.n,
            stop_token_ids=tuple(self.stop_token_ids),
            stop=tuple(self.stop),
            ignore_eos=self.ignore_eos,
        )


class StreamOptions(_Fields):
    include_usage: bool = False


class _Body(SamplingFields):
    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_tokens_as_token_ids: bool = False
    request_id: str = ""


class ChatBody(_Body):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    tools: list[dict[str, Any]] = []
    tool_choice: Any = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str = ""
    add_special_tokens: Literal[False] = False


class CompletionBody(_Body):
    """The body of `/v1/completions`. `prompt` is a text, token ids, or a list of either."""

    prompt: Any
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    add_special_tokens: Literal[True] = True


class TokenSampling(SamplingFields):
    """The field `sampling_params` of `TokensBody`."""

    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None


class TokensBody(_Fields):
    """The body of `/inference/v1/generate`."""

    token_ids: list[int]
    sampling_params: TokenSampling = TokenSampling()
    model: str = ""
    stream: bool = False
    return_token_ids: bool = False
    request_id: str = ""


_Kind = TypeVar("_Kind", bound=BaseModel)


async def read_body(request: Request, kind: type[_Kind], max_bytes: int) -> _Kind:
    """The request's body as a `kind`. Raises `ApiError` naming an invalid field, or if the body is not a JSON object,
    is larger than `max_bytes` bytes, or does not arrive in `BODY_TIMEOUT_S`."""
    try:
        given = orjson.loads(await _read_content(request, max_bytes))
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(given, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return parse(given, kind)


async def _read_content(request: Request, max_bytes: int) -> bytearray:
    """The content of a body of at most `max_bytes`; a larger `content-length` is refused without waiting."""
    large = ApiError(413, f"the body is larger than {max_bytes >> 20} MiB", code="body_too_large")
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise large
    content, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                size += len(piece)
                if size <= max_bytes:
                    content += piece
                elif size > DRAIN_FACTOR * max_bytes:
                    break
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:g} seconds", code="body_timeout") from error
    if size > max_bytes:
        raise large
    return content


def parse(given: dict[str, Any], kind: type[_Kind]) -> _Kind:
    """A JSON object as a `kind`. Raises `ApiError` naming an invalid field."""
    given = {name: _without_nulls(kind, name, value) for name, value in given.items() if value is not None}
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = _field_path(first["loc"])
        raise bad_field(param, f"{param}: {first['msg']}") from error
    _check_extra(body, "")
    if isinstance(body, _Body) and "stream_options" in body.model_fields_set and not body.stream:
        message = "stream_options has no effect on an answer that is not streamed; leave it out"
        raise bad_field("stream_options", message)
    return body


def _without_nulls(kind: type[BaseModel], name: str, value: Any) -> Any:
    """A nested object of settings without its null fields. Messages and values by name are left as they are."""
    field = kind.model_fields.get(name)
    settings = field is None or (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))
    return {k: v for k, v in value.items() if v is not None} if settings and isinstance(value, dict) else value


def _field_path(place: tuple[int | str, ...]) -> str:
    """`stop[0]` for ("stop", 0)."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def _check_extra(body: BaseModel, prefix: str) -> None:
    for name, value in (body.model_extra or {}).items():
        neutral, reason = _UNSUPPORTED.get(name, ([], ""))
        if name in _NO_EFFECT or value in neutral:
            continue
        what = f"is not supported, as {reason}; leave it out" if reason else "is no field of this route"
        raise bad_field(f"{prefix}{name}", f"{prefix}{name} {what}")
    for name in type(body).model_fields:
        inner = getattr(body, name)
        if isinstance(inner, BaseModel):
            _check_extra(inner, f"{prefix}{name}.")
