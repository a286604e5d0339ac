"""Caches tokenizers, so that `transformers` need not be imported: one second, or seven on a slow file system.

A tokenizer's saved files are kept in the user's cache folder, under a key of the contents of its model folder, the
versions of both libraries, and this package's sources. Plain text goes straight to the `tokenizers` backend with the
same options; for everything else, such as chat messages, the full tokenizer is loaded.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import fingerprint, user_folder

_FILES = (".json", ".jinja", ".txt", ".model")  # suffixes of files in a model folder that a tokenizer may read
_ATTRIBUTES = ("eos_token_id", "pad_token_id", "chat_template", "name_or_path")  # cached beside the files
_MAX_CACHED = 8  # tokenizers to keep
_LOADING = threading.RLock()  # several threads cannot import `transformers` at once
_LARGEST = 64 << 20  # bytes from which on a file is identified by size and time, not by a hash


class CachedTokenizer:
    """A tokenizer for plain text, with the attributes that this package uses; any other attribute loads the full one.

    Args:
        files: the tokenizer's saved files, by name. attributes: those listed in `_ATTRIBUTES`, by name.
        load: loads the full tokenizer.
    """

    def __init__(self, files: Mapping[str, str], attributes: Mapping[str, Any], load: Callable[[], Any]) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(files["tokenizer.json"])
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._files, self._load = dict(files), load
        self._full_tokenizer: Any = None
        self.eos_token_id, self.pad_token_id = attributes["eos_token_id"], attributes["pad_token_id"]
        self.chat_template, self.name_or_path = attributes["chat_template"], attributes["name_or_path"]
        self._kept_template = self.chat_template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, add_special_tokens)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        """Token ids by token, including added tokens."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files that the full tokenizer would write."""
        if self.chat_template != self._kept_template:
            self._full().save_pretrained(folder)
        else:
            for name, text in self._files.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._full(), name)

    def _full(self) -> Any:
        with _LOADING:
            if self._full_tokenizer is None:
                self._full_tokenizer = self._load()
        self._full_tokenizer.chat_template = self.chat_template  # it may have been changed
        return self._full_tokenizer


def load_cached(source: Path | str, load: Callable[[], Any]) -> Any:
    """The tokenizer of a folder or name: from the cache, or by `load` and then cached."""
    with _LOADING:
        return load() if fingerprint.is_modified() else _load_cached(source, load)


def _load_cached(source: Path | str, load: Callable[[], Any]) -> Any:
    path = user_folder.cache_folder() / "tokenizers" / f"{_key(source)}.json"
    with suppress(Exception):  # whatever a library raises on unsuitable files; then it is loaded
        if (cached := _read(path)) is not None:
            return CachedTokenizer(*cached, load)
    full = load()
    with suppress(Exception):  # such as a full disk, in whatever form a library raises it
        if _is_plain(full):
            attributes = {name: getattr(full, name) for name in _ATTRIBUTES}
            content = json.dumps([_saved_files(full), attributes])
            user_folder.write(path, {"content": content, "hash": fingerprint.digest(content)}, keep=_MAX_CACHED)
    return full


def _read(path: Path) -> tuple[dict[str, str], dict[str, Any]] | None:
    """The cached files and attributes, or None if absent or damaged."""
    raw = user_folder.read(path)
    if not isinstance(raw, dict) or raw.get("hash") != fingerprint.digest(raw.get("content")):
        return None
    files, attributes = json.loads(raw["content"])
    return files, attributes


def _is_plain(full: Any) -> bool:
    """Whether text goes straight to the backend and back: no subclass or option changes it before or after."""
    from transformers import PreTrainedTokenizerFast

    methods = ("__call__", "_call_one", "_encode_plus", "_batch_encode_plus", "encode", "decode", "_decode")
    if not isinstance(full, PreTrainedTokenizerFast) or not isinstance(full.chat_template, (str, type(None))):
        return False
    own = any(getattr(type(full), m, None) is not getattr(PreTrainedTokenizerFast, m, None) for m in methods)
    return not (own or full.clean_up_tokenization_spaces or getattr(full, "split_special_tokens", False))


def _saved_files(full: Any) -> dict[str, str]:
    """The files that the tokenizer saves, by name."""
    with tempfile.TemporaryDirectory() as folder:
        full.save_pretrained(folder)
        return {path.name: path.read_text(encoding="utf-8") for path in Path(folder).iterdir() if path.is_file()}


def _describe_file(path: Path) -> str:
    """A text that changes with a file."""
    status = path.stat()
    if status.st_size < _LARGEST:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{status.st_size} {status.st_mtime_ns}"


def _key(source: Path | str) -> str:
    """A hash of everything that a tokenizer may be made from."""
    versions = [fingerprint.version(name) for name in ("transformers", "tokenizers")]
    files = []
    if isinstance(source, Path):
        paths = sorted([*source.iterdir(), *source.glob("additional_chat_templates/*")])
        files = [(str(p.relative_to(source)), _describe_file(p)) for p in paths if p.suffix in _FILES and p.is_file()]
    return fingerprint.digest(fingerprint.sources(), versions, str(source), files)
