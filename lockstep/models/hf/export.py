"""Writing Hugging Face model folders, bit for bit, in shards of limited size, by one process or several."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from ...cache.tensor_file import Entry, OpenTensorFile, TensorFile, split_by_size
from ...errors import LockstepError
from ..blocks.weight_slices import WeightSlice
from ..config import ModelConfig
from ..decoder import Decoder
from ..parts import Ranges, TensorRange, intersect, meta_tensors, ranges_of
from .config import to_hf
from .weight_map import VALUE_HEAD, VALUE_HEAD_PIECE, weight_map

MAX_SHARD_BYTES = 5 * 10**9
GENERATION_CONFIG = "generation_config.json"


def save_model(
    model: Decoder, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES, metadata: Mapping[str, str] | None = None
) -> None:
    """Write `config.json`, `generation_config.json` and the weights, with a value head in a separate file;
    `transformers` can load the folder. A file of weights has up to `max_shard_bytes` of tensors, unless a single one is
    larger, and `metadata` in addition to the format. `LockstepError`: a file cannot be written."""
    export = Export(model, folder, max_shard_bytes, metadata)
    export.create_files()
    export.write(ranges_of(model))
    export.convert_layouts()


class Export:
    """A model folder written by several processes, byte for byte as by one: the first process calls `create_files`,
    then each calls `write` with what it holds, and, once all have written, `convert_layouts`. Arguments and errors are
    those of `save_model`. A write holds `tensor_file.CHUNK_BYTES` in memory, or two copies of a block of a
    `RowLayout`. `generation`: values of `generation_config.json`, such as a temperature; the ends are the model's."""

    def __init__(
        self,
        model: Decoder,
        folder: Path,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        metadata: Mapping[str, str] | None = None,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        self._model, self._folder, self._generation = model, folder, generation or {}
        self._cut_blocks = list[tuple[TensorFile, WeightSlice, Tensor, int]]()  # held from the first element on
        tensors = {name: tensor.to(model.embed.dtype) for name, tensor in meta_tensors(model.config).items()}
        tensors |= {name: buffer.to("meta") for name, buffer in model.named_buffers()}
        pieces = [(piece, piece.rows_of(tensors)) for piece in weight_map(model.config)]
        shards = list(split_by_size(((item, item[1].nbytes) for item in pieces), max_shard_bytes))
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        placed = dict(zip(names if len(shards) > 1 else ["model.safetensors"], shards, strict=True))
        if model.value_head is not None:
            placed[VALUE_HEAD] = [(VALUE_HEAD_PIECE, model.value_head.detach().to("meta"))]
        header = {"format": "pt", **(metadata or {})}
        self._files = [
            (TensorFile(folder / name, {p.name: Entry.of(p.to_hf(rows)) for p, rows in shard}, header), shard)
            for name, shard in placed.items()
        ]

    def create_files(self) -> None:
        """Write everything but the weights, and allocate their files."""
        folder, config = self._folder, self._model.config
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LockstepError(f"{folder}: the folder cannot be made ({error.strerror})") from error
        dtype = str(self._model.embed.dtype).removeprefix("torch.")
        _write_json(folder / "config.json", to_hf(config, dtype))
        _write_json(folder / GENERATION_CONFIG, _generation_config(config, self._generation))
        for file, _ in self._files:
            with _report_write_errors(file.path):
                file.create()
        weights = [file for file, _ in self._files if file.path.name != VALUE_HEAD]
        if len(self._files) > 1:  # vLLM reads all files where there is no index, the value head's among them
            total = sum(entry.nbytes for file in weights for entry in file.entries.values())
            index = {name: file.path.name for file in weights for name in file.entries}
            _write_json(
                folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
            )

    def write(self, held: Ranges) -> None:
        """Write the ranges of the model's tensors that this process holds, by the decoder's names."""
        for file, pieces in self._files:
            with _report_write_errors(file.path), file.open() as opened:
                for piece, rows in pieces:
                    for begin, values in intersect(held[piece.parameter], piece.first_element(rows), rows.numel()):
                        if piece.layout is None:
                            opened.write(piece.name, begin, values)
                        else:
                            cut = _write_converted(opened, piece, rows, TensorRange(values, begin))
                            self._cut_blocks += [(file, piece, rows, at) for at in cut]

    def convert_layouts(self) -> None:
        """Convert, in the written files, blocks of tensors in another layout that no process held whole: those of which
        this one held the first element."""
        for file, piece, rows, at in self._cut_blocks:
            with _report_write_errors(file.path), file.open() as opened:
                block = opened.read(piece.name, at, _block_size(piece, rows))
                opened.write(piece.name, at, _convert(block, piece, rows))


def _block_size(piece: WeightSlice, rows: Tensor) -> int:
    assert piece.layout is not None
    return piece.layout.block * (rows.numel() // rows.shape[0])


def _write_converted(file: OpenTensorFile, piece: WeightSlice, rows: Tensor, held: TensorRange) -> list[int]:
    """Convert the blocks that are held whole, and write the parts of others as they are. Returns where blocks start of
    which the first part is held."""
    size, begin, end = _block_size(piece, rows), held.first, held.first + held.values.numel()
    cuts, partial = sorted({begin, end, *range(-(-begin // size) * size, end, size)}), list[int]()
    for at, until in pairwise(cuts):
        part = held.values[at - begin : until - begin]
        if until - at == size:
            part = _convert(part, piece, rows)
        elif at % size == 0:
            partial.append(at)
        file.write(piece.name, at, part)
    return partial


def _convert(block: Tensor, piece: WeightSlice, rows: Tensor) -> Tensor:
    """The flat elements of a block as the folder stores them. On the host, as a GPU may have no memory left."""
    converted = piece.to_hf(block.cpu().view(-1, *rows.shape[1:]))
    return converted.squeeze(0).flatten()  # torch copies a transposed matrix in tiles, a batch of them slowly


@contextlib.contextmanager
def empty_on_error(folder: Path) -> Iterator[None]:
    """Empty `folder` after an error inside, so that no partial model remains."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


@contextlib.contextmanager
def staging_folder(folder: Path, first: bool) -> Iterator[Path]:
    """A hidden folder beside `folder` to write a model in, for `replace_folder`. Of several processes that write it,
    the `first` removes leftovers beforehand, and the folder after an error."""
    folder = folder.resolve()
    made = folder.with_name(f".new-{folder.name}")
    if first:
        shutil.rmtree(made, ignore_errors=True)  # left by a process that was killed
    try:
        yield made
    except BaseException:
        if first:
            shutil.rmtree(made, ignore_errors=True)
        raise


def replace_folder(made: Path, folder: Path) -> None:
    """Replace `folder`, or what it links to, by the complete folder `made`. `LockstepError`: that failed, and both are
    where they were."""
    folder = folder.resolve()
    before = folder.with_name(f".old-{folder.name}")
    try:
        if folder.exists():
            shutil.rmtree(before, ignore_errors=True)
            folder.rename(before)
        made.rename(folder)
    except BaseException as error:
        if before.exists() and not folder.exists():
            before.rename(folder)
        if not isinstance(error, OSError):
            raise
        raise LockstepError(f"{folder}: cannot be replaced ({error}); the model is in {made}") from error
    shutil.rmtree(before, ignore_errors=True)


def _generation_config(config: ModelConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    own = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id, **given}
    fields = own | {"eos_token_id": list(config.eos_token_ids)}  # with those given
    return {k: v for k, v in fields.items() if v not in (None, [])}


def _write_json(path: Path, value: dict) -> None:
    with _report_write_errors(path):
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _report_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LockstepError(f"{path}: cannot be written ({error.strerror or error})") from error
