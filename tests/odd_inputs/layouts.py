"""What several processes share, and how: settings, what torchrun says, and the commands that take a part of it."""

from __future__ import annotations

from collections.abc import Iterator

from case import SMALL, Odd

TRAIN = "train --model tiny --trainer.prompts-per-step 4"
GENERATE = "generate --model tiny --prompt a --max-completion-length 2"


def layouts() -> Iterator[Odd]:
    """Settings of `parallel` and of what is exchanged, through `train`, `plan` and `precompile` in one process."""
    for name, values in {
        "fsdp": ["-1", "4097", "2", "1.0", "all", "", "0x2", "1e1", "nan"],
        "tp": ["0", "-2", "65", "2", "3", "half", "", "1.5", "inf"],
        "generator-tp": ["-1", "65", "2", "7", "auto", "", "2.0", "None"],
        "zero-stage": ["1", "0", "4", "-3", "two", "", "2.0", "none"],
        "batch-shards": ["-1", "65537", "3", "8", "one", "", "4.5"],
        "cell": ["0", "-1", "65537", "eight", "", "2.5"],
        "timeout": ["0", "-5", "86401", "inf", "nan", "5m", "", "10"],
        "symmetric-memory": ["yes", "1"],
        "balance-batch": ["no", "false"],
    }.items():
        for value in values:
            yield Odd(f"{TRAIN}\0--parallel.{name}\0{value}".replace(" ", "\0"), (name.partition("-")[0],))
    for flags, word in [
        ("--parallel.no-symmetric-memory", "parallel.symmetric_memory"),
        ("--parallel.zero-stage 2 --parallel.tp 2", "parallel.zero_stage is 2 and parallel.tp 2"),
        ("--parallel.zero-stage 2 --parallel.generator-tp 4", "parallel.zero_stage is 2 and parallel.generator_tp 4"),
        ("--parallel.tp 2 --parallel.fsdp 2", "parallel.tp is 2"),
        ("--parallel.tp 2 --parallel.tp 2", "twice"),
        ("--parallel.no-tp", "--parallel.no-tp"),
        ("--parallel.batch-shards 3 --parallel.cell 3", "prompts_per_step is 4"),
        ("--parallel.generator_tp=3", "parallel.generator_tp is 3"),
        ("--parallel.zero_stage", "zero"),
        ("--parallel", "--parallel"),
        ("--parallel.ep 2", "--parallel.ep"),
        ("--parallel.generator-ep 2", "--parallel.generator-ep"),
        ("--parallel.pp 2", "--parallel.pp"),
        ("--optimizer.offload yes", "yes"),
        ("--optimizer.no-offload --optimizer.offload", "twice"),
        ("--optimizer.offload 1", "1"),
        ("--compile.bucket-collectives maybe", "maybe"),
        ("--compile.no-reshard-after-forward --compile.reshard-after-forward", "twice"),
        ("--compile.no-reorder-collectives", "compile"),
        ("--checkpoint.interval 1.5", "interval"),
        ("--checkpoint.keep-last two --checkpoint.interval 1", "two"),
    ]:
        yield Odd(f"{TRAIN} {flags}", (word,))
        if word.startswith("parallel.zero"):
            yield Odd(f"precompile {flags}", (word,))
            yield Odd(f"plan {flags}", (word,))
    for flags, word in [
        ("--world 0", "--world"),
        ("--world -8", "--world"),
        ("--world 5000", "--world"),
        ("--world two", "world"),
        ("--world 2.5", "world"),
        ("--world 2 --parallel.tp 4", "parallel.tp is 4"),
        ("--world 3 --parallel.generator-tp 2", "parallel.generator_tp is 2"),
        ("--world 4 --parallel.fsdp 3", "parallel.fsdp"),
        ("--world 3 --trainer.prompts-per-step 4", "trainer.prompts_per_step is 4"),
        ("--world 2 --parallel.batch-shards 3", "parallel.batch_shards is 3"),
        ("--device-memory-gib -1", "--device-memory-gib"),
        ("--device-memory-gib nan", "--device-memory-gib"),
        ("--device-memory-gib inf", "--device-memory-gib"),
        ("--device-memory-gib 80GB", "80GB"),
        ("--model nowhere", "nowhere"),
        ("--arch giant", "giant"),
        ("--run-dir x", "--run-dir"),
        ("--resume run", "--resume"),
        ("nothing", "nothing"),
        ("dataset", "task.data"),
        ("--world 2 --compile.capture layer --device cpu", "compile.capture is layer"),
        (
            "--compile.cudagraph-mode piecewise --compile.capture step --device cpu",
            "compile.cudagraph_mode is piecewise",
        ),
        ("--optimizer.offload --device cpu", "optimizer.offload is on"),
    ]:
        yield Odd(f"plan {flags}", (word,))


