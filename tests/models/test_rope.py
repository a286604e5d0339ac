"""Rotary frequencies and what a config.json says of them, at the edges: as `transformers` has them."""

from __future__ import annotations

import copy
import json
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
from lockstep.models.hf.config import from_hf, to_hf

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


PHI4_MINI = {
    "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "vocab_size": 200064, "hidden_size": 3072,
    "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 24, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "sliding_window": 262144, "tie_word_embeddings": True,
    "attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5 + i for i in range(48)]},
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"attention_factor": 0.5}, {"factor": 8.0}, {"short_factor": [2.0, 3.0] * 24}])
def test_longrope_is_that_of_transformers_and_comes_back(changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = PHI4_MINI | {"rope_scaling": PHI4_MINI["rope_scaling"] | changes}
    ours = from_hf(values, "config.json")
    assert (ours.rotary_dim, ours.max_position_embeddings, ours.sliding_layers) == (96, 4096, ())
    written = json.loads(json.dumps(to_hf(ours, "bfloat16")))
    for given in (values, written):
        theirs = transformers.Phi3Config(**copy.deepcopy(given))
        expected, factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, torch.device("cpu"))
        assert ours.rope_scaling is not None and ours.rope_scaling.table_factor == pytest.approx(factor)
        assert torch.equal(inverse_frequencies(96, 10000.0, ours.rope_scaling), expected)
    assert from_hf(written, "config.json") == ours
    assert written["rope_scaling"] == values["rope_scaling"] and written["max_position_embeddings"] == 131072


def test_a_written_share_of_a_head_is_read_as_the_same_elements() -> None:
    assert int(44 * (30 / 44)) == 29
    for family in ("glm4_moe", "phi3"):
        ours = replace(next(iter(FAMILIES[family].architectures.values())), head_dim=44, rotary_dim=30)
        assert int(44 * to_hf(ours, "bfloat16")["partial_rotary_factor"]) == 30


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
