"""`/inference/v1/generate`: token ids in, token ids and log-probabilities out; nothing is decoded or encoded.

The interface is vLLM's, which training clients of verifiers use. `logprob` is in the sampled distribution, after
temperature and filters, as a trainer compares it; `model_logprob`, an additional field, is in the model's own.
"""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ...types import Trajectory
from ..bodies import TokensBody, read_body
from ..errors import bad_field
from ..events import json_response
from ..service import Service
from .common import token_usage, weights_version


async def generate_tokens(service: Service, request: Request) -> Response:
    body = await read_body(request, TokensBody, service.settings.max_body_mib << 20)
    service.check_model(body.model)
    if body.stream:
        raise bad_field("stream", "stream must be false: this route answers at once")
    sampling = body.sampling_params
    if sampling.logprobs is not None and sampling.logprobs > 1:
        message = "sampling_params.logprobs must be 0 or 1: there are log-probabilities of sampled tokens alone"
        raise bad_field("sampling_params.logprobs", message)
    seed = service.ensure_seed(sampling)
    room = max(1, service.context - len(body.token_ids))
    job = service.job(body.token_ids, sampling, sampling.max_tokens or room, "token_ids")
    async with service.open_ticket(request, [job]) as ticket:
        (samples,) = await ticket.completions()
    choices = [_choice(i, completion) for i, completion in enumerate(samples)]
    answer: dict[str, Any] = {
        "request_id": body.request_id or f"gen-{uuid.uuid4().hex}",
        "seed": seed,
        "choices": choices,
    }
    if body.return_token_ids:
        answer["prompt_token_ids"] = body.token_ids
    return json_response({**answer, "usage": token_usage([job], sum(len(c.token_ids) for c in samples))})


def _choice(index: int, completion: Trajectory) -> dict[str, Any]:
    columns = zip(completion.token_ids, completion.logprobs, completion.model_logprobs, strict=True)
    content = [
        {"token": f"token_id:{token}", "logprob": logprob, "model_logprob": own} for token, logprob, own in columns
    ]
    choice: dict[str, Any] = {"index": index, "token_ids": completion.token_ids}
    choice |= {"finish_reason": completion.finish_reason, "logprobs": {"content": content}}
    return choice | weights_version(completion)
