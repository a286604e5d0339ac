"""A model that says what it is told to: each token has one that follows it, so greedy answers are known."""

from __future__ import annotations

from pathlib import Path

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


def scripted_folder(folder: Path) -> Path:
    """A model folder that follows `SCRIPTS`, greedily."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([piece for script in SCRIPTS.values() for piece in script])
    tokenizer.chat_template = TEMPLATE
    end = tokenizer.convert_tokens_to_ids(IM_END)
    config = ModelConfig(
        512, 128, 64, 1, 2, 1, 32, 2048, tie_word_embeddings=False, eos_token_ids=(end,), family="qwen3"
    )
    model = initialize(Decoder(config, torch.float32), seed=0)
    with torch.no_grad():
        model.layers[0].o.zero_()
        model.layers[0].down.zero_()
        model.embed.normal_(generator=torch.Generator().manual_seed(1))
        for start, script in SCRIPTS.items():
            ids = [tokenizer.convert_tokens_to_ids(piece) for piece in script]
            chain = [*tokenizer.encode(start, add_special_tokens=False), *ids, end]
            for token, following in zip(chain, chain[1:], strict=False):
                model.lm_head[following] += model.embed[token]
    save_model(model, folder)
    save_tokenizer(tokenizer, folder)
    return folder
