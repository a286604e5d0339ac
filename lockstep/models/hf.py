"""Hugging Face model folders, read and written bit for bit: `config.json`, safetensors (sharded too)."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InputError, LockstepError
from ..json_file import read_json
from .checks import check_end_of_sequence, check_fields, require_memory
from .config import ModelConfig
from .decoder import Decoder
from .families import from_hf, to_hf
from .weight_map import WeightSlice, fused_experts, is_left_out, weight_map

MAX_SHARD_BYTES = 5 * 10**9


def resolve_folder(model: str) -> Path:
    """The local folder of `model`: a path, or a hub id that is downloaded or already in the hub's cache.

    Raises:
        InputError: there is neither such a folder nor such a hub repository at hand.
    """
    path = Path(model).expanduser()
    if model.strip() and path.is_dir():
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
    path, generation = folder / "config.json", folder / "generation_config.json"
    values = _read_json(path)
    check_fields(values, str(path))
    try:
        config = from_hf({name: value for name, value in values.items() if value is not None}, str(path))
    except InputError as error:
        raise error if str(path) in str(error) else InputError(f"{path}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:  # fields of one family only
        raise InputError(f"{path}: a field's value is of the wrong kind ({type(error).__name__}: {error})") from error
    check_end_of_sequence(config.eos_token_ids, config.vocab_size, str(path))
    if generation.exists():
        values = _read_json(generation)
        check_fields(values, str(generation))
        eos = values.get("eos_token_id")
        more = eos if isinstance(eos, list) else [] if eos is None else [eos]
        check_end_of_sequence(more, config.vocab_size, str(generation))
        config = replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))
    return config


def load_model(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    """The decoder of a Hugging Face folder with its weights, converted to `dtype` on `device`.

    Raises:
        InputError: a file is missing or damaged, a tensor is missing, has the wrong shape, or values that are not
            finite in `dtype`.
    """
    config = read_config(folder)
    require_memory(config, dtype, device, str(folder))
    model = Decoder(config, dtype, device)
    tensors = _tensors(model)
    wanted = {s.name: s for s in weight_map(config)}
    fused = fused_experts(config)
    extremes: dict[tuple[Path, str], Tensor] = {}  # kept on the device, so that nothing waits for a tensor
    with torch.no_grad():
        for name, tensor, file in _read_tensors(folder, wanted.keys() | fused, config):
            if name in fused:
                target, piece = tensors[fused[name]], None
                wanted = {n: s for n, s in wanted.items() if s.parameter != fused[name]}
            else:
                piece = wanted.pop(name)
                target = piece.of(tensors)
            if tensor.shape != target.shape:
                raise InputError(
                    f"{file}: {name} has shape {list(tensor.shape)}; config.json asks for {list(target.shape)}"
                )
            if not tensor.is_floating_point() or tensor.itemsize < 2:
                raise InputError(f"{file}: {name} is {tensor.dtype}; quantized weights are not supported, use bfloat16")
            target.copy_(piece.from_hf(tensor) if piece else tensor)
            extremes[file, name] = torch.stack(torch.aminmax(target))  # a NaN is both
    if wanted:
        raise InputError(
            f"{folder}: {len(wanted)} tensors are missing, first {next(iter(wanted))} "
            f"(config.json asks for {len(weight_map(config))})"
        )
    _require_finite(extremes, dtype)
    return model


def _require_finite(extremes: dict[tuple[Path, str], Tensor], dtype: torch.dtype) -> None:
    """Raise `InputError` naming the first tensor whose smallest or largest value is NaN or infinite."""
    finite = torch.stack([pair.float() for pair in extremes.values()]).isfinite().all(1).tolist()
    for (file, name), good in zip(extremes, finite, strict=True):
        if not good:
            raise InputError(f"{file}: {name} has values that are NaN or infinite as {dtype}; the model is damaged")


def _tensors(model: Decoder) -> dict[str, Tensor]:
    """What a folder holds: parameters and buffers."""
    return {name: p.detach() for name, p in model.named_parameters()} | dict(model.named_buffers())


def _read_tensors(folder: Path, names: set[str], config: ModelConfig) -> Iterator[tuple[str, Tensor, Path]]:
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.exists():
        placed = _read_json(index).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
            raise InputError(f"{index}: weight_map must be an object of tensor names and their files")
        files = sorted({folder / placed[name] for name in names if name in placed})
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.is_file():
            named = f"{index.name} names it" if index.exists() else "a model folder needs it, or an index and shards"
            raise InputError(f"{file}: missing ({named})")
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    if name in names:
                        yield name, tensors.get_tensor(name), file
                    elif name.startswith("model.layers.") and not is_left_out(name, config):
                        raise InputError(f"{file}: {name} has no place in the model that config.json describes")
        except SafetensorError as error:
            raise InputError(f"{file}: not a whole safetensors file ({error})") from error


def save_model(model: Decoder, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write `config.json`, `generation_config.json` and the weights; `transformers` loads the folder.

    Raises:
        LockstepError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LockstepError(f"{folder}: the folder cannot be made ({error.strerror})") from error
    dtype = str(model.embed.dtype).removeprefix("torch.")
    _write_json(folder / "config.json", to_hf(model.config, dtype))
    _write_json(folder / "generation_config.json", _generation_config(model.config))
    tensors = _tensors(model)
    pieces = [(piece, piece.of(tensors)) for piece in weight_map(model.config)]
    shards = _shards(pieces, max_shard_bytes)
    placed: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        file = {piece.name: piece.to_hf(rows).contiguous().cpu() for piece, rows in shard}
        _write_tensors(folder / name, file)
        placed |= dict.fromkeys(file, name)
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
        value = read_json(path)
    except FileNotFoundError:
        raise InputError(f"{path}: missing (is this a Hugging Face model folder?)") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value


def _write_json(path: Path, value: dict) -> None:
    try:
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise LockstepError(f"{path}: cannot be written ({error.strerror})") from error


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file with the permissions of the files beside it, which the library keeps to the owner."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
        shutil.copymode(path.with_name("config.json"), path)
    except (OSError, SafetensorError) as error:
        raise LockstepError(f"{path}: cannot be written ({error})") from error
