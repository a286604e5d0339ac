"""Environments and tools, the server's flags, and replays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from case import EVAL, Odd

ENVIRONMENTS = """
from lockstep.environments import End, Environment

class Fine(Environment):
    def step(self, turn):
        return End(1.0)

class NoStep(Environment):
    pass

class Abstract(Environment):
    def __init__(self, needed):
        pass

class Starts(Fine):
    def start(self, row, seed):
        return None

class Differs(Fine):
    made = 0
    def start(self, row, seed):
        Differs.made += 1
        return str(Differs.made)

class Empty(Fine):
    def start(self, row, seed):
        return ""

class Exits(Environment):
    def step(self, turn):
        raise SystemExit(3)

class Endless(Environment):
    def step(self, turn):
        return {"role": "user"}

class NoReward(Environment):
    def step(self, turn):
        return End()

class Infinite(Environment):
    def step(self, turn):
        return End(float("inf"))

class Images:
    def reset(self, **row):
        return [{"type": "image"}]

class RaisesInReset:
    def reset(self, **row):
        raise OSError("no server")

class Resets:
    pass

def rollouts(prompts, trainer):
    return 3

def short(prompts, trainer):
    return {"prompt_ids": [[1]], "completion_ids": [[1]], "logprobs": [[0.0]]}

def undescribed(x):
    return x

def told(x: int) -> int:
    '''Told.'''
    return x

def tool(x: int) -> int:
    '''A tool.

    Args:
        x: A number.
    '''
    return x

