"""`lockstep chat`: history, commands, stopping an answer, models without a template, a conversation through a pipe."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import pytest
from scripted import RETURNED, SPECIAL, following, templates

from lockstep.cli.chat import HELP, Conversation, converse, interrupts, read_lines
from lockstep.cli.main import main
from lockstep.config import GeneratorConfig
from lockstep.errors import InputError
from lockstep.session.generate import LLM
from lockstep.types import SamplingParams

SAMPLING = SamplingParams(max_completion_length=20, temperature=0.7)


@pytest.fixture
def llm(model: Path) -> LLM:
    return LLM(model, device="cpu", config=GeneratorConfig(steps_per_sync=1))


def recorded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list:
    """The prompts that the model gets from here on."""
    prompts: list = []
    encode = llm.policy.encode
    monkeypatch.setattr(llm.policy, "encode", lambda prompt: prompts.append(prompt) or encode(prompt))
    return prompts


def test_the_conversation_goes_on_until_it_is_reset(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = recorded(llm, monkeypatch)
    conversation = Conversation(llm, SAMPLING, system="be brief")
    first = "".join(conversation.ask("hello"))
    "".join(conversation.ask("and?"))
    system, hello = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}
    turns = [system, hello, {"role": "assistant", "content": first}, {"role": "user", "content": "and?"}]
    assert prompts[0] == [system, hello] and prompts[-1] == turns
    conversation.reset()
    "".join(conversation.ask("hello"))
    assert prompts[-1] == [system, hello]


def test_an_answer_is_what_the_template_asks_for(llm: LLM) -> None:
    answer = "".join(Conversation(llm, SAMPLING).ask("hello"))
    alone = [p.text for p in llm.stream([[{"role": "user", "content": "hello"}]], SAMPLING, seed=1)]
    assert answer == "".join(alone)


@pytest.mark.parametrize("how", ["--plain", "no template"])
def test_plain_text_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    prompts = recorded(llm, monkeypatch)
    if how == "no template":
        llm.policy.tokenizer.chat_template = None
    conversation = Conversation(llm, SAMPLING, plain=how == "--plain")
    answer = "".join(conversation.ask("12 34="))
    "".join(conversation.ask("more"))
    assert prompts[0] == "12 34=" and prompts[-1] == f"12 34={answer}\nmore"
    with pytest.raises(InputError, match="--system-prompt needs a chat template"):
        Conversation(llm, SAMPLING, system="s", plain=True)
    llm.policy.template_variables = {"enable_thinking": False}
    with pytest.raises(InputError, match="--chat-template-kwargs needs a chat template"):
        Conversation(llm, SAMPLING, plain=True)


def test_a_stopped_answer_stays_as_far_as_it_came(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = recorded(llm, monkeypatch)
    conversation = Conversation(llm, SamplingParams(max_completion_length=100, ignore_eos=True))
    pieces = []
    for piece in conversation.ask("count", stopped=lambda: len(pieces) == 2):
        pieces.append(piece)
    assert len(pieces) == 2
    "".join(conversation.ask("next"))
    assert prompts[-1][1] == {"role": "assistant", "content": "".join(pieces)}


def test_an_answer_in_a_channel_goes_back_without_the_channels_name(tmp_path: Path) -> None:
    template = (templates() / "gptoss.jinja").read_text(encoding="utf-8")
    script = ("<|channel|>", "final", "<|message|>", "It is ", "so.", RETURNED)
    llm = LLM(following(tmp_path / "model", {"t": script}, template, SPECIAL), device="cpu")
    conversation = Conversation(llm, SamplingParams(max_completion_length=20, temperature=0.0))
    shown = ["".join(conversation.ask(line)) for line in ("hello", "and?")]
    asked = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "It is so."}]
    assert shown == ["finalIt is so."] * 2 and conversation._messages[:2] == asked


def test_a_full_context_is_no_end(llm: LLM) -> None:
    long = "x" * (llm.context + 1)
    shown = list(converse(Conversation(llm, SAMPLING), [long, "hello"]))
    assert "fills the model's context" in shown[0] and "".join(shown[1:]).endswith("\n")


def test_ctrl_c_is_a_flag_while_an_answer_runs() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts() as pressed:
        assert not pressed()
        os.kill(os.getpid(), signal.SIGINT)
        assert pressed()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_piped_conversation(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(LLM(model, device="cpu"), SamplingParams(max_completion_length=9, temperature=1.0))
    first = "".join(conversation.ask("hello"))
    conversation.reset()
    second = "".join(conversation.ask("hello"))
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n/reset\nhello\n/what\n/quit\nnever\n"))
    chat = ["chat", "--model", str(model), "--device", "cpu", "--max-completion-length", "9", "--temperature", "1"]
    assert main([*chat, "--top-p", "1"]) == 0
    said = f"{first}\nThe conversation starts anew.\n{second}\n{HELP}"
    assert first and second and capsys.readouterr().out == said


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_that_is_not_utf8_costs_that_line_only(llm: LLM, monkeypatch: pytest.MonkeyPatch, errors: str) -> None:
    raw = io.BytesIO(b"h\xff\nhello\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(raw, encoding="utf-8", errors=errors))
    shown = list(converse(Conversation(llm, SAMPLING), read_lines()))
    assert shown[0].startswith("(the prompt is not valid Unicode") and "".join(shown[1:]).strip()
