"""Finding and reading the tensors of a Hugging Face folder that the decoder has parameters for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import NamedTuple

import torch
from torch import Tensor

from ...cache.tensor_file import Staging, StoredTensor, TensorReader
from ...errors import InputError
from ...json_file import read_json_object
from ..blocks import mxfp4
from ..blocks.weight_slices import RowLayout, WeightSlice
from ..config import ModelConfig
from ..families import family_of, is_multimodal
from ..parts import TensorRange, intersect
from .weight_map import LM_HEAD, fused_experts, is_ignored, text_model_name, weight_map


def weights_path(folder: Path) -> Path:
    """The index of a folder's shards, or the single file of weights."""
    index = folder / "model.safetensors.index.json"
    return index if index.exists() else folder / "model.safetensors"


class FoundTensor(NamedTuple):
    """A tensor of a folder: its name, in a folder of the text model alone; its file; and how to read it."""

    name: str
    file: Path
    stored: StoredTensor


def find_tensors(folder: Path, config: ModelConfig, opened: ExitStack) -> Iterator[FoundTensor]:
    """The tensors in a folder's files, which can be read until `opened` is closed: those of `weight_map` or
    `fused_experts`, and a head even if it is tied; of a multimodal model, those of the text model. MXFP4 weights are
    presented as bfloat16. `InputError`: a file is missing or damaged; a tensor has no place in the model, or occurs
    twice."""
    from safetensors import SafetensorError

    seen, parts = _SeenTensors(config), mxfp4.PartJoiner()
    name_of = text_model_name if is_multimodal(read_json_object(folder / "config.json")) else str
    staging = opened.enter_context(Staging())
    for file in _files(folder, config, name_of):
        if not os.path.isfile(file):  # False also for invalid names
            index = weights_path(folder).name
            named = "a model folder needs it, or an index and shards" if index == file.name else f"{index} names it"
            raise InputError(f"{file}: {_describe_path(file)} ({named})")
        try:
            reader = TensorReader(file, staging)
        except OSError as error:
            raise InputError(f"{file}: cannot be read ({error.strerror})") from error
        except SafetensorError as error:
            raise InputError(f"{file}: not a whole safetensors file ({error})") from error
        opened.callback(reader.close)
        for key, stored in reader.tensors.items():
            name = name_of(key)
            if name is None:
                continue
            if name in seen:
                seen.add(name, file)
                if found := parts.join(name, stored, str(file)):
                    yield FoundTensor(found[0], file, found[1])
            elif not is_ignored(name, config):
                raise InputError(f"{file}: {key} has no place in the model that config.json describes")


def fill_rows(found: FoundTensor, piece: WeightSlice, rows: Tensor, held: Sequence[TensorRange]) -> Iterator[Tensor]:
    """Fill the held ranges of a piece from the file, and yield each. Of `rows`, the decoder's rows of the piece, only
    the shape counts. Of a piece in another layout, parts of blocks are read. `InputError`: the file cannot be read."""
    start = piece.first_element(rows)
    try:
        if piece.layout is None:
            for begin, values in intersect(held, start, rows.numel()):
                found.stored.fill(begin, values)
        else:
            size = rows.numel() // rows.shape[0] * piece.layout.block
            for at in range(0, rows.numel(), size):
                if wanted := list(intersect(held, start + at, size)):
                    _fill_block(found.stored, piece.layout, at, rows[: piece.layout.block], wanted)
    except OSError as error:
        raise InputError(f"{found.file}: cannot be read ({error})") from error
    for _, values in intersect(held, start, rows.numel()):
        yield values


