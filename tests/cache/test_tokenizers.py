"""A tokenizer that was kept does to text what the whole one does, and is used only while nothing changed."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import finished
from transformers import PreTrainedTokenizerFast

from lockstep.cache import fingerprint, tokenizers
from lockstep.cache.tokenizers import CachedTokenizer
from lockstep.models.tokenizer import byte_tokenizer, encode_prompt, load_tokenizer, save_tokenizer

MESSAGES = [{"role": "user", "content": "12 34?"}]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


@pytest.fixture(scope="module")
def merges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained byte-pair tokenizer, a post-processor, truncation, padding and special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    backend.train_from_iterator(["the quick brown fox", "jumps over the lazy dog", "lorem ipsum dolor"] * 9, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    whole = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    whole.chat_template = "{% for m in messages %}{{ bos_token + m['content'] }}{% endfor %}"
    folder = tmp_path_factory.mktemp("merges")
    backend.enable_truncation(4)
    backend.enable_padding()
    save_tokenizer(whole, folder)
    return folder


def both(folder: Path) -> tuple[PreTrainedTokenizerFast, CachedTokenizer]:
    """The whole tokenizer, as the first load gives it, and the kept one of the second."""
    whole, again = load_tokenizer(folder), load_tokenizer(folder)
    assert isinstance(whole, PreTrainedTokenizerFast) and isinstance(again, CachedTokenizer)
    return whole, again


def test_a_kept_one_is_the_whole_one(merges: Path, cache: Path, tmp_path: Path) -> None:
    whole, again = both(merges)

    @given(st.text() | st.sampled_from(["<s> the quick </s>fox", "lorem\n\n  ipsum", "a" * 50]))
    def same(text: str) -> None:
        for special in (True, False):
            ids = list(whole(text, add_special_tokens=special)["input_ids"])
            assert again(text, add_special_tokens=special)["input_ids"] == ids == again.encode(text, special)
            for skip in (True, False):
                assert again.decode(ids, skip_special_tokens=skip) == whole.decode(ids, skip_special_tokens=skip)

    same()
    assert again.get_vocab() == whole.get_vocab() and again.bos_token == "<s>"
    assert (again.eos_token_id, again.pad_token_id) == (whole.eos_token_id, whole.pad_token_id)
    assert encode_prompt(again, MESSAGES) == encode_prompt(whole, MESSAGES)
    for name, tokenizer in (("whole", whole), ("again", again)):
        save_tokenizer(tokenizer, tmp_path / name)
    files = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("whole", "again")]
    assert files[0] == files[1] and "tokenizer.json" in files[0]


def test_another_folder_or_a_damaged_file_is_loaded(merges: Path, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(merges, folder)
    both(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<s>"}))
    whole, again = both(folder)
    assert again.eos_token_id == whole.eos_token_id == 0
    for file in cache.iterdir():
        text = file.read_text()
        file.write_text(text.replace("lazy", "hazy") if "lazy" in text else text[:-30])
    both(folder)


def test_a_change_that_leaves_size_and_time_is_seen(merges: Path, cache: Path, tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(merges, folder)
    both(folder)
    file = folder / "tokenizer_config.json"
    before, text = file.stat(), file.read_text()
    assert text.count('"eos_token": "</s>"') == 1
    file.write_text(text.replace('"eos_token": "</s>"', '"eos_token":  "<s>"'))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    whole, again = both(folder)
    assert again.eos_token_id == whole.eos_token_id == 0
    monkeypatch.setattr(tokenizers, "_LARGEST", 100)  # now all are too large to be hashed
    both(folder)
    file.write_text(text)
    whole, again = both(folder)
    assert again.eos_token_id == whole.eos_token_id == 1
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    assert isinstance(load_tokenizer(folder), PreTrainedTokenizerFast)


def test_one_that_cannot_be_kept_is_loaded(merges: Path, cache: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as on a full disk
    try:
        for _ in range(2):
            assert isinstance(load_tokenizer(merges), PreTrainedTokenizerFast)
            assert isinstance(byte_tokenizer(), PreTrainedTokenizerFast)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    both(merges)


def test_a_tokenizer_that_does_more_to_text_is_not_kept(merges: Path, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(merges, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"split_special_tokens": True}))
    for _ in range(2):
        assert isinstance(load_tokenizer(folder), PreTrainedTokenizerFast)
    assert not cache.exists()


def test_text_does_not_import_transformers_a_second_time(cache: Path) -> None:
    assert isinstance(byte_tokenizer(), PreTrainedTokenizerFast)
    program = (
        "import sys\n"
        "from lockstep.models.tokenizer import byte_tokenizer, encode_prompt\n"
        "tokenizer = byte_tokenizer()\n"
        "print(encode_prompt(tokenizer, 'ab'), tokenizer.decode([97, 258], skip_special_tokens=True))\n"
        "print('transformers' in sys.modules)\n"
        "print(len(encode_prompt(tokenizer, [{'role': 'user', 'content': 'a'}])), 'transformers' in sys.modules)\n"
    )
    done = finished([sys.executable, "-c", program])
    assert done.stdout.splitlines() == ["[97, 98] a", "False", "20 True"], done.stderr


def test_threads_may_load_one_each(cache: Path, tmp_path: Path) -> None:
    save_tokenizer(byte_tokenizer(), tmp_path)
    source = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from lockstep.models.tokenizer import load_tokenizer\n"
        "with ThreadPoolExecutor(3) as pool:\n"
        f"    print([t.decode([65]) for t in pool.map(load_tokenizer, [{str(tmp_path)!r}] * 3)])\n"
    )
    found = finished([sys.executable, "-c", source])
    assert found.stdout == "['A', 'A', 'A']\n", found.stderr


def test_one_that_an_edited_package_kept_is_loaded(merges: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both(merges)
    monkeypatch.setattr(fingerprint, "sources", lambda: "edited")
    both(merges)


def test_one_of_a_package_that_somebody_has_changed_is_neither_kept_nor_found(
    merges: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("lockstep.models.tokenizer.encode_prompt", lambda *_: [])
        fingerprint.recheck_code()
        assert isinstance(load_tokenizer(merges), PreTrainedTokenizerFast) and not cache.exists()
    fingerprint.recheck_code()
    both(merges)
    with monkeypatch.context() as patch:
        patch.setattr("lockstep.models.tokenizer.encode_prompt", lambda *_: [])
        fingerprint.recheck_code()
        assert isinstance(load_tokenizer(merges), PreTrainedTokenizerFast)
    fingerprint.recheck_code()
