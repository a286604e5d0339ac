"""What all tests share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lockstep.config import GeneratorConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.models import Decoder

# Tests run beside each other and beside other work; threads that spin for each other would be many times slower.
torch.set_num_threads(1)


@pytest.fixture
def engine_of() -> Callable[..., Engine]:
    """`engine_of(model, cache_tokens=..., **GeneratorConfig fields)`."""

    def make(model: Decoder, cache_tokens: int = 16384, **fields) -> Engine:
        return Engine(SharedWeights(model), GeneratorConfig(**fields), cache_tokens)

    return make
