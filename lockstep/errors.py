"""Exceptions that users may see. Messages say what was wrong, where, and what would be right."""

import errno
import os
from collections.abc import Iterable
from typing import Any


class LockstepError(Exception):
    """A run or check failed. The command line prints the message and exits with code 1. `reported`, set when several
    processes have the error: whether it was reported already, or another process reports it."""

    reported: bool

    def __reduce__(self) -> tuple[Any, ...]:
        """So that errors with an `__init__` of their own can be sent to other processes, too."""
        return _error, (type(self), self.args, vars(self))


def _error(kind: type[LockstepError], args: tuple[Any, ...], state: dict[str, Any]) -> LockstepError:
    """An unpickled error."""
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error


class InputError(LockstepError):
    """Bad input: a flag, file, row, model folder or reward. The command line exits with code 2."""


class FieldError(InputError):
    """Bad input in one field of several, such as `messages[0].role`, which the message names too."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def refuse(when: bool, message: str) -> None:
    """Raise `InputError` if `when` is true."""
    if when:
        raise InputError(message)


def did_you_mean(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.75) -> str:
    """The question "did you mean X?" for the known names closest to an unknown one; empty if none is close."""
    import difflib  # only when needed

    close = difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(close)}?" if close else ""


def did_you_mean_note(name: str, known: Iterable[str]) -> str:
    """The question of `did_you_mean` in parentheses, to follow the name in a message."""
    question = did_you_mean(name, known)
    return f" ({question})" if question else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: a device's, the host's, or address space (`ulimit -v`)."""
    if isinstance(error, MemoryError):
        return True
    messages = "out of memory", "can't allocate memory", "failed to map segment"
    return isinstance(error, (RuntimeError, ImportError)) and any(message in str(error) for message in messages)


def spawn_failure(error: BaseException) -> str:
    """What the system could not start, according to an error: a "thread", of Python or a Rust library, or a "process";
    empty for other errors."""
    if any(message in str(error) for message in ("can't start new thread", "ThreadPoolBuildError")):
        return "thread"
    fork_failed = isinstance(error, BlockingIOError) and error.strerror == os.strerror(errno.EAGAIN)
    return "process" if fork_failed else ""


class PromptTooLong(InputError):
    """A prompt too long for the model's context, whatever the tokenizer; `size` is in bytes."""

    def __init__(self, size: int, context: int) -> None:
        super().__init__(f"the prompt has {size:,} bytes, which is more than the model's context of {context} tokens")
        self.size = size


class HistoryRewritten(InputError):
    """A chat template leaves out parts of earlier answers that it showed before. `messages` are those so far, without
    these parts."""

    def __init__(self, message: str, messages: list[dict[str, Any]]) -> None:
        super().__init__(message)
        self.messages = messages


class ParityError(LockstepError):
    """Generator and trainer disagree on a log-probability; no weight was changed by that step."""


class NonFiniteError(LockstepError):
    """The loss, the gradient norm or the log-probability of a generated token is NaN or infinite. In the first two
    cases no weight was changed by that step."""


class PeerLost(LockstepError):
    """Another process of the run died, or did not reach the point where the others wait for it."""


class ToolUnavailable(LockstepError):
    """A tool could not do its work, through no fault of the model. The trajectory is left out, as if its environment
    had failed; any other error of a tool is shown to the model."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP reached a run, which then ends as on Ctrl-C; `args[0]` is the signal."""
