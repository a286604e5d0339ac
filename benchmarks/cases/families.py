"""Ten RL steps of a model of each family, in recorded graphs: bits compared, and the rate of generation.

Layers have their real widths, weights are random, and the depth is what one GPU trains (float32 masters, gradients and
moments beside bfloat16 weights: 18 bytes a parameter). Each step: 5 prompts of 145 tokens, 8 samples of 100
(temperature 0.8, top-p 0.95), alternating advantages, one update; of a long window fewer prompts, which are longer than
it is. Tokens and choices of experts are compared at each. Beside the tokens a second are those that reading the weights
once a step, and the keys and values that are seen, would allow.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from cases.capture import make_runtime
from cases.generate import Case, random_prompts
from common import Report, bandwidth, first_layers, random_weights, seconds

from lockstep.config import GeneratorConfig, LossConfig, OptimizerConfig
from lockstep.generator import Engine, SharedWeights, plan_cache_tokens
from lockstep.graph import check_against_eager
from lockstep.machine import freeze_gc
from lockstep.models import ModelConfig, num_parameters
from lockstep.models.init import ARCHITECTURES
from lockstep.trainer import BatchShape, StepResult, Trainer, pack
from lockstep.types import RolloutGroup, SampleIdentity

GIB = 2**30
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Family:
    """An architecture at a depth and vocabulary that one GPU trains.

    Attributes:
        case: what is generated; None: as of the others.
        freeze: what is not trained, by patterns, so that the rest's state fits.
        trusted: the functions whose graphs are held to eager's bits before the first step; of a large model not those
            whose state does not fit twice.
    """

    arch: str
    layers: int
    vocabulary: int
    trusted: tuple[str, ...] = ("forward_backward", "check", "optim_step", "decode", "mixed")
    case: Case | None = None
    freeze: tuple[str, ...] = ()

    @property
    def config(self) -> ModelConfig:
        """No token ends a completion."""
        return replace(first_layers(self.arch, self.layers), vocab_size=self.vocabulary)


BUT_THE_UPDATE, GENERATION = ("forward_backward", "check", "decode", "mixed"), ("decode", "mixed")
FAMILIES = {
    "Llama 3.2 1B": Family("llama3.2-1b", 16, 128256),
    "Qwen3-30B-A3B, 4 layers": Family("qwen3-30b-a3b", 4, 151936, BUT_THE_UPDATE),
    "DeepSeek-V3, 3 layers, 32 experts": Family("deepseek-v3-3-layers-32-experts", 3, 32768, GENERATION),
    "Qwen2.5 7B, the last layers trained": Family(
        "qwen2.5-7b", 28, 152064, GENERATION,
        freeze=("model.embed_tokens", "lm_head", "model.layers.[0-9]", "model.layers.1[0-9]"),
    ),
    "Gemma 3 4B": Family("gemma3-4b", 34, 262208, GENERATION, Case(2, 8, 1200, 100, 0.8, 0.95)),
    "gpt-oss 20B, 4 layers": Family("gpt-oss-20b", 4, 201088, GENERATION),
    "Mistral 7B, 8 layers": Family("mistral-7b", 8, 32000, BUT_THE_UPDATE, Case(1, 8, 4400, 100, 0.8, 0.95)),
    "OLMo 2 1B": Family("olmo2-1b", 16, 100352),
    "OLMo 3 7B, 8 layers": Family("olmo3-7b", 8, 100278, BUT_THE_UPDATE, Case(1, 8, 4400, 100, 0.8, 0.95)),
    "GLM-4.5-Air, 2 layers": Family("glm4.5-air", 2, 151552, GENERATION),
}  # fmt: skip
TINY = {name: Family(name, 2, 512) for name in ARCHITECTURES if name.startswith("tiny-")}
TINY["tiny-qwen2"] = replace(TINY["tiny-qwen2"], freeze=("model.embed_tokens", "model.layers.0"))
CASE, TINY_CASE = Case(5, 8, 145, 100, 0.8, 0.95), Case(2, 4, 20, 12, 0.8, 0.95)


class Policy:
    """Trainer and engine on one model, in graphs of one runtime."""

    def __init__(self, family: Family, case: Case, device: str) -> None:
        self.case, config = case, family.config
        self.model = random_weights(config, device)
        embed = self.model.embed
        self.runtime = runtime = make_runtime("CUDA graph", embed.device)
        optimizer = OptimizerConfig(freeze=family.freeze)
        self.trainer = Trainer(self.model, optimizer, LossConfig(), runtime=runtime)
        options = GeneratorConfig(max_num_seqs=case.sequences)
        tokens = plan_cache_tokens(options, config, embed.dtype, embed.device, case.sequences, case.prompt + case.new)
        weights = SharedWeights(self.model, lambda: self.trainer.weights_version)
        self.engine = Engine(weights, options, tokens, runtime=runtime)
        length = case.prompt + case.new
        packed = case.prompts * case.prompt + case.sequences * (case.new - 1)
        self.shapes = [BatchShape(-(-packed // 16) * 16, case.sequences * case.new, case.sequences + 6, length)]

    def start(self, trusted: tuple[str, ...]) -> list[str]:
        """Make all graphs, kernels compiled side by side, and check them; what was checked."""
        if self.model.embed.is_cuda:
            with self.runtime.warm_up.rehearsal():
                self._warm_up()
        self._warm_up()
        sampling = self.case.sampling
        work = [*self.trainer.check_cases(self.shapes, sampling, check_parity=True), *self.engine.check_cases()]
        verdicts = check_against_eager(self.runtime, [w for w in work if w[0].name in trusted], "strict")
        self.runtime.end_warm_up()
        return [f"{v.function}: {v.cases} cases, {v.level}" for v in verdicts]

    def _warm_up(self) -> None:
        self.trainer.warm_up(self.shapes, self.case.sampling, check_parity=True, with_checks=False)
        self.engine.warm_up(self.case.sequences, self.case.prompt + self.case.new, self.case.sampling)

    def generate(self, step: int) -> list[RolloutGroup]:
        case = self.case
        prompts = random_prompts(case.prompts, lambda: case.prompt)
        identities = [SampleIdentity(0, 0, step, g) for g in range(case.prompts)]
        groups = self.engine.generate(prompts, [case.sampling] * case.prompts, identities)
        weight = 1 / (case.sequences * case.new)
        for samples in groups:
            for i, c in enumerate(samples):
                c.advantage, c.loss_weight = (-1.0) ** i, weight
        return [RolloutGroup(samples, case.sampling) for samples in groups]

    def train(self, groups: list[RolloutGroup]) -> StepResult:
        for batch in pack(groups, max_tokens=1 << 17, check_parity=True, shapes=self.shapes):
            self.trainer.forward_backward(batch.to(self.model.embed.device))
        return self.trainer.optim_step(LEARNING_RATE)


def trained(family: Family, case: Case, steps: int, device: str) -> dict[str, Any]:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    case = family.case if family.case and device == "cuda" else case
    policy = Policy(family, case, device)
    checked = policy.start(family.trusted)
    figures: dict[str, Any] = {
        "arch": family.arch, "layers": family.layers, "vocabulary": family.vocabulary, "case": vars(case),
        "parameters": num_parameters(family.config), "startup_s": time.perf_counter() - began,
        "graphs_checked": checked, "generate_s": [], "train_s": [], "tokens_checked": 0, "tokens_different": 0,
        "choices_checked": 0, "tokens_routed_differently": 0, "texts": 0,
    }  # fmt: skip
    seen = set()
    with freeze_gc():  # as a run's steps are
        for step in range(steps):
            found: list[Any] = []
            figures["generate_s"].append(seconds(lambda step=step, f=found: f.append(policy.generate(step)), device))
            seen.add(tuple(found[0][0].rollouts[0].token_ids))
            figures["train_s"].append(seconds(lambda f=found: f.append(policy.train(f[0])), device))
            result: StepResult = found[1]
            figures["tokens_checked"] += result.tokens_checked
            figures["tokens_different"] += result.tokens_different
            if result.routing:
                figures["choices_checked"] += result.routing.choices_checked
                figures["tokens_routed_differently"] += result.routing.tokens_different
            assert result.applied, f"step {step} was not applied: {result}"
    generated, rate = case.sequences * case.new, statistics.median(figures["generate_s"][1:] or figures["generate_s"])
    floor = decode_bytes(family.config, case, policy.model.embed.element_size()) / bandwidth(device)
    figures |= {"tokens_per_s": generated / rate, "tokens_per_s_floor": generated / floor}
    figures |= {"steps": steps, "texts": len(seen), "recompiles": policy.runtime.recompiles}
    figures["replays"] = dict(policy.runtime.replays)
    figures["peak_gib"] = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None
    policy.runtime.close()
    return figures


def decode_bytes(c: ModelConfig, case: Case, size: int) -> float:
    """Weights once a step, and of the keys and values that a layer sees a group's prompt once and each sequence's own;
    elements of `size` bytes."""
    weights = num_parameters(c) - (0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size)
    heads, key, value = c.kv_cache_sizes
    rows = 0
    for window in c.windows:
        for new in range(case.new):
            own = min(new, window) if window else new
            prompt = case.prompt if not window else max(0, min(case.prompt, window - own))
            rows += case.prompts * prompt + case.sequences * own
    return float(size * (case.new * weights + rows * heads * (key + value)))


def row(name: str, f: dict[str, Any]) -> list[str]:
    if "failed" in f:
        return [name, "FAILED", f["failed"][:80], *[""] * 7]
    times = [f"{1e3 * statistics.median(f[key][1:] or f[key]):.0f}" for key in ("generate_s", "train_s")]
    peak = "-" if f["peak_gib"] is None else f"{f['peak_gib']:.0f}"
    different = f"{f['tokens_different']} of {f['tokens_checked']:,}"
    experts = f"{f['tokens_routed_differently']} of {f['choices_checked']:,}" if f["choices_checked"] else "-"
    billions = f"{f['parameters'] / 1e9:.2f}"
    rate = f"{f['tokens_per_s']:,.0f} of {f['tokens_per_s_floor']:,.0f}"
    return [name, billions, f"{f['startup_s']:.1f}", *times, rate, different, experts, str(f["recompiles"]), peak]


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", help="families, by name; default: all")
    parser.add_argument("--steps", type=int, default=10)


def measure(args: argparse.Namespace, report: Report) -> bool:
    families, case = (TINY, TINY_CASE) if args.device == "cpu" else (FAMILIES, CASE)
    figures = report.figures["families"] = {}
    rows = [["model", "1e9 parameters", "start-up s", "generate ms", "train ms", "tokens/s of floor",
             "tokens different", "choices of experts different", "recompiles", "peak GiB"]]  # fmt: skip
    for name, family in families.items():
        if args.only and name not in args.only:
            continue
        print(name, file=sys.stderr, flush=True)
        try:
            figures[name] = trained(family, case, args.steps, args.device)
        except Exception as error:
            figures[name] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        rows.append(row(name, figures[name]))
        report.save()
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    report.tables.append(rows)
    return any("failed" in f or f["tokens_different"] or f["recompiles"] for f in figures.values())
