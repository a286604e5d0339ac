"""Bodies of requests: their fields, what each may be, and what the engine has no answer for.

A field that would change the answer and that nothing here reads is refused by name, never dropped in silence.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import Request
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..config import LEAST_TEMPERATURE, MAX_SEED
from ..types import SamplingParams
from .errors import ApiError, refused

# Fields that no answer depends on, and those that are taken at the one value that changes nothing.
_NO_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_salt"}
_NO_EFFECT |= {"priority", "request_id", "routed_experts_prompt_start", "skip_special_tokens", "detokenize"}
_NO_EFFECT |= {"spaces_between_special_tokens"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "prompt_logprobs": (0,),
    "bad_words": ([],),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
}


BODY_SECONDS = 60.0  # that a body may take to come
READ_TO_ITS_END = 4  # times the limit: a client that still sends reads no answer


def _greedy_or_warm(value: float) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        raise ValueError(f"it must be at least {LEAST_TEMPERATURE}, or 0 for greedy")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _off(value: Any) -> Any:
    return 0 if value == -1 else value


class SamplingFields(BaseModel):
    """What all routes sample by. A field that is null is as one that is left out."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    temperature: Annotated[float, Field(ge=0, le=1e4), AfterValidator(_greedy_or_warm)] = 1.0
    top_p: Annotated[float, Field(ge=1e-6, le=1)] = 1.0
    top_k: Annotated[int, BeforeValidator(_off), Field(ge=0, lt=1 << 31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    n: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED)] = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list), Field(max_length=64)] = []
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] = []
    ignore_eos: bool = False

    def sampling(self, max_tokens: int) -> SamplingParams:
        """As the engine takes it."""
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


class StreamOptions(BaseModel):
    """Of a streamed answer."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool = False


class _Body(SamplingFields):
    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_tokens_as_token_ids: bool = False


class ChatBody(_Body):
    """Of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    tools: list[dict[str, Any]] = []
    tool_choice: Any = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str = ""


class CompletionBody(_Body):
    """Of `/v1/completions`. `prompt` is a text, token ids, or a list of either."""

    prompt: Any
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None


class TokenSampling(SamplingFields):
    """Of `sampling_params`."""

    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None


class TokensBody(BaseModel):
    """Of `/inference/v1/generate`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    token_ids: list[int]
    sampling_params: TokenSampling = TokenSampling()
    model: str = ""
    stream: bool = False
    return_token_ids: bool = False


_Kind = TypeVar("_Kind", bound=BaseModel)


async def read_body(request: Request, kind: type[_Kind], most: int) -> _Kind:
    """The request's body as a `kind`. Raises `ApiError` naming the field that is wrong, and for a body that is no JSON
    object, or larger than `most` bytes."""
    content, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                size += len(piece)
                if size <= most:
                    content += piece
                elif size > READ_TO_ITS_END * most:
                    break
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {BODY_SECONDS:g} seconds", code="body_timeout") from error
    if size > most:
        raise ApiError(413, f"the body is larger than {most >> 20} MiB", code="body_too_large")
    try:
        given = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(given, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return parse(given, kind)


def parse(given: dict[str, Any], kind: type[_Kind]) -> _Kind:
    """The body of a JSON object. Raises `ApiError` naming the field that is wrong."""
    given = {name: _without_nulls(value) for name, value in given.items() if value is not None}
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = _path(first["loc"])
        raise refused(param, f"{param}: {first['msg']}") from error
    _check_extra(body, "")
    if isinstance(body, _Body) and "stream_options" in body.model_fields_set and not body.stream:
        raise refused("stream_options", "stream_options has no effect on an answer that is not streamed; leave it out")
    return body


def _without_nulls(value: Any) -> Any:
    """An object of settings without the fields that are null; messages are left as they are."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _path(place: tuple[int | str, ...]) -> str:
    """`stop[0]` for ("stop", 0)."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def _check_extra(body: BaseModel, prefix: str) -> None:
    for name, value in (body.model_extra or {}).items():
        if name in _NO_EFFECT or any(value == neutral for neutral in _NEUTRAL.get(name, ())):
            continue
        if name in _NEUTRAL:
            raise refused(f"{prefix}{name}", f"{prefix}{name} is not supported; leave it out")
        raise refused(f"{prefix}{name}", f"{prefix}{name} is no field of this route")
    for name in type(body).model_fields:
        inner = getattr(body, name)
        if isinstance(inner, BaseModel):
            _check_extra(inner, f"{prefix}{name}.")
