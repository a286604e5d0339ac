"""Tokenizers: a byte-level one for random models, loading, saving, encoding prompts, and incremental decoding.

`transformers` and `tokenizers` are imported inside the functions that need them.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cache.tokenizers import load_cached
from ..errors import HistoryRewritten, InputError, LockstepError, PromptTooLong, refuse
from ..json_file import read_json, read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# ChatML, with tools and their calls in the format of Hermes and Qwen.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\nTools:\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
    '{{ \'Call one: <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call><|im_end|>\\n\' }}{% endif %}'
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# A folder with any one of these has a tokenizer.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
# Files that hold a JSON object, with a field that each must have.
_OBJECT_FILES = {"tokenizer.json": "model", "tokenizer_config.json": None, "special_tokens_map.json": None}


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer with one token per byte: the token's id is the byte's value, and 256 to 258 are special. There are no
    merges and no normalization, so every text round-trips. `<|endoftext|>` pads, `<|im_end|>` ends a sequence, and the
    chat template is ChatML with tools."""
    return load_cached("byte-level", _make_byte_tokenizer)


def _make_byte_tokenizer() -> PreTrainedTokenizerBase:
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
    return tokenizer


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte, as GPT-2's byte-level encoding defines it (`decoders.ByteLevel`)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


TODAY = "strftime_now"  # the function by which templates read the clock; as a variable, a day
_ASKS_TODAY = re.compile(TODAY + r"""\(\s*(["'])([^"']*)\1\s*\)""")
_END_OF_THINKING = "</think>"
_MARK = "\ue000\ue001\ue000"  # private use characters: no text has them, and no template changes them


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local Hugging Face folder. Nothing is downloaded, and no code from the folder is run. Raises
    `InputError` naming the folder, or the file that cannot be read or whose chat template has a syntax error."""
    folder = Path(folder)
    refuse(not folder.is_dir(), f"tokenizer folder {folder} does not exist")
    found = any((folder / name).is_file() for name in _TOKENIZER_FILES)
    refuse(not found, f"{folder} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)} is there")
    try:
        return load_cached(folder, lambda: _load_full_tokenizer(folder))
    except OSError as error:
        raise InputError(f"the tokenizer in {folder} cannot be read: {error}") from error


def _load_full_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer = _tokenizer_class(folder).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the libraries raise many types for a damaged file, a bare Exception among them
        _check_object_files(folder)
        raise InputError(f"the tokenizer in {folder} cannot be read: {type(error).__name__}: {error}") from error
    _check_template(tokenizer)
    return tokenizer


def _check_object_files(folder: Path) -> None:
    """Raise `InputError` naming the file, if one of these is why the libraries failed."""
    for name, field in _OBJECT_FILES.items():
        path = folder / name
        if not path.exists():
            continue
        value = read_json_object(path)
        if field is not None and field not in value:
            raise InputError(f"{path}: there is no field {field}; it is not a tokenizer of the tokenizers library")
        if path.read_bytes().startswith(codecs.BOM_UTF8):
            raise InputError(f"{path}: begins with a byte order mark, which transformers does not read; remove it")


def _check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `InputError` naming the file if its chat template has a syntax error."""
    from jinja2 import TemplateSyntaxError

    if not tokenizer.chat_template:
        return
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except TemplateSyntaxError as error:
        raise InputError(f"{_template_file(tokenizer)}, line {error.lineno}: {error.message}") from error
    except Exception:  # it may need other messages or variables
        return


def _template_file(tokenizer: PreTrainedTokenizerBase) -> str:
    folder = Path(tokenizer.name_or_path)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        if tokenizer.name_or_path and (folder / name).is_file():
            return f"the chat template in {folder / name}"
    return "the tokenizer's chat template"


