"""`lockstep chat`: a conversation with a model, lines in and text out."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..config import MAX_SEED
from ..errors import InputError, refuse
from ..session.generate import LLM
from ..session.signals import handle_signals
from ..types import SamplingParams

HELP = "/reset forgets the conversation, /quit (or Ctrl-D) ends it, Ctrl-C stops an answer.\n"


class Conversation:
    """The turns so far: messages with a chat template, one growing text without."""

    def __init__(self, llm: LLM, sampling: SamplingParams, system: str | None = None, plain: bool = False) -> None:
        """`plain`: ignore the model's chat template. Raises `InputError` for what needs one if it is not used."""
        self._llm = llm
        self._sampling = sampling
        self._templated = bool(llm.policy.tokenizer.chat_template) and not plain
        template_flags = {"--system-prompt": system, "--chat-template-kwargs": llm.policy.template_variables}
        for flag, value in template_flags.items():
            refuse(
                bool(value) and not self._templated,
                f"{flag} needs a chat template, which is not there or turned off by --plain; remove it",
            )
        self._system: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._turns = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self._messages = list(self._system)
        self._text = ""

    def ask(self, line: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """The answer to `line`, as it appears; a `stopped` answer stays in the conversation as far as it got. Raises
        `InputError` if the conversation fills the model's context; `line` is then not added to it."""
        prompt: str | list[dict[str, Any]] = self._text + line
        if self._templated:
            prompt = [*self._messages, {"role": "user", "content": line}]
        room = self._llm.context - len(self._llm.policy.encode(prompt))
        refuse(room < 1, f"the conversation fills the model's context of {self._llm.context} tokens; /reset it")
        sampling = replace(self._sampling, max_completion_length=min(self._sampling.max_completion_length, room))
        answer, completion = "", None
        self._turns += 1
        seed = (self._llm.config.seed + self._turns) % (MAX_SEED + 1)  # a different one for each answer
        with contextlib.closing(self._llm.stream([prompt], sampling, seed=seed)) as pieces:
            for piece in pieces:
                answer, completion = answer + piece.text, piece.completion
                yield piece.text
                if stopped():
                    break
        self._text += f"{line}{answer}\n"
        said = {"role": "assistant", "content": answer} if completion is None else self._llm.message(completion)
        self._messages += [{"role": "user", "content": line}, said]


def converse(conversation: Conversation, lines: Iterable[str]) -> Iterator[str]:
    """What the terminal shows: for each of `lines` until /quit, an answer or the effect of a command."""
    for line in lines:
        line = line.rstrip("\n")
        if line in ("/quit", "/exit"):
            return
        if line == "/reset":
            conversation.reset()
            yield "The conversation starts anew.\n"
        elif line.startswith("/"):
            yield HELP
        elif line:
            try:
                with interrupts() as pressed:
                    yield from conversation.ask(line, pressed)
                yield "\n"
            except InputError as error:
                yield f"({error})\n"


def read_lines() -> Iterator[str]:
    """Lines typed at a prompt, with the terminal's editing and history, or the lines of a pipe."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # invalid UTF-8 costs one line, not the conversation
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (importing it makes input() use it)
    while True:
        try:
            with contextlib.redirect_stdout(sys.__stdout__):
                line = input("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            print("\n" + HELP, end="", file=sys.stderr)
            continue
        yield line


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """A context in which Ctrl-C does not raise (amid a computation); the callable returns whether it was pressed."""
    pressed: list[int] = []
    with handle_signals(lambda number, _: pressed.append(number), [signal.SIGINT]):
        yield lambda: bool(pressed)
