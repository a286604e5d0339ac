"""Reading Hugging Face model folders, bit for bit: `config.json` and safetensors files, sharded or not."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...cache.file_hashes import hash_files, sampled_hash
from ...cache.tensor_file import CHUNK_BYTES, Entry, Staging, TensorReader
from ...errors import InputError, refuse
from ...json_file import read_json_object
from ..blocks.weight_slices import WeightSlice
from ..checks import check_end_of_sequence, check_fields
from ..config import ModelConfig
from ..families import require_family, text_config
from ..parts import Ranges, TensorRange, meta_tensors
from .config import drop_nulls, from_hf, read_eos_token_ids
from .export import GENERATION_CONFIG
from .stored_tensors import FoundTensor, file_names, fill_rows, find_tensors, weights_path
from .weight_map import (
    ALL_ROWS,
    LM_HEAD,
    VALUE_HEAD,
    VALUE_HEAD_PIECE,
    fused_experts,
    require_all_stored,
    weight_map,
)

_FILE_SUFFIXES = {".safetensors", ".gguf", ".bin", ".pt", ".pth", ".json", ".yaml", ".zip", ".tar", ".gz", ".py"}
_DOWNLOADED = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
_WEIGHTS_AGAIN = ["original/*", "consolidated*"]  # in their makers' form, beside Hugging Face's


def resolve_folder(model: str) -> Path:
    """The local folder of `model`: a path, or a hub id, which is downloaded unless the hub's cache has it. `InputError`
    if it is neither."""
    path = Path(os.path.expanduser(model))
    if model.strip() and os.path.isdir(path):  # False also for invalid names
        _refuse_run_folder(path)
        return path
    local = model.startswith((".", "/", "~")) or model.count("/") != 1 or path.suffix.lower() in _FILE_SUFFIXES
    if os.path.exists(path) or local:
        raise InputError(f"model {model!r}: there is no such folder (give a Hugging Face folder or a hub id org/name)")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, allow_patterns=_DOWNLOADED, ignore_patterns=_WEIGHTS_AGAIN))
    except Exception as error:
        parent = f" in {str(path.parent)!r}, which is here" if os.path.isdir(path.parent) else ""
        raise InputError(f"model {model!r}: no such folder{parent}, and the hub did not give it ({error})") from error


def _refuse_run_folder(path: Path) -> None:
    if (path / "config.json").exists():
        return
    run, steps = path.absolute().parent.parent, path.name.removeprefix("step_")
    if path.absolute().match("checkpoints/step_*") and (run / "config.yaml").is_file():
        resume = f"lockstep train --resume {run} --steps {steps}"
        its_model = f" that has no model yet: {resume} makes one of what is done by then"
        if (run / "model").is_dir():
            its_model = f"; its model is {str(run / 'model')!r}"
        raise InputError(f"model {str(path)!r} is a checkpoint of a run{its_model}")
    if not (path / "config.yaml").is_file():
        return
    if (path / "model").is_dir():
        raise InputError(f"model {str(path)!r} is the folder of a run; its model is {str(path / 'model')!r}")
    raise InputError(
        f"model {str(path)!r} is the folder of a run that has no model yet: it comes when the run ends "
        f"(lockstep train --resume {path} goes on with it, from a checkpoint if it saved any)"
    )


EXTRA_TEMPLATES = "additional_chat_templates"  # a subfolder; as a key of `describe_folder`: its files are included


def describe_folder(model: str) -> dict[str, Any]:
    """What identifies a model when a run is resumed: the `revision` of a hub id, or the size and SHA-256 of each of a
    folder's `files`, by name. Raises as `resolve_folder` does, and `InputError` for a file that cannot be read."""
    folder = resolve_folder(model)
    if not (model.strip() and os.path.isdir(os.path.expanduser(model))):
        return {"revision": folder.name}
    try:
        return {"files": hash_files(folder, file_names(folder)), EXTRA_TEMPLATES: True}
    except OSError as error:
        raise InputError(f"model {model}: {error.filename or folder} cannot be read: {error.strerror}") from error


def sampled_hashes(model: str) -> dict[str, str]:
    """For each file of a model folder, by name, a fingerprint that takes only samples of large files. Raises as
    `resolve_folder` does."""
    folder = resolve_folder(model)
    return {name: sampled_hash(folder / name) for name in file_names(folder)}


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The values of the folder's `generation_config.json`; empty if it has none."""
    path = folder / GENERATION_CONFIG
    if not path.exists():
        return {}
    values = read_json_object(path)
    check_fields(values, str(path))
    return values


def read_config(folder: Path) -> ModelConfig:
    """The folder's configuration, with the end-of-sequence ids of generation_config.json added."""
    path = folder / "config.json"
    adapter = folder / "adapter_config.json"
    refuse(
        adapter.exists() and not weights_path(folder).exists(),
        f"{adapter}: an adapter, such as LoRA's, is no model; merge it into its base model (peft: merge_and_unload)",
    )
    values = text_config(read_json_object(path))
    if isinstance(values.get("model_type"), str | None):
        require_family(values, str(path))  # before other fields, which are meaningless for an unknown model
    check_fields(values, str(path))
    try:
        config = from_hf(drop_nulls(values), str(path))
    except InputError as error:
        raise error if str(path) in str(error) else InputError(f"{path}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:  # fields of a single family
        raise InputError(f"{path}: a field's value is of the wrong kind ({type(error).__name__}: {error})") from error
    check_end_of_sequence(config.eos_token_ids, config.vocab_size, str(path))
    more = read_eos_token_ids(read_generation_config(folder))
    check_end_of_sequence(more, config.vocab_size, str(folder / GENERATION_CONFIG))
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))