def _tokenizer_class(folder: Path) -> Any:
    """The class to load the folder with. Where the folder names the generic class, `AutoTokenizer` would choose it too,
    but importing that reads a file for every model that transformers has."""
    with suppress(OSError, ValueError):
        named = read_json(folder / "tokenizer_config.json")
        if isinstance(named, dict) and named.get("tokenizer_class") == "TokenizersBackend":
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write the tokenizer and its chat template in Hugging Face's layout; `LockstepError`: a file cannot be written."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)  # if it is a file, the library would only log that
        tokenizer.save_pretrained(folder)
    except Exception as error:  # tokenizers raises a bare Exception for the file that it writes
        raise LockstepError(f"{folder}: the tokenizer cannot be written ({error})") from error


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int, where: str, with_added: bool = False) -> None:
    """Raise `InputError`, naming `where`, if the tokenizer's vocabulary is larger than the model's. A smaller one is
    usual. Unless `with_added`, tokens that were added to it, other than its end of sequence, may lie beyond the
    model's: text with one of them is refused later (`require_known`)."""
    ids = set(tokenizer.get_vocab().values())
    if not with_added and max(ids) >= vocab_size:
        ids = ids.difference(tokenizer.get_added_vocab().values()) | {tokenizer.eos_token_id or 0}
    needed = max(ids) + 1
    refuse(needed > vocab_size, f"{where} needs a vocabulary of {needed}, but the model's has {vocab_size} entries")


def require_known(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], vocab_size: int) -> list[int]:
    """Return `token_ids` of a text. `InputError`: one of them is beyond the model's vocabulary."""
    if token_ids and (last := max(token_ids)) >= vocab_size:
        token = tokenizer.decode([last])
        raise InputError(f"the text has {token!r}, token id {last}, outside the model's vocabulary of {vocab_size}")
    return token_ids


def require_same_tokens(
    tokenizer: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, sizes: tuple[int, int], where: str
) -> None:
    """Raise `InputError`, naming `where`, unless the teacher's tokens and ids are the same and its vocabulary is at
    least as large; `sizes` are the vocabulary sizes of the model and of the teacher."""
    own, other = tokenizer.get_vocab(), teacher.get_vocab()
    if own != other:
        different = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
        first = different[0]
        raise InputError(
            f"{where}: its tokenizer has another vocabulary than the model's: {len(different)} tokens differ, first "
            f"{first!r}, {own.get(first, 'none')} in the model's and {other.get(first, 'none')} in the teacher's; "
            "distillation needs a teacher of the same tokenizer"
        )
    if sizes[1] < sizes[0]:
        raise InputError(
            f"{where}: its vocabulary has {sizes[1]} entries and the model's {sizes[0]}, so the model may sample what "
            "the teacher has no row for; use a teacher with at least as many"
        )


def max_token_bytes(tokenizer: PreTrainedTokenizerBase) -> int:
    """An upper bound on the bytes of text that one token of the vocabulary stands for."""
    return max(len(token.encode(errors="replace")) for token in tokenizer.get_vocab())


