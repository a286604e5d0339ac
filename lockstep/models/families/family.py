"""`Family`, the record of what distinguishes the models of one `model_type`, and helpers that families share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ...errors import InputError, refuse
from ..blocks.layer import Layer
from ..blocks.rope import YarnScaling, is_positive, rope_of_hf, scaling_from_hf, scaling_to_hf
from ..blocks.weight_slices import LayerSlice, slices_of_layer
from ..blocks.weights import Weight
from ..config import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers


@dataclass(frozen=True)
class Raw:
    """A parsed config.json; `where` names the file in errors."""

    values: dict[str, Any]
    where: str

    def integer(self, *names: str) -> int:
        """The first of these fields that is present; `InputError` if it is not an integer."""
        name = next((n for n in names if n in self.values), names[0])
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputError(f"{self.where}: {name} is {value!r}; it must be an integer")
        return value

    def refuse(self, condition: Any, what: str) -> None:
        """Raise `InputError` naming the file if `condition` holds."""
        refuse(bool(condition), f"{self.where}: {what}")


def rope(raw: Raw) -> dict[str, Any]:
    values = rope_of_hf(raw.values, raw.where)
    theta = values.get("rope_theta") or raw.values.get("rope_theta") or 10000.0
    return {"rope_theta": float(theta), "rope_scaling": scaling_from_hf(raw.values, raw.where)}


def nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """What a `model_type` implies.

    Attributes:
        architecture: the class name in transformers.
        layer: makes a layer of the decoder from `(config, index, weight)`; called like `blocks.layer.Layer`.
        slices: the tensors of a layer in a folder, from `(config, index)`.
        fixed: fields of config.json that the decoder implements for one value only, with the spellings of that value;
            the first is assumed if the field is absent.
        read: reads the `ModelConfig` fields that are specific to the family, or named differently in its config.json.
        write: the inverse of `read`.
        rope: reads the `ModelConfig` fields for rotary positions.
        also: fields of config.json that the family reads and most do not.
        sizes: further fields of config.json that are integers above 0.
        layer_kinds: the values allowed in config.json's `layer_types`.
        quantized: quantization methods whose weights are dequantized on loading.
        check: raises `InputError` for a configuration, made in code or read, that the layers do not support.
        norm_offset: added to the weights of the final norm.
        embedding_scale: the factor on embeddings.
        defaults: defaults of config.json fields that differ from most families'.
        leaves_out: whether the decoder has no use for a tensor of a folder.
        inside: the `model_type` of multimodal models whose text model is of this family.
        golden: small decoders whose gradients fingerprint a machine's arithmetic for this configuration, by the names
            stored in run folders; from the configuration and the dense decoder of odd sizes that is always included.
        architectures: random models, by the names that users give.
    """

    architecture: str
    layer: Callable[[ModelConfig, int, Weight], nn.Module] = Layer
    slices: Callable[[ModelConfig, int], Iterable[LayerSlice]] = slices_of_layer
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    read: Callable[[Raw], dict[str, Any]] = nothing
    write: Callable[[ModelConfig], dict[str, Any]] = nothing
    rope: Callable[[Raw], dict[str, Any]] = rope
    also: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    layer_kinds: tuple[str, ...] = (FULL,)
    quantized: tuple[str, ...] = ()
    check: Callable[[ModelConfig], None] = lambda config: None
    norm_offset: float = 0.0
    embedding_scale: Callable[[ModelConfig], float] = lambda config: 1.0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    leaves_out: Callable[[str, ModelConfig], bool] = lambda name, config: False
    inside: tuple[str, ...] = ()
    golden: Callable[[ModelConfig, ModelConfig], dict[str, ModelConfig]] = nothing
    architectures: Mapping[str, ModelConfig] = field(default_factory=dict)

    def takes(self, name: str, value: Any) -> bool:
        """Whether the family supports this value of a field that only some families read."""
        if name == "quantization_config":
            return isinstance(value, dict) and value.get("quant_method") in self.quantized
        if name == "layer_types":
            return isinstance(value, list) and all(kind in self.layer_kinds for kind in value)
        return value in self.fixed[name] if name in self.fixed else name in self.also


EXPERT_SIZES = (
    *("moe_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok", "decoder_sparse_step"),
    *("n_routed_experts", "n_group", "topk_group"),
)
PARTLY, BY_KIND = "partial_rotary_factor", FULL  # refused by `rope_of_hf`; in `also` of families that read them
PLAIN: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish"), "attention_bias": (False, None)}
WINDOW: dict[str, Any] = {"sliding_window": 4096}  # transformers' default for use_sliding_window without a size


def windows_by_layer(raw: Raw) -> dict[str, Any]:
    """Windows by `layer_types` or, without it, from layer `max_window_layers` on."""
    layers = range(raw.integer("num_hidden_layers"))
    kinds = raw.values.get("layer_types")
    if kinds is None:
        first = raw.values.get("max_window_layers", 28)  # as in transformers
        return switched_windows(raw, tuple(i for i in layers if i >= first))
    sliding = sliding_layers(raw, kinds)
    wanted = sliding and not raw.values.get("use_sliding_window")
    raw.refuse(wanted, f"layer_types has {SLIDING}, and use_sliding_window is not true")
    return switched_windows(raw, sliding)


def sliding_layers(raw: Raw, kinds: list[str]) -> tuple[int, ...]:
    """The layers that have a window according to `layer_types`."""
    layers = range(raw.integer("num_hidden_layers"))
    wrong = len(kinds) != len(layers)
    raw.refuse(wrong, f"layer_types has {len(kinds)} entries; there are {len(layers)} layers")
    return tuple(i for i in layers if kinds[i] == SLIDING)


def switched_windows(raw: Raw, layers: tuple[int, ...]) -> dict[str, Any]:
    """A window in these layers, if `use_sliding_window` is true."""
    if not raw.values.get("use_sliding_window") or not layers:
        return {}
    raw.refuse(not raw.values.get("sliding_window"), "sliding_window is None; it must be an integer")
    return window_of(raw, layers)


def window_of(raw: Raw, layers: Iterable[int]) -> dict[str, Any]:
    """A window in these layers, if the file has one."""
    if not (chosen := tuple(layers)) or not raw.values.get("sliding_window"):
        return {}
    return {"sliding_window": raw.integer("sliding_window"), "sliding_layers": chosen}


def write_windows_by_layer(config: ModelConfig) -> dict[str, Any]:
    if not config.sliding_layers:
        return write_switched_window(config)
    first = next(i for i, window in enumerate(config.windows) if window)
    return {**write_switched_window(config), "max_window_layers": first, "layer_types": layer_types(config)}


def write_switched_window(config: ModelConfig) -> dict[str, Any]:
    window = config.sliding_window if config.sliding_layers else None
    return {"use_sliding_window": window is not None, "sliding_window": window}


def layer_types(config: ModelConfig) -> list[str]:
    return [SLIDING if window else FULL for window in config.windows]


def all_but_every(period: int, layers: int) -> tuple[int, ...]:
    """All layers but every `period`th."""
    return tuple(i for i in range(layers) if (i + 1) % period)


def alternating(raw: Raw, period: int) -> dict[str, Any]:
    """Windows by `layer_types` or, without it, in all layers but every `period`th."""
    layers, kinds = raw.integer("num_hidden_layers"), raw.values.get("layer_types")
    return window_of(raw, all_but_every(period, layers) if kinds is None else sliding_layers(raw, kinds))


def write_alternating(config: ModelConfig) -> dict[str, Any]:
    window = config.sliding_window or 4096  # transformers requires one even if no layer has it
    return {"sliding_window": window, "layer_types": layer_types(config)}


def rope_by_kind(raw: Raw, local: float) -> dict[str, Any]:
    """The rotary positions of full and of sliding layers; `local` is the default base of the latter."""
    all_layers, full, sliding = _parameters_by_kind(raw)
    other = sliding.get("rope_type", sliding.get("type", "default"))
    raw.refuse(
        other != "default", f"rope_type of {SLIDING} is {other!r}; 'default' is supported, scaled are full layers"
    )
    both = full | (raw.values.get("rope_scaling") or {})
    kind, old = both.get("rope_type", both.get("type")), both.get("type")
    raw.refuse(
        old not in (None, kind),
        f"the rope scaling of {FULL} has type {old!r}, which transformers does not read beside rope_type, which is "
        f"{kind!r}; write what is meant as rope_type",
    )
    context = {"max_position_embeddings": raw.values.get("max_position_embeddings")}
    theta = _base(raw, FULL, both, raw.values.get("rope_theta") or 10000.0)
    scaling = scaling_from_hf({"rope_parameters": both} | context, raw.where)
    _require_agreement(raw, all_layers, {"rope_theta": theta, **scaling_to_hf(scaling)})
    local = _base(raw, SLIDING, sliding, local)
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}


def _parameters_by_kind(raw: Raw) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The values in `rope_parameters` for all layers, for full layers and for sliding layers. The first are those that
    those of full layers do not override."""
    found = raw.values.get("rope_parameters") or {}
    for kind in (FULL, SLIDING):
        wrong = not isinstance(found.get(kind), dict | None)
        raw.refuse(wrong, f"rope_parameters.{kind} is {found.get(kind)!r}; it must be an object")
    full, sliding = (found.get(kind) or {"rope_type": "default"} for kind in (FULL, SLIDING))
    still = {"truncate"} if found.get(FULL) else found.keys() - {FULL, SLIDING}
    return {name: found[name] for name in still if name in found}, full, sliding


