"""safetensors files that several processes read and write in parallel, each its own ranges of the tensors, with one
chunk of memory. The file is byte for byte what the library would write (https://github.com/huggingface/safetensors:
eight bytes with the size of a JSON header, the header, and the tensors)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cached_property, partial
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

CHUNK_BYTES = 32 << 20  # bytes in flight at once
_PART_BYTES = 1 << 20  # bytes that a thread reads at once
_DTYPES = {  # in the library's order; tensors of later dtypes come first in a file
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}


class Entry(NamedTuple):
    """The dtype and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Entry:
        return Entry(tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """The layout of a file at `path` with these tensors, the same as the library's.

    Attributes:
        header: the bytes before the tensors. names: the tensors' names in file order.
    """

    def __init__(self, path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str] | None = None) -> None:
        order, self.path, self.entries = list(_DTYPES), path, entries
        names = sorted(entries, key=lambda name: (-order.index(entries[name].dtype), name))
        ends = [0, *accumulate(entries[name].nbytes for name in names)]
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        for name, begin, end in zip(names, ends, ends[1:], strict=False):
            dtype, shape = entries[name]
            header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.names = names
        self._begins = {name: len(self.header) + begin for name, begin in zip(names, ends, strict=False)}
        self.size = len(self.header) + ends[-1]

    def create(self) -> None:
        """Create the file with its header and full size, before any process writes tensors."""
        with self.path.open("wb") as file:
            file.write(self.header)
            file.truncate(self.size)

    def open(self) -> OpenTensorFile:
        return OpenTensorFile(self)

    def begin(self, name: str, element: int) -> int:
        """The byte offset of a tensor's element in the file."""
        return self._begins[name] + element * self.entries[name].dtype.itemsize


class OpenTensorFile:
    """An open file whose tensors are read and written in ranges."""

    def __init__(self, file: TensorFile) -> None:
        self._file, self._descriptor = file, os.open(file.path, os.O_RDWR)

    def __enter__(self) -> OpenTensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write(
        self, name: str, first: int, values: Tensor, also: Callable[[memoryview], object] = lambda data: None
    ) -> None:
        """Write flat `values`, on any device, to a tensor from element `first` on, rounded to its dtype. `also` is
        called with the bytes of each chunk."""
        step, dtype = CHUNK_BYTES // values.itemsize, self._file.entries[name].dtype
        for at in range(0, values.numel(), step):
            data = _bytes(values[at : at + step].to(dtype))
            also(data)
            begin = self._file.begin(name, first + at)
            while data:  # a call may write only part
                done = os.pwrite(self._descriptor, data, begin)
                data, begin = data[done:], begin + done

    def read(self, name: str, first: int, count: int) -> Tensor:
        """`count` elements of a tensor from `first` on, flat."""
        found = torch.empty(count, dtype=self._file.entries[name].dtype)
        _read(self._descriptor, self._file.begin(name, first), _bytes(found), f"{self._file.path} ends within {name}")
        return found

    def flush(self) -> None:
        """Sync what was written to disk."""
        os.fsync(self._descriptor)


class Fill(Protocol):
    """Reads ranges of a tensor."""

    def __call__(self, first: int, values: Tensor, step: int = 0) -> None:
        """Fill `values`, on any device, with the tensor's elements from `first` on: flat ones of any dtype; or, with
        `step`, a matrix [N, C] of the tensor's dtype, whose rows are `step` elements apart in the file. `OSError`: the
        file cannot be read or has become shorter."""


class StoredTensor(NamedTuple):
    """A tensor in a file, read in ranges."""

    entry: Entry
    fill: Fill


class Staging:
    """Resources for reading ranges, shared by any number of files, one range at a time: a thread pool, and `chunk`, a
    staging buffer for values of another device or dtype."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(torch.get_num_threads())

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    @cached_property
    def chunk(self) -> Tensor:
        return torch.empty(CHUNK_BYTES, dtype=torch.uint8)

    def read(self, descriptor: int, begin: int, values: Tensor, if_truncated: str) -> None:
        """Fill a flat CPU tensor from byte `begin` of a file; `if_truncated` is the error if the file ends early."""
        data = _bytes(values)
        if len(data) <= _PART_BYTES:
            _read(descriptor, begin, data, if_truncated)
            return
        parts = range(0, len(data), _PART_BYTES)
        reads = [
            self._threads.submit(_read, descriptor, begin + i, data[i : i + _PART_BYTES], if_truncated) for i in parts
        ]
        wait(reads)
        for read in reads:
            read.result()


class TensorReader:
    """An open safetensors file of any origin, read in ranges. `tensors`: its tensors by name. `SafetensorError`: it is
    not a valid file; `OSError`: it cannot be opened."""

    def __init__(self, path: Path, staging: Staging) -> None:
        from safetensors import safe_open

        path.open("rb").close()  # safetensors would report any file it cannot open as missing
        with safe_open(path, framework="pt") as opened:  # validates the file; tensors are mapped, not read
            entries = {name: Entry.of(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118
        self._descriptor = os.open(path, os.O_RDONLY)
        size = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        header = json.loads(os.pread(self._descriptor, size, 8))
        self._begins = {name: 8 + size + header[name]["data_offsets"][0] for name in entries}
        self._staging = staging
        self.tensors = {
            name: StoredTensor(entry, partial(self._fill, name, entry.dtype)) for name, entry in entries.items()
        }

    def close(self) -> None:
        os.close(self._descriptor)

    def _fill(self, name: str, dtype: torch.dtype, first: int, values: Tensor, step: int = 0) -> None:
        begin, if_truncated = self._begins[name] + first * dtype.itemsize, f"it ends within {name}"
        if step == values.shape[-1]:  # contiguous rows
            values, step = values.view(-1), 0
        if step:
            assert values.dtype == dtype
            on_host = values if values.is_cpu else torch.empty_like(values, device="cpu")
            for i, row in enumerate(on_host.unbind()):
                _read(self._descriptor, begin + i * step * dtype.itemsize, _bytes(row), if_truncated)
            values.copy_(on_host)
            return
        if values.device.type == "cpu" and values.dtype == dtype:
            self._staging.read(self._descriptor, begin, values, if_truncated)
            return
        for part in values.split(CHUNK_BYTES // dtype.itemsize):
            found = self._staging.chunk[: part.numel() * dtype.itemsize].view(dtype)
            self._staging.read(self._descriptor, begin, found, if_truncated)
            part.copy_(found)
            begin += part.numel() * dtype.itemsize


def _read(descriptor: int, begin: int, data: memoryview, if_truncated: str) -> None:
    """Fill `data` from byte `begin` of a file. `if_truncated`: the error message if the file ends too early."""
    while data:
        done = os.preadv(descriptor, [data], begin)
        if not done:
            raise OSError(if_truncated)
        data, begin = data[done:], begin + done


def _bytes(values: Tensor) -> memoryview:
    """The bytes of a flat tensor; without a copy if it is on the CPU."""
    return values.detach().cpu().contiguous().view(torch.uint8).numpy().data


def split_by_size(sizes: Iterable[tuple[T, int]], limit: int) -> Iterator[list[T]]:
    """Split items, given with their sizes, into parts of at most `limit` each; a larger item is a part by itself."""
    part: list[T] = []
    used = 0
    for item, size in sizes:
        if part and used + size > limit:
            yield part
            part, used = [], 0
        part.append(item)
        used += size
    yield part