_Match = tuple[FoundTensor, WeightSlice, Tensor]  # a tensor, its slice of the decoder, and the rows on the meta device


class FolderWeights:
    """A `WeightSource` that reads a Hugging Face folder, and of its tensors only the wanted ranges. `InputError`: a
    file is missing or damaged; a tensor is missing, duplicate, unknown or of the wrong shape; values read are not
    finite in the target's dtype; or a head that should be tied to the embedding differs from it.

    Args:
        dtype: the model's, in which a head and the embedding must be equal; by default that of the ranges, which is
            wider where they are an optimizer's masters.

    Attributes:
        generation_config: the values of the folder's file of that name.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        self.folder, self.config, self.dtype = folder, read_config(folder), dtype
        self.generation_config = read_generation_config(folder)

    @torch.no_grad()
    def fill(self, wanted: Ranges) -> None:
        extremes: dict[tuple[Path, str, torch.dtype], list[Tensor]] = {}  # on the device: no synchronization per tensor
        with ExitStack() as opened:
            placed, head = self._match_tensors(opened)
            if wanted.get("value_head"):
                placed += self._value_head(opened)
            for found, piece, rows in placed:
                for values in fill_rows(found, piece, rows, wanted.get(piece.parameter, ())):
                    pair = torch.stack(torch.aminmax(values))  # a NaN makes both NaN
                    extremes.setdefault((found.file, found.name, values.dtype), []).append(pair)
            _require_finite(extremes)
            if head is not None:
                _require_tied(head, wanted.get("embed", ()), self.dtype)

    def _match_tensors(self, opened: ExitStack) -> tuple[list[_Match], FoundTensor | None]:
        """The folder's tensors, and that of the head if there is one although config.json ties it to the embedding."""
        config = self.config
        shapes, pieces = meta_tensors(config), {piece.name: piece for piece in weight_map(config)}
        require_all_stored(config, shapes)
        fused, missing = fused_experts(config), {name: piece.parameter for name, piece in pieces.items()}
        placed, head = list[_Match](), None
        for found in find_tensors(self.folder, config, opened):
            piece, parameter = pieces.get(found.name), fused.get(found.name)
            if piece is not None:
                del missing[found.name]
                shape = piece.to_hf(piece.rows_of(shapes))
            elif parameter is not None:
                missing = {n: p for n, p in missing.items() if p != parameter}
                piece, shape = WeightSlice(found.name, parameter, 0, ALL_ROWS), shapes[parameter]
            else:
                head = found
                continue
            _require_shape(found.stored.entry, shape, f"{found.file}: {found.name}")
            placed.append((found, piece, piece.rows_of(shapes)))
        if missing:
            raise InputError(
                f"{weights_path(self.folder)}: {len(missing)} tensors are missing, first {next(iter(missing))} "
                f"(config.json asks for {len(pieces)})"
            )
        return placed, head

    def _value_head(self, opened: ExitStack) -> list[_Match]:
        """The critic's value head, if the folder has its file."""
        from safetensors import SafetensorError

        path = self.folder / VALUE_HEAD
        if not path.exists():
            return []
        try:
            reader = TensorReader(path, opened.enter_context(Staging()))
            opened.callback(reader.close)
            stored = reader.tensors["value_head"]
        except (OSError, SafetensorError, KeyError) as error:
            raise InputError(f"{path}: not a safetensors file with a value_head ({error})") from error
        rows = torch.empty(1, self.config.hidden_size, device="meta")
        _require_shape(stored.entry, rows, f"{path}: value_head")
        return [(FoundTensor("value_head", path, stored), VALUE_HEAD_PIECE, rows)]


def _require_shape(entry: Entry, expected: Tensor, where: str) -> None:
    """Raise `InputError` if a file's tensor has another shape than `expected`, or is quantized."""
    if entry.shape != tuple(expected.shape):
        raise InputError(f"{where} has shape {list(entry.shape)}; config.json asks for {list(expected.shape)}")
    if not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
        raise InputError(f"{where} is {entry.dtype}; quantized weights are not supported, use bfloat16")


def _require_tied(head: FoundTensor, embed: Sequence[TensorRange], dtype: torch.dtype | None) -> None:
    """Raise `InputError` if a folder's head differs in `dtype`, by default that of the ranges, from the embedding, to
    which config.json ties it."""
    for values, first in embed:
        for at in range(0, values.numel(), CHUNK_BYTES):
            part = values[at : at + CHUNK_BYTES]
            own = torch.empty_like(part)
            try:
                head.stored.fill(first + at, own)
            except OSError as error:
                raise InputError(f"{head.file}: cannot be read ({error})") from error
            if not torch.equal(own.to(dtype or own.dtype), part.to(dtype or part.dtype)):
                raise InputError(
                    f"{head.file}: {LM_HEAD} differs from the embedding, and tie_word_embeddings is true in config.json"
                    f"; set that to false to use {LM_HEAD}, or remove the tensor"
                )


def _require_finite(extremes: Mapping[tuple[Path, str, torch.dtype], Sequence[Tensor]]) -> None:
    """Raise `InputError` naming the first tensor whose smallest or largest value is NaN or infinite."""
    if not extremes:
        return
    pairs = [(source, pair) for source, found in extremes.items() for pair in found]
    finite = torch.stack([pair.float() for _, pair in pairs]).isfinite().all(1).tolist()
    for ((file, name, dtype), _), is_finite in zip(pairs, finite, strict=True):
        refuse(not is_finite, f"{file}: {name} has values that are NaN or infinite as {dtype}; the model is damaged")
