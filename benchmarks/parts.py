"""What `all.py` runs, what matters most first: commands, seconds that each needs, and those after which it is ended."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Part(NamedTuple):
    """A process that writes its figures to `{json}`, again and again while it runs.

    Attributes:
        need_s: an estimate, of a machine that has none of its kernels compiled where the part is the first.
        cap_s: when it is ended.
        device: what it is for: one GPU, two, or a CPU, where the figures mean nothing.
    """

    name: str
    command: tuple[str, ...]
    need_s: float
    cap_s: float
    device: Literal["cuda", "cuda-x2", "cpu"] = "cuda"


def _script(name: str, *flags: str) -> tuple[str, ...]:
    return (f"benchmarks/{name}.py", *flags, "--json", "{json}")


def _case(name: str, *flags: str) -> tuple[str, ...]:
    return ("benchmarks/run.py", name, *flags, "--json", "{json}")


def _tests(*files: str) -> tuple[str, ...]:
    return ("benchmarks/gpu_tests.py", *files, "--json", "{json}")


def _learning(limit: int, *flags: str) -> tuple[str, ...]:
    return ("benchmarks/run.py", "learning", "--json", "{json}", "--limit", str(limit), "--", *flags)


LINEAR_MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen3-32b")
WORDS = ("word-arithmetic", "--steps", "150")
DIGITS = (
    *("sum-digits", "--arch", "qwen3-100m", "--task.no-easy", "--sampling.max-completion-length", "64"),
    *("--trainer.warmup-steps", "2000", "--trainer.warmup-learning-rate", "5e-4", "--trainer.warmup-loss", "0"),
    *("--trainer.warmup-reward", "0.6", "--optimizer.learning-rate", "5e-5", "--task.validation-interval", "25"),
    *("--checkpoint.interval", "0", "--steps", "100"),
)

PARTS = (
    # The first run finds no kernel compiled: a cold start. The second, and all that follows, finds most of them.
    Part("seed_workload", _case("seed_workload", "--steps", "20", "--runs", "2", "--peer", "trl-vllm"), 260, 420),
    Part("tests-roles", _tests("precompile", "families", "routing", "moe", "trust", "lent_cache", "timings"), 190, 400),
    Part("tests-compile", _tests("compile"), 90, 260),
    Part("capture", _case("capture"), 90, 180),
    Part("compile_ways", _case("compile_ways"), 120, 300),
    Part("learning-words", _learning(120, *WORDS), 60, 150),
    Part("algorithms", _case("algorithms"), 120, 240),
    Part("families", _case("families", "--only", "Llama 3.2 1B", "Qwen3-30B-A3B, 4 layers",
                           "DeepSeek-V3, 3 layers, 32 experts"), 110, 240),
    Part("families-dense", _case("families", "--steps", "3", "--only", "Qwen2.5 7B, the last layers trained",
                                 "Gemma 3 4B", "Mistral 7B, 8 layers", "OLMo 2 1B", "OLMo 3 7B, 8 layers"), 200, 500),
    Part("families-experts", _case("families", "--steps", "3", "--only", "gpt-oss 20B, 4 layers",
                                   "GLM-4.5-Air, 2 layers"), 100, 300),
    Part("generate", _case("generate", "--peer", "none", "--case", "seed", "--case", "seed, top-p", "--case", "one",
                             "--case", "mid", "--case", "mixed"), 120, 220),
    Part("kernels", _case("kernels"), 60, 150),
    Part("endurance", _case("endurance", "--steps", "200"), 75, 160),
    Part("parity_cost", _case("parity_cost"), 130, 240),
    Part("train_step", _case("train_step"), 120, 200),
    Part("tests-latent", _tests("latent"), 90, 200),
    Part("tests-ops", _tests("fused", "fused_backward", "sampling", "adamw", "ops", "operands", "host_memory", "fold"),
         200, 400),
    Part("tests-attention", _tests("attention", "attention_backward", "backward", "generator", "llm", "whole_model"),
         120, 260),
    Part("tests-scores", _tests("scores"), 220, 400),
    Part("tests-flex", _tests("flex"), 100, 260),
    Part("tests-fsdp", _tests("fsdp"), 400, 600, "cuda-x2"),
    Part("tests-tp", _tests("push", "tp"), 150, 300, "cuda-x2"),
    Part("ops", _case("ops", "--only", "attention", "logprobs", "sampling", "rows", "embedding"), 60, 180),
    Part("ops-linear", _case("ops", "--only", "linear", "--models", *LINEAR_MODELS), 60, 240),
    Part("moe", _case("moe"), 60, 150),
    Part("startup", _case("startup", "--repeats", "2"), 140, 280),
    Part("flex", _case("flex", "--only", "flex"), 90, 200),
    Part("windows", _case("flex", "--only", "native"), 120, 300),
    Part("decode_layer", _case("decode_layer"), 20, 60),
    Part("sustained", _case("sustained"), 15, 60),
    Part("learning-digits", _learning(120, *DIGITS), 60, 150),
    Part("growth", _case("growth", "--repeats", "3"), 60, 300),
    Part("generate-big", _case("generate", "--peer", "none", "--case", "big", "--repeats", "3"), 75, 130),
    Part("generate-vllm", _case("generate", "--peer", "vllm", "--case", "seed", "--case", "seed, top-p", "--case",
                                  "mid", "--case", "one"), 260, 400),
    Part("generate-big-vllm", _case("generate", "--peer", "vllm", "--case", "big", "--repeats", "3"), 300, 450),
    Part("settings", _case("settings", "--budget", "420"), 200, 430),
    Part("settings-sharded", _case("settings", "--only", "experts, one process", "experts, sharded",
                                    "groups, one process", "groups, sharded"), 60, 200,
         "cuda-x2"),
    Part("turns", _case("turns"), 60, 240),
    Part("offload", _case("offload"), 30, 120),
    Part("checkpoints", _case("checkpoints", "--processes", "1"), 40, 150),
    Part("threads", _case("threads", "--loops", "0"), 60, 240),
    Part("serve", _case("serve", "--minutes", "2", "--repeats", "3"), 300, 500),
    Part("generate-peer", _case("generate", "--peer", "transformers", "--case", "seed"), 50, 100),
    Part("fsdp", _case("fsdp"), 400, 600, "cuda-x2"),
    Part("long_rows", _case("long_rows"), 120, 300, "cuda-x2"),
    Part("degrees", _case("degrees", "--arch", "qwen3-8b", "--repeats", "3"), 150, 400, "cuda-x2"),
    Part("scaling", _case("scaling", "--warm"), 100, 300, "cuda-x2"),
    Part("checkpoints-x2", _case("checkpoints", "--processes", "1", "2"), 80, 200, "cuda-x2"),
    # Every script at its smallest, to see here what would fail there.
    Part("cpu-decode_layer", _case("decode_layer", "--rows", "2"), 2, 200, "cpu"),
    Part("cpu-flex", _case("flex"), 4, 60, "cpu"),
    Part("cpu-sustained", _case("sustained"), 2, 60, "cpu"),
    Part("cpu-moe", _case("moe", "--repeats", "1"), 3, 60, "cpu"),
    Part("cpu-ops", _case("ops"), 5, 60, "cpu"),
    Part("cpu-generate", _case("generate", "--repeats", "1", "--case", "mixed", "--case", "cpu"), 5, 60, "cpu"),
    Part("cpu-train_step", _case("train_step", "--repeats", "1", "--sequences", "8", "--length", "32", "--prompt",
                                   "8", "--peer", "eager"), 5, 60, "cpu"),
    Part("cpu-capture", _case("capture", "--repeats", "1", "--sequences", "8", "--length", "6"), 12, 90, "cpu"),
    Part("cpu-compile_ways", _case("compile_ways", "--repeats", "1", "--length", "6", "--only", "joint", "layer"),
         12, 90, "cpu"),
    Part("cpu-kernels", _case("kernels"), 10, 90, "cpu"),
    Part("cpu-families", _case("families", "--steps", "2"), 30, 200, "cpu"),
    Part("cpu-algorithms", _case("algorithms", "--only", "gspo", "--prompts", "2", "--samples", "4",
                                     "--tokens", "8", "--repeats", "2"), 8, 90, "cpu"),
    Part("cpu-algorithms_bits", _case("algorithms_bits", "--only", "rloo"), 30, 180, "cpu"),
    Part("cpu-algorithms_learning", _case("algorithms_learning", "--tiny", "--only", "rloo", "--seeds", "1"),
         15, 120, "cpu"),
    Part("cpu-tool_learning", _case("tool_learning", "--tiny", "--seeds", "1", "--steps", "2"), 8, 90, "cpu"),
    Part("cpu-agent_kills", _case("agent_kills", "--kills", "1", "--steps", "6"), 15, 120, "cpu"),
    Part("cpu-endurance", _case("endurance", "--steps", "4"), 8, 90, "cpu"),
    Part("cpu-growth", _case("growth", "--tiny", "--repeats", "1"), 10, 90, "cpu"),
    Part("cpu-seed_workload", _case("seed_workload", "--arch", "tiny", "--steps", "2"), 12, 120, "cpu"),
    Part("cpu-parity_cost", _case("parity_cost", "--repeats", "1"), 30, 120, "cpu"),
    Part("cpu-tune_linear", _script("tune_linear", "--out", "{scratch}/table.json"), 15, 120, "cpu"),
    Part("cpu-learning", _learning(60, "word-arithmetic", "--arch", "tiny", "--steps", "2", "--trainer.warmup-steps",
                                   "2", "--trainer.warmup-batch-size", "4", "--trainer.prompts-per-step", "2",
                                   "--task.validation-prompts", "4"), 8, 60, "cpu"),
    Part("cpu-settings", _case("settings", "--only", "plain", "checkpoints"), 30, 120, "cpu"),
    Part("cpu-fsdp", _case("fsdp", "--steps", "2", "--only", "one process", "sharded"), 40, 120, "cpu"),
    Part("cpu-scaling", _case("scaling", "--arch", "tiny", "--prompts", "2", "--samples", "4", "--tokens", "8",
                              "--steps", "2"), 40, 120, "cpu"),
    Part("cpu-long_rows", _case("long_rows", "--repeats", "1"), 20, 120, "cpu"),
    Part("cpu-degrees", _case("degrees", "--repeats", "1"), 20, 120, "cpu"),
    Part("cpu-turns", _case("turns", "--repeats", "1"), 8, 60, "cpu"),
    Part("cpu-offload", _case("offload", "--arch", "tiny", "--repeats", "1"), 5, 60, "cpu"),
    Part("cpu-checkpoints", _case("checkpoints", "--processes", "1", "2", "--arch", "tiny", "--repeats", "1"), 20, 120,
         "cpu"),
    Part("cpu-threads", _case("threads", "--steps", "2", "--loops", "0"), 40, 240, "cpu"),
    Part("cpu-kills", _case("kills", "--tries", "1", "--kills", "1", "--steps", "3"), 40, 240, "cpu"),
    Part("cpu-serve", _case("serve", "--clients", "8", "--minutes", "0.1", "--requests", "8", "--concurrent", "8",
                              "--rounds", "1", "--prompt", "16", "--new", "8", "--context", "128", "--repeats", "1"),
         40, 240, "cpu"),
    Part("cpu-memory_plan", _script("memory_plan", "--device", "cpu"), 10, 90, "cpu"),
    Part("cpu-compare", _script("compare", ".", "--device", "cpu", "--rounds", "1", "--seed-rounds", "0",
                                "--tolerance", "9"), 30, 180, "cpu"),
    Part("cpu-startup", _case("startup", "--repeats", "1", "--steps", "2"), 40, 180, "cpu"),
    Part("cpu-tests", _tests("families", "--gpus", "2"), 5, 200, "cpu"),
)  # fmt: skip
