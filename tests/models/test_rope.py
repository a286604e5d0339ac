"""Rotary frequencies and what a config.json says of them, at the edges: as `transformers` has them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from small import CONFIG
from torch import Tensor

from lockstep import ops
from lockstep.errors import InputError
from lockstep.models import Decoder
from lockstep.models.blocks.rope import YarnScaling, inverse_frequencies, scaling_from_hf, scaling_to_hf
from lockstep.models.families import FAMILIES, Raw
from lockstep.models.families.family import FULL, SLIDING

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"original_max_position_embeddings": 65536},  # the slowest pair turns more than once over it
        {"beta_fast": 1.5, "truncate": False},
        {"attention_factor": 0.5},
        {"mscale": 0.7, "mscale_all_dim": 1.0},
    ],
)
def test_yarn_is_that_of_transformers(changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.Qwen3Config(head_dim=16, max_position_embeddings=1 << 18, rope_parameters=YARN | changes)
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    scaling = scaling_from_hf({"rope_parameters": YARN | changes}, "config.json")
    assert isinstance(scaling, YarnScaling) and scaling.table_factor == pytest.approx(factor)
    torch.testing.assert_close(inverse_frequencies(16, 10000.0, scaling), expected)
    assert scaling_from_hf({"rope_parameters": scaling_to_hf(scaling)}, "config.json") == scaling


def test_which_field_of_a_config_wins() -> None:
    both = {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 8.0}}
    found = [scaling_from_hf(raw, "config.json") for raw in (both, both | {"rope_scaling": None})]
    assert [s.factor for s in found if s] == [4.0, 8.0]
    beside = scaling_from_hf({"rope_parameters": YARN, "original_max_position_embeddings": 64}, "config.json")
    assert isinstance(beside, YarnScaling) and beside.original_max_position_embeddings == 64


@pytest.mark.parametrize(
    "values",
    [
        {"rope_parameters": {FULL: YARN, SLIDING: {}}, "original_max_position_embeddings": 64},
        {"rope_parameters": {FULL: {"type": "linear", "factor": 4.0, "rope_theta": 99.0}, SLIDING: None}},
        {"rope_theta": 77.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 99.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 77.0, "rope_parameters": {"rope_theta": 77.0, "type": "default"}},
        {
            "rope_parameters": {"rope_theta": 9.0, FULL: {"rope_type": "yarn", "factor": 4.0}},
            "max_position_embeddings": 99,
        },
    ],
)
def test_kinds_of_layers_have_what_transformers_gives_them(values: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    ours = FAMILIES["olmo3"].rope(Raw({"rope_theta": 5e5} | copy.deepcopy(values), "config.json"))
    try:
        theirs = transformers.Olmo3Config(**copy.deepcopy(values)).rope_parameters
    except AttributeError:
        pytest.skip(f"transformers {transformers.__version__} reads no such file")
    scaling = scaling_to_hf(ours["rope_scaling"])
    assert scaling == {name: theirs[FULL].get(name, scaling[name]) for name in scaling}
    assert ours["rope_theta"] == theirs[FULL]["rope_theta"]
    assert ours["local_rope_theta"] == theirs[SLIDING]["rope_theta"]


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_theta": 77.0}, "rope_theta for all layers; .* gives full_attention rope_theta 500000.0;"),
        (YARN, "factor, original_.*, rope_theta, rope_type for all layers; .* rope_type default;"),
        ({"truncate": False, FULL: YARN}, "truncate for all layers"),
    ],
)
def test_what_transformers_drops_is_refused(parameters: dict[str, Any], named: str) -> None:
    """Of what a file says for all layers where kinds have their own, which would be another model than it says."""
    with pytest.raises(InputError, match=rf"config\.json: rope_parameters has {named}"):
        FAMILIES["olmo3"].rope(Raw({"rope_theta": 5e5, "rope_parameters": parameters}, "config.json"))


class Rotations:
    """An `Attend` that keeps the table of cosines and sines it is given."""

    def prepare(self, *sizes: int) -> None:
        pass

    def __call__(self, layer: int, qkv_TE: Tensor, by: ops.Rotation, *_: object) -> Tensor:
        self.table = by.cos_sin_TH
        return torch.zeros(qkv_TE.shape[0], by.num_heads, by.cos_sin_TH.shape[1])


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
def test_the_factor_is_on_cosines_and_sines(factor: float) -> None:
    scaling = YarnScaling(4.0, 32, attention_factor=factor)
    model, attend = Decoder(replace(CONFIG, num_layers=1, rope_scaling=scaling), torch.float32), Rotations()
    for parameter in model.parameters():
        parameter.data.zero_()
    model(torch.zeros(3, dtype=torch.int64), torch.arange(3), attend)
    expected = factor * ops.rope_table(torch.arange(3), model.inv_freq)
    assert torch.equal(attend.table, expected)
