"""Model folders and run folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from case import Odd


def _config(**changes: object) -> Callable[[], None]:
    def edit() -> None:
        path = _copied() / "config.json"
        values = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in values.items() if value != "absent"}))

    return edit


def _copied() -> Path:
    shutil.copytree(Path("tiny").resolve(), "m")
    return Path("m")


def _file(name: str, content: bytes | None) -> Callable[[], None]:
    def edit() -> None:
        path = _copied() / name
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)

    return edit


def models() -> Iterator[Odd]:
    """Model folders, through `generate`."""
    line = "generate --model m --prompt hi --max-completion-length 2"
    for name, values in {
        "model_type": ["gemma3", "gemma3_text", "gpt_oss", "olmo3", "qwen3_next", "qwen3_5", "mistral", "", 3, {}],
        "hidden_size": [0, -1, 1.5, "128", True, 127, [128], 2**40, 96],
        "num_hidden_layers": [0, "4", 10_001, 3, 5, 1e3],
        "num_attention_heads": [0, 3, "x", None, 5],
        "num_key_value_heads": [0, 3, 8, "x"],
        "head_dim": [0, 31, -2, "x", 64],
        "vocab_size": [0, 100, 2**32, "x"],
        "max_position_embeddings": [0, "x", 1.5],
        "rms_norm_eps": [0, -1e-6, "x", True],
        "rope_parameters": ["x", {"rope_theta": 0}, {"rope_type": "magic"}, {"rope_type": 3}],
        "layer_types": ["full_attention", ["linear_attention"] * 4, ["full_attention"], [1, 2]],
        "eos_token_id": ["x", 10**6, -1, [[1]]],
        "hidden_act": ["gelu", 3],
        "tie_word_embeddings": ["true", 1],
        "quantization_config": [{"quant_method": "fp8"}],
        "use_sliding_window": ["yes", 1],
    }.items():
        for value in values:
            edit = _config(**{name: "absent" if value is None else value}, **_without_theta(name))
            yield Odd(line, ("m",), prepare=edit)
    index = b'{"weight_map": {"model.norm.weight": "%s"}}'
    for name, content, word in [
        *[("config.json", c, "config.json") for c in (b"", b"null", b"{]", b"\xff", b"[" * 90_000, b'{"a": 1}')],
        *[("generation_config.json", c, "generation_config.json") for c in (b"", b"[]", b'{"eos_token_id": 99999}')],
        *[("tokenizer.json", c, "tokenizer") for c in (b"", b"[]", b"{}", b'{"model": {}}', b"\xff\xfe", None)],
        *[("tokenizer_config.json", c, "tokenizer") for c in (b"{", b"[]", b"3")],
        *[("model.safetensors", c, "model.safetensors") for c in (b"", b"\x00" * 8, b"\xff" * 8, b"{}" * 50, None)],
        *[("model.safetensors.index.json", c, "index.json") for c in (b"", b"{}", b'{"weight_map": 3}', b"[]")],
        ("model.safetensors.index.json", index % b"absent.safetensors", "absent.safetensors"),
        ("model.safetensors.index.json", index % b"config.json", "config.json"),
        ("chat_template.jinja", b"{% if %}", "chat_template.jinja"),
        ("chat_template.jinja", b"{{ messages[0].content }", "chat_template.jinja"),
    ]:
        yield Odd(line, ("m", word), prepare=_file(name, content))


def _without_theta(name: str) -> dict[str, object]:
    return {"rope_theta": "absent"} if name == "rope_parameters" else {}


def _run(change: Callable[[Path], None]) -> Callable[[], None]:
    def edit() -> None:
        shutil.copytree(Path("run").resolve(), "r")
        change(Path("r"))

    return edit


def _text(name: str, text: str | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)

    return change


def run_folders() -> Iterator[Odd]:
    """Damaged run folders: `report` shows what there is, or names the file; resuming names the file."""
    for name, text, code in [
        ("config.yaml", None, 2),
        ("config.yaml", "", 0),
        ("config.yaml", "[", 0),
        ("config.yaml", "stepz: 1", 0),
        ("metrics.jsonl", None, 0),
        ("metrics.jsonl", "", 0),
        ("metrics.jsonl", "{}\n", 2),
        ("metrics.jsonl", '{"step": -1}\n', 2),
        ("metrics.jsonl", '{"step": 1.5}\n', 2),
        ("metrics.jsonl", '{"step": 0, "reward/mean": "x"}\n', 0),
        ("metrics.jsonl", '{"step": 0, "loss": [1]}\n', 0),
        ("metrics.jsonl", "\x00\n", 2),
        ("summary.json", "{", 0),
        ("summary.json", "[]", 0),
        ("summary.json", '{"validation": {"x": {"y": "z"}}}', 0),
        ("parity.json", "{", 0),
        ("parity.json", '{"identical": "maybe"}', 0),
        ("rollouts.jsonl", "x\n", 0),
        ("rollouts.jsonl", '{"step": 0, "samples": 3}\n', 0),
        ("rollouts.jsonl", '{"step": 0, "group": 0, "prompt": [], "samples": [{}]}\n', 0),
        ("timeline.json", "x", 0),
        ("failure.json", '{"error": 3}', 0),
        ("crash.txt", "x", 0),
    ]:
        yield Odd("report r", (name,) if code else (), code, prepare=_run(_text(name, text)))
    for name, text, word in [
        ("config.yaml", "", ""),
        ("config.yaml", "steps: 1", ""),
        ("config.yaml", "[", "config.yaml"),
        ("config.yaml", None, "config.yaml"),
    ]:
        yield Odd("train --resume r --steps 9", ("r", word), prepare=_run(_text(name, text)))
    yield Odd("train --resume r --steps 9", ("r",), prepare=_run(lambda r: shutil.rmtree(r / "checkpoints")))