def require_prompt_fits(prompt: str | list[dict[str, Any]], context: int, longest: int) -> None:
    """Raise `PromptTooLong`, without tokenizing, for a prompt of more than twice the size of `context` tokens of
    `longest` bytes: twice, since a tokenizer may normalize text to less. Tokenizing megabytes takes a minute."""
    texts = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt if isinstance(m.get("content"), str)]
    characters = sum(map(len, texts))
    if characters > 2 * context * longest:  # it has at least as many bytes as characters
        raise PromptTooLong(sum(len(text.encode(errors="replace")) for text in texts), context)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[dict[str, Any]],
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt. A string is plain text, with the special tokens that the tokenizer adds by default (BOS
    for Llama; none for Qwen). Messages go through the tokenizer's chat template with its generation prompt;
    `chat_template_kwargs` are its variables, such as `enable_thinking`. `InputError`: there is no template, or it
    refuses the messages."""
    if isinstance(prompt, str):
        return encode_text(tokenizer, prompt, special=True)
    return encode_text(tokenizer, render_chat(tokenizer, prompt, chat_template_kwargs or {}))


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], chat_template_kwargs: dict[str, Any]
) -> str:
    """Messages as rendered by the tokenizer's chat template, with its generation prompt. The variable `TODAY` is a
    day, as text, that the template takes for today. Raises as `encode_prompt`."""
    if not tokenizer.chat_template:
        raise InputError("the prompt is chat messages, but the tokenizer has no chat template; give a text prompt")
    try:
        if TODAY in chat_template_kwargs:
            day, tools = chat_template_kwargs[TODAY], chat_template_kwargs.get("tools")
            chat_template_kwargs = {n: v for n, v in chat_template_kwargs.items() if n != TODAY}
            chat_template_kwargs["chat_template"] = _set_today(tokenizer.get_chat_template(tools=tools), day)
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **chat_template_kwargs
        )
    except InputError:
        raise
    except Exception as error:  # Jinja's errors and whatever the template itself raises
        lacks_tools = "tools" in str(tokenizer.chat_template) and not chat_template_kwargs.get("tools")
        hint = "; it reads tools: give them, as in task.chat_template_kwargs" if lacks_tools else ""
        raise InputError(f"{_template_file(tokenizer)} refuses the messages: {error}{hint}") from error


def _set_today(template: str, day: Any) -> str:
    """The chat template with this day as text where it asks for today's date, as in `strftime_now("%Y-%m-%d")`."""
    try:
        today = date.fromisoformat(day)
    except (TypeError, ValueError) as error:
        what = f"the chat template's {TODAY} is {day!r:.40}"
        raise InputError(f'{what}; it must be a day, as in "2026-01-31"') from error
    return _ASKS_TODAY.sub(lambda asked: json.dumps(today.strftime(asked[2])), template)


def shows_today(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], chat_template_kwargs: dict[str, Any]
) -> bool:
    """Whether the chat template shows these messages in other words on other days. Raises as `encode_prompt`."""
    if TODAY not in str(tokenizer.chat_template) or TODAY in chat_template_kwargs:
        return False
    days = ({TODAY: day} for day in ("2000-01-01", "2011-12-30"))
    first, second = (render_chat(tokenizer, messages, chat_template_kwargs | day) for day in days)
    return first != second


def encode_following(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    following: list[dict[str, Any]],
    chat_template_kwargs: dict[str, Any] | None = None,
    ends: Sequence[str] = (),
) -> list[int]:
    """Token ids of what the chat template renders after the last of `messages`, an answer, when the messages in
    `following` come next: the end of the answer, those messages, and the generation prompt. `ends` are the texts of the
    tokens that end answers; in an answer with `tool_calls`, the tokens returned begin at the first of them.

    Raises `HistoryRewritten` if the template drops earlier thinking, so that these tokens do not continue what was
    sampled, and `InputError` if it does not render the answer verbatim, or leaves out a following message.
    """
    *before, answer = messages
    marked = [_mark_thinking(message, i) for i, message in enumerate([*before, _add_mark(answer)])]
    whole = render_chat(tokenizer, [*marked, *following], chat_template_kwargs or {})
    head, found, tail = whole.rpartition(_MARK)
    if answer.get("tool_calls"):
        found_ends = [tail.index(end) for end in ends if end in tail]
        tail = tail[min(found_ends, default=len(tail)) :]
    roles = " and ".join(sorted({str(message.get("role")) for message in following}))
    where = f"{_template_file(tokenizer)} cannot go on from what was sampled with a message of role {roles}"
    is_verbatim = found and tail and _MARK not in head
    refuse(not is_verbatim, f"{where}: it does not show an answer as it is; give text or token ids instead")
    unseen = next((m.get("role") for m in following if not _is_shown(m.get("content"), tail)), None)
    refuse(unseen is not None, f"{where}: it leaves out what a message of role {unseen} says; give text or token ids")
    lost = [i for i, message in enumerate(marked) if _thinking(message) not in head]
    # The prompt may have shown earlier thinking no more than this does: the model has not seen that.
    seen = render_chat(tokenizer, marked[:-1], chat_template_kwargs or {}) if lost and lost[0] < len(before) else ""
    if any(i == len(before) or _thought_mark(i) in seen and _thought_mark(i) not in head for i in lost):
        kept = [_without_thinking(message) if i in lost else message for i, message in enumerate(messages)]
        raise HistoryRewritten(
            f"{where}: it leaves out the thinking of earlier answers, which the model has seen", kept
        )
    return encode_continuation(tokenizer, tail)


