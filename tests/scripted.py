"""A model that says what it is told to: each token has one that follows it, so greedy answers are known."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from lockstep.models import Decoder, ModelConfig, save_model
from lockstep.models.init import initialize
from lockstep.models.tokenizer import IM_END, byte_tokenizer, save_tokenizer

TEMPLATE = """{% if tools %}<|im_start|>system
Call with <tool_call>: {{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{{ lead or "" }}{% endif %}"""  # noqa: E501

# What is said after a generation prompt that ends in a newline, and after those that end in another character.
ADD = ("I add. ", "<tool", '_call>\n{"name": "add", ', '"arguments":  {"a": 1, "b": 2}}', "\n</tool_call>")
TWO = (
    '<tool_call>\n{"name": "one", "arguments": {}}\n</tool_call>\n',
    '<tool_call>{"name": "two", "arguments": "{\\"x\\": \\"é\\"}"}</tool_call>',
)
MALFORMED = ("<tool_call>\n{'name': add}\n</tool_call>",)
UNCLOSED = ('<tool_call>\n{"name": "never"}',)
PLAIN = ("It is ", "<b>th", "ree</b>.")
SCRIPTS = {"\n": ADD, "2": TWO, "3": MALFORMED, "4": UNCLOSED, "5": PLAIN}
CALLED, RETURNED = "<|call|>", "<|return|>"
# In the marks of gpt-oss and of Mistral; what ends an answer is the last piece.
THOUGHT = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
CHANNELS = {
    "t": (THOUGHT, " to=functions.add", "<|channel|>", "commentary json", "<|message|>", '{"a":  1}', CALLED),
    "2": ("<|channel|>final<|message|>", "It is ", "so", ".", RETURNED),
}
BRACKETS = {"]": ("[TOOL_CALLS]", '[{"name": "add", "arguments":  {"a": 1}, ', '"id": "abcdefghi"}]', "</s>")}
SPECIAL = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", CALLED, RETURNED, "[TOOL_CALLS]", "</s>")

# As Mistral's 7B-Instruct-v0.3 renders tools, in short; TRL has none of its templates.
MISTRALS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}"
    "{% if tools and loop.first %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]</s>"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


def templates() -> Path:
    """Chat templates of published models, which TRL has."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl is not installed")
    return Path(spec.origin).parent / "chat_templates"


def scripted_folder(folder: Path) -> Path:
    """A model folder that follows `SCRIPTS`, greedily."""
    return following(folder, {start: (*script, IM_END) for start, script in SCRIPTS.items()}, TEMPLATE)


def following(folder: Path, scripts: dict[str, tuple[str, ...]], template: str, special: tuple[str, ...] = ()) -> Path:
    """A model folder that says one of `scripts` after each generation prompt that ends in its character; the last piece
    of each ends an answer. Some tokens are `special`."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.add_tokens([piece for script in scripts.values() for piece in script if piece not in special])
    tokenizer.chat_template = template
    ends = tuple(dict.fromkeys(tokenizer.convert_tokens_to_ids(script[-1]) for script in scripts.values()))
    tokenizer.add_special_tokens({"eos_token": tokenizer.convert_ids_to_tokens(ends[-1])})
    config = ModelConfig(512, 128, 64, 1, 2, 1, 32, 2048, tie_word_embeddings=False, eos_token_ids=ends, family="qwen3")
    model = initialize(Decoder(config, torch.float32), seed=0)
    with torch.no_grad():
        model.layers[0].o.zero_()
        model.layers[0].down.zero_()
        model.embed.normal_(generator=torch.Generator().manual_seed(1))
        for start, script in scripts.items():
            ids = [tokenizer.convert_tokens_to_ids(piece) for piece in script]
            chain = [*tokenizer.encode(start, add_special_tokens=False), *ids]
            for token, following in zip(chain, chain[1:], strict=False):
                model.lm_head[following] += model.embed[token]
    save_model(model, folder)
    save_tokenizer(tokenizer, folder)
    return folder
