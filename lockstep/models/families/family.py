"""`Family`, the record of what distinguishes the models of one `model_type`, and helpers that families share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ...errors import InputError, refuse
from ..blocks.layer import Layer
from ..blocks.rope import YarnScaling, is_positive, rope_parameters_from_hf, scaling_from_hf, scaling_to_hf
from ..blocks.weight_slices import LayerSlice, slices_of_layer
from ..blocks.weights import WeightFactory
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

    @property
    def head_dim(self) -> int:
        """The elements of a head: as given, or else its share of the hidden state."""
        return self.values.get("head_dim") or self.integer("hidden_size") // self.integer("num_attention_heads")

    def refuse(self, condition: Any, what: str) -> None:
        """Raise `InputError` naming the file if `condition` holds."""
        refuse(bool(condition), f"{self.where}: {what}")


def read_rope(raw: Raw) -> dict[str, Any]:
    values = rope_parameters_from_hf(raw.values, raw.where)
    theta = values.get("rope_theta") or raw.values.get("rope_theta") or 10000.0
    return {"rope_theta": float(theta), "rope_scaling": scaling_from_hf(raw.values, raw.where)}


def read_rotary_dim(raw: Raw, default: float) -> int:
    """The elements of each head that are rotated; `default` is the family's share of them in transformers."""
    both = raw.values.get("rope_scaling") or raw.values.get("rope_parameters") or {}
    found = both.get(PARTIAL_ROTARY, raw.values.get(PARTIAL_ROTARY, default))  # as in transformers
    fits = is_positive(found) and found <= 1
    raw.refuse(not fits, f"{PARTIAL_ROTARY} is {found!r}; it must be a number above 0, and at most 1")
    head_dim = raw.head_dim
    rotated = int(head_dim * found)
    raw.refuse(rotated < 2, f"{PARTIAL_ROTARY} is {found!r}; it must rotate at least 2 of a head's {head_dim} elements")
    return rotated


def write_rotary_factor(config: ModelConfig) -> float:
    """The share of each head that is rotated; transformers takes the whole part of its product with `head_dim`."""
    share = config.rotary_dim / config.head_dim
    return share if int(config.head_dim * share) == config.rotary_dim else math.nextafter(share, 1.0)


def read_partial_rope(raw: Raw) -> dict[str, Any]:
    """`read_rope` of a family of which a part of each head may be rotated."""
    whole = {key: value for key, value in raw.values.items() if key != PARTIAL_ROTARY}
    for name in ("rope_scaling", "rope_parameters"):
        if values := whole.get(name):
            whole[name] = {key: value for key, value in values.items() if key != PARTIAL_ROTARY}
    return read_rope(Raw(whole, raw.where))


