"""Exceptions a user can meet. Messages name what was wrong, where, and what would be right."""

import errno
import os
from collections.abc import Iterable
from typing import Any


class LockstepError(Exception):
    """A run or check failed. The command line prints the message and exits with code 1. `reported`: set where several
    processes have the error: whether it was told already, or another of them tells of it."""

    reported: bool


class InputError(LockstepError):
    """Bad input: a flag, file, row, model folder or reward. The command line exits with code 2."""


class FieldError(InputError):
    """Bad input in one field of several, such as `messages[0].role`, which the message names too."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def refuse(when: bool, message: str) -> None:
    """Raise `InputError`, where something is wrong."""
    if when:
        raise InputError(message)


def near(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.75) -> str:
    """The question which of these was meant by a name that is none of them; empty where none is much like it."""
    import difflib  # not before it is needed

    close = difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(close)}?" if close else ""


def meant(name: str, known: Iterable[str]) -> str:
    """`near` in brackets, behind the name."""
    return f" ({question})" if (question := near(name, known)) else ""


def ran_out(error: BaseException) -> bool:
    """Whether it says that memory did: a device's, the host's, or what a process may address (`ulimit -v`)."""
    said = "out of memory", "can't allocate memory", "failed to map segment"
    by_name = isinstance(error, (RuntimeError, ImportError)) and any(words in str(error) for words in said)
    return by_name or isinstance(error, MemoryError)


def no_more(error: BaseException) -> str:
    """Of what it says that the system starts no further one: a "thread", for Python or for a library in Rust, or a
    "process"; empty for an error of another kind."""
    if any(words in str(error) for words in ("can't start new thread", "ThreadPoolBuildError")):
        return "thread"
    refused = isinstance(error, BlockingIOError) and error.strerror == os.strerror(errno.EAGAIN)  # as fork says it
    return "process" if refused else ""


class PromptTooLong(InputError):
    """A prompt that no tokenizer makes short enough for the model's context; `size` is in bytes."""

    def __init__(self, size: int, context: int) -> None:
        super().__init__(f"the prompt has {size:,} bytes, which is more than the model's context of {context} tokens")
        self.size = size


class RewritesPast(InputError):
    """A chat template leaves out what it showed of earlier answers; `messages` are those so far, without that."""

    def __init__(self, message: str, messages: list[dict[str, Any]]) -> None:
        super().__init__(message)
        self.messages = messages


class ParityError(LockstepError):
    """Generator and trainer disagree on a log-probability; no weight was changed by that step."""


class NonFiniteError(LockstepError):
    """The loss or the gradient norm is NaN or infinite, and no weight was changed by that step; or the log-probability
    of a generated token is."""


class PeerLost(LockstepError):
    """Another process of the run is gone, or did not come to where the others wait for it."""


class ToolUnavailable(LockstepError):
    """A tool could not do its work, through no fault of the model's. A tool that raises it leaves the trajectory out,
    as an environment that fails; of any other error it raises the model is told."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP reached a run, which ends as Ctrl-C ends it; `args[0]` is the signal."""