def _fill_block(
    stored: StoredTensor, layout: RowLayout, at: int, rows: Tensor, wanted: Sequence[tuple[int, Tensor]]
) -> None:
    """Fill the `wanted` ranges, each given with its offset in the block, from the block at element `at` of a piece. It
    is converted on their device."""
    width, device = rows.numel() // len(rows), wanted[0][1].device
    wanted_rows = [range(first // width, -(-(first + values.numel()) // width)) for first, values in wanted]
    for read in layout.plan_reads(wanted_rows):
        if read.columns is None:
            theirs = torch.empty(layout.to_hf(rows).shape, dtype=stored.entry.dtype, device=device)
            stored.fill(at, theirs.view(-1))
        else:
            theirs = torch.empty(width, len(read.columns), dtype=stored.entry.dtype, device=device)
            stored.fill(at + read.columns.start, theirs, len(rows))
            theirs = theirs.unsqueeze(0)
        ours = layout.from_hf(theirs).flatten().split([len(r) * width for r in read.rows])
        available = [TensorRange(values, r.start * width) for values, r in zip(ours, read.rows, strict=True)]
        for first, values in wanted:
            for begin, overlap in intersect(available, first, values.numel()):
                values[begin : begin + overlap.numel()].copy_(overlap)


def _files(folder: Path, config: ModelConfig, name_of: Callable[[str], str | None]) -> list[Path]:
    """The files to read: shards without any tensor of the decoder are left out."""
    path = weights_path(folder)
    if path.suffix != ".json":
        return [path]
    placed = ((name_of(stored), file) for stored, file in _read_shard_index(path).items())
    return sorted({folder / file for name, file in placed if name and not is_ignored(name, config)})


def file_names(folder: Path) -> list[str]:
    """Every file of a model folder: its files that are not hidden, additional chat templates, and shards in
    subfolders."""
    path = weights_path(folder)
    shards = _read_shard_index(path).values() if path.suffix == ".json" else ()
    files = (*folder.iterdir(), *folder.glob("additional_chat_templates/*"))
    beside = (str(file.relative_to(folder)) for file in files if file.is_file() and not file.name.startswith("."))
    return sorted({*beside, *(str(PurePath(shard)) for shard in shards)})


def _read_shard_index(index: Path) -> dict[str, str]:
    """The file of each tensor in a shard index; `InputError` if one is outside the index's folder."""
    placed = read_json_object(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise InputError(f"{index}: weight_map must be an object of tensor names and their files")
    for name, file in placed.items():
        if PurePath(file).is_absolute() or ".." in PurePath(file).parts or "\0" in file:
            raise InputError(
                f"{index}: weight_map places {name} in {file!r}, out of the model's folder; name a file in that folder"
            )
    return placed


def _describe_path(path: Path) -> str:
    try:
        path.stat()
    except FileNotFoundError:
        return "missing, the link leads nowhere" if path.is_symlink() else "missing"
    except OSError as error:
        return f"cannot be read, {error.strerror}"  # a loop of links, or a folder without permission
    return "a folder, not a file" if path.is_dir() else "not a regular file"


class _SeenTensors:
    """Checks that each known tensor occurs once, and that a layer's experts are in one of their two forms only."""

    def __init__(self, config: ModelConfig) -> None:
        self._fused = fused_experts(config)
        self._parameters = (
            {piece.name: piece.parameter for piece in weight_map(config)} | self._fused | {LM_HEAD: LM_HEAD}
        )
        if mxfp4.METHOD in family_of(config).quant_methods:
            ends = mxfp4.BLOCKS, mxfp4.SCALES
            self._parameters |= {name + end: owner for name, owner in self._fused.items() for end in ends}
        self._files: dict[str, Path] = {}
        self._forms: dict[tuple[str, bool], str] = {}  # (parameter, whether fused) -> its first tensor

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def add(self, name: str, file: Path) -> None:
        """Record a tensor's file; `InputError` if the tensor, or its parameter in the other form, was found before."""
        if name in self._files:
            raise InputError(f"{file}: {name} is in {self._files[name]} too; remove one of them")
        parameter, fused = self._parameters[name], name in self._fused
        other = self._forms.get((parameter, not fused))
        if other is not None:
            raise InputError(
                f"{file}: {name} and {other} in {self._files[other]} are the same weights; keep one of the two forms"
            )
        self._files[name] = file
        self._forms.setdefault((parameter, fused), name)
