"""Where parameters lie: what is declared in the models, and what a rank has of each."""

from __future__ import annotations

from math import prod

import pytest
import torch

from lockstep.distributed import ONE_PROCESS, Axis, Mesh, World
from lockstep.distributed.placement import ROWS, WHOLE, Placement
from lockstep.models import Decoder
from lockstep.models.init import architecture

PAIR = Mesh(ep=Axis("ep", 2), tp=Axis("tp", 2))


@pytest.mark.parametrize("arch", ["tiny", "tiny-llama", "tiny-qwen3-moe", "tiny-deepseek-v3"])
def test_every_parameter_says_how_it_lies(arch: str) -> None:
    model = Decoder(architecture(arch), torch.float32, "meta")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert model.placements.keys() == shapes.keys()
    for name, shape in shapes.items():
        on = model.placements[name]
        assert on.part_shape(ONE_PROCESS.mesh, shape) == on.part_shape(World(1, 8).mesh, shape) == shape, name
        whole = len(shape) == 1 or name.endswith("router") or name == "embed"
        assert prod(shape) == prod(on.part_shape(PAIR, shape)) * (1 if whole else 4 if "experts." in name else 2), name
        assert not on.blocks or sum(on.blocks) == shape[on.tp], name
        assert on.tp is None or on.tp == len(shape) - 2, name  # outputs, never what is summed over


def test_what_is_fused_is_cut_block_by_block() -> None:
    fused = Placement(tp=0, blocks=(64, 16, 16))
    assert fused.part_shape(PAIR, (96, 5)) == (48, 5)
    with pytest.raises(ValueError, match=r"\[9, 5\]: 2 ranks of tp cannot share dimension 0 evenly"):
        Placement(tp=0, blocks=(4, 4, 1)).part_shape(PAIR, (9, 5))
    with pytest.raises(ValueError, match="2 ranks of tp cannot share"):
        ROWS.part_shape(PAIR, (3, 4))
    assert WHOLE.part_shape(PAIR, (3, 4)) == (3, 4)


def test_an_axis_deals_items_out_in_turn() -> None:
    axes = [World(rank, 3).mesh.fsdp for rank in range(3)]
    assert [axis.local_items(range(7)) for axis in axes] == [range(0, 7, 3), range(1, 7, 3), range(2, 7, 3)]
    assert (
        axes[0].max_local_items(7) == 3 == max(len(axis.local_items(range(7))) for axis in axes)
        and axes[0].group == "@fsdp"
    )
    assert World(0, 3).sizes == {"fsdp": 3} and ONE_PROCESS.sizes == {} and World(0, 2, tp=2).sizes == {"tp": 2}