def end_of_answer(
    tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any], end_tokens: Collection[int]
) -> int | None:
    """The one of `end_tokens` with which the chat template ends an answer; the tokenizer's end of sequence if it shows
    none of them there."""
    tail = ""
    with suppress(InputError):  # it may accept other messages
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        tail = render_chat(tokenizer, messages, chat_template_kwargs).rpartition(_MARK)[2]
    return next((token for token in encode_text(tokenizer, tail) if token in end_tokens), tokenizer.eos_token_id)


def _is_shown(content: Any, text: str) -> bool:
    """Whether a message's content is in `text`, verbatim or escaped as in JSON."""
    if not isinstance(content, str):
        return True
    return content.strip() in text or json.dumps(content.strip(), ensure_ascii=False)[1:-1] in text


def _add_mark(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer with a mark at the end of its content, or in the arguments of its last call."""
    if not answer.get("tool_calls"):
        return {**answer, "content": f"{answer['content']}{_MARK}"}
    *calls, last = answer["tool_calls"]
    function = {**last["function"], "arguments": {**last["function"]["arguments"], "mark": _MARK}}
    return {**answer, "tool_calls": [*calls, {**last, "function": function}]}


def _thinking(message: dict[str, Any]) -> str:
    """The thinking of an answer: what precedes `</think>`, or the field `thinking` that some templates read."""
    if message.get("role") != "assistant" or not isinstance(message.get("content"), str):
        return ""
    thought = message.get("thinking") or message["content"].rpartition(_END_OF_THINKING)[0]
    return thought.strip().removeprefix("<think>").strip()


def _thought_mark(number: int) -> str:
    return f"\ue000\ue002{number}\ue000"


def _mark_thinking(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Message `number` with a mark at the end of its thinking, if it has any: the same words may stand elsewhere."""
    if not _thinking(message):
        return message
    mark = _thought_mark(number)
    if message.get("thinking"):
        return {**message, "thinking": f"{message['thinking'].rstrip()}{mark}"}
    thought, end, said = message["content"].rpartition(_END_OF_THINKING)
    return {**message, "content": f"{thought.rstrip()}{mark}{end}{said}"}


def _without_thinking(message: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in message.items() if name != "thinking"}
    return {**rest, "content": message["content"].rpartition(_END_OF_THINKING)[2].lstrip("\n")}


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> list[int]:
    """Token ids of a text; with `special`, including the special tokens that the tokenizer adds by default."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the prompt is not valid Unicode: {error.reason} at character {error.start}") from error
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def encode_continuation(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that stands after others, without the space that some tokenizers (SentencePiece's) put before
    the first word of any text."""
    if _adds_nothing_before(tokenizer):
        return encode_text(tokenizer, text)
    before = "a" if text[:1].isspace() else "\n"  # what the text does not merge with: newlines merge with one another
    begin, ids = encode_text(tokenizer, before), encode_text(tokenizer, before + text)
    return ids[len(begin) :] if ids[: len(begin)] == begin else encode_text(tokenizer, text)


@lru_cache(maxsize=4)
def _adds_nothing_before(tokenizer: PreTrainedTokenizerBase) -> bool:
    newline, word, both = (encode_text(tokenizer, text) for text in ("\n", "a", "\na"))
    return both == newline + word


class TextStream:
    """Decodes a growing list of token ids, piece by piece. Each call decodes only the previous piece and the tokens
    since; the former is the context for tokenizers that treat the first token of a text specially."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._context = self._read = 0  # token offsets: where decoding begins; the end of what was returned
        self._length = 0

    def feed(self, token_ids: list[int]) -> str:
        """The new text; empty while it ends within a character."""
        before = self._decode(token_ids[self._context : self._read])
        after = self._decode(token_ids[self._context :])
        if len(after) <= len(before) or after.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._context, self._read = self._read, len(token_ids)
        self._length += len(after) - len(before)
        return after[len(before) :]

    def finish(self, text: str) -> str:
        return text[self._length :]