three, none, text, empty = 3, None, "text", {}
raise_later = Fine().start
"""


def environments() -> Iterator[Odd]:
    """What `--environment` and `--tools` name, through `eval`."""
    files: dict[str, bytes | str] = {"e.py": ENVIRONMENTS, "broken.py": "import nothing_of_this_name", "bad.py": "def"}
    line = f"{EVAL} --data good.jsonl --max-turns 2"
    for name, word in [
        ("", "task.environment"),
        ("\t", "task.environment"),
        ("e.py", "task.environment 'e.py'"),
        ("e.py:", "task.environment"),
        (":Fine", "task.environment"),
        ("e.py:Missing", "Missing"),
        ("missing.py:Fine", "missing.py"),
        ("broken.py:Fine", "nothing_of_this_name"),
        ("bad.py:Fine", "SyntaxError"),
        ("e.py:three", "e.py:three"),
        ("e.py:none", "e.py:none"),
        ("e.py:text", "e.py:text"),
        ("e.py:empty", "e.py:empty"),
        ("e.py:Abstract", "Abstract"),
        ("e.py:Starts", "start returned NoneType"),
        ("e.py:Empty", "no tokens"),
        ("e.py:Resets", "reset"),
        ("e.py:RaisesInReset", "no server"),
        ("e.py:Images", "reset returned list"),
        ("e.py:NoStep", "no method step"),
        ("e.py:Exits", "SystemExit"),
        ("e.py:Endless", "step returned dict"),
        ("e.py:NoReward", "reward"),
        ("e.py:Infinite", "finite number"),
        ("e.py:rollouts", "rollouts"),
        ("e.py:short", "rollout_func returned"),
        ("Calculator", "calculator"),
        ("json:loads", "json:loads"),
        ("os.path:join", "os.path:join"),
        ("verifiers", "verifiers:NAME"),
        ("http://", "http://"),
        ("http://127.0.0.1", "http://127.0.0.1"),
        ("http://127.0.0.1:x", "http://127.0.0.1:x"),
        ("http://127.0.0.1:99999", "99999"),
        ("http://127.0.0.1:-1", "-1"),
        ("http://nowhere.invalid:8000", "nowhere.invalid"),
        ("http://[::1", "http://[::1"),
        ("http://user:pass@127.0.0.1:8000", "http://"),
        ("https://127.0.0.1:8000", "must be http://HOST:PORT"),
        ("http://127.0.0.1:8000/path?x=1", "http://"),
        ("https://127.0.0.1:8000", "https://"),
        ("ftp://127.0.0.1:8000", "ftp://"),
    ]:
        # What fails once it is played leaves its trajectory out, and nothing is left of one alone.
        yield Odd(
            f"{line}\0--environment\0{name}".replace(" --", "\0--").replace(" ", "\0"),
            (word,),
            files=files,
            raises="e.py",
        )
    for flags, word in [
        ("--tools e.py:undescribed", "undescribed cannot be described"),
        ("--tools e.py:told", "told cannot be described"),
        ("--tools e.py:tool e.py:tool", "several tools of the name tool"),
        ("--tools e.py:three", "e.py:three"),
        ("--tools e.py:Missing", "Missing"),
        ("--tools missing.py:f", "missing.py"),
        ("--tools nothing", "task.tools 'nothing'"),
        ("--tools json:loads", "loads cannot be described"),
        ("--tools e.py:tool --environment calculator", "task.tools has no effect beside"),
        ("--environment calculator --tools python", "task.tools has no effect beside"),
        ("--allow-unsandboxed", "allow_unsandboxed"),
        ("--environment calculator --allow-unsandboxed", "allow_unsandboxed"),
        ("--environment calculator --max-turns 0", "max_turns"),
        ("--environment calculator --max-turns -1", "max_turns"),
        ("--environment calculator --max-response-length 1", "max_response_length"),
        ("--environment calculator --max-response-length -1", "max_response_length"),
        ("--environment calculator --environment-timeout -1", "environment_timeout"),
        ("--environment calculator --environment-timeout nan", "environment_timeout"),
        ("--environment calculator --environment-timeout 1e9", "environment_timeout"),
        ("--environment-timeout 9", "environment_timeout"),
    ]:
        yield Odd(f"{EVAL} --data good.jsonl --reward r.py:one {flags}", (word,), files=files)
    for data, word in [
        ("reasoning_gym:", "reasoning_gym:"),
        ("reasoning_gym:no_such_task", "no_such_task"),
        ("reasoning_gym:gcd,size=0", "size"),
        ("reasoning_gym:gcd,size=many", "size=many"),
        ("reasoning_gym:gcd,=3", "=3"),
        ("reasoning_gym:gcd,no_such=3", "no_such"),
        ("reasoning_gym:gcd,min_value=[]", "reasoning_gym:gcd"),
        ("verifiers:", "verifiers:"),
        ("verifiers:no_such_taskset", "no_such_taskset"),
        ("verifiers:textarena,size=-1", "size"),
        ("verifiers:textarena,renderer=3", "renderer"),
        ("verifiers:textarena,game", "game"),
        ("verifiers:../x,size=1", "../x"),
    ]:
        environment = "--environment verifiers" if data.startswith("verifiers") else "--reward r.py:one"
        yield Odd(f"{EVAL} --data {data} {environment}", (word,))


def servers() -> Iterator[Odd]:
    """Flags of `serve`, all of which are refused before it listens."""
    for name, values in {
        "port": ["65536", "http", "1.5", ""],
        "max-model-len": ["-1", "4.5", "1k", "99999999999"],
        "max-num-seqs": ["0", "-1", "65537", "all"],
        "kv-cache-tokens": ["-1", "1", "x"],
        "max-waiting": ["-1", "1048577", "few"],
        "max-body-mib": ["0", "1025", "0.5"],
        "shutdown-seconds": ["-1", "nan", "inf", "86401", "soon"],
        "host": ["", "256.1.1.1", "nowhere.invalid", "-1"],
        "served-model-name": [""],
        "api-key": [""],
        "seed": ["-1", "9223372036854775808", "x"],
        "device": ["gpu"],
        "dtype": ["half"],
        "chat-template-kwargs": ["x", "a=b", "1=2", "tokenize=true"],
        "attention-mask": ["m.py:f"],
        "reload": ["yes"],
        "workers": ["4"],
    }.items():
        word = {"api-key": "API key", "kv-cache-tokens": "kv"}.get(name, name.replace("attention-", "attention_"))
        for value in values:
            yield Odd(
                f"serve\0--model\0tiny\0--port\09\0--{name}\0{value}".replace("\0--port\09\0--port", "\0--port"),
                (word,),
            )


def _recorded(change: Callable[[list[dict[str, Any]]], None]) -> Callable[[], None]:
    """A run whose record of rollouts is changed."""

    def edit() -> None:
        shutil.copytree(Path("run").resolve(), "r")
        path = Path("r/rollouts.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        change(lines)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return edit


def _sample(**changes: Any) -> Callable[[], None]:
    return _recorded(lambda lines: lines[0]["samples"][0].update(changes))


def _emptied(name: str, text: str | None) -> Callable[[], None]:
    def edit() -> None:
        shutil.copytree(Path("run").resolve(), "r")
        Path("r", name).unlink()
        if text is not None:
            Path("r", name).write_text(text)

    return edit


def replays() -> Iterator[Odd]:
    """`replay`: which trajectory, and a record that was changed."""
    for which in (
        "",
        "0",
        "0/0",
        "0/0/0/0",
        "a/b/c",
        "-1/0/0",
        "0/0/9",
        "0/9/0",
        "9/0/0",
        "0.0/0/0",
        "٠/0/0",
        "0/0/0 ",
    ):
        yield Odd(f"replay\0run\0--trajectory\0{which}", ("trajectory",))
    yield Odd("replay\0run\0--trajectory\0" + "9" * 30 + "/0/0", ("trajectory",))
    for line, word in [
        ("replay run", "trajectory"),
        ("replay --trajectory 0/0/0", "RUN_DIR"),
        ("replay nowhere --trajectory 0/0/0", "nowhere"),
        ("replay tiny --trajectory 0/0/0", "tiny"),
        ("replay good.jsonl --trajectory 0/0/0", "good.jsonl"),
        ("replay run run --trajectory 0/0/0", "run"),
        ("replay run --trajectory 0/0/0 --seed 3", "--seed"),
        ("replay run --trajectory 0/0/0 --trajectory 0/0/1", "twice"),
    ]:
        yield Odd(line, (word,))
    line = "replay r --trajectory 0/0/0"
    for name, text, word in [
        ("rollouts.jsonl", None, "rollouts.jsonl"),
        ("rollouts.jsonl", "", "rollouts.jsonl"),
        ("rollouts.jsonl", "x\n", "rollouts.jsonl"),
        ("rollouts.jsonl", "[]\n", "rollouts.jsonl"),
        ("rollouts.jsonl", "{}\n", "rollouts.jsonl"),
        ("rollouts.jsonl", '{"step": 0}\n', "rollouts.jsonl"),
        ("rollouts.jsonl", '{"step": 0, "group": 0, "samples": 3}\n', "rollouts.jsonl"),
        ("rollouts.jsonl", '{"step": 0, "group": 0, "samples": [3]}\n', "rollouts.jsonl"),
        ("rollouts.jsonl", '{"step": 0, "group": 0, "samples": [{"sample": 0}]}\n', "rollouts.jsonl"),
        ("config.yaml", None, "config.yaml"),
        ("config.yaml", "steps: x", "steps"),
        ("config.yaml", "recipe: sum-digits\nmodel: nowhere", "nowhere"),
    ]:
        yield Odd(line, (word,), prepare=_emptied(name, text))
    for changes, word, code in [
        ({"token_ids": []}, "0/0/0", 2),
        ({"token_ids": "x"}, "0/0/0", 2),
        ({"token_ids": [1, 2, 3, 4]}, "DIFFERENT", 1),
        ({"segments": []}, "0/0/0", 2),
        ({"segments": 3}, "0/0/0", 2),
        ({"segments": [{"kind": "given"}]}, "0/0/0", 2),
        ({"segments": [{"kind": "sampled", "tokens": "x"}]}, "0/0/0", 2),
        ({"logprobs_digest": "other"}, "DIFFERENT", 1),
        ({"logprobs_digest": 3}, "DIFFERENT", 1),
    ]:
        yield Odd(line, (word,), code, prepare=_sample(**changes))
