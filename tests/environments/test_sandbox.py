"""The Python tool: what a program cannot do, each limit that it meets, and what a model is told."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from small import CONFIG, make_model

from lockstep.config import TaskConfig
from lockstep.environments import Environment, Limits, Problem, Turn, make_environment, worked_trajectories
from lockstep.environments.sandbox import ProgramResult, SandboxLimits, python_tool, run_python
from lockstep.environments.sandbox import python as module
from lockstep.environments.tools import tool_environment
from lockstep.errors import InputError, ToolUnavailable
from lockstep.models.tokenizer import byte_tokenizer
from lockstep.session.text.policy import Policy

LIMITS = SandboxLimits(seconds=20.0, cpu_seconds=1, memory_mib=128, files_mib=1, processes=6, output_bytes=1000)
SHORT = SandboxLimits(seconds=1.0, cpu_seconds=3, memory_mib=128, processes=6)
UNHURRIED = replace(SHORT, seconds=2.0)  # in which Python starts and answers on a busy machine too

needs_namespaces = pytest.mark.skipif(module.isolation_failure() != "", reason=module.isolation_failure())

# A template that shows tools and calls as Qwen3's does, in short.
CHAT = (
    "{% if tools %}tools: {{ tools[0].function.description }}\n{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)

# name: program, limits, how it ends, and what it writes.
BOMBS: dict[str, tuple[str, SandboxLimits, str, str]] = {
    "waiting": ("import time\nprint('begun')\ntime.sleep(99)", UNHURRIED, "time", "begun\n"),
    "output": ("while True: print('x' * 99)", LIMITS, "output", ("x" * 99 + "\n") * 10),
    "closed output": ("import os, time\nos.close(1)\nos.close(2)\ntime.sleep(99)", SHORT, "time", ""),
    "memory": ("x = []\nwhile True: x.append(bytearray(1 << 24))", LIMITS, "exit", "MemoryError"),
    "processes": ("import os\nwhile True:\n try: os.fork()\n except OSError: pass", SHORT, "time", ""),
    "threads": (
        "import threading as t, time\n[t.Thread(target=time.sleep, args=(9,), daemon=True).start() for _ in range(9)]",
        *(LIMITS, "exit", "can't start new thread"),
    ),
    "one file": ("open('f', 'wb').write(bytes(3 << 20))", LIMITS, "exit", "OSError"),
    "loop": ("import signal\nfor n in range(1, 20):\n try: signal.signal(n, signal.SIG_IGN)\n except OSError: pass\n"
                "while True: pass", LIMITS, "cpu", ""),
    "own end": ("import os\nos.abort()", LIMITS, "exit", ""),
    "deep": ("def f(): f()\nf()", LIMITS, "exit", "RecursionError"),
    "input": ("input()", LIMITS, "exit", "EOFError"),
    "shared memory": (
        "import ctypes as c\nlibc = c.CDLL(None, use_errno=True)\n"
        "print(libc.shmget(0, c.c_size_t(4096), 0o1600), c.get_errno())",
        *(LIMITS, "exit", "-1 38\n"),
    ),
    "memory file": ("import os\nos.memfd_create('x')", LIMITS, "exit", "Function not implemented"),
}  # fmt: skip

LIMITED = ("waiting", "output", "memory", "one file", "shared memory", "memory file")  # if it is not cut off, too

# What a program may not reach; each prints what became of it.
OUTSIDE = {
    "passwords": ("open('/etc/passwd').read()", "FileNotFoundError"),
    "variables": ("import os\nprint(sorted(os.environ), os.path.exists('/proc/self/environ'))", "False"),
    "the home folder": ("import os\nprint(os.path.exists(HERE))", "False"),
    "files to write": ("open('/lib/x', 'w')", "Read-only file system"),
    "the folder itself": ("import os\nos.rmdir(os.getcwd())", "OSError"),
    "many files": ("for i in range(9): open(str(i), 'wb').write(bytes(1 << 19))", "No space left"),
    "the network": ("import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)", "Network is unreachable"),
    "the parent": ("import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)\nprint('alone')", "ProcessLookupError"),
    "its parent's number": ("import os\nprint(os.getpid(), os.getppid(), os.getuid())", "1 0 65534"),
    "root": ("import os\nos.setuid(0)", "Error: [Errno"),
    "mounts": ("import ctypes, os\nprint(ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, 0))", "-1"),
    "namespaces": ("import ctypes\nprint(ctypes.CDLL(None).unshare(0x10000000))", "-1"),
}


@pytest.fixture(scope="module")
def listening() -> Iterator[int]:
    """A port of this machine that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def together(calls: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda call: call(), calls))


