"""Every model family through both roles: bits equal before and after updates, eager and captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from c_library import using
from small import (
    CONFIG,
    DEEPSEEK,
    FAMILIES,
    assert_no_schedule_changes_a_bit,
    compare,
    generate,
    make_model,
    requests,
    rounds,
    train_groups,
)

from lockstep.config import OptimizerConfig
from lockstep.generator import Engine
from lockstep.models.config import MLAConfig, MoEConfig
from lockstep.ops.native import library

ODD = replace(CONFIG, hidden_size=70, intermediate_size=5, num_layers=2)
ODD_SIZES = {
    "5 heads of 6": replace(ODD, num_heads=5, num_kv_heads=5, head_dim=6),
    "6 heads of 10 on 2": replace(ODD, num_kv_heads=2, head_dim=10, family="llama"),
    "3 experts": replace(ODD, head_dim=10, family="qwen3_moe", moe=MoEConfig(3, 2, 7)),
    "latent of 5": replace(
        DEEPSEEK, hidden_size=70, head_dim=2, mla=MLAConfig(5, 6, 2, 3, 9), moe=MoEConfig(3, 2, 7, (0,), True)
    ),
}


# In either dtype, and of a head of its own as of a tied one; `tests/matrix.py` has the others, balanced biases
# DeepSeek's in bfloat16, and `tests/graph/test_captured_loop.py` Qwen3's.
CAPTURED = {name: torch.bfloat16 for name in ("qwen3_moe", "llama, scaled positions, tied")}
CAPTURED |= {name: torch.float32 for name in ("llama", "deepseek_v3")}


@pytest.mark.parametrize("path", ["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", ODD_SIZES)
def test_odd_sizes_agree(sizes: str, dtype: torch.dtype, path: str, engine_of: Callable[..., Engine]) -> None:
    if path == "native" and library.built is None:
        pytest.skip("the C library is not built")
    with using(library.built if path == "native" else None):
        model = make_model(dtype, config=ODD_SIZES[sizes])
        prompts, sampling = requests(4, length=12)
        completions = generate(engine_of(model), prompts, sampling)
        result = compare(model, train_groups(prompts, sampling, completions), max_tokens=200)
    assert result.tokens_different == 0 < result.tokens_checked


@pytest.mark.parametrize(
    ("family", "capture", "dtype"),
    [
        *((family, "none", dtype) for family in FAMILIES for dtype in (torch.float32, torch.bfloat16)),
        *((family, "step", dtype) for family, dtype in CAPTURED.items()),
    ],
)
def test_generator_and_trainer_agree_over_updates(family: str, capture: str, dtype: torch.dtype) -> None:
    completions, different = family_rounds(family, capture, dtype)
    assert different == [0, 0, 0]
    assert completions[0] != completions[1] != completions[2]


@pytest.mark.parametrize("family", CAPTURED)
def test_captured_is_eager(family: str) -> None:
    assert family_rounds(family, "none", CAPTURED[family]) == family_rounds(family, "step", CAPTURED[family])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_no_schedule_or_packing_changes_a_bit(
    family: str, dtype: torch.dtype, engine_of: Callable[..., Engine]
) -> None:
    assert_no_schedule_changes_a_bit(make_model(dtype, config=FAMILIES[family]), engine_of, count=5, page_size=7)


def test_balanced_biases_are_the_same_captured_and_change_no_parity() -> None:
    optimizer = OptimizerConfig(router_bias_rate=0.01)
    eager = make_model(torch.bfloat16, config=DEEPSEEK)
    captured = make_model(torch.bfloat16, config=DEEPSEEK)
    before = [bias.clone() for bias in eager.buffers()]
    found = rounds(eager, "none", optimizer=optimizer)
    assert found == rounds(captured, "step", optimizer=optimizer)
    assert found[1] == [0, 0, 0]
    for old, bias, other in zip(before, eager.buffers(), captured.buffers(), strict=True):
        assert torch.equal(bias, other)
        moves = (bias - old) / 0.01
        assert moves.any() and torch.allclose(moves, moves.round(), atol=1e-4) and moves.abs().max() < 3.5


@cache
def family_rounds(family: str, capture: str, dtype: torch.dtype) -> tuple[list, list[int]]:
    return rounds(make_model(dtype, config=FAMILIES[family]), capture)
