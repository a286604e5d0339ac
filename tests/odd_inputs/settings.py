"""Flags and files of settings."""

from __future__ import annotations

import os
from collections.abc import Iterator

from case import Odd


def flags() -> Iterator[Odd]:
    """Values of `train`'s flags."""
    for flag, value, word in [
        *[
            ("steps", v, "steps")
            for v in ("-1", "1e3", "0x10", "3.0", "", "one", "999999999999999999999999x", "−3", "1_0_")
        ],
        *[("seed", v, "seed") for v in ("-1", "9223372036854775808", "1.5", "nan", "0b1", "seed")],
        *[
            ("sampling.temperature", v, "temperature")
            for v in ("0", "-0.1", "1e5", "inf", "-inf", "NaN", "warm", "1,0")
        ],
        *[("sampling.top-p", v, "top") for v in ("0", "1.0001", "-1", "nan", "50%", "1e-9")],
        *[("sampling.top-k", v, "top") for v in ("-1", "2147483648", "1.5", "all")],
        *[("sampling.min-p", v, "min") for v in ("-0.1", "1.1", "inf")],
        *[("sampling.num-generations", v, "num") for v in ("0", "1", "-8", "65537", "eight")],
        *[("sampling.max-completion-length", v, "max") for v in ("0", "-1", "5000", "1e2")],
        *[("optimizer.beta1", v, "beta1") for v in ("1", "-0.1", "nan")],
        *[("optimizer.epsilon", v, "epsilon") for v in ("0", "-1e-8", "inf")],
        *[("optimizer.max-grad-norm", v, "max") for v in ("-1", "nan", "none")],
        *[("loss.beta", v, "beta") for v in ("-0.1", "inf")],
        *[("loss.loss-type", v, "loss") for v in ("sft", "pppo", "GRPO", "")],
        *[("trainer.prompts-per-step", v, "prompts") for v in ("0", "-5", "1048577")],
        *[("generator.page-size", v, "page") for v in ("-16", "4097", "16.5")],
        *[("parallel.fsdp", v, "fsdp") for v in ("-1", "5000", "yes")],
        *[("parallel.timeout", v, "timeout") for v in ("0", "inf")],
        *[("device", v, "device") for v in ("gpu", "CPU", "cuda:0", "")],
        *[("dtype", v, "dtype") for v in ("float16", "fp32", "")],
        *[("parity", v, "parity") for v in ("on", "true", "")],
        *[("arch", v, "arch") for v in ("", "Tiny", "gpt2", "../tiny")],
        *[("task.name", v, "name") for v in ("math", "")],
        *[
            ("task.reward", v, "reward")
            for v in ("f", ":f", "r.py:", "missing.py:f", "os:nothing", "sys:argv", "a:b:c")
        ],
        *[("metrics.trackers", v, "trackers") for v in ("mlflow", "wandb wandb")],
        *[("attention", v, "attention") for v in ("flash", "eager")],
        ("attention-mask", "m.py:f", "attention_mask"),
        ("compile.cudagraph-mode", "full", "cudagraph_mode"),
        ("compile.backend", "eager", "compile"),
        ("task.chat-template-kwargs", "a=1", "chat_template_kwargs"),
        ("loss.epsilon-high", "0.1", "epsilon_high"),
        ("checkpoint.keep-last", "0", "keep_last"),
        ("checkpoint.interval", "-1", "interval"),
        ("config", "nothing.yaml", "nothing.yaml"),
        ("resume", "nothing", "nothing"),
        ("run-dir", "/dev/null", "/dev/null"),
        ("run-dir", "/dev/null/x", "/dev/null"),
        ("model", "tiny/config.json", "tiny/config.json"),
        ("model", "a/b.safetensors", "a/b.safetensors"),
        ("model", " ", "model"),
        ("model", "~nobody/x", "~nobody"),
        ("model", "https://example.org/m", "example.org"),
    ]:
        yield Odd(
            f"train\0--{flag}\0" + "\0".join(value.split(" ") if flag == "metrics.trackers" else [value]), (word,)
        )
    for line, word in [
        ("train sum-digits gsm8k", "gsm8k"),
        ("train --steps", "steps"),
        ("train --steps 1 --steps 2", "twice"),
        ("train --steps=1 --steps=2", "twice"),
        ("train -steps 3", "steps"),
        ("train --", ""),
        ("train dataset --data good.jsonl", "reward"),
        ("train --resume run --config run/config.yaml", "both"),
        ("train --resume run --steps 0", "steps"),
        ("train --resume run --seed 9", "seed"),
        ("train --resume run --run-dir other", "--run-dir"),
        ("train --json yes", "yes"),
        ("Train", "Train"),
        ("--train", "train"),
        ("train\0--model\0tiny\0--arch\0tiny", "arch"),
    ]:
        if word:
            yield Odd(line, (word,))


