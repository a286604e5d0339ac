"""Hugging Face model folders, read and written bit for bit: `config.json`, safetensors (sharded too)."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cache.file_hashes import fingerprints
from ..cache.tensor_file import CHUNK_BYTES, Entry, OpenTensorFile, TensorFile, cut
from ..errors import InputError, LockstepError
from ..json_file import read_object
from .blocks.weight_slices import WeightSlice
from .checks import check_end_of_sequence, check_fields, require_memory
from .config import ModelConfig
from .decoder import Decoder
from .families import require_family, text_part
from .hf_config import end_of_sequence, from_hf, to_hf, without_nulls
from .parts import Ranges, whole, within
from .shards import file_names, read_tensors, weights_path
from .weight_map import HEAD, fused_experts, weight_map

_FILE_SUFFIXES = {".safetensors", ".gguf", ".bin", ".pt", ".pth", ".json", ".yaml", ".zip", ".tar", ".gz", ".py"}
MAX_SHARD_BYTES = 5 * 10**9
VALUE_HEAD = "value_head.safetensors"  # beside the weights, whose names are Hugging Face's


def resolve_folder(model: str) -> Path:
    """The local folder of `model`: a path, or a hub id that is downloaded or already in the hub's cache.

    Raises:
        InputError: there is neither such a folder nor such a hub repository at hand.
    """
    path = Path(model).expanduser()
    if model.strip() and path.is_dir():
        _refuse_run_folder(path)
        return path
    local = model.startswith((".", "/", "~")) or model.count("/") != 1 or path.suffix.lower() in _FILE_SUFFIXES
    if path.exists() or local:
        raise InputError(f"model {model!r}: there is no such folder (give a Hugging Face folder or a hub id org/name)")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]))
    except Exception as error:
        raise InputError(f"model {model!r}: no such folder, and the hub did not give it ({error})") from error


def _refuse_run_folder(path: Path) -> None:
    if (path / "config.json").exists() or not (path / "config.yaml").is_file():
        return
    if (path / "model").is_dir():
        raise InputError(f"model {str(path)!r} is the folder of a run; its model is {str(path / 'model')!r}")
    raise InputError(
        f"model {str(path)!r} is the folder of a run that has no model yet: it comes when the run ends "
        f"(lockstep train --resume {path} goes on with it, from a checkpoint if it saved any)"
    )


TEMPLATES = "additional_chat_templates"  # a folder in a model's, and among what is said of it: that it was looked into


def describe_folder(model: str) -> dict[str, Any]:
    """What a model is to a run that goes on with it: a hub id's `revision`, or size and SHA-256 of a folder's `files`,
    by name: weights, tokenizer, template and all. Raises as `resolve_folder` does, and for a file that cannot be read.
    """
    folder = resolve_folder(model)
    if not (model.strip() and Path(model).expanduser().is_dir()):
        return {"revision": folder.name}
    try:
        return {"files": fingerprints(folder, file_names(folder)), TEMPLATES: True}
    except OSError as error:
        raise InputError(f"model {model}: {error.filename or folder} cannot be read: {error.strerror}") from error


def read_config(folder: Path) -> ModelConfig:
    """The folder's configuration; generation_config.json's end-of-sequence ids are added."""
    path, generation = folder / "config.json", folder / "generation_config.json"
    values = text_part(read_object(path))
    if isinstance(values.get("model_type"), str):
        require_family(values, str(path))  # of another model no other field says anything
    check_fields(values, str(path))
    try:
        config = from_hf(without_nulls(values), str(path))
    except InputError as error:
        raise error if str(path) in str(error) else InputError(f"{path}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:  # fields of one family only
        raise InputError(f"{path}: a field's value is of the wrong kind ({type(error).__name__}: {error})") from error
    check_end_of_sequence(config.eos_token_ids, config.vocab_size, str(path))
    if generation.exists():
        values = read_object(generation)
        check_fields(values, str(generation))
        more = end_of_sequence(values)
        check_end_of_sequence(more, config.vocab_size, str(generation))
        config = replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))
    return config


def load_model(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    """The decoder of a Hugging Face folder with its weights, converted to `dtype` on `device`.

    Raises:
        InputError: a file is missing or damaged; a tensor is missing, there twice, unknown, of the wrong shape, or has
            values that are not finite in `dtype`; or there is a head that is not the embedding it is tied to.
    """
    config = read_config(folder)
    require_memory(config, dtype, device, str(folder))
    model = Decoder(config, dtype, device)
    tensors = _tensors(model)
    pieces = {piece.name: piece for piece in weight_map(config)}
    fused = fused_experts(config)
    wanted = {name: piece.parameter for name, piece in pieces.items()}
    head: tuple[Path, Tensor] | None = None
    extremes: dict[tuple[Path, str], Tensor] = {}  # kept on the device, so that nothing waits for a tensor
    with torch.no_grad():
        for name, tensor, file in read_tensors(folder, config):
            piece, parameter = pieces.get(name), fused.get(name)
            if piece is not None:
                del wanted[name]
            elif parameter is not None:
                wanted = {n: p for n, p in wanted.items() if p != parameter}
            else:
                head = file, tensor
                continue
            target = piece.of(tensors) if piece else tensors[fused[name]]
            _require_form(tensor, target if piece is None else _in_folder(piece, target), f"{file}: {name}")
            target.copy_(piece.from_hf(tensor) if piece else tensor)
            extremes[file, name] = torch.stack(torch.aminmax(target))  # a NaN is both
    if wanted:
        raise InputError(
            f"{weights_path(folder)}: {len(wanted)} tensors are missing, first {next(iter(wanted))} "
            f"(config.json asks for {len(pieces)})"
        )
    _require_finite(extremes, dtype)
    if head is not None:
        _require_tied(*head, model.embed)
    return model


def load_value_head(model: Decoder, folder: Path) -> None:
    """Fill the model's value head with the folder's, if it has one.

    Raises:
        InputError: the file is damaged, or its tensor is of another shape or not finite.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not (path := folder / VALUE_HEAD).exists():
        return
    assert model.value_head is not None
    try:
        tensor = load_file(path)["value_head"]
    except (OSError, SafetensorError, KeyError) as error:
        raise InputError(f"{path}: not a safetensors file with a value_head ({error})") from error
    _require_form(tensor, model.value_head, f"{path}: value_head")
    with torch.no_grad():
        model.value_head.copy_(tensor)
    _require_finite({(path, "value_head"): torch.stack(torch.aminmax(model.value_head))}, model.value_head.dtype)


