"""The decoder's configuration."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property

from ..errors import InputError, refuse
from .blocks.rope import Scaling, YarnScaling


def _require_sizes(config: object, names: tuple[str, ...], of: str = "") -> None:
    """Raise `InputError` for the first of these fields that is below 1; None counts as absent."""
    for name in names:
        value = getattr(config, name)
        refuse(value is not None and value < 1, f"model config: {of}{name} is {value}; it must be at least 1")


@dataclass(frozen=True)
class MoEConfig:
    """Mixture-of-experts layers. The fields from `sigmoid` to `scale` are those of `ops.RouteSettings`.

    Attributes:
        dense_layers: layers with a plain feed-forward instead.
        shared_experts: additional experts that every token goes through, as wide as the routed ones.
        router_bias: whether experts are chosen by score plus a per-expert bias (float32, without gradient).
        activation: the activation of the experts' gates.
        biases: whether the router and the experts' projections have biases.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    dense_layers: tuple[int, ...] = ()
    sigmoid: bool = False
    groups: int = 1
    kept_groups: int = 1
    normalize: bool = True
    scale: float = 1.0
    shared_experts: int = 0
    router_bias: bool = False
    activation: str = "silu"
    biases: bool = False

    def __post_init__(self) -> None:
        sizes = "num_experts", "num_experts_per_token", "intermediate_size", "groups", "kept_groups"
        _require_sizes(self, sizes, "moe ")
        refuse(
            self.num_experts % self.groups > 0 or self.kept_groups > self.groups,
            f"model config: {self.num_experts} experts in {self.groups} groups, {self.kept_groups} of them kept: "
            "groups must be of one size, and no more kept than there are (config.json: n_group, topk_group)",
        )
        eligible = self.num_experts // self.groups * self.kept_groups
        refuse(
            self.num_experts_per_token > eligible,
            f"model config: num_experts_per_token is {self.num_experts_per_token}, of {eligible} eligible experts "
            "(config.json: num_experts_per_tok)",
        )


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). Sizes are counts of elements.

    Attributes:
        kv_rank: the latent that keys and values are projected from, which is cached.
        nope_dim, rope_dim: a query or key head's parts without and with rotary positions; heads share the key's latter.
        v_dim: a value head.
        q_rank: the latent that queries are projected from; None: they are projected directly from the hidden state.
        interleaved: whether a Hugging Face folder stores the two elements of a rotated pair side by side.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int | None = None
    interleaved: bool = True

    def __post_init__(self) -> None:
        _require_sizes(self, ("kv_rank", "nope_dim", "rope_dim", "v_dim", "q_rank"), "mla ")

    @property
    def key_dim(self) -> int:
        """Elements of a cached row: the latent and the rotated key."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer. Sizes are counts of elements; names follow Hugging Face.

    `family` is Hugging Face's `model_type`, a key of `families.FAMILIES`. With `mla`, all heads read one latent:
    `num_kv_heads` is 1, and `head_dim` is the size of the rotated part. In `sliding_layers` a token attends to the last
    `sliding_window` tokens, itself included.

    Attributes:
        local_rope_theta: for the sliding layers, whose frequencies are not scaled; None: all layers share `rope_theta`.
        rotary_dim: rotated elements of a head; 0: all.
        biases: the attention projections with biases, among "qkv" and "o".
        qk_norm: whether each query and key head is normalized, in families where models differ in that.
        attention_scale: the factor on attention scores; 0: `head_dim ** -0.5`.
        attention_sinks: whether each head's softmax has a learned logit in addition to those of the keys.
        unrotated_layers: those without rotary positions.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 40960
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    tie_word_embeddings: bool = True
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    _: KW_ONLY
    family: str
    rope_scaling: Scaling | None = None
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    sliding_window: int = 0
    sliding_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    rotary_dim: int = 0
    biases: tuple[str, ...] = ()
    qk_norm: bool = False
    attention_scale: float = 0.0
    attention_sinks: bool = False
    unrotated_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"
        _require_sizes(self, sizes)
        refuse(
            self.num_heads % self.num_kv_heads > 0,
            f"model config: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads} "
            "(config.json: num_attention_heads, num_key_value_heads)",
        )
        refuse(
            self.head_dim < 2 or self.head_dim % 2 > 0,
            f"model config: head_dim is {self.head_dim}; rotary embedding needs an even number",
        )
        refuse(
            self.rotary_dim % 2 > 0 or not 0 <= self.rotary_dim <= self.head_dim,
            f"model config: rotary_dim is {self.rotary_dim}; it must be even, and at most head_dim {self.head_dim}",
        )
        refuse(
            isinstance(self.rope_scaling, YarnScaling) and self.rope_theta <= 1,
            f"model config: rope_theta is {self.rope_theta}; yarn scaling needs a number above 1",
        )
        if self.sliding_layers:
            _require_sizes(self, ("sliding_window",))
        for name in ("sliding_layers", "unrotated_layers"):
            layers = getattr(self, name)
            refuse(
                not set(range(self.num_layers)).issuperset(layers),
                f"model config: {name} is {layers} in {self.num_layers} of {self.family}",
            )
        if self.mla is not None and (self.num_kv_heads, self.head_dim) != (1, self.mla.rope_dim):
            raise InputError(
                f"model config: num_kv_heads is {self.num_kv_heads} and head_dim {self.head_dim}; latent attention has "
                f"1 and rope_dim, which is {self.mla.rope_dim}"
            )

    @property
    def supports_flex_attention(self) -> bool:
        """Whether FlexAttention supports the attention scores: scaled by `head_dim ** -0.5`, and without sinks."""
        return self.attention_scale in (0.0, self.head_dim**-0.5) and not self.attention_sinks

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Each layer's sliding window; 0: the whole context."""
        return tuple(self.sliding_window if i in self.sliding_layers else 0 for i in range(self.num_layers))

    @property
    def kv_cache_sizes(self) -> tuple[int, int, int]:
        """What the KV cache stores per position and layer: the number of heads, and the elements of a key and of a
        value. A latent serves as both, so its values have none."""
        if self.mla is not None:
            return 1, self.mla.key_dim, 0
        return self.num_kv_heads, self.head_dim, self.head_dim

    def per_rank(self, ranks: int) -> ModelConfig:
        """The part of each of `ranks` tensor-parallel ranks, with its share of the heads. A latent is replicated."""
        kv_heads = self.num_kv_heads if self.mla is not None else self.num_kv_heads // ranks
        return replace(self, num_heads=self.num_heads // ranks, num_kv_heads=kv_heads)

    def first_layers(self, count: int) -> ModelConfig:
        """The model of the first `count` layers."""
        kinds = self.sliding_layers, self.unrotated_layers
        sliding, unrotated = (tuple(layer for layer in layers if layer < count) for layers in kinds)
        return replace(self, num_layers=count, sliding_layers=sliding, unrotated_layers=unrotated)

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

    @cached_property
    def moe_layers(self) -> int:
        return 0 if self.moe is None else sum(map(self.is_moe, range(self.num_layers)))
