"""Data files and reward functions."""

from __future__ import annotations

from collections.abc import Iterator

from case import EVAL, Odd


def rows() -> Iterator[Odd]:
    """Data files, through `eval` on a task of rows."""
    good = '{"prompt": "a"}\n'
    for name, content, word in [
        ("d.jsonl", good + "\x00\n", "line 2"),
        ("d.jsonl", good + "{'prompt': 'a'}\n", "line 2"),
        ("d.jsonl", good + '{"prompt": "a",}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": "a"} {"prompt": "b"}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": NaN}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": true}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": null}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": {}}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": []}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": [[]]}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": ["a"]}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": [{"role": "user"}]}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": [{"role": 1, "content": "x"}]}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": [{"role": "user", "content": ["x"]}]}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": [{"role": "user", "content": ""}]}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": [{"role": "assistant", "content": "x"}]}\n', "line 2"),
        ("d.jsonl", good + '{"Prompt": "a"}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": "a", "completions": 1}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": "a", "prompts": 1}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": "a", "prompt": "b"}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": "a", "x": {"y": 1, "y": 2}}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": "\\ud83d"}\n', "line 2"),
        ("d.jsonl", good + '"prompt"\n', "line 2"),
        ("d.jsonl", good + "[]\n", "line 2"),
        ("d.jsonl", good + "null\n", "line 2"),
        ("d.jsonl", good + "{}\n", "line 2"),
        ("d.jsonl", good + '{"prompt": "a"', "line 2"),
        ("d.jsonl", good + '{"question": "q"}\n', "line 2"),
        ("d.jsonl", good + '{"question": 3, "answer": "4"}\n', "line 2"),
        ("d.jsonl", good + '{"question": "", "answer": "4"}\n', "line 2"),
        ("d.jsonl", good + '{"prompt": ' + "[" * 3000 + "\n", "line 2"),
        ("d.jsonl", good.encode("utf-16"), "d.jsonl line 1"),
        ("d.jsonl", b'{"prompt": "\xe9"}\n', "line 1"),
        ("d.jsonl", b"\x1f\x8b\x08\x00", "d.jsonl line 1"),
        ("d.jsonl", "\ufeff\n\n", "no rows"),
        ("d.jsonl", "\r\n\r\n", "no rows"),
        ("d.json", "{", "line 1"),
        ("d.json", "[", "d.json"),
        ("d.json", "[[]]", "d.json"),
        ("d.json", "[null]", "d.json"),
        ("d.json", '["a"]', "d.json"),
        ("d.json", '[{"prompt": "a"},]', "d.json"),
        ("d.json", '[{"prompt": 1}]', "d.json"),
        ("d.json", '{"data": [{"prompt": "a"}]}', "line 1"),
        ("d.csv", "prompt\n\n\n", "no rows"),
        ("d.csv", "question\nq\n", "d.csv row 0"),
        ("d.csv", 'prompt\n"open\n', "d.csv"),
        ("d.csv", "prompt,answer\na,b,c,d\n", "d.csv"),
        ("d.csv", b"prompt\n\xff\xfe\n", "d.csv"),
        ("d.csv", "prompt\n1.5\n", "d.csv row 0"),
        ("d.parquet", b"PAR1", "d.parquet"),
        ("d.parquet", b"", "d.parquet"),
        ("d.arrow", b"x", "d.arrow"),
        ("d.tsv", "prompt\na\n", "d.tsv"),
        ("d.xlsx", b"PK", "d.xlsx"),
        ("d", good, "must end in"),
        ("d.JSONL", good, "must end in"),
        ("d.jsonl", '{"prompt": "' + "x" * 100_000 + '"}\n', "line 1"),
    ]:
        yield Odd(f"{EVAL} --data {name} --reward r.py:one", (name, word), files={name: content})
    for data in (
        "x.csv",
        "x/y.parquet",
        "x/y.txt",
        "/nowhere/x.jsonl",
        "a b",
        "../..",
        "org/name/x",
        "?",
        "file:///x.jsonl",
    ):
        line = EVAL.replace(" ", "\0")
        yield Odd(f"{line}\0--data\0{data}\0--reward\0r.py:one", (data,))
    for line, word in [
        (f"{EVAL} --data ok.csv --reward r.py:one", ""),
        (f"{EVAL} --data ok.json --reward r.py:one", ""),
        (f"{EVAL} --data bom.jsonl --reward r.py:one", ""),
        (f"{EVAL} --data crlf.jsonl --reward r.py:column --prompt-column q", ""),
    ]:
        yield Odd(
            line,
            (word,),
            0,
            {
                "ok.csv": "prompt,n\nhello,1\n",
                "ok.json": '[\n {"prompt": "hello", "n": 1}\n]',
                "bom.jsonl": "\ufeff" + good,
                "crlf.jsonl": '{"q": "a"}\r\n\r\n{"q": "b"}\r\n',
            },
        )