def parts_of_a_layout() -> Iterator[Odd]:
    """Of commands without steps."""
    for command in (GENERATE, f"eval --model tiny --task sum-digits {SMALL}", "parity --model tiny --tokens 20"):
        kind = command.split()[0]
        for flags, word in [
            ("--parallel.generator-tp 2", "parallel.generator_tp is 2"),
            ("--parallel.generator-tp -1", "parallel.generator_tp is -1"),
            ("--parallel.generator-tp 99", "parallel.generator_tp is 99"),
            ("--parallel.generator-tp x", "x"),
            ("--parallel.no-symmetric-memory", "parallel.symmetric_memory"),
            ("--parallel.timeout 20", "parallel.timeout"),
            ("--parallel.zero-stage 3", "--parallel.zero-stage is for training"),
            ("--parallel.batch-shards 1", "--parallel.batch-shards is for training"),
            ("--parallel.cell 8", "--parallel.cell is for training"),
            ("--parallel.no-balance-batch", "--parallel.no-balance-batch is for training"),
            ("--parallel.balance_batch", "--parallel.balance-batch is for training"),
            ("--parallel.fsdpp 1", "--parallel.fsdpp"),
            ("--optimizer.offload", "--optimizer.offload"),
        ]:
            yield Odd(f"{command} {flags}", (word,))
        if kind != "parity":
            yield Odd(f"{command} --parallel.fsdp 1", ("--parallel.fsdp is for training",))
            yield Odd(f"{command} --parallel.tp=1", ("--parallel.tp is for training",))
            yield Odd(f"{command} --compile.reorder-collectives", ("--compile.reorder-collectives is for training",))
    for flags, word in [
        ("--parallel.fsdp 2", "parallel.fsdp"),
        ("--parallel.tp 2", "parallel.tp is 2"),
        ("--parallel.tp 0", "parallel.tp is 0"),
        ("--tokens 0", "tokens"),
        ("--tokens 99999999999999", "tokens"),
        ("--seed -1", "seed"),
        ("--compile.capture layers", "layers"),
    ]:
        yield Odd(f"parity --model tiny {flags}", (word,))
    for command in ("chat --model tiny", "serve --model tiny --port 0"):
        yield Odd(f"{command} --parallel.generator-tp 1", ("--parallel.generator-tp",))
        yield Odd(f"{command} --compile.bucket_collectives", ("--compile.bucket-collectives is for training",))


def launches() -> Iterator[Odd]:
    """What torchrun says through the environment, and what it may say."""
    of_two = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29599"}
    for line in (GENERATE, "parity --model tiny --tokens 20", f"eval --model tiny --task sum-digits {SMALL}", TRAIN):
        for changes, word in [
            ({"WORLD_SIZE": "two"}, "WORLD_SIZE"),
            ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
            ({"WORLD_SIZE": "-2"}, "WORLD_SIZE"),
            ({"WORLD_SIZE": ""}, "WORLD_SIZE"),
            ({"RANK": "2"}, "RANK"),
            ({"RANK": "x"}, "RANK"),
            ({"RANK": "-1"}, "RANK"),
            ({"LOCAL_RANK": "first"}, "LOCAL_RANK"),
        ]:
            yield Odd(f"{line} --device cpu", (word,), environment={**of_two, **changes})
    for line, word in [
        ("chat --model tiny", "chat works in one process"),
        ("serve --model tiny --port 0", "serve works in one process"),
        ("replay run --trajectory 0/0/0", "replay works in one process"),
        ("plan --model tiny", "plan works in one process"),
        ("init tiny --out o", "init works in one process"),
    ]:
        yield Odd(line, (word,), environment=of_two)
    for line in (GENERATE, "parity --model tiny --tokens 20"):
        yield Odd(f"{line} --parallel.timeout 1 --device cpu", ("parallel.timeout",), 1, environment=of_two)
        yield Odd(f"{line} --parallel.generator-tp 4 --device cpu", ("parallel.generator_tp is 4",), environment=of_two)