@pytest.mark.parametrize("cut_off", [pytest.param(True, marks=needs_namespaces), False], ids=["cut off", "limited"])
def test_every_limit_ends_its_bomb(cut_off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not cut_off:
        monkeypatch.setattr(module, "isolation_failure", lambda: "not asked for")
    bombs = dict(BOMBS) if cut_off else {name: BOMBS[name] for name in LIMITED}
    if not cut_off and limited_processes():
        bombs["processes"] = BOMBS["processes"]
    found = together([lambda b=b: run_python(b[0], b[1], not cut_off) for b in bombs.values()])
    for (name, (_, _, ended, output)), ran in zip(bombs.items(), found, strict=True):
        assert ran.ended == ended, (name, ran)
        assert output in ran.output and len(ran.output) <= 8192, (name, ran)
        assert output != "" or ran.output == "" or name == "own end", (name, ran)


def limited_processes() -> bool:
    """Whether a limit of processes holds without namespaces: for root it does not."""
    return run_python("import os\nprint(os.getuid())", LIMITS, True).output != "0\n"


def test_where_the_system_has_namespaces_they_cut_off() -> None:
    assert not module.isolation_failure().startswith("a program"), "only the system may say no"


@needs_namespaces
def test_whether_processes_are_limited_is_found_with_16_of_them() -> None:
    ran = run_python(module._ESCAPE_ATTEMPTS, replace(LIMITS, processes=17))
    assert ran == ProgramResult("any number of processes\n", "exit")


@needs_namespaces
def test_what_is_cut_off_is_not_there(listening: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the run")
    here = str(Path(__file__).parent)
    programs = [f"PORT, HERE = {listening}, {here!r}\n{program}" for program, _ in OUTSIDE.values()]
    found = together([lambda p=p: run_python(p, LIMITS) for p in programs])
    for (name, (_, expected)), ran in zip(OUTSIDE.items(), found, strict=True):
        assert expected in ran.output and "SECRET" not in ran.output, (name, ran)
    again = run_python("import os\nprint(os.listdir(), os.getcwd())", LIMITS)
    assert again == ProgramResult("[] /tmp\n", "exit"), "nothing of another program is left"


def test_a_program_is_the_main_module() -> None:
    """What it defines is found there, as in a file that Python runs."""
    test = (
        "import unittest\nclass T(unittest.TestCase):\n  def test_it(self): self.fail('as it should')\nunittest.main()"
    )
    programs = [
        test,
        "import pickle\nclass A: pass\ntype(pickle.loads(pickle.dumps(A()))) is A, __name__, __doc__",
        "import timeit\ndef f(): return 1\ntimeit.timeit('f()', 'from __main__ import f', number=1) > 0",
    ]
    failed, pickled, timed = together([lambda p=p: run_python(p, allow_unsandboxed=True) for p in programs])
    assert failed.code == 1 and "Ran 1 test" in failed.output and "as it should" in failed.output
    assert (pickled.output, timed.output) == ("(True, '__main__', None)\n", "True\n")


def test_a_program_that_is_not_cut_off_leaves_no_process(monkeypatch: pytest.MonkeyPatch, listening: int) -> None:
    """Those too that have left its session; and what is cut off elsewhere is there."""
    monkeypatch.setattr(module, "isolation_failure", lambda: "not asked for")
    code = (
        "import os, socket, time\n"
        f"socket.create_connection(('127.0.0.1', {listening}), 1)\n"
        "ready, done = os.pipe()\n"
        "for leave in (False, True):\n"
        "    if os.fork() == 0:\n"
        "        if leave: os.setsid()\n"
        "        os.write(1, b'%d\\n' % os.getpid())\n"
        "        os.write(done, b'.')\n"
        "        time.sleep(99)\n"
        "    os.read(ready, 1)\n"
    )
    ran = run_python(code, LIMITS, allow_unsandboxed=True)
    assert ran.ended == "exit" and len(ran.output.split()) == 2, ran
    for pid in map(int, ran.output.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_program_ends_with_the_run() -> None:
    """Its watcher looks whether its own parent is there."""
    numbers = ("60", "9", str(1 << 28), "8", "99", "1048576", str(int(module.isolation_failure() == "")))
    command = [sys.executable, "-I", "-S", str(Path(module.__file__).with_name("confine.py")), *numbers]
    program = "import time; time.sleep(60)"
    script = (
        "import os, subprocess, sys\n"
        f"with subprocess.Popen([*sys.argv[1:], str(os.getpid()), {program!r}]): print('begun', flush=True)"
    )
    run = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", script, *command],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert run.stdout is not None and run.stdout.readline() == b"begun\n"
    os.kill(run.pid, signal.SIGKILL)
    began = time.monotonic()
    out, _ = run.communicate(timeout=20)  # all that could write is gone
    assert out.startswith(b"parent") and time.monotonic() - began < 10


def test_a_run_does_not_wait_for_its_programs() -> None:
    """When it ends, as by Ctrl-C, while the model's programs run and wait."""
    script = (
        "import asyncio, os, time\n"
        "from lockstep.environments.calls import event_loop\n"
        "from lockstep.environments.sandbox import SandboxLimits, python_tool\n"
        "python = python_tool(SandboxLimits(seconds=60.0), allow_unsandboxed=True)\n"
        "for _ in range(2 * os.cpu_count()):\n"
        "    asyncio.run_coroutine_threadsafe(python('import time; time.sleep(50)'), event_loop())\n"
        "time.sleep(1)\n"
    )
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", script], check=True, stdin=subprocess.DEVNULL)
    assert time.monotonic() - began < 40


def test_at_most_as_many_programs_run_at_once_as_there_are_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait too long, or for nobody, are not run; none takes a thread."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(module, "_waiting", cache(module._waiting.__wrapped__))
    python = python_tool(replace(LIMITS, patience=0.5), allow_unsandboxed=True)

    async def asked() -> list[str]:
        first = asyncio.create_task(python("import time; time.sleep(2)\n1"))
        await asyncio.sleep(0.1)
        unwanted = asyncio.create_task(python("2"))
        await asyncio.sleep(0.1)
        unwanted.cancel()
        others = [asyncio.create_task(python("3")) for _ in range(100)]
        await asyncio.sleep(0.1)
        assert threading.active_count() < threads + 10
        return [await first, *set(await asyncio.gather(*others)), await python("4")]

    threads = threading.active_count()
    assert asyncio.run(asked()) == ["1", "[not run: too many programs were waiting]", "4"]


def test_signals_for_all_processes_are_the_runs() -> None:
    with ThreadPoolExecutor(1) as pool:
        ran = pool.submit(run_python, "import time; time.sleep(0.5)\nprint('done')", LIMITS, True)
        while not (watching := [pid for pid in children(os.getpid()) if children(pid)]):
            assert not ran.done()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(watching[0], number)
        assert ran.result() == ProgramResult("done\n", "exit")


def children(process: int) -> list[int]:
    """Of all its threads."""
    found: list[int] = []
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, thread.read_text().split())
    return found


def test_programs_repeat_and_show_their_last_value() -> None:
    code = "import random, socket\nhash('a'), random.random(), list({'b', 'c', 'a'}), __name__"
    first, again = together([lambda: run_python(code, allow_unsandboxed=True)] * 2)
    assert first == again and first.ended == "exit" and "'__main__'" in first.output
    assert run_python("x = 2\nx ** 100", allow_unsandboxed=True).output == f"{2**100}\n"
    wrong = run_python("x = 1\nx / 0", allow_unsandboxed=True)
    assert wrong.code == 1 and wrong.output.startswith('Traceback (most recent call last):\n  File "<program>", line 2')
    unfinished = run_python("if", allow_unsandboxed=True).output
    assert unfinished.startswith('  File "<program>", line 1') and unfinished.endswith("SyntaxError: invalid syntax\n")
    assert run_python("import sys; sys.exit(3)", allow_unsandboxed=True) == ProgramResult("", "exit", 3)
    assert run_python("print('é', '\udcff')", allow_unsandboxed=True).output == "é ?\n"


class Asks(Environment):
    """A chat in which the model's turns are known."""

    @classmethod
    def worked_turns(cls, row: dict[str, Any], worked_example: str) -> list[str]:
        called = '<tool_call>\n{"name": "python", "arguments": {"code": "%s"}}\n</tool_call>'
        return [
            "<think>" + called % "1" + "</think>" + called % "6 * 7" + called % "1 / 0",
            "<tool_call>6",
            called % "2" + "<tool_call>",
            "42",
        ]


def test_a_model_calls_it_in_the_form_of_its_chat_template() -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = CHAT
    policy = Policy(make_model(torch.float32, config=replace(CONFIG, eos_token_ids=(258,))), tokenizer)
    tools = make_environment(TaskConfig(tools=("python",), allow_unsandboxed=True))
    kind = type("Known", (Asks, tools), {})
    problem = Problem([{"role": "user", "content": "6 * 7?"}], worked_example="")
    limits = Limits(turns=8)
    (made,) = worked_trajectories(kind, [problem], policy.tokens, policy.encode_completion, limits)
    prompt, *after = [segment.text or tokenizer.decode(segment.token_ids) for segment in made.segments]
    assert "tools: Run a Python program" in prompt
    malformed = "tool: {'error': 'the call is malformed: it is not in the form that was asked for'}"
    assert [text.split("\n")[0] for text in after[1::2]] == ["tool: 42", malformed, "tool: 2"]
    assert after[5].split("\n")[1] == malformed, "beside a call that is one"
    assert "ZeroDivisionError" in after[1] and after[6] == "42" and len(after) == 7


def call(code: Any) -> dict[str, Any]:
    return {"function": {"name": "python", "arguments": {"code": code}}}


def test_it_is_a_tool_like_others() -> None:
    """Several calls of a turn run beside each other; what goes wrong is an answer."""
    make = tool_environment([python_tool(UNHURRIED, allow_unsandboxed=True)], "a test")
    schema = make.schemas[0]["function"]
    assert schema["name"] == "python" and schema["parameters"]["required"] == ["code"]
    calls = [call("import time; time.sleep(9)")] * 2 + [
        call("1 + 1"),
        call("pass"),
        call(7),
        {"function": {"name": "python", "arguments": {}}},
    ]
    began = time.monotonic()
    said = make().step(Turn("", [0], "stop", {"role": "assistant", "content": "", "tool_calls": calls}))
    told = [message["content"] for message in said]
    assert told[:4] == ["[stopped: it ran longer than 2 s]"] * 2 + ["2", "[no output]"]
    assert "error" in told[4] and "missing 1 required" in told[5] and time.monotonic() - began < 10


def test_a_sandbox_that_cannot_start_is_told_early(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TaskConfig(tools=("python",))
    monkeypatch.setattr(module, "isolation_failure", lambda: "unshare: Operation not permitted")
    with pytest.raises(InputError, match=r"task.tools python: .*unshare: Operation not permitted.* task.allow_unsand"):
        make_environment(config)
    allowed = make_environment(TaskConfig(tools=("python",), allow_unsandboxed=True, environment_timeout=20.0))
    assert (SandboxLimits.within(20.0), SandboxLimits.within(0.0)) == (
        SandboxLimits(5.0, patience=10.0),
        SandboxLimits(),
    )
    (answer,) = allowed().step(
        Turn("", [0], "stop", {"role": "assistant", "content": "", "tool_calls": [call("7 * 6")]})
    )
    assert answer == {"role": "tool", "name": "python", "content": "42"}
    with pytest.raises(InputError, match="memory_mib is 0; it must be more than 0"):
        SandboxLimits(memory_mib=0)
    with pytest.raises(InputError, match="memory_mib=1.* do not let Python start: "):
        python_tool(SandboxLimits(memory_mib=1), allow_unsandboxed=True)


def test_a_tool_that_is_not_available_is_no_answer() -> None:
    def search(query: str) -> str:
        """Search.

        Args:
            query: What for.
        """
        raise ToolUnavailable("the service is down")

    async def search_async(query: str) -> str:
        """Search.

        Args:
            query: What for.
        """
        raise ToolUnavailable("the service is down")

    for tool in (search, search_async):
        environment = tool_environment([tool], "a test")()
        asked = {"function": {"name": tool.__name__, "arguments": {"query": "x"}}}
        with pytest.raises(ToolUnavailable, match="the service is down"):
            environment.step(Turn("", [0], "stop", {"role": "assistant", "content": "", "tool_calls": [asked]}))