def no_fields(*_: Any) -> dict[str, Any]:
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
        extra_fields: fields of config.json that the family reads and most do not.
        sizes: further fields of config.json that are integers above 0.
        layer_kinds: the values allowed in config.json's `layer_types`.
        quant_methods: quantization methods whose weights are dequantized on loading.
        check: raises `InputError` for a configuration, made in code or read, that the layers do not support.
        norm_offset: added to the weights of the final norm.
        embedding_scale: the factor on embeddings.
        defaults: defaults of config.json fields that differ from most families'.
        ignores_tensor: whether the decoder has no use for a tensor of a folder.
        multimodal_types: the `model_type` of multimodal models whose text model is of this family.
        golden: small decoders whose gradients fingerprint a machine's arithmetic for this configuration, by the names
            stored in run folders; from the configuration and the dense decoder of odd sizes that is always included.
            None: the first architecture's layers, with sizes that are no multiple of a SIMD vector.
        architectures: random models, by the names that users give.
    """

    architecture: str
    layer: Callable[[ModelConfig, int, WeightFactory], nn.Module] = Layer
    slices: Callable[[ModelConfig, int], Iterable[LayerSlice]] = slices_of_layer
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    read: Callable[[Raw], dict[str, Any]] = no_fields
    write: Callable[[ModelConfig], dict[str, Any]] = no_fields
    rope: Callable[[Raw], dict[str, Any]] = read_rope
    extra_fields: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    layer_kinds: tuple[str, ...] = (FULL,)
    quant_methods: tuple[str, ...] = ()
    check: Callable[[ModelConfig], None] = lambda config: None
    norm_offset: float = 0.0
    embedding_scale: Callable[[ModelConfig], float] = lambda config: 1.0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ignores_tensor: Callable[[str, ModelConfig], bool] = lambda name, config: False
    multimodal_types: tuple[str, ...] = ()
    golden: Callable[[ModelConfig, ModelConfig], dict[str, ModelConfig]] | None = None
    architectures: Mapping[str, ModelConfig] = field(default_factory=dict)

    def golden_decoders(self, config: ModelConfig, odd: ModelConfig) -> dict[str, ModelConfig]:
        """The decoders that `golden` describes."""
        if self.golden is not None:
            return self.golden(config, odd)
        first = self.first_architecture
        return {} if first is None else {"layers": replace(first.first_layers(2), vocab_size=509, hidden_size=131)}

    @property
    def first_architecture(self) -> ModelConfig | None:
        return next(iter(self.architectures.values()), None)

    def supports(self, name: str, value: Any) -> bool:
        """Whether the family supports this value of a field that only some families read."""
        if name == "quantization_config":
            return isinstance(value, dict) and value.get("quant_method") in self.quant_methods
        if name == "layer_types":
            return isinstance(value, list) and all(kind in self.layer_kinds for kind in value)
        return value in self.fixed[name] if name in self.fixed else name in self.extra_fields


EXPERT_SIZES = (
    *("moe_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok", "decoder_sparse_step"),
    *("n_routed_experts", "n_group", "topk_group"),
)
# Fields that `rope_parameters_from_hf` refuses; in `extra_fields` of families that read them.
PARTIAL_ROTARY, ROPE_BY_LAYER_TYPE = "partial_rotary_factor", FULL
SILU_WITHOUT_BIAS: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish"), "attention_bias": (False, None)}
DEFAULT_WINDOW: dict[str, Any] = {"sliding_window": 4096}  # transformers' default for use_sliding_window without a size


def read_windows_by_layer(raw: Raw, default: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Windows by `layer_types` or, without it, in the `default` layers; None: from layer `max_window_layers` on."""
    kinds = raw.values.get("layer_types")
    if kinds is None:
        first = raw.values.get("max_window_layers", 28)  # as in transformers
        layers = range(first, raw.integer("num_hidden_layers"))
        return read_optional_window(raw, tuple(layers) if default is None else default)
    sliding = read_sliding_layers(raw, kinds)
    wanted = sliding and not raw.values.get("use_sliding_window")
    raw.refuse(wanted, f"layer_types has {SLIDING}, and use_sliding_window is not true")
    return read_optional_window(raw, sliding)


def read_sliding_layers(raw: Raw, kinds: list[str]) -> tuple[int, ...]:
    """The layers that have a window according to `layer_types`."""
    layers = range(raw.integer("num_hidden_layers"))
    wrong = len(kinds) != len(layers)
    raw.refuse(wrong, f"layer_types has {len(kinds)} entries; there are {len(layers)} layers")
    return tuple(i for i in layers if kinds[i] == SLIDING)


def read_optional_window(raw: Raw, layers: tuple[int, ...]) -> dict[str, Any]:
    """A window in these layers, if `use_sliding_window` is true."""
    if not raw.values.get("use_sliding_window") or not layers:
        return {}
    raw.refuse(not raw.values.get("sliding_window"), "sliding_window is None; it must be an integer")
    return read_window(raw, layers)


def read_window(raw: Raw, layers: Iterable[int]) -> dict[str, Any]:
    """A window in these layers, if the file has one."""
    if not (chosen := tuple(layers)) or not raw.values.get("sliding_window"):
        return {}
    return {"sliding_window": raw.integer("sliding_window"), "sliding_layers": chosen}


def write_windows_by_layer(config: ModelConfig) -> dict[str, Any]:
    if not config.sliding_layers:
        return write_optional_window(config)
    first = next(i for i, window in enumerate(config.windows) if window)
    return {**write_optional_window(config), "max_window_layers": first, "layer_types": layer_types(config)}


def write_optional_window(config: ModelConfig) -> dict[str, Any]:
    window = config.sliding_window if config.sliding_layers else None
    return {"use_sliding_window": window is not None, "sliding_window": window}


def layer_types(config: ModelConfig) -> list[str]:
    return [SLIDING if window else FULL for window in config.windows]


def all_but_every(period: int, layers: int) -> tuple[int, ...]:
    """All layers but every `period`th."""
    return tuple(i for i in range(layers) if (i + 1) % period)


def read_alternating_windows(raw: Raw, period: int) -> dict[str, Any]:
    """Windows by `layer_types` or, without it, in all layers but every `period`th."""
    layers, kinds = raw.integer("num_hidden_layers"), raw.values.get("layer_types")
    return read_window(raw, all_but_every(period, layers) if kinds is None else read_sliding_layers(raw, kinds))


def write_alternating_windows(config: ModelConfig) -> dict[str, Any]:
    window = config.sliding_window or 4096  # transformers requires one even if no layer has it
    return {"sliding_window": window, "layer_types": layer_types(config)}


