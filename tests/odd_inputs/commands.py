"""Arguments of the other commands, and the environment."""

from __future__ import annotations

from collections.abc import Iterator

from case import Odd


def other_commands() -> Iterator[Odd]:
    """Arguments of everything but `train`."""
    generate = "generate --model tiny"
    for line, word in [
        (generate, "--prompt"),
        (f"{generate} --prompt a --prompts good.jsonl", "one of the two"),
        (f"{generate} --prompts tiny", "tiny"),
        (f"{generate} --prompts r.py", "r.py"),
        (f"{generate} --prompts good.jsonl --prompt-column x", "line 1"),
        (f"{generate} --prompt a --n 0", "num_generations"),
        (f"{generate} --prompt a --n -2", "num_generations"),
        (f"{generate} --prompt a --top-p 0", "top_p"),
        (f"{generate} --prompt a --seed -1", "seed"),
        (f"{generate} --prompt a --max-completion-length 0", "max_completion_length"),
        (f"{generate} --prompt a --max-completion-length 100000", "context"),
        (f"{generate} --prompt a --chat-template-kwargs x=1", "--chat-template-kwargs"),
        (f"{generate} --prompt a --system-prompt b --chat-template-kwargs x", "NAME=VALUE"),
        (f"{generate} --prompt a --system-prompt b --chat-template-kwargs tokenize=true", "tokenize"),
        (f"{generate} --prompt a --compile.recompute full", "compile"),
        (f"{generate} --prompt a --attention-mask m.py:f", "attention_mask"),
        (f"{generate} --prompt a --attention flex --attention-mask m.py:f", "m.py"),
        (f"{generate} --prompt a --dtype half", "dtype"),
        ("generate --prompt a", "model"),
        ("eval --model tiny", "task"),
        ("eval --model tiny --task sum-digits --prompts 0", "--prompts"),
        ("eval --model tiny --task sum-digits --n 0", "n is 0"),
        ("eval --model tiny --task sum-digits --n 2 --k 3", "k is"),
        ("eval --model tiny --task sum-digits --n 2 --k 0", "k is"),
        ("eval --model tiny --task sum-digits --n 2 --temperature 0", "temperature is 0"),
        ("eval --model tiny --task sum-digits --pass-threshold nan", "pass_threshold"),
        ("eval --model tiny --task sum-digits --data good.jsonl", "task.data"),
        ("eval --model tiny --task word-arithmetic --no-easy", "--no-easy"),
        ("chat", "model"),
        ("chat --model nowhere", "nowhere"),
        ("chat --model tiny --plain --system-prompt x", "--system-prompt"),
        ("chat --model tiny --temperature -1", "temperature"),
        ("serve", "model"),
        ("serve --model nowhere", "nowhere"),
        ("serve --model tiny --port -1", "--port"),
        ("serve --model tiny --max-model-len 1000000", "--max-model-len"),
        ("serve --model tiny --host nowhere.invalid", "--host"),
        ("serve --model tiny --compile.recompute full", "compile"),
        ("report", "RUN_DIR"),
        ("report nowhere", "nowhere"),
        ("report tiny", "tiny"),
        ("report good.jsonl", "good.jsonl"),
        ("report run --out /nowhere/x.html", "/nowhere"),
        ("report run --out .", "."),
        ("report run nowhere", "nowhere"),
        ("parity --model tiny --tokens -1", "tokens"),
        ("parity --model tiny --tokens 1.5", "tokens"),
        ("parity --model nowhere", "nowhere"),
        ("parity --model tiny --compile.capture layer --compile.cudagraph-mode full", "cudagraph_mode"),
        ("init", "out"),
        ("init tiny", "out"),
        ("init giant --out o", "giant"),
        ("init tiny --out /dev/null", "/dev/null"),
        ("init tiny --out o --vocab-size 0", "vocab"),
        ("init tiny --out o --vocab-size -5", "vocab"),
        ("init tiny --out o --tokenizer good.jsonl", "good.jsonl"),
        ("init tiny --out o --seed 1.5", "seed"),
        ("precompile --model nowhere", "compile.capture"),
        ("precompile dataset", "task.data"),
        ("precompile --run-dir x", "run-dir"),
        ("precompile --steps -1", "steps"),
        ("no-such-command", "no-such-command"),
        ("", "train"),
    ]:
        yield Odd(line, (word,))
    yield Odd("chat --model tiny --max-completion-length 2", (), 0, stdin="hi\n/reset\n/what\n\n/quit\n")
    yield Odd("chat --model tiny --max-completion-length 2", ("context",), 0, stdin="x" * 60_000 + "\n")
    yield Odd("report run --out /dev/full", ("/dev/full",))
    small = "--sampling.num-generations 2 --sampling.max-completion-length 4 --trainer.prompts-per-step 1 --steps 2"
    train = f"train --model tiny --trainer.warmup-steps 0 --task.validation-prompts 0 {small} --run-dir r"
    for line, word, largest in [
        ("init tiny --out o", "o/", 100),
        ("init tiny --out o", "model.safetensors", 100_000),
        ("report run --out x.html", "x.html", 1000),
        (train, "r", 0),
        (train, "r/", 1000),
        (train, "r/", 8000),
        (f"{train} --checkpoint.interval 1", "r/", 100_000),
        (f"{train} --checkpoint.interval 2", "r/", 3_000_000),
    ]:
        yield Odd(line, (word,), 1, largest=largest)
    for name, value in [("WORLD_SIZE", "2"), ("WORLD_SIZE", "x"), ("LOCAL_RANK", "1")]:
        code = 0 if name == "LOCAL_RANK" else 2
        yield Odd("report run", ("torchrun",) if code else (), code, environment={name: value})
    for value in ("/dev/null", "/proc/nothing", "\n", "~"):
        yield Odd(
            "generate --model tiny --prompt a --max-completion-length 1", (), 0, environment={"LOCKSTEP_CACHE": value}
        )
