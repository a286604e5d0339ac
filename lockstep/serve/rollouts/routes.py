"""The routes for taking and ending rollouts, and their bodies."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.responses import Response

from ...environments.episodes.answers import reward_error
from ...environments.remote import TurnRefused
from ..bodies import read_body
from ..errors import ApiError, bad_field, shutting_down
from ..events import json_response
from ..service import Service
from ..ticket import ClientLeft
from .service import RolloutService

PREFIX = "/rollouts/{rollout}"  # prefix of each rollout's routes
DEFAULT_WAIT_S = 10.0  # default seconds that a request waits for a rollout


class TakeBody(BaseModel):
    """The body of `/rollouts`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    wait: Annotated[float, Field(ge=0, le=600)] = DEFAULT_WAIT_S


def _require_reward(reward: Any) -> Any:
    if reward is not None and (wrong := reward_error(reward)):
        raise ValueError(wrong)
    return reward


class EndBody(BaseModel):
    """The body of `/rollouts/ID/end`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    reward: Annotated[Any, AfterValidator(_require_reward)] = None
    error: str | None = None


async def take_rollout(service: Service, request: Request) -> Response:
    """Answer with a rollout to play, once there is one; with status 503 if there is none in time."""
    assert isinstance(service, RolloutService)
    body = await read_body(request, TakeBody, service.settings.max_body_mib << 20)
    rollout = None if service.stopping else await service.registry.take(body.wait)
    if rollout is None:
        if service.stopping:
            raise shutting_down()
        raise ApiError(503, "there is no rollout to play now", code="no_rollout")
    if await request.is_disconnected():
        service.registry.offer(rollout)
        raise ClientLeft
    base = str(request.base_url).rstrip("/")
    answer = {"id": rollout.id, "base_url": f"{base}/rollouts/{rollout.id}/v1", "model": service.settings.name}
    return json_response({**answer, "row": orjson.Fragment(rollout.row_json), "seed": rollout.seed})


async def end_rollout(service: Service, request: Request) -> Response:
    assert isinstance(service, RolloutService)
    body = await read_body(request, EndBody, service.settings.max_body_mib << 20)
    if body.error is not None and body.reward is not None:
        raise bad_field("reward", "reward has no effect beside error; leave one of them out")
    rollout = service.rollout(request)
    try:
        if body.error is not None:
            rollout.fail(body.error)
        else:
            rollout.end(body.reward)
    except TurnRefused as error:
        raise ApiError(410, str(error), code="rollout_over") from error
    return json_response({})
