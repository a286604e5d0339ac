"""Every tensor of a model's Hugging Face folder, and the slice of the decoder's parameters that it corresponds to."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...errors import InputError, refuse
from ..blocks.weight_slices import WeightSlice
from ..config import ModelConfig
from ..families import family_of

LM_HEAD = "lm_head.weight"  # the output head; equal to the embedding if they are tied
ALL_ROWS = 1 << 62
VALUE_HEAD = "value_head.safetensors"  # not part of Hugging Face's format
VALUE_HEAD_PIECE = WeightSlice("value_head", "value_head", 0, ALL_ROWS)


def weight_map(config: ModelConfig) -> list[WeightSlice]:
    """Every tensor of the Hugging Face folder, in file order."""
    slices = [WeightSlice("model.embed_tokens.weight", "embed", 0, config.vocab_size)]
    pieces = family_of(config).slices
    for i in range(config.num_layers):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        slices += [WeightSlice(f"{theirs}.{p.name}", f"{ours}.{p.parameter}", *p[2:]) for p in pieces(config, i)]
    slices.append(WeightSlice("model.norm.weight", "norm", 0, config.hidden_size))
    if not config.tie_word_embeddings:
        slices.append(WeightSlice(LM_HEAD, "lm_head", 0, config.vocab_size))
    return slices


def require_all_stored(config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Check that the family's slices have every row of a whole model's `tensors` once, as a folder would otherwise lose
    weights. `InputError`: they leave out rows, have some twice, or name a parameter that the layers do not have."""
    ends, where = dict.fromkeys(tensors, 0), f"family {config.family}: Family.slices"
    for piece in sorted(weight_map(config), key=lambda piece: piece.start):  # tens of thousands, of many experts
        if piece.parameter not in ends:
            raise InputError(f"{where} name {piece.parameter}, which the model does not have")
        if piece.start != (end := ends[piece.parameter]):
            begins = f"{where} have {piece.name} begin at row {piece.start} of {piece.parameter}"
            raise InputError(f"{begins}; the rows before end at {end}")
        ends[piece.parameter] = end + piece.rows
    for name, tensor in tensors.items():
        rows = tensor.shape[:-1].numel() if tensor.dim() > 1 else len(tensor)
        refuse(ends[name] != rows, f"{where} have {ends[name]} of the {rows} rows of {name}, and must have all")


def fused_experts(config: ModelConfig) -> dict[str, str]:
    """The decoder's parameters by the names of a folder's tensors, if one holds all experts of a layer."""
    return {
        f"model.layers.{i}.mlp.experts.{own}_proj": f"layers.{i}.moe.experts.{own}"
        for i in range(config.num_layers)
        for own in ("gate_up", "down")
        if config.is_moe(i)
    }


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether the decoder has no use for a folder's tensor: rotary frequencies, or a tensor that the family ignores."""
    return name.endswith("rotary_emb.inv_freq") or family_of(config).ignores_tensor(name, config)


def text_model_name(name: str) -> str | None:
    """A tensor's name in a folder of the text model alone, from its name in a multimodal folder, as `transformers` 4 or
    5 writes it; None for tensors of other parts."""
    for outer, inner in (("language_model.", ""), ("model.language_model.", "model.")):
        if name.startswith(outer):
            return inner + name.removeprefix(outer)
    return name if name == LM_HEAD else None
