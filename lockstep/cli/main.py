"""The `lockstep` command: its output streams and exit codes.

Nothing here imports torch before the flags are parsed and valid, so `--help` and errors in flags appear at once.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from .. import __version__
from ..errors import InputError, LockstepError, Terminated, is_out_of_memory, spawn_failure
from ..json_file import to_json
from ..machine import (
    describe_thread_limits,
    is_multi_process,
    open_files_limit,
    require_address_space,
    torchrun_launch,
    torchrun_report_note,
)
from ..run.display import FailsafeStream, RequiredStream
from .commands import COMMANDS, MULTIPROCESS_COMMANDS
from .resolve import parse

_THREAD_GRACE = 5.0  # seconds that threads have to end after the command
# Seconds that the first process has to report an error common to all, before another one leaves; torchrun then ends the
# rest. The second is for an error that may be common to all, such as wrong flags.
_REPORT_SECONDS, _COMMON_ERROR_SECONDS = 0.5, 2.0


def entry() -> NoReturn:
    """Run `main` as a process that ends with the command: a thread that a reward function left running does not delay
    it, and Ctrl-C no longer changes an outcome that was printed."""
    code = main()
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(RuntimeError):  # no more threads can be started
        threading.Thread(target=_abandon_threads, args=(code,), daemon=True).start()
    sys.exit(code)


def _abandon_threads(code: int) -> None:
    """End the process if threads still delay it after some seconds."""
    time.sleep(_THREAD_GRACE)
    others = [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    if others:
        names = ", ".join(thread.name for thread in others)
        print(
            f"lockstep: done; threads that still ran were left (of a reward function, perhaps): {names}",
            file=sys.stderr,
        )
        atexit._run_exitfuncs()
        sys.stdout.flush()
        _exit_now(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 the run or check failed, 2 bad input, 130 interrupted; 128
    plus the signal's number if another signal ended it."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with contextlib.redirect_stderr(FailsafeStream(sys.stderr)):
        if sys.stdout is None:
            code = _fail("error: standard output is closed; send it somewhere, such as to /dev/null", 2)
        else:
            with contextlib.redirect_stdout(RequiredStream(sys.stdout)):
                code = _main(arguments)
        if is_multi_process():
            _exit_now(code)
    return code


def _exit_now(code: int) -> None:
    """End the process without an orderly exit, which the rest of a failed process group could delay."""
    sys.stderr.flush()
    os._exit(code)


def _main(arguments: list[str]) -> int:
    try:
        return _run(arguments, sys.stdout)
    except InputError as error:
        return _fail(f"error: {error}", 2, _is_reported_elsewhere(error))
    except LockstepError as error:
        return _fail(f"failed: {error}", 1, _is_reported_elsewhere(error))
    except Terminated as stop:
        return _fail(_with_notes(f"ended by {stop.args[0].name}", stop), 128 + stop.args[0], _is_later_rank())
    except KeyboardInterrupt as stop:
        return _fail(_with_notes("interrupted", stop), 130, _is_later_rank())
    except BrokenPipeError:  # the reader of standard output has gone
        return 1
    except BaseException as error:  # a panic in a Rust library is not an `Exception`
        if not (reason := _describe_exhausted_resource(error)):
            raise
        return _fail(f"error: {reason}", 2, _is_reported_elsewhere(error))


def _run(arguments: list[str], output: Any) -> int:
    """Run one command, print its outcome to `output`, and return its exit code."""
    if arguments == ["--version"]:
        output.write(f"lockstep {__version__}\n")
        output.flush()
        return 0
    flags = _parse(arguments)
    if isinstance(flags, int):
        output.flush()
        return flags
    if is_multi_process() and not isinstance(flags, MULTIPROCESS_COMMANDS):
        raise InputError(f"lockstep {arguments[0]} works in one process; start it without torchrun")
    require_address_space()
    as_json = getattr(flags, "json", False)
    with contextlib.redirect_stdout(sys.stderr):  # standard output is only for the outcome
        with _descriptor_to_stderr(output) if as_json else contextlib.nullcontext():
            outcome = COMMANDS[type(flags)](flags)
        text = outcome.text
        if as_json:
            text = [to_json(outcome.payload) + "\n"] if outcome.payload else []
        for piece in text:
            if torchrun_launch().rank == 0:
                output.write(piece)
                output.flush()
    return outcome.code


def _describe_exhausted_resource(error: BaseException) -> str:
    """Which resource ran out, and what would help; empty for other errors."""
    message = (str(error) or type(error).__name__).splitlines()[0]
    if what := spawn_failure(error):
        return f"the system starts no further {what}: {message}; {describe_thread_limits()}"
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return (
            f"the system opens no further file: {message}; this process may have {open_files_limit()} open (ulimit -n)"
        )
    if isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error):
        return f"no temporary file can be written: {message}; set TMPDIR to a folder that is neither full nor read-only"
    return f"memory ran out: {message}; ask for less at once, or use a smaller model" if is_out_of_memory(error) else ""


def _parse(arguments: list[str]) -> Any:
    """`parse`, where only the first process prints usage errors, since the others would print the same."""
    if not _is_later_rank():
        return parse(arguments)
    with contextlib.redirect_stderr(io.StringIO()) as usage_errors:
        flags = parse(arguments)
    if isinstance(flags, int) and flags != 0:
        return _fail(f"error: wrong flags\n{usage_errors.getvalue().rstrip()}", flags, None)
    return flags


@contextlib.contextmanager
def _descriptor_to_stderr(output: Any) -> Iterator[None]:
    """A context in which the file descriptor of `output` refers to standard error, so that what a reward's subprocess
    or a C library writes to it does not mix with the JSON."""
    try:
        descriptor, stderr = output.fileno(), sys.__stderr__.fileno()  # type: ignore[union-attr]
        saved = os.dup(descriptor)
    except (AttributeError, OSError, ValueError):  # no file descriptor, or no standard error
        yield
        return
    os.dup2(stderr, descriptor)
    try:
        yield
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)


def _with_notes(message: str, error: BaseException) -> str:
    """`message`, followed by the notes of `error`: where the run is, and how to resume it."""
    return "\n".join((message, *getattr(error, "__notes__", ()))).rstrip()


def _fail(message: str, code: int, reported: bool | None = False) -> int:
    """Print a failure unless another process has `reported` it, and return its exit code. If that is not known (None),
    first give the first process time to do so, after which a launcher would end this one."""
    if reported is not False:
        _wait_for_first_process(code, _REPORT_SECONDS if reported else _COMMON_ERROR_SECONDS)
    if not reported:
        rank = f"rank {torchrun_launch().rank}: " if reported is None else ""
        print(f"lockstep: {rank}{message}{torchrun_report_note()}", file=sys.stderr)
    return code


def _wait_for_first_process(code: int, seconds: float) -> None:
    """Wait, because a launcher ends all processes once one has left, and the first may not have reported the cause."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(seconds)


def _is_later_rank() -> bool:
    """Whether this is not the first process, which reports what concerns all, such as a signal."""
    try:
        return is_multi_process() and torchrun_launch().rank > 0
    except InputError:  # its rank is not known
        return False


def _is_reported_elsewhere(error: BaseException) -> bool | None:
    """Whether another process reports this error; None if that is not known."""
    return getattr(error, "reported", None if _is_later_rank() else False)
