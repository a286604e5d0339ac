"""What a run and the command make of a plan."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import finished

from lockstep.cli.main import main
from lockstep.config import (
    CompileConfig,
    GeneratorConfig,
    LossConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
    yaml_file,
)
from lockstep.distributed import World
from lockstep.errors import InputError
from lockstep.session.build import build
from lockstep.session.memory import explain_out_of_memory, measure_memory

PLANNING = """
import sys
from lockstep.session import build
from lockstep.config import RunConfig
traced = "sympy", "torch.fx.experimental.symbolic_shapes", "torch._dynamo"
assert not any(name in sys.modules for name in traced)
build.plan_memory(RunConfig(device="cpu"), 1, 141)
print([name for name in traced if name in sys.modules])
"""


def test_planning_imports_no_tracer() -> None:
    done = finished([sys.executable, "-c", PLANNING])
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


RUN = RunConfig(
    steps=1,
    device="cpu",
    task=TaskConfig(easy=True),
    sampling=SamplingConfig(num_generations=2, max_completion_length=8, ignore_eos=True),
    trainer=TrainerConfig(prompts_per_step=2, skip_zero_variance=False),
    generator=GeneratorConfig(kv_cache_tokens=256, max_num_batched_tokens=64),
    compile=CompileConfig("step", verify="off"),
)


def test_a_run_computes_again_what_its_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    session = build(replace(RUN, loss=LossConfig(beta=0.1)))
    assert session.plan.recomputed == (0, False, False) and session.config.compile.recompute == ()
    shown = session.plan.to_dict()["terms_gib"]
    taken = measure_memory(session.trainer, session.engine.cache, session.runtime)
    for name in ("weights", "moments", "gradients", "reference or teacher", "KV cache"):
        assert taken[name] == pytest.approx(shown[name], rel=0.02, abs=1e-3), name
    monkeypatch.setattr("lockstep.session.build.available_memory", lambda *_: session.plan.total - 1000)
    tight = build(session.config)
    assert tight.plan.fits and tight.plan.recomputed == (0, True, False) and tight.plan.cache_tokens == 256
    assert tight.config.compile.recompute == tight.runtime.config.recompute == ("elementwise",)
    monkeypatch.setattr("lockstep.session.build.available_memory", lambda *_: 1 << 20)
    with pytest.raises(InputError, match="may take 0.0:(.|\n)*What would fit"):
        build(RUN)


@pytest.mark.parametrize("place", ["lockstep.session.build.Trainer", "lockstep.rl.loop.Loop.step"])
def test_running_out_is_answered_with_the_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture, place: str
) -> None:
    def run_out(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 3 GiB.")

    monkeypatch.setattr(place, run_out)
    yaml_file.save(replace(RUN, compile=CompileConfig()), tmp_path / "config.yaml")
    assert main(["train", "--config", str(tmp_path / "config.yaml"), "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "memory ran out: CUDA out of memory. Tried to allocate 2.00 GiB" in said and "Traceback" not in said
    assert "it was planned as\n" in said and "--trainer.max-tokens-per-micro-batch" in said
    with pytest.raises(InputError, match=r"memory ran out on rank 1 \("), explain_out_of_memory(str, World(1, 2)):
        raise RuntimeError("CUDA error: out of memory")
    for error in (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), MemoryError()):
        with (
            pytest.raises(InputError, match="memory ran out: (Default|MemoryError)"),
            explain_out_of_memory(str, World(0, 1)),
        ):
            raise error
    monkeypatch.setattr("lockstep.session.memory.usage.address_space_limit", lambda: 3 << 29)
    with (
        pytest.raises(InputError, match=r"This process may address 1\.50 GiB \(ulimit -v\): raise that"),
        explain_out_of_memory(str, World(0, 1)),
    ):
        raise MemoryError
    with pytest.raises(RuntimeError, match="something else"), explain_out_of_memory(str, World(0, 1)):
        raise RuntimeError("something else")


def test_more_gpus_are_named_with_what_they_can_share(capsys: pytest.CaptureFixture) -> None:
    """Six shards are for 1, 2, 3 or 6 processes, and a joint capture is for one."""
    asked = ["plan", "--arch", "qwen3-8b", "--device-memory-gib", "60", "--trainer.prompts-per-step", "96"]
    shards = ["--world", "2", "--parallel.batch-shards", "6"]
    assert main([*asked, *shards]) == 2
    said = capsys.readouterr().err
    assert "; 4 GPUs (torchrun), " in said and "sharded, with --parallel.batch-shards 4\n" in said
    assert main([*asked, "--world", "4", "--parallel.batch-shards", "4"]) == 0
    assert main([*asked, "--world", "4", *shards[2:]]) == 2 and main([*asked, "--world", "1"]) == 2
    said = capsys.readouterr().err
    assert "use a multiple of 4" in said and said.endswith("moments and gradients are sharded\n")
    flags = "--arch mistral-7b-8-layers --trainer.prompts-per-step 2 --sampling.num-generations 32"
    flags += " --sampling.max-completion-length 128 --trainer.max-tokens-per-micro-batch 4096"
    alone = ["plan", *flags.split(), "--device-memory-gib", "24", "--compile.activation-memory-gib", "0.5"]
    assert main([*alone, "--compile.cudagraph-mode", "none"]) == 2  # two need less besides than one does
    said = capsys.readouterr().err
    assert said.count("--optimizer.offload") == 1 and "2 GPUs (torchrun), " in said
    assert said.endswith("sharded, with --trainer.max-tokens-per-micro-batch 256 and --compile.recompute full\n")
    assert main([*asked, "--world", "1", "--compile.capture", "joint"]) == 2
    assert "GPUs (torchrun)" not in capsys.readouterr().err


def test_processes_of_a_machine_without_a_gpu_are_planned_with_a_share_of_its_memory_each(
    capsys: pytest.CaptureFixture,
) -> None:
    asked = ["plan", "--device", "cpu", "--trainer.prompts-per-step", "8"]
    memory = [main([*asked, "--world", str(n), "--json"]) or json.loads(capsys.readouterr().out) for n in (1, 4)]
    assert memory[0]["memory_gib"] == pytest.approx(4 * memory[1]["memory_gib"], abs=0.01)
    assert main([*asked, "--arch", "qwen3-8b"]) == 2  # and as many more would share it too
    assert "GPUs (torchrun)" not in capsys.readouterr().err


def test_the_command_plans_for_gpus_that_are_not_here(capsys: pytest.CaptureFixture) -> None:
    given = [
        "plan",
        "--arch",
        "qwen3-8b",
        "--trainer.prompts-per-step",
        "64",
        "--sampling.max-completion-length",
        "512",
    ]
    asked = [*given, "--world", "8", "--device-memory-gib"]
    assert main([*asked, "141", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory_gib"] == 141 and found["fits"] and found["terms_gib"]["weights"] == 15.256
    assert main([*asked, "141"]) == 0
    title = (
        "qwen3-8b, random weights (8,190.7 million parameters), sum-digits, dapo: 64 prompts x 8 completions of at most"
    )
    assert capsys.readouterr().out.startswith(f"{title} 512 tokens a step; 8 processes\n  ")
    assert main([*asked, "39"]) == 2
    said = capsys.readouterr().err.partition("What would fit: ")[2]
    assert "--optimizer.offload, with 11.4 GiB" in said and "; 16 GPUs (torchrun)" in said  # two generating together
    assert main([*given, "--device", "cpu"]) == 2
    assert capsys.readouterr().err.endswith("; GPUs, for which lockstep plan --device-memory-gib 80 plans\n")
    assert main([*given, "--world", "7", "--device-memory-gib", "141"]) == 2
    assert "7 shards" in capsys.readouterr().err
    assert main([*asked, "141", "--parallel.fsdp", "3"]) == 2
    assert "parallel.fsdp is 3, and there are 8 processes; start it with torchrun" in capsys.readouterr().err
    refused_by_train = {
        "--compile.cudagraph-mode full --compile.capture step": "CUDA graphs need a GPU",
        "--optimizer.offload": "the device is a CPU",
        "--attention flex --attention-mask nowhere:mask": "attention_mask 'nowhere:mask'",
    }
    for flags, why in refused_by_train.items():
        assert main([*given, "--device", "cpu", *flags.split()]) == 2 and why in capsys.readouterr().err
    assert main([*asked, "141", "--dtype", "float32"]) == 2 and "dtype is float32" in capsys.readouterr().err
    assert main([*asked, "141", "--device", "cpu"]) == 2 and "add --device cuda" in capsys.readouterr().err
    assert main([*given, "--world", "0"]) == 2 and main([*given, "--device-memory-gib", "-1"]) == 2
    assert "--world is 0" in capsys.readouterr().err
