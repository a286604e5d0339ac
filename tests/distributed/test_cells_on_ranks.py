"""Eight shards in two cells have the same bits on one process, on two and on four."""

from __future__ import annotations

import pytest
import torch
from cell_cases import CELL, KINDS, SHARDS, SMALL_CELL, on_a_rank, steps, trainer_of
from processes import on_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, list[str]]]]:
    """By the number of ranks, of each rank; four go on also from the state of two."""
    folder = tmp_path_factory.mktemp("states")
    return {2: on_ranks(2, on_a_rank, folder, 0), 4: on_ranks(4, on_a_rank, folder, 2)}


@pytest.mark.parametrize("kind", KINDS)
def test_rollouts_losses_norms_and_weights_are_those_of_one_process(found: dict, kind: str) -> None:
    """Of steps of two updates, the second of them on four ranks also where two have begun."""
    torch.set_num_threads(1)
    one = steps(trainer_of(kind), [0, 1])
    assert [rank[kind] for ranks in found.values() for rank in ranks] == [one] * 6
    assert [rank[f"{kind}, resumed"] for rank in found[4]] == [one[1:]] * 4


def test_cells_of_fewer_ranks_than_there_are_add_up_what_is_theirs_first(found: dict) -> None:
    torch.set_num_threads(1)
    one = steps(trainer_of("dense", cell=SMALL_CELL), [0])
    assert [rank["small cells"] for rank in found[4]] == [one] * 4 and one != found[2][0]["dense"][:1]
    bucketed, reordered = found[4][0]["exchanges"][:2]
    assert bucketed.endswith(" 18 -> 4 exchanges, 18 -> 4 exchanges between cells")
    assert reordered.endswith(" 6 exchanges end a layer late")


def test_another_order_of_cells_has_other_bits(found: dict) -> None:
    """The control: the second cell before the first."""
    torch.set_num_threads(1)
    assert steps(trainer_of("dense"), [0], [*range(CELL, SHARDS), *range(CELL)]) != found[2][0]["dense"][:1]