def _require_form(tensor: Tensor, target: Tensor, where: str) -> None:
    """Raise `InputError` when a file's tensor is not of the target's shape, or quantized."""
    if tensor.shape != target.shape:
        raise InputError(f"{where} has shape {list(tensor.shape)}; config.json asks for {list(target.shape)}")
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        raise InputError(f"{where} is {tensor.dtype}; quantized weights are not supported, use bfloat16")


def _in_folder(piece: WeightSlice, rows: Tensor) -> Tensor:
    """The folder's tensor of these rows, without memory where it is another."""
    return rows if piece.form is None else piece.to_hf(rows.to("meta"))


def _require_tied(file: Path, head: Tensor, embed: Tensor) -> None:
    """Raise `InputError` when a file has a head of its own where config.json ties it to the embedding."""
    if not torch.equal(head.to(embed), embed):
        raise InputError(
            f"{file}: {HEAD} differs from the embedding, and tie_word_embeddings is true in config.json; set that to "
            f"false to use {HEAD}, or remove the tensor"
        )


def _require_finite(extremes: dict[tuple[Path, str], Tensor], dtype: torch.dtype) -> None:
    """Raise `InputError` naming the first tensor whose smallest or largest value is NaN or infinite."""
    finite = torch.stack([pair.float() for pair in extremes.values()]).isfinite().all(1).tolist()
    for (file, name), good in zip(extremes, finite, strict=True):
        if not good:
            raise InputError(f"{file}: {name} has values that are NaN or infinite as {dtype}; the model is damaged")


def _tensors(model: Decoder) -> dict[str, Tensor]:
    """What a folder holds: parameters and buffers."""
    return {name: p.detach() for name, p in model.named_parameters()} | dict(model.named_buffers())


def save_model(
    model: Decoder, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES, metadata: Mapping[str, str] | None = None
) -> None:
    """Write `config.json`, `generation_config.json` and the weights, a value head in a file of its own; `transformers`
    loads the folder.

    Args:
        max_shard_bytes: of tensors in one file of weights, unless one tensor has more.
        metadata: of the files of weights, besides the format.

    Raises:
        LockstepError: a file cannot be written.
    """
    export = Export(model, folder, max_shard_bytes, metadata)
    export.begin()
    export.write(whole(model))
    export.arrange()