def _require_agreement(raw: Raw, all_layers: dict[str, Any], full: dict[str, Any]) -> None:
    """Refuse values for all layers that full layers do not have: transformers would ignore them, as it reads only the
    values per kind of layer and `truncate`."""
    said = {("rope_type" if name == "type" else name): value for name, value in all_layers.items()}
    effect = {"truncate": True} | full
    wrong = sorted(name for name, value in said.items() if value is not None and value != effect.get(name))
    raw.refuse(
        wrong,
        f"rope_parameters has {', '.join(wrong)} for all layers; transformers reads no such here and gives {FULL} "
        f"{', '.join(f'{name} {effect.get(name)}' for name in wrong)}; {FULL} and {SLIDING} have their own here",
    )


def _base(raw: Raw, kind: str, found: dict[str, Any], default: float) -> float:
    theta = default if found.get("rope_theta") is None else found["rope_theta"]
    raw.refuse(not is_positive(theta), f"rope_theta of {kind} is {theta!r}; it must be a number above 0")
    return float(theta)


def whole_ramps(config: ModelConfig) -> None:
    """For `Family.check`: refuse YaRN with `truncate` false, whose ramp does not end at whole pairs."""
    scaling = config.rope_scaling
    refuse(
        isinstance(scaling, YarnScaling) and not scaling.truncate,
        f"model config: truncate of the yarn rope scaling is false (config.json: rope_parameters.{FULL}.truncate); it "
        "must be true or left out, as transformers does not read it where kinds of layers have their own parameters",
    )


