"""The byte-level tokenizer, prompts to ids, and what loading and checking refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import CONFIG, make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.config import RunConfig
from lockstep.errors import InputError, LockstepError
from lockstep.models.init import init_folder
from lockstep.models.tokenizer import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    byte_tokenizer,
    check_vocabulary,
    encode_continuation,
    encode_following,
    encode_prompt,
    end_of_answer,
    load_tokenizer,
    render_chat,
    save_tokenizer,
    shows_today,
)
from lockstep.serve.chat_prompt import encode_chat
from lockstep.session.build import load_policy
from lockstep.session.text.policy import Policy

TOKENIZER = byte_tokenizer()
SPECIAL = END_OF_TEXT, IM_START, IM_END
MESSAGES = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "12 34?\n"}]


@given(st.text().filter(lambda text: not any(token in text for token in SPECIAL)))
def test_ids_are_the_utf8_bytes_and_round_trip(text: str) -> None:
    ids = encode_prompt(TOKENIZER, text)
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_special_tokens() -> None:
    assert encode_prompt(TOKENIZER, "a<|endoftext|><|im_start|><|im_end|>") == [97, 256, 257, 258]
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.bos_token_id) == (256, 258, None)
    assert TOKENIZER.decode([97, 258], skip_special_tokens=True) == "a"


def test_messages_go_through_the_chat_template() -> None:
    expected = (
        "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\n12 34?\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert TOKENIZER.decode(encode_prompt(TOKENIZER, MESSAGES)) == expected


def test_an_answer_ends_as_the_chat_template_ends_it() -> None:
    """By Gemma's and Phi's templates that is not the tokenizer's own end of sequence."""
    tokenizer, ends = byte_tokenizer(), {256, 258}
    assert end_of_answer(tokenizer, {}, ends) == tokenizer.eos_token_id == 258
    template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}END<|im_start|>{% endfor %}"
    for end, expected in ((END_OF_TEXT, 256), (IM_END, 258), ("\n", 258)):
        tokenizer.chat_template = template.replace("END", f" {end}")
        assert end_of_answer(tokenizer, {}, ends) == expected
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert end_of_answer(tokenizer, {}, ends) == 258
    tokenizer.chat_template = template.replace("END", END_OF_TEXT)
    policy = Policy(make_model(torch.float32, config=replace(CONFIG, eos_token_ids=(256, 258))), tokenizer)
    assert [policy.encode_completion("a", in_chat) for in_chat in (True, False)] == [[97, 256], [97, 258]]


@pytest.mark.parametrize("ends", [(), (256, 258)])
def test_a_completion_ends_as_the_model_s_do_where_the_tokenizer_has_no_end(ends: tuple[int, ...]) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend_tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    policy = Policy(make_model(torch.float32, config=replace(CONFIG, eos_token_ids=ends)), tokenizer)
    assert tokenizer.eos_token_id is policy.end_of_answer is None
    assert [policy.encode_completion("a", in_chat) for in_chat in (True, False)] == [[97, *ends[:1]]] * 2


def test_a_random_model_with_a_tokenizer_that_has_no_end(tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend_tokenizer).save_pretrained(tmp_path / "tokenizer")
    init_folder("tiny", tmp_path / "model", 0, str(tmp_path / "tokenizer"))
    policy = load_policy(RunConfig(model=str(tmp_path / "model"), device="cpu"))
    assert policy.model.config.eos_token_ids == () and policy.tokenizer.eos_token_id is None


def test_template_variables_reach_the_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ '!' if loud else '.' }}"
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(encode_prompt(tokenizer, messages, {"loud": True})) == "hi!"
    assert tokenizer.decode(encode_prompt(tokenizer, messages)) == "hi."


def test_plain_text_gets_the_tokenizers_own_special_tokens_and_messages_do_not() -> None:
    from tokenizers import processors

    tokenizer = byte_tokenizer()
    begin = ("<|im_start|>", 257)
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[begin]
    )
    assert encode_prompt(tokenizer, "a") == [257, 97]
    assert encode_prompt(tokenizer, MESSAGES) == encode_prompt(TOKENIZER, MESSAGES)


def test_messages_without_or_against_a_template_are_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        encode_prompt(tokenizer, MESSAGES)
    tokenizer.chat_template = "{{ raise_exception('only one system message') }}"
    with pytest.raises(InputError, match="refuses the messages: only one system message"):
        encode_prompt(tokenizer, MESSAGES)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "llama", "deepseek_v3"])