REWARDS = """
import asyncio, sys, threading, numpy, torch
def one(completions, **_): return [1.0] * len(completions)
def column(completions, q): return [float(len(text)) for text in q]
def nothing(completions, **_): pass
def none(completions, **_): return [None] * len(completions)
def text(completions, **_): return "1" * len(completions)
def generator(completions, **_): return (1.0 for _ in completions)
def mapping(completions, **_): return {i: 1.0 for i, _ in enumerate(completions)}
def nested(completions, **_): return [[1.0]] * len(completions)
def inf(completions, **_): return [float("-inf")] * len(completions)
def huge(completions, **_): return [10**400] * len(completions)
def complexes(completions, **_): return [1j] * len(completions)
def strings(completions, **_): return ["1.0"] * len(completions)
def more(completions, **_): return [1.0] * (len(completions) + 1)
def none_at_all(completions, **_): return []
def keyed(completions, **_): return {}["x"]
def stop(completions, **_): raise StopIteration
def exits(completions, **_): sys.exit("bye")
def recursion(completions, **_): return recursion(completions)
def base(completions, **_): raise BaseException("base")
def unprintable(completions, **_):
    class E(Exception):
        def __str__(self): raise ValueError
    raise E
def long(completions, **_): raise ValueError("x" * 100000)
def control(completions, **_): raise ValueError("\\x1b[2J\\n\\r")
def system(completions, **_): raise SystemError
def interrupted(completions, **_): raise asyncio.CancelledError
def memory(completions, **_): raise MemoryError
def positional(completions, /): return [1.0] * len(completions)
def wants(completions, solution): return [1.0] * len(completions)
def nobody(): return [1.0]
async def slow(completions, **_): await asyncio.sleep(0); raise OSError("no")
async def bare(completions, **_): return 3
def metric(completions, log_metric): log_metric("a", "b")
def extra(completions, log_extra): log_extra("a", [])
def state(completions, trainer_state): return [trainer_state.max_steps] * len(completions)
def tensor(completions, **_): return torch.ones(len(completions), 2)
def array(completions, **_): return numpy.array(["x"] * len(completions))
not_callable = 3
class Takes:
    def __init__(self, completions): raise TypeError("no")
def numbers(completions, **_): return numpy.ones(len(completions), dtype=numpy.int8)
def booleans(completions, **_): return [True] * len(completions)
def tensors(completions, **_): return list(torch.ones(len(completions), dtype=torch.bfloat16))
def logs(completions, trainer_state, log_metric, log_extra):
    log_metric("n", len(completions))
    log_extra("c", completions)
    return [float(trainer_state.global_step)] * len(completions)
"""


def rewards() -> Iterator[Odd]:
    """Reward functions, through `eval`."""
    bad = "nothing none text generator mapping nested inf huge complexes strings more none_at_all keyed stop exits "
    bad += "recursion base unprintable long control system interrupted memory positional wants nobody slow bare metric "
    bad += "extra state tensor array not_callable Takes"
    for name in bad.split():
        yield Odd(f"{EVAL} --data good.jsonl --reward r.py:{name}", (name,))
    for name in ("numbers", "booleans", "tensors", "logs"):
        yield Odd(f"{EVAL} --data good.jsonl --reward r.py:{name}", (), 0)
    for text, word in [
        ("def f(:", "SyntaxError"),
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
        ("1 / 0", "ZeroDivisionError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("", "no function"),
        ("f = None", "no function"),
        ("\x00", "bad.py"),
    ]:
        yield Odd(f"{EVAL} --data good.jsonl --reward bad.py:f", ("bad.py", word), files={"bad.py": text})
    yield Odd(f"{EVAL} --data good.jsonl --reward r.py:one --pass-reward two", ("two",))
    yield Odd(f"{EVAL} --data good.jsonl --reward r.py:one r.py:one", ("twice",))
