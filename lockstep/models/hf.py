"""Hugging Face model folders, read and written bit for bit: `config.json`, safetensors (sharded too).

The decoder's fused weights are row ranges of one tensor; `weight_map` is the one place that says which.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InputError
from .config import ModelConfig, from_hf, to_hf
from .decoder import Decoder

MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class WeightSlice:
    """Tensor `name` of a Hugging Face folder is rows `start : start + rows` of the decoder's `parameter`."""

    name: str
    parameter: str
    start: int
    rows: int


def weight_map(config: ModelConfig) -> list[WeightSlice]:
    """Every tensor of the Hugging Face form, in file order."""
    q, kv, f, d = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
        config.intermediate_size,
        config.hidden_size,
    )
    slices = [WeightSlice("model.embed_tokens.weight", "embed", 0, config.vocab_size)]
    for i in range(config.num_layers):
        rows = [
            ("input_layernorm", "attention_norm", 0, d),
            ("self_attn.q_proj", "qkv", 0, q),
            ("self_attn.k_proj", "qkv", q, kv),
            ("self_attn.v_proj", "qkv", q + kv, kv),
            *[(f"self_attn.{own}", own, 0, config.head_dim) for own in ("q_norm", "k_norm") if config.qk_norm],
            ("self_attn.o_proj", "o", 0, d),
            ("post_attention_layernorm", "mlp_norm", 0, d),
            ("mlp.gate_proj", "gate_up", 0, f),
            ("mlp.up_proj", "gate_up", f, f),
            ("mlp.down_proj", "down", 0, d),
        ]
        slices += [WeightSlice(f"model.layers.{i}.{hf}.weight", f"layers.{i}.{own}", a, n) for hf, own, a, n in rows]
    slices.append(WeightSlice("model.norm.weight", "norm", 0, d))
    if not config.tie_word_embeddings:
        slices.append(WeightSlice("lm_head.weight", "lm_head", 0, config.vocab_size))
    return slices


def resolve_folder(model: str) -> Path:
    """The local folder of `model`: a path, or a hub id that is downloaded or already in the hub's cache.

    Raises:
        InputError: there is neither such a folder nor such a hub repository at hand.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise InputError(f"model {model!r}: there is no such folder (give a Hugging Face folder or a hub id org/name)")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]))
    except Exception as error:
        raise InputError(f"model {model!r}: no such folder, and the hub did not give it ({error})") from error


def read_config(folder: Path) -> ModelConfig:
    """The folder's configuration; generation_config.json's end-of-sequence ids are added."""
    config = from_hf(_read_json(folder / "config.json"), str(folder / "config.json"))
    generation = folder / "generation_config.json"
    if generation.exists():
        eos = _read_json(generation).get("eos_token_id")
        more = eos if isinstance(eos, list) else [] if eos is None else [eos]
        config = replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))
    return config


def load_model(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    """The decoder of a Hugging Face folder with its weights, converted to `dtype` on `device`.

    Raises:
        InputError: a file is missing or damaged, a tensor is missing or has the wrong shape.
    """
    config = read_config(folder)
    model = Decoder(config, dtype, device)
    parameters = dict(model.named_parameters())
    wanted = {s.name: s for s in weight_map(config)}
    with torch.no_grad():
        for name, tensor, file in _read_tensors(folder, set(wanted)):
            piece = wanted.pop(name)
            target = parameters[piece.parameter][piece.start : piece.start + piece.rows]
            if tensor.shape != target.shape:
                raise InputError(
                    f"{file}: {name} has shape {list(tensor.shape)}; config.json asks for {list(target.shape)}"
                )
            target.copy_(tensor)
    if wanted:
        raise InputError(f"{folder}: {len(wanted)} tensors are missing, first {next(iter(wanted))}")
    return model


def _read_tensors(folder: Path, names: set[str]) -> Iterator[tuple[str, Tensor, Path]]:
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.exists():
        placed = _read_json(index).get("weight_map", {})
        files = sorted({folder / placed[name] for name in names if name in placed})
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise InputError(f"{file}: missing (a model folder needs model.safetensors, or its index and shards)")
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    if name in names:
                        yield name, tensors.get_tensor(name), file
        except SafetensorError as error:
            raise InputError(f"{file}: not a whole safetensors file ({error})") from error


def save_model(model: Decoder, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write `config.json`, `generation_config.json` and the weights; `transformers` loads the folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(model.embed.dtype).removeprefix("torch.")
    _write_json(folder / "config.json", to_hf(model.config, dtype))
    _write_json(folder / "generation_config.json", _generation_config(model.config))
    parameters = dict(model.named_parameters())
    pieces = [(s, parameters[s.parameter].detach()[s.start : s.start + s.rows]) for s in weight_map(model.config)]
    shards = _shards(pieces, max_shard_bytes)
    placed: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        tensors = {piece.name: tensor.contiguous().cpu() for piece, tensor in shard}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        placed |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        total = sum(t.numel() * t.element_size() for _, t in pieces)
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": placed})


def _shards(pieces: list[tuple[WeightSlice, Tensor]], limit: int) -> list[list[tuple[WeightSlice, Tensor]]]:
    shards: list[list[tuple[WeightSlice, Tensor]]] = [[]]
    used = 0.0
    for piece, tensor in pieces:
        size = math.prod(tensor.shape) * tensor.element_size()
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append((piece, tensor))
        used += size
    return shards


def _generation_config(config: ModelConfig) -> dict:
    fields = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
    }
    return {k: v for k, v in fields.items() if v not in (None, [])}


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path}: missing (is this a Hugging Face model folder?)") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
