"""Runs one program confined: `python -I -S confine.py SECONDS CPU_SECONDS MEMORY PROCESSES OUTPUT FILES CUT_OFF PARENT
RUNNER`.

The program is read from standard input; the output is one line that says how it ended, and then what it wrote. This
process starts the program, reads its output, and kills it with all its descendants if it takes too long, writes too
much, or this process's parent is gone. It imports only the standard library, so that it starts quickly.

With CUT_OFF, the program is the first process in separate namespaces: it sees no other process, no network, and no
files but Python's, the system's libraries, and a small folder in memory; its user has no privileges. All of this ends
with the program. Without, only the limits hold, and root becomes the user nobody, if that user can execute Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import select
import shutil
import signal
import struct
import sys
import sysconfig
import tempfile
import time

NOBODY = 65534
FOLDER = "/tmp"  # the program's folder, if it is cut off
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/nix/store")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

# <linux/sched.h>, <linux/mount.h>, <linux/prctl.h>, <linux/filter.h>, <linux/seccomp.h>
NEW_NS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH = 2
SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVILEGES = 1, 36, 38
SET_SECCOMP, FILTER = 22, 2
LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, FAIL, OTHER_ABI = 0x7FFF0000, 0x50000, 1 << 30
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "ppc64le": 203, "s390x": 217, "riscv64": 41}
# Calls for memory that RLIMIT_AS does not count: shmget, msgget, semget, memfd_create, memfd_secret and, where there is
# one, ipc; after the architecture's name in <linux/audit.h>.
UNCOUNTED_MEMORY = {
    "x86_64": (0xC000003E, 29, 68, 64, 319, 447),
    "aarch64": (0xC00000B7, 194, 186, 190, 279, 447),
    "ppc64le": (0xC0000015, 395, 399, 393, 360, 447, 117),
    "s390x": (0x80000016, 395, 399, 393, 350, 447, 117),
    "riscv64": (0xC00000F3, 194, 186, 190, 279, 447),
}

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raises `OSError` with its name if it fails."""
    plain = [a.encode() if isinstance(a, str) else ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if getattr(_libc, name)(*plain) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


class Confinement:
    """The limits on a program, and running it. Sizes are in bytes, times in seconds."""

    def __init__(self, arguments: list[str]) -> None:
        numbers = list(map(int, arguments[1:8]))
        self.seconds = float(arguments[0])
        self.cpu_seconds, self.memory, self.processes, self.output, self.files, self.isolated, self.parent = numbers
        self.runner = arguments[8]
        self.root = os.geteuid() == 0
        self.changes_user = self.root
        self.python = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
        self.folder = FOLDER if self.isolated else tempfile.mkdtemp()
        if self.root and not self.isolated:
            os.seteuid(NOBODY)
            self.changes_user = os.access(self.python, os.X_OK, effective_ids=True)
            os.seteuid(0)

    def run(self) -> tuple[str, bytes]:
        """Run the program. Returns how it ended, and its output."""
        out, failed = os.pipe(), os.pipe()
        if self.isolated:
            self._enter_namespaces()
        elif sys.platform == "linux":
            _call("prctl", SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # adopts orphans, so that they can be killed
        child = os.fork()
        if child == 0:
            self._exec_program(out[1], failed[1])
        os.close(out[1])
        os.close(failed[1])
        try:
            if reason := os.read(failed[0], 4096):
                os.waitpid(child, 0)
                return f"unable {reason.decode()}", b""
            return self._watch(child, out[0])
        finally:
            if not self.isolated:
                _kill_descendants(child)
                shutil.rmtree(self.folder, ignore_errors=True)

    def _watch(self, child: int, out: int) -> tuple[str, bytes]:
        """Wait for the program to end, or kill it at a limit."""
        deadline, written, limit = time.monotonic() + self.seconds, bytearray(), ""
        status, is_open = None, True  # the program's exit status, and whether the pipe has writers
        while status is None or (is_open and self.isolated):  # if isolated, all writers end with it
            if status is None:
                pid, found, used = os.wait4(child, os.WNOHANG)
                status = found if pid else None
            if not is_open:
                time.sleep(0.005)
            elif select.select([out], [], [], 0.02 if status is None else 0)[0]:
                piece = os.read(out, 1 << 16)
                written += piece
                is_open = bool(piece)
            if len(written) > self.output:
                limit = "output"
            elif status is None and time.monotonic() > deadline:
                limit = "time"
            elif status is None and os.getppid() != self.parent:
                limit = "parent"
            if limit:
                break
        if status is None:
            os.kill(child, signal.SIGKILL)
            _, status, used = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
        used_up = used.ru_utime + used.ru_stime > self.cpu_seconds / 2  # half, as RLIMIT_CPU overcounts
        if not limit and code == -signal.SIGKILL and used_up:
            limit = "cpu"
        return limit or f"exit {code}", bytes(written[: self.output])

    def _enter_namespaces(self) -> None:
        """Enter separate namespaces, for which a process that stays outside maps users."""
        if self.root:
            with contextlib.suppress(PermissionError):
                os.setgroups([])
        ready, answer, own_pid = os.pipe(), os.pipe(), os.getpid()
        helper = os.fork()
        if helper == 0:
            os.close(ready[1])
            os.read(ready[0], 1)
            os._exit(self._map_users(own_pid, answer[1]))
        os.close(answer[1])
        _call("unshare", NEW_USER | NEW_NS | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS)
        os.close(ready[1])
        mapped = os.read(answer[0], 4096).decode()
        os.waitpid(helper, 0)
        if mapped not in ("two", "one"):
            raise OSError(errno.EPERM, mapped)
        self.changes_user = mapped == "two"
        with contextlib.suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as limit:
            limit.write("0")  # no nested namespaces

    def _map_users(self, pid: int, answer: int) -> int:
        """Map the users of process `pid`: for root, whom RLIMIT_NPROC does not limit, both root, which mounts, and
        nobody; otherwise only nobody. Writes "two", "one" or an error to `answer`."""
        mapped = ""
        with contextlib.suppress(OSError):
            _write(f"/proc/{pid}/setgroups", "deny")
        for name, text in (("two", f"0 0 1\n{NOBODY} {NOBODY} 1"), ("one", f"{NOBODY} {{}} 1")):
            if name == "two" and not self.root:
                continue
            try:
                _write(f"/proc/{pid}/uid_map", text.format(os.geteuid()))
                _write(f"/proc/{pid}/gid_map", text.format(os.getegid()))
                mapped = name
                break
            except OSError as error:
                mapped = f"users cannot be mapped: {error.strerror}"
        os.write(answer, mapped.encode())
        return 0

    def _exec_program(self, out: int, failed: int) -> None:
        """Turn the forked child into the program."""
        try:
            os.setsid()
            if self.isolated:
                self._isolate_files()
                _call("sethostname", "sandbox", 7)
            self._drop_privileges()
            self._set_limits()
            os.chdir(self.folder)
            for descriptor in (1, 2):
                os.dup2(out, descriptor)
            os.set_inheritable(failed, False)
            environment = {"HOME": self.folder, "TMPDIR": self.folder, "LANG": "C.UTF-8", "TZ": "UTC"}
            environment |= {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1"}  # the same at every call
            os.execve(self.python, [self.python, "-s", "-S", "-B", "-c", self.runner], environment)
        except BaseException as error:
            os.write(failed, f"{type(error).__name__}: {error}".encode()[:4000])
        os._exit(1)

    def _isolate_files(self) -> None:
        """Leave only Python and libraries in the file system, read-only, and a folder in memory."""
        _call("mount", None, "/", None, RECURSIVE | PRIVATE, None)
        paths = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), self.python, *LIBRARIES, *DEVICES}
        paths.add(os.path.join(sys.base_prefix, "lib"))
        nested = [path for path in paths if any(path.startswith(f"{other}/") for other in paths)]
        opened = {path: os.open(path, os.O_PATH) for path in paths.difference(nested) if os.path.exists(path)}
        _call("mount", "tmpfs", FOLDER, "tmpfs", NO_SUID, f"size=1m,nr_inodes={len(opened) * 8 + 64},mode=755")
        for path, descriptor in opened.items():
            _bind(descriptor, f"{FOLDER}{path}", read_only=path not in DEVICES)
        os.makedirs(f"{FOLDER}{FOLDER}", exist_ok=True)
        options = f"size={self.files},nr_inodes=1024,mode=700,uid={NOBODY},gid={NOBODY}"
        _call("mount", "tmpfs", f"{FOLDER}{FOLDER}", "tmpfs", NO_SUID | NO_DEVICES, options)
        os.chdir(FOLDER)
        if _libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b".") < 0:
            raise OSError(ctypes.get_errno(), "pivot_root: " + os.strerror(ctypes.get_errno()))
        _call("umount2", ".", DETACH)
        _call("mount", None, "/", None, REMOUNT | BIND | READ_ONLY | NO_SUID, None)

    def _drop_privileges(self) -> None:
        if self.changes_user:
            if not self.isolated:
                os.chown(self.folder, NOBODY, NOBODY)
                os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        if sys.platform == "linux":
            _call("prctl", SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
            _call("prctl", SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
            _refuse_uncounted_memory()

    def _set_limits(self) -> None:
        limits = {
            resource.RLIMIT_AS: self.memory,
            resource.RLIMIT_CPU: self.cpu_seconds,
            resource.RLIMIT_NPROC: self.processes,
            resource.RLIMIT_FSIZE: self.files,
            resource.RLIMIT_NOFILE: 64,
            resource.RLIMIT_CORE: 0,
        }
        for kind, value in limits.items():
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))