class Export:
    """A model's folder that several processes write, each what it has, with the bytes of one: the first begins, then
    all write, and when all have, all arrange. The arguments are those of `save_model`; so are the errors.

    What is written at one time is `tensor_file.CHUNK_BYTES`, or a block of rows that a folder has in another form.
    """

    def __init__(
        self,
        model: Decoder,
        folder: Path,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._model, self._folder = model, folder
        tensors = {name: tensor.to("meta") for name, tensor in _tensors(model).items()}
        pieces = [(piece, piece.of(tensors)) for piece in weight_map(model.config)]
        shards = list(cut(((item, item[1].nbytes) for item in pieces), max_shard_bytes))
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        placed = dict(zip(names if len(shards) > 1 else ["model.safetensors"], shards, strict=True))
        if model.value_head is not None:
            placed[VALUE_HEAD] = [(_VALUE_HEAD_PIECE, tensors["value_head"])]
        about = {"format": "pt", **(metadata or {})}
        self._files = [
            (TensorFile(folder / name, {p.name: Entry.of(_in_folder(p, rows)) for p, rows in shard}, about), shard)
            for name, shard in placed.items()
        ]

    def begin(self) -> None:
        """Write all but the weights, for which there is room then."""
        folder, config = self._folder, self._model.config
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LockstepError(f"{folder}: the folder cannot be made ({error.strerror})") from error
        dtype = str(self._model.embed.dtype).removeprefix("torch.")
        _write_json(folder / "config.json", to_hf(config, dtype))
        _write_json(folder / "generation_config.json", _generation_config(config))
        for file, _ in self._files:
            with _writing(file.path):
                file.create()
        weights = [file for file, _ in self._files if file.path.name != VALUE_HEAD]
        if len(weights) > 1:
            total = sum(entry.nbytes for file in weights for entry in file.entries.values())
            index = {name: file.path.name for file in weights for name in file.entries}
            _write_json(
                folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
            )

    def write(self, held: Ranges) -> None:
        """Write what this process has of the model's tensors, by the decoder's names."""
        for file, pieces in self._files:
            with _writing(file.path), file.open() as opened:
                for piece, rows in pieces:
                    start = piece.start * (rows.shape[-1] if rows.dim() > 1 else 1)
                    for begin, values in within(held[piece.parameter], start, rows.numel()):
                        opened.write(piece.name, begin, values)

    def arrange(self, rank: int = 0, ranks: int = 1) -> None:
        """Bring what a folder has in another form into it, every rank of so many its part."""
        for file, pieces in self._files:
            with _writing(file.path), file.open() as opened:
                for piece, rows in pieces:
                    if piece.form is not None:
                        _arrange(opened, piece, rows, (rank, ranks))


_VALUE_HEAD_PIECE = WeightSlice("value_head", "value_head", 0, 1 << 62)


def _arrange(file: OpenTensorFile, piece: WeightSlice, rows: Tensor, part: tuple[int, int]) -> None:
    """Of a tensor's blocks, as many at a time as are a chunk, those whose turn is this rank's."""
    assert piece.form is not None
    width, (rank, ranks) = rows.numel() // rows.shape[0], part
    count = max(1, CHUNK_BYTES // (piece.form.block * width * rows.itemsize)) * piece.form.block
    for at in range(rank * count, piece.rows, ranks * count):
        shape = min(count, piece.rows - at), *rows.shape[1:]
        found = file.read(piece.name, at * width, prod(shape)).view(shape)
        file.write(piece.name, at * width, piece.to_hf(found).flatten())


@contextlib.contextmanager
def all_or_nothing(folder: Path) -> Iterator[None]:
    """After an error inside, `folder` is empty: half a model is none."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def _generation_config(config: ModelConfig) -> dict:
    fields = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
    }
    return {k: v for k, v in fields.items() if v not in (None, [])}


def _write_json(path: Path, value: dict) -> None:
    try:
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise LockstepError(f"{path}: cannot be written ({error.strerror})") from error


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LockstepError(f"{path}: cannot be written ({error})") from error