def write_by_kind(config: ModelConfig) -> dict[str, Any]:
    full = {"rope_theta": config.rope_theta, **scaling_to_hf(config.rope_scaling)}
    sliding = {"rope_theta": config.local_rope_theta, "rope_type": "default"}
    return write_alternating(config) | {"rope_parameters": {FULL: full, SLIDING: sliding}}


def odd_words(tiny: ModelConfig) -> Callable[[ModelConfig, ModelConfig], dict[str, ModelConfig]]:
    """For `Family.golden`: the family's tiny model, with sizes that are no multiple of a SIMD vector."""
    windows = tuple(layer for layer in tiny.sliding_layers if layer < 2)
    made = replace(tiny, num_layers=2, sliding_layers=windows, vocab_size=509, hidden_size=131)
    return lambda config, odd: {"layers": made}


def one_window(raw: Raw) -> dict[str, Any]:
    """A window in all layers, if the file has one."""
    return window_of(raw, range(raw.integer("num_hidden_layers")))


def write_one_window(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window or None}


def all_or_none(config: ModelConfig) -> None:
    """For `Family.check`: either all layers have a window, or none."""
    some = 0 < len(config.sliding_layers) < config.num_layers
    refuse(some, f"model config: sliding_layers must be all layers of a {config.family}, or none")


def no_windows(config: ModelConfig) -> None:
    refuse(
        bool(config.sliding_layers),
        f"model config: sliding_layers is {config.sliding_layers} in {config.num_layers} of {config.family}",
    )
