"""Tokenizers: the byte-level one of the random models, loading, saving, and prompts to token ids.

`transformers` and `tokenizers` are imported inside the functions that need them.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Any one of these makes a folder a tokenizer's.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def byte_tokenizer(vocab_size: int = 512) -> PreTrainedTokenizerBase:
    """A tokenizer with one token a byte: the token's id is the byte's value, and 256 to 258 are special.

    There are no merges and no normalization, so every text round-trips. `<|endoftext|>` pads, `<|im_end|>` ends a
    sequence, and the chat template is plain ChatML. `vocab_size` is that of the model it is for.

    Raises `InputError` when the tokens do not fit into `vocab_size`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT, IM_START, IM_END])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=END_OF_TEXT, eos_token=IM_END, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    check_vocabulary(tokenizer, vocab_size, "the byte-level tokenizer")
    return tokenizer


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte, as GPT-2's byte-level encoding defines it (`decoders.ByteLevel`)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local Hugging Face folder. Nothing is downloaded and no code of the folder's is run.

    Raises `InputError` naming the folder when it is missing, holds no tokenizer, or cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"tokenizer folder {folder} does not exist")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise InputError(f"{folder} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)} is there")
    try:
        return _tokenizer_class(folder).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the libraries raise many types for a damaged file, a bare Exception among them
        raise InputError(f"the tokenizer in {folder} cannot be read: {error}") from error


def _tokenizer_class(folder: Path) -> Any:
    """What reads the folder. Where it names the generic class that is `AutoTokenizer`'s choice too, but importing that
    reads a file for every model there is."""
    with suppress(OSError, ValueError):
        named = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        if isinstance(named, dict) and named.get("tokenizer_class") == "TokenizersBackend":
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write the tokenizer and its chat template in Hugging Face's layout into `folder`, made when missing."""
    tokenizer.save_pretrained(folder)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int, where: str) -> None:
    """Raise `InputError`, naming `where`, when the tokenizer has a token id that the model has no row for.

    A tokenizer with fewer tokens than the model has rows is usual: embeddings are padded to round sizes.
    """
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > vocab_size:
        raise InputError(f"{where} needs a vocabulary of {needed}, but the model's has {vocab_size} entries")


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[dict[str, Any]],
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt.

    A string is plain text: no template, and the special tokens that the tokenizer adds by default and no others (a
    Llama's BOS; nothing for a Qwen). Messages go through the tokenizer's own chat template with its generation
    prompt; `chat_template_kwargs` are the template's variables, such as `enable_thinking`.

    Raises `InputError` when messages meet a tokenizer without a template or a template that refuses them.
    """
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the prompt is not valid Unicode: {error.reason} at character {error.start}") from error
        return list(tokenizer(prompt)["input_ids"])
    if not tokenizer.chat_template:
        raise InputError("the prompt is chat messages, but the tokenizer has no chat template; give a text prompt")
    try:
        text = tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True, **(chat_template_kwargs or {})
        )
    except Exception as error:  # Jinja's errors and whatever the template itself raises
        raise InputError(f"the tokenizer's chat template refuses the messages: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