def _refuse_uncounted_memory() -> None:
    """Let this process's calls for memory that its limit does not count fail from now on, and those of another ABI,
    whose numbers are others."""
    if (known := UNCOUNTED_MEMORY.get(os.uname().machine)) is None:
        return
    architecture, *refused = known
    checks = [(JUMP_IF_AT_LEAST, OTHER_ABI), *((JUMP_IF_EQUAL, number) for number in refused)]
    program = [(LOAD, 0, 0, 4), (JUMP_IF_EQUAL, 0, len(checks) + 2, architecture), (LOAD, 0, 0, 0)]
    program += [(code, len(checks) - i, 0, number) for i, (code, number) in enumerate(checks)]
    program += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, FAIL | errno.ENOSYS)]
    steps = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    _call("prctl", SET_SECCOMP, FILTER, struct.pack("HP", len(program), ctypes.addressof(steps)), 0, 0)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _bind(descriptor: int, target: str, read_only: bool) -> None:
    """Bind-mount an open file or folder at `target`."""
    source = f"/proc/self/fd/{descriptor}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    _call("mount", source, target, None, BIND | RECURSIVE, None)
    if read_only:
        locked = os.statvfs(target).f_flag & NO_EXEC  # a remount may not clear it
        _call("mount", None, target, None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES | locked, None)
    os.close(descriptor)


def _kill_descendants(child: int) -> None:
    """Kill what a program has left behind: its process group, and orphans that this process has adopted."""
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    until = time.monotonic() + 2
    with contextlib.suppress(OSError):  # no children are left, or they cannot be listed
        while time.monotonic() < until:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                for pid in file.read().split():
                    os.kill(int(pid), signal.SIGKILL)
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.001)


def main() -> None:
    """Run the program, and report how it ended. Signals that a launcher sends to all processes are for the run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the program would inherit
    try:
        ended, output = Confinement(sys.argv[1:]).run()
    except Exception as error:
        ended, output = f"unable {error.strerror if isinstance(error, OSError) else error!r}", b""
    sys.stdout.buffer.write(ended.replace("\n", " ").encode() + b"\n" + output)


if __name__ == "__main__":
    main()