def test_saving_and_loading_beside_a_models_config(tmp_path: Path, model_type: str) -> None:
    save_tokenizer(TOKENIZER, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = load_tokenizer(tmp_path)
    text = "a  b\r\n é Å ﬁ 東京 \x00 . , 's <|im_end|>"
    assert encode_prompt(loaded, text) == encode_prompt(TOKENIZER, text)
    assert loaded.decode(encode_prompt(loaded, text)) == text
    assert encode_prompt(loaded, MESSAGES) == encode_prompt(TOKENIZER, MESSAGES)
    assert (loaded.pad_token_id, loaded.eos_token_id) == (256, 258)


@pytest.mark.parametrize("named", ["TokenizersBackend", "PreTrainedTokenizerFast", None])
def test_the_generic_class_is_what_the_library_chooses(tmp_path: Path, named: str | None) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(TOKENIZER, tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": named}))
    loaded, expected = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is type(expected) and repr(loaded) == repr(expected)
    assert encode_prompt(loaded, MESSAGES) == encode_prompt(expected, MESSAGES) == encode_prompt(TOKENIZER, MESSAGES)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that gives an error in place of its bytes")
def test_a_file_that_the_disk_does_not_give_is_named(tmp_path: Path) -> None:
    save_tokenizer(byte_tokenizer(), tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "chat_template.jinja").symlink_to("/proc/self/mem")
    with pytest.raises(InputError, match=f"the tokenizer in {tmp_path} cannot be read: .*Input/output error"):
        load_tokenizer(tmp_path)


def test_loading_names_the_folder_and_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(InputError, match=f"{tmp_path} has no tokenizer: none of tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer\.json: cannot be read as JSON"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{}", "tokenizer.json: there is no field model"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json: must hold a JSON object, holds list"),
        ("tokenizer_config.json", b"[" * 100_000, "tokenizer_config.json: cannot be read as JSON .it is nested too"),
        ("tokenizer.json", b"\xef\xbb\xbf{}", "tokenizer.json: there is no field model"),
        ("tokenizer_config.json", b"\xef\xbb\xbf{}", "tokenizer_config.json: begins with a byte order mark"),
        ("chat_template.jinja", b"hello\n{% for x in", "chat_template.jinja, line 2: unexpected"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    save_tokenizer(TOKENIZER, tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_tokenizer(tmp_path)


def test_a_template_that_refuses_is_named_with_its_file(tmp_path: Path) -> None:
    save_tokenizer(TOKENIZER, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('only one turn') }}")
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(InputError, match=f"{tmp_path}/chat_template.jinja refuses the messages: only one turn"):
        encode_prompt(tokenizer, MESSAGES)


# As families write them: turns that must alternate (Gemma, Mistral), a date, an effort and channels (gpt-oss), thinking
# that is switched off by an empty thought (Qwen3, GLM), and tools without which there is nothing to render.
ALTERNATE = """{{ bos_token }}{% for m in messages %}
{%- set mine = loop.index0 % 2 == 0 %}
{%- if (m.role == 'user') != mine %}{{ raise_exception('roles must alternate user and model') }}{% endif %}
{{- '<start>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end>\n' }}{% endfor %}"""
EFFORT = """{{ 'Date: ' + strftime_now('%Y')[:2] + ' Reasoning: ' + (reasoning_effort or 'medium') if true }}
{%- for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content }}{% endfor %}"""
SWITCHED = """{{ messages[-1].content }}<think>
{%- if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"""
TOOLS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ messages[-1].content }}"
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("template", "variables", "expected"),
    [
        (ALTERNATE, {}, "<start>user\nhi<end>\n"),
        (EFFORT, {"reasoning_effort": "low"}, "Date: 20 Reasoning: low<|start|>user<|message|>hi"),
        (EFFORT, {"strftime_now": "1999-01-31"}, "Date: 19 Reasoning: medium<|start|>user<|message|>hi"),
        (SWITCHED, {}, "hi<think>"),
        (SWITCHED, {"enable_thinking": False}, "hi<think></think>"),
        (TOOLS, {"tools": [TOOL]}, '{"type": "function", "function": {"name": "add"}}hi'),
    ],
)
def test_templates_of_the_families_render(template: str, variables: dict, expected: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    assert tokenizer.decode(encode_prompt(tokenizer, [{"role": "user", "content": "hi"}], variables)) == expected


def test_templates_of_the_families_say_what_they_want() -> None:
    tokenizer = byte_tokenizer()
    for template, message in {
        ALTERNATE: "refuses the messages: roles must alternate user and model$",
        TOOLS: r"refuses the messages: .*; it reads tools: give them, as in task\.chat_template_kwargs$",
    }.items():
        tokenizer.chat_template = template
        with pytest.raises(InputError, match=message):
            encode_prompt(tokenizer, MESSAGES)


def test_the_day_is_that_of_the_template_that_a_chat_is_shown_by() -> None:
    """Of several, as in Command R's folders, one is for tools."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "{{ strftime_now('%A') }}'s", "tool_use": "{{ tools | length }}"}
    chat = [{"role": "user", "content": "hi"}]
    assert shows_today(tokenizer, chat, {}) and not shows_today(tokenizer, chat, {"tools": [TOOL]})
    assert render_chat(tokenizer, chat, {"strftime_now": "2026-01-31"}) == "Saturday's"
    assert render_chat(tokenizer, chat, {"strftime_now": "2026-01-31", "tools": [TOOL]}) == "1"


def test_text_that_is_not_unicode_is_refused_in_either_form() -> None:
    for prompt in ("h\udcff", [{"role": "user", "content": "h\udcff"}]):
        with pytest.raises(InputError, match="the prompt is not valid Unicode: surrogates not allowed"):
            encode_prompt(TOKENIZER, prompt)


@pytest.mark.parametrize("blocked", ["tokenizer.json", "."])
def test_a_tokenizer_that_cannot_be_written(tmp_path: Path, blocked: str) -> None:
    folder = tmp_path / "out"
    if blocked == ".":
        folder.write_text("a file")
    else:
        (folder / blocked).mkdir(parents=True)
    with pytest.raises(LockstepError, match="out: the tokenizer cannot be written"):
        save_tokenizer(TOKENIZER, folder)


def test_a_vocabulary_must_hold_every_token_id() -> None:
    check_vocabulary(TOKENIZER, 259, "folder")
    check_vocabulary(TOKENIZER, 512, "folder")
    with pytest.raises(InputError, match="folder needs a vocabulary of 259, but the model's has 258"):
        check_vocabulary(TOKENIZER, 258, "folder")


def test_a_token_added_beyond_the_vocabulary_is_refused_where_a_text_has_it(tmp_path: Path) -> None:
    """As `<image_soft_token>` of Gemma 3 1B, which has no row for it."""
    folder = tmp_path / "model"
    init_folder("tiny", folder, 0, vocab_size=259)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    save_tokenizer(tokenizer, folder)
    for policy in [load_policy(RunConfig(model=str(folder), device="cpu")) for _ in range(2)]:  # then from the cache
        assert policy.encode("a") == [97] and policy.tokenizer.encode("<image>") == [259]
        chat, said = [*MESSAGES, {"role": "assistant", "content": "4"}], [{"role": "user", "content": "a<image>b"}]
        for encode in (
            partial(policy.encode, "a<image>b"),
            partial(policy.encode, said),
            partial(policy.encode_completion, "a<image>b", False),
            partial(policy.encode_following, None, "a<image>b"),
            partial(policy.encode_following, chat, said),
            partial(encode_chat, policy, said, {}, None),
        ):
            with pytest.raises(InputError, match="'<image>', token id 259, outside the model's vocabulary of 259"):
                encode()
    with pytest.raises(InputError, match="arch tiny needs a vocabulary of 260, but the model's has 259 entries"):
        init_folder("tiny", tmp_path / "another", 0, str(folder), vocab_size=259)


# As Qwen3's: thinking stays while tools answer, and is left out of what lies before the last user message.
THINKING = """
{%- set last = namespace(i=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.i = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set content = m.content.split('</think>')[-1] if m.role == 'assistant' and loop.index0 < last.i else m.content %}
{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""


def test_what_follows_an_answer_is_what_the_template_puts_after_it() -> None:
    """The prompt, the sampled tokens and what follows are what the whole conversation is."""
    answer, tool = {"role": "assistant", "content": "<think>hm</think>4"}, {"role": "tool", "content": "5"}
    following = encode_following(TOKENIZER, [*MESSAGES, answer], [tool])
    assert TOKENIZER.decode(following) == "<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    joined = encode_prompt(TOKENIZER, MESSAGES) + TOKENIZER.encode(answer["content"]) + following
    assert joined == encode_prompt(TOKENIZER, [*MESSAGES, answer, tool])


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_text_that_stands_after_others_begins_with_no_space_of_its_own(scheme: str) -> None:
    """SentencePiece's tokenizers (Mistral, Phi-3) put one before the first word of a text."""
    tokens = ["<unk>", "▁", *"0123456789ab+=:\n", "\n\n"]
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [("\n", "\n")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    ids, text = encode_prompt(tokenizer, "12+5="), "12+5="
    for more in ("17\n", " 17", "\n", "=", "\n\n17", ""):
        ids, text = ids + encode_continuation(tokenizer, more), text + more
        assert tokenizer.decode(ids) == text
    following = encode_following(tokenizer, [{"role": "assistant", "content": "a"}], [{"role": "user", "content": "b"}])
    assert tokenizer.convert_ids_to_tokens(following) == ["\n", "b", "\n"]
    assert encode_continuation(TOKENIZER, " a\n") == TOKENIZER.encode(" a\n")


def test_a_template_that_rewrites_its_past_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING
    thought, plain = ({"role": "assistant", "content": text} for text in ("<think>hm</think>4", "4"))
    tool, user = {"role": "tool", "content": "5"}, {"role": "user", "content": "and now?"}
    for before, following in (([thought], tool), ([plain], user), ([thought, tool, thought], tool)):
        assert encode_following(tokenizer, [*MESSAGES, *before], [following])
    said_twice = {"role": "assistant", "content": "<think>\n4\n</think>\n\nIt is 4"}  # its thought's words, too
    for before in ([thought], [thought, tool, plain], [said_twice]):
        with pytest.raises(InputError, match="role user: it leaves out the thinking of earlier answers"):
            encode_following(tokenizer, [*MESSAGES, *before], [user])
    unseen = [*MESSAGES, thought, user]  # a prompt without its thought, which nothing leaves out later
    assert "hm" not in tokenizer.decode(encode_prompt(tokenizer, unseen))
    for before, following in (([plain], tool), ([thought], tool), ([thought, tool, plain], tool), ([plain], user)):
        assert encode_following(tokenizer, [*unseen, *before], [following])
    with pytest.raises(InputError, match="role user: it leaves out the thinking of earlier answers"):
        encode_following(tokenizer, [*unseen, thought, tool, plain], [user])
    tokenizer.chat_template = THINKING.replace("else m.content %}", "else m.content.split('<think>')[-1] %}")
    shown_in_part = {"role": "assistant", "content": "Well. <think>hm</think>4"}
    with pytest.raises(InputError, match="role user: it leaves out the thinking of earlier answers"):
        encode_following(tokenizer, [*MESSAGES, shown_in_part, tool, plain], [user])
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(InputError, match="role tool: it does not show an answer as it is"):
        encode_following(tokenizer, [*MESSAGES, plain], [tool])


# As Phi-3's, which knows no tools; and as GLM-4.5's, which writes a thought anew, and JSON of what tools say.
OF_TWO = """{% for m in messages if m.role in ('user', 'assistant') %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
ANEW = """{% for m in messages %}<|{{ m.role }}|>
{%- set parts = m.content.split('</think>') %}
{%- if m.role == 'tool' %}{{ m.content | tojson }}
{%- elif parts | length > 1 %}<think>{{ parts[0].split('<think>')[-1].strip() }}</think>{{ parts[1] }}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""


def test_what_is_to_follow_is_shown_or_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = OF_TWO
    answer, user = {"role": "assistant", "content": "4"}, {"role": "user", "content": "and now?"}
    tool = {"role": "tool", "content": 'a "b"\n'}
    assert tokenizer.decode(encode_following(tokenizer, [*MESSAGES, answer], [user])) == (
        "<|end|><|user|>and now?<|end|><|assistant|>"
    )
    with pytest.raises(InputError, match="it leaves out what a message of role tool says; give text or token ids"):
        encode_following(tokenizer, [*MESSAGES, answer], [tool])
    with pytest.raises(InputError, match="what a message of role tool says"):
        encode_following(tokenizer, [*MESSAGES, answer], [user, tool])
    tokenizer.chat_template = ANEW
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}
    assert tokenizer.decode(encode_following(tokenizer, [*MESSAGES, thought], [tool])) == '<|tool|>"a \\"b\\"\\n"'