def read_rope_by_layer_type(raw: Raw, local: float) -> dict[str, Any]:
    """The rotary positions of full and of sliding layers; `local` is the default base of the latter."""
    all_layers, full, sliding = _rope_parameters_by_layer_type(raw)
    other = sliding.get("rope_type", sliding.get("type", "default"))
    raw.refuse(
        other != "default", f"rope_type of {SLIDING} is {other!r}; it must be 'default', as only {FULL} may be scaled"
    )
    scaled = full | (raw.values.get("rope_scaling") or {})
    kind, old = scaled.get("rope_type", scaled.get("type")), scaled.get("type")
    raw.refuse(
        old not in (None, kind),
        f"the rope scaling of {FULL} has type {old!r}, which transformers does not read beside rope_type, which is "
        f"{kind!r}; keep the intended one as rope_type",
    )
    context = {"max_position_embeddings": raw.values.get("max_position_embeddings")}
    theta = _read_theta(raw, FULL, scaled, raw.values.get("rope_theta") or 10000.0)
    scaling = scaling_from_hf({"rope_parameters": scaled} | context, raw.where)
    _require_agreement(raw, all_layers, {"rope_theta": theta, **scaling_to_hf(scaling)})
    local = _read_theta(raw, SLIDING, sliding, local)
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}


def _rope_parameters_by_layer_type(raw: Raw) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The values in `rope_parameters` for all layers, for full layers and for sliding layers. Of the first, only those
    that the values for full layers do not override."""
    found = raw.values.get("rope_parameters") or {}
    for kind in (FULL, SLIDING):
        wrong = not isinstance(found.get(kind), dict | None)
        raw.refuse(wrong, f"rope_parameters.{kind} is {found.get(kind)!r}; it must be an object")
    full, sliding = (found.get(kind) or {"rope_type": "default"} for kind in (FULL, SLIDING))
    names = {"truncate"} if found.get(FULL) else found.keys() - {FULL, SLIDING}
    return {name: found[name] for name in names if name in found}, full, sliding


def _require_agreement(raw: Raw, all_layers: dict[str, Any], full: dict[str, Any]) -> None:
    """Refuse values for all layers that full layers do not have: transformers would ignore them, as it reads only the
    values per kind of layer and `truncate`."""
    given = {("rope_type" if name == "type" else name): value for name, value in all_layers.items()}
    effective = {"truncate": True} | full
    ignored = sorted(name for name, value in given.items() if value is not None and value != effective.get(name))
    raw.refuse(
        ignored,
        f"rope_parameters has {', '.join(ignored)} for all layers; transformers ignores that and gives {FULL} "
        f"{', '.join(f'{name} {effective.get(name)}' for name in ignored)}; {FULL} and {SLIDING} have their own here",
    )


def _read_theta(raw: Raw, kind: str, found: dict[str, Any], default: float) -> float:
    theta = default if found.get("rope_theta") is None else found["rope_theta"]
    raw.refuse(not is_positive(theta), f"rope_theta of {kind} is {theta!r}; it must be a number above 0")
    return float(theta)


def require_truncated_yarn(config: ModelConfig) -> None:
    """For `Family.check`: refuse YaRN with `truncate` false, whose ramp does not end at whole pairs."""
    scaling = config.rope_scaling
    refuse(
        isinstance(scaling, YarnScaling) and not scaling.truncate,
        f"model config: truncate of the yarn rope scaling is false (config.json: rope_parameters.{FULL}.truncate); it "
        "must be true or left out, as transformers does not read it where kinds of layers have their own parameters",
    )


def write_rope_by_layer_type(config: ModelConfig) -> dict[str, Any]:
    full = {"rope_theta": config.rope_theta, **scaling_to_hf(config.rope_scaling)}
    sliding = {"rope_theta": config.local_rope_theta, "rope_type": "default"}
    return write_alternating_windows(config) | {"rope_parameters": {FULL: full, SLIDING: sliding}}


def read_uniform_window(raw: Raw) -> dict[str, Any]:
    """A window in all layers, if the file has one."""
    return read_window(raw, range(raw.integer("num_hidden_layers")))


def write_uniform_window(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window or None}


def require_uniform_windows(config: ModelConfig) -> None:
    """For `Family.check`: either all layers have a window, or none."""
    some = 0 < len(config.sliding_layers) < config.num_layers
    refuse(some, f"model config: sliding_layers must be all layers of a {config.family}, or none")


def refuse_windows(config: ModelConfig) -> None:
    refuse(
        bool(config.sliding_layers),
        f"model config: sliding_layers is {config.sliding_layers} in {config.num_layers} of {config.family}",
    )
