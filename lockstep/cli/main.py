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
from .commands import COMMANDS, ON_RANKS
from .resolve import parse

_GRACE = 5.0  # seconds that threads have to end after the command
_FIRST_TELLS = 0.5  # seconds that the first process has to report an error common to all, before another one leaves
_FIRST_WOULD = 2.0  # the same for an error that may be common to all, such as wrong flags; torchrun then ends the rest


def entry() -> NoReturn:
    """Run `main` as a process that ends with the command: a thread that a reward function left running does not delay
    it, and Ctrl-C no longer changes an outcome that was printed."""
    code = main()
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(RuntimeError):  # no more threads can be started
        threading.Thread(target=_leave_threads, args=(code,), daemon=True).start()
    sys.exit(code)


def _leave_threads(code: int) -> None:
    """End the process if threads still delay it after some seconds."""
    time.sleep(_GRACE)
    others = [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    if others:
        names = ", ".join(thread.name for thread in others)
        print(
            f"lockstep: done; threads that still ran were left (of a reward function, perhaps): {names}",
            file=sys.stderr,
        )
        atexit._run_exitfuncs()
        sys.stdout.flush()
        _leave(code)


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
            _leave(code)
    return code


def _leave(code: int) -> None:
    """End the process without an orderly exit, which the rest of a failed process group could delay."""
    sys.stderr.flush()
    os._exit(code)


def _main(arguments: list[str]) -> int:
    output = sys.stdout
    try:
        if arguments == ["--version"]:
            output.write(f"lockstep {__version__}\n")
            output.flush()
            return 0
        flags = _parsed(arguments)
        if isinstance(flags, int):
            output.flush()
            return flags
        if is_multi_process() and not isinstance(flags, ON_RANKS):
            raise InputError(f"lockstep {arguments[0]} works in one process; start it without torchrun")
        require_address_space()
        as_json = getattr(flags, "json", False)
        with contextlib.redirect_stdout(sys.stderr):  # standard output is only for the outcome
            with _nothing_else_written(output) if as_json else contextlib.nullcontext():
                outcome = COMMANDS[type(flags)](flags)
            for piece in [to_json(outcome.payload) + "\n"] * bool(outcome.payload) if as_json else outcome.text:
                if torchrun_launch().rank == 0:
                    output.write(piece)
                    output.flush()
        return outcome.code
    except LockstepError as error:
        bad_input = isinstance(error, InputError)
        return _fail(f"{'error' if bad_input else 'failed'}: {error}", 2 if bad_input else 1, _elsewhere(error))
    except Terminated as stop:
        return _fail(_with_notes(f"ended by {stop.args[0].name}", stop), 128 + stop.args[0], _is_not_first())
    except KeyboardInterrupt as stop:
        return _fail(_with_notes("interrupted", stop), 130, _is_not_first())
    except BrokenPipeError:  # the reader of standard output has gone
        return 1
    except BaseException as error:  # a panic in a Rust library is not an `Exception`
        if not (lacking := _lacking(error)):
            raise
        return _fail(f"error: {lacking}", 2, _elsewhere(error))


def _lacking(error: BaseException) -> str:
    """Which resource ran out, and what would help; empty for other errors."""
    said = (str(error) or type(error).__name__).splitlines()[0]
    if what := spawn_failure(error):
        return f"the system starts no further {what}: {said}; {describe_thread_limits()}"
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return f"the system opens no further file: {said}; this process may have {open_files_limit()} open (ulimit -n)"
    if isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error):
        return f"no temporary file can be written: {said}; set TMPDIR to a folder that is neither full nor read-only"
    return f"memory ran out: {said}; ask for less at once, or use a smaller model" if is_out_of_memory(error) else ""


def _parsed(arguments: list[str]) -> Any:
    """`parse`, where only the first process prints usage errors, since the others would print the same."""
    if not _is_not_first():
        return parse(arguments)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        flags = parse(arguments)
    wrong = isinstance(flags, int) and flags != 0
    return _fail(f"error: wrong flags\n{said.getvalue().rstrip()}", flags, None) if wrong else flags


@contextlib.contextmanager
def _nothing_else_written(output: Any) -> Iterator[None]:
    """A context in which the file descriptor of `output` refers to standard error, so that what a reward's subprocess
    or a C library writes to it does not mix with the JSON."""
    try:
        descriptor, other = output.fileno(), sys.__stderr__.fileno()  # type: ignore[union-attr]
        kept = os.dup(descriptor)
    except (AttributeError, OSError, ValueError):  # no file descriptor, or no standard error
        yield
        return
    os.dup2(other, descriptor)
    try:
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


def _with_notes(message: str, error: BaseException) -> str:
    """`message`, followed by the notes of `error`: where the run is, and how to resume it."""
    return "\n".join((message, *getattr(error, "__notes__", ()))).rstrip()


def _fail(message: str, code: int, reported: bool | None = False) -> int:
    """Print a failure unless another process has `reported` it, and return its exit code. If that is not known (None),
    first give the first process time to do so, after which a launcher would end this one."""
    if reported is not False:
        _let_the_first_tell(code, _FIRST_TELLS if reported else _FIRST_WOULD)
    if not reported:
        rank = f"rank {torchrun_launch().rank}: " if reported is None else ""
        print(f"lockstep: {rank}{message}{torchrun_report_note()}", file=sys.stderr)
    return code


def _let_the_first_tell(code: int, seconds: float) -> None:
    """Wait, because a launcher ends all processes once one has left, and the first may not have reported the cause."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(seconds)


def _is_not_first() -> bool:
    """Whether this is not the first process, which reports what concerns all, such as a signal."""
    try:
        return is_multi_process() and torchrun_launch().rank > 0
    except InputError:  # its rank is not known
        return False


def _elsewhere(error: BaseException) -> bool | None:
    """Whether another process reports this error; None if that is not known."""
    return getattr(error, "reported", None if _is_not_first() else False)
