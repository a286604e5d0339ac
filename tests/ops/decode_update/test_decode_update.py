"""The state of decode rows from one token to the next, and its kernels under Triton's interpreter.

As in `test_kernels_interpret`, one test runs `Interpreted` in a process of its own.
"""

import os
from typing import Any

import pytest
import torch
from processes import run_interpreted

from lockstep import ops
from lockstep.ops.decode_update import operator as decode_update_operator

if os.environ.get("TRITON_INTERPRET") == "1":
    from lockstep.ops.decode_update import triton as kernels

PAGE, NULL_PAGE, STEPS = 4, 50, 3


def rows(count: int, routed: bool = False) -> dict[str, torch.Tensor]:
    """Rows of all kinds: idle, at their last token, about to draw one of their stop ids, in the middle."""
    torch.manual_seed(count)
    remaining = torch.randint(0, 4, (count,), dtype=torch.int32)
    drawn = torch.randint(0, 6, (count,))
    return {
        "drawn": drawn,
        "logprob": torch.randn(count),
        "model_logprob": torch.randn(count),
        "stop": torch.randint(-1, 6, (count, 4)),
        "token": torch.randint(0, 6, (count,)),
        "position": torch.where(remaining == 0, 0, torch.randint(0, 5 * PAGE, (count,))),
        "remaining": remaining,
        "results": torch.full((count, 3 + routed, STEPS), 9, dtype=torch.int32),
        "next": torch.tensor([1]),
        **({"route": torch.arange(count, dtype=torch.int32) * 2654435 + 2**30} if routed else {}),
        "table": torch.randint(0, NULL_PAGE, (count, 6), dtype=torch.int32),
    }


def arguments(r: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    """Of `decode_advance`."""
    drawn, state = list(r.values())[:3], list(r.values())[3:9]
    return ops.SampledTokens(*drawn), ops.DecodeRows(*state), *([r["route"]] if "route" in r else [])


def test_slots_are_of_the_rows_own_page_and_an_idle_rows_of_the_null_page() -> None:
    r = rows(40)
    slots, context = ops.decode_slots(r["position"], r["remaining"], r["table"], PAGE, NULL_PAGE)
    for row, (position, remaining) in enumerate(zip(r["position"].tolist(), r["remaining"].tolist(), strict=True)):
        own = int(r["table"][row, position // PAGE]) * PAGE + position % PAGE
        assert slots[row] == (own if remaining else NULL_PAGE * PAGE)
        assert context[row] == position + 1
    assert slots.dtype == torch.int64 and context.dtype == torch.int32


def test_a_row_moves_on_or_becomes_idle() -> None:
    r = rows(60)
    before = {name: tensor.clone() for name, tensor in r.items()}
    ops.decode_advance(*arguments(r))
    kinds = set()
    for row in range(60):
        old = {name: tensor[row].tolist() for name, tensor in before.items() if name != "next"}
        left = max(0, old["remaining"] - 1) * (old["drawn"] not in old["stop"])
        kinds.add((old["remaining"] > 0, left > 0))
        assert (r["remaining"][row], r["position"][row]) == (left, old["position"] + 1 if left else 0)
        assert r["token"][row] == old["drawn" if old["remaining"] else "token"]
        assert r["results"][row, 0].tolist() == [9, old["drawn"] if old["remaining"] else -1, 9]
    words = r["results"][:, 1:, 1].contiguous().view(torch.float32)
    busy = (before["remaining"] > 0).unsqueeze(1)
    assert torch.equal(words, torch.stack((r["logprob"], r["model_logprob"]), dim=1) * busy)
    assert kinds == {(False, False), (True, False), (True, True)} and r["next"].item() == 2


def test_a_result_has_a_fourth_word_for_the_experts() -> None:
    plain, routed = rows(20), rows(20, routed=True)
    ops.decode_advance(*arguments(plain))
    ops.decode_advance(*arguments(routed))
    assert torch.equal(routed["results"][:, 3, 1], routed["route"] * (plain["results"][:, 0, 1] >= 0))
    assert torch.equal(routed["results"][:, :3], plain["results"])


def test_kernels_under_the_interpreter() -> None:
    run_interpreted(__file__)


class Interpreted:
    @pytest.mark.parametrize("routed", [False, True])
    @pytest.mark.parametrize("count", [1, 3, 128, 130, 257])
    def test_they_do_what_the_reference_does(self, count: int, routed: bool) -> None:
        reference, own = rows(count, routed), rows(count, routed)
        for _ in range(2):
            slots, expected = (
                slots(r["position"], r["remaining"], r["table"], PAGE, NULL_PAGE)
                for slots, r in ((kernels.slots, own), (decode_update_operator.decode_slots, reference))
            )
            assert all(map(torch.equal, slots, expected))
            decode_update_operator.decode_advance(*arguments(reference))
            kernels.advance(*arguments(own))
            assert all(torch.equal(own[name], reference[name]) for name in own)