def yaml_files() -> Iterator[Odd]:
    """Files for --config."""
    for text, word in [
        ("\ufeff", "my.yaml"),
        ("---\n---\n", "my.yaml"),
        ("---\nsteps: 1\n---\nsteps: 2\n", "my.yaml"),
        ("null", "no key"),
        ("[]", "mapping"),
        ("''", "mapping"),
        ("false", "mapping"),
        ("0", "mapping"),
        ("just words", "mapping"),
        ("!!set {a, b}", "my.yaml"),
        ("&a [*a]", "my.yaml"),
        ("steps: &x 3\nseed: *y", "my.yaml"),
        ("a: &a {b: *a}", "my.yaml"),
        ("<<: {steps: 1}\nstepz: 1", "my.yaml"),
        ("steps: 2024-01-01", "steps"),
        ("steps: 1:30", "steps"),
        ("steps: .inf", "steps"),
        (f"recipe: sum-digits\nsteps: 1{400 * '0'}", "it must be at least 0 and finite"),
        (f"recipe: sum-digits\noptimizer: {{learning_rate: 1{400 * '0'}}}", "optimizer.learning_rate is inf"),
        ("steps: ~", "steps"),
        ("steps: [1]", "steps"),
        ("seed: -0x1", "seed is -1"),
        ("seed: 1e3", "seed"),
        ("recipe: 3", "recipe"),
        ("recipe: {sum-digits: 1}", "recipe"),
        ("recipe: SUM-DIGITS", "recipe"),
        ("recipe: ' sum-digits'", "recipe"),
        ("recipe: ''", "recipe"),
        ("recipe: dataset", "task.data"),
        ("recipe: dataset\ntask: {data: good.jsonl}", "task.reward"),
        ("recipe: sum-digits\ntask: []", "task"),
        ("recipe: sum-digits\ntask: {reward: [1]}", "task.reward[0]"),
        ("recipe: sum-digits\ntask: {reward: [[math]]}", "task.reward[0]"),
        ("recipe: sum-digits\nsampling: {stop: ['']}", "sampling.stop"),
        ("recipe: sum-digits\nsampling: {stop: x}", "sampling.stop"),
        ("recipe: sum-digits\nsampling: {temperature: '1e'}", "sampling.temperature"),
        ("recipe: sum-digits\nsampling: {top_p: .nan}", "sampling.top_p"),
        ("recipe: sum-digits\nloss: {epsilon_high: x}", "loss.epsilon_high"),
        ("recipe: sum-digits\noptimizer: {lr_scheduler: step}", "lr_scheduler"),
        ("recipe: sum-digits\nmetrics: {trackers: [tensorboard, tensorboard]}", "twice"),
        ("recipe: sum-digits\nmetrics: {project: x}", "metrics.project"),
        ("recipe: sum-digits\nparallel: {batch_shards: 7}", "parallel.batch_shards"),
        ("recipe: sum-digits\ncompile: {capture: step, backend: none}", "compile.backend"),
        ("recipe: sum-digits\ncompile: {capture: all}", "compile.capture"),
        ("recipe: sum-digits\ncheckpoint: {keep_last: 0}", "keep_last"),
        ("recipe: gsm8k\ntask: {data: good.jsonl}\ncheckpoint: {keep_last: 7}", "checkpoint.keep_last"),
        ("recipe: sum-digits\nmodel: tiny\narch: tiny-moe", "arch"),
        ("recipe: sum-digits\nrun_dir: x", "run_dir"),
        ("recipe: sum-digits\njson: true", "json"),
        ("recipe: sum-digits\nresume: x", "resume"),
        ("recipe: sum-digits\nsteps: 1\n\tseed: 2", "my.yaml"),
        ("recipe: sum-digits\nsampling.top_p: 0.5", "sampling.top_p"),
        ("{recipe: sum-digits, steps: 1, steps: 1}", "twice"),
        ("recipe: sum-digits\n? {a: b}\n: c", "my.yaml"),
        ("\x00", "my.yaml"),
        ("steps: \x07", "my.yaml"),
        ("%YAML 9.9\n---\nsteps: x", "my.yaml"),
    ]:
        yield Odd("train --config my.yaml", (word,), files={"my.yaml": text})
    yield Odd("train --config .", (".",))
    yield Odd("train --config loop.yaml", ("loop.yaml",), prepare=lambda: os.symlink("loop.yaml", "loop.yaml"))
    yield Odd("train --config my.yaml", ("my.yaml",), files={"my.yaml": "steps: 1".encode("utf-16")})
