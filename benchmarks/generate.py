"""Tokens a second of generation, beside `transformers.generate` on the same weights in the same run.

The floor is the time that the matrix products of the new tokens alone take, measured on the same machine.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from common import alternate, arguments, finish, summary

from lockstep.config import GeneratorConfig
from lockstep.generator import Engine, SharedWeights, plan_cache_tokens
from lockstep.models import Decoder, save_model
from lockstep.models.init import architecture, initialize
from lockstep.types import SampleIdentity, SamplingParams


@dataclass(frozen=True)
class Case:
    """`prompts` prompts of `prompt` tokens, `samples` completions each of exactly `new` tokens, temperature 1."""

    prompts: int
    samples: int
    prompt: int
    new: int

    @property
    def sequences(self) -> int:
        """Completions in all."""
        return self.prompts * self.samples


CASES = {
    "cpu": Case(4, 8, 64, 64),
    "cpu, no shared prompt": Case(32, 1, 64, 64),
    "seed": Case(5, 8, 145, 100),
    "mid": Case(32, 8, 256, 512),
    "big": Case(64, 8, 256, 1024),
    "one": Case(1, 1, 64, 256),
}


class Ours:
    """One engine; every call has an identity of its own, and no prefix is left over from the call before."""

    def __init__(self, model: Decoder, case: Case, prompts: list[list[int]]) -> None:
        config = GeneratorConfig(prefix_caching=False, max_num_seqs=max(256, case.sequences))
        tokens = plan_cache_tokens(
            config, model.config, model.embed.dtype, model.embed.device, case.sequences, case.prompt + case.new
        )
        self.engine = Engine(SharedWeights(model), config, tokens)
        self.params = SamplingParams(n=case.samples, max_completion_length=case.new, ignore_eos=True)
        self.prompts = prompts
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        identities = [SampleIdentity(0, 0, self.calls, g) for g in range(len(self.prompts))]
        self.engine.generate(self.prompts, [self.params] * len(self.prompts), identities)


class Transformers:
    """`generate` on the same weights; every sample carries its own copy of the prompt, as its users call it."""

    def __init__(self, model: Decoder, case: Case, prompts: list[list[int]]) -> None:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        with tempfile.TemporaryDirectory() as folder:
            save_model(model, Path(folder))
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.embed.dtype)
        self.model = loaded.to(model.embed.device).eval()
        self.ids = torch.tensor(prompts, device=model.embed.device).repeat_interleave(case.samples, dim=0)
        self.new = case.new

    def __call__(self) -> None:
        self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            max_new_tokens=self.new,
            min_new_tokens=self.new,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
        )


def floor(model: Decoder, case: Case):
    """The matrix products of every decode step and nothing else."""
    layers = [w for layer in model.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    weights = [w.detach() for w in (*layers, model.lm_head)]
    inputs = {w.shape[1]: torch.randn(case.sequences, w.shape[1]).to(w) for w in weights}

    @torch.inference_mode()
    def run() -> None:
        for _ in range(case.new):
            for weight in weights:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    return run


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: the device's")
    parser.add_argument("--arch", help="default: tiny on a CPU, qwen3-0.6b on a GPU")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32 on a CPU")
    parser.add_argument("--peer", choices=["transformers", "none"], default="transformers")
    args = parser.parse_args()
    on_cpu = args.device == "cpu"
    dtype = getattr(torch, args.dtype or ("float32" if on_cpu else "bfloat16"))
    config = replace(architecture(args.arch or ("tiny" if on_cpu else "qwen3-0.6b")), eos_token_ids=())
    model = initialize(Decoder(config, dtype, args.device), seed=0)
    figures: dict = {"arch": args.arch or "default", "dtype": str(dtype), "cases": {}}
    rows = [["case", "system", "tok/s", "median s", "min", "max", "ms a token step"]]
    for name in args.case or (["cpu", "cpu, no shared prompt"] if on_cpu else ["seed", "one"]):
        case = CASES[name]
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(0, 256, (case.prompts, case.prompt), generator=generator).tolist()
        runs = {"lockstep": Ours(model, case, prompts), "floor (matrix products)": floor(model, case)}
        if args.peer == "transformers":
            runs["transformers"] = Transformers(model, case, prompts)
        times = alternate(runs, args.repeats, args.device)
        figures["cases"][name] = {**vars(case), "systems": {}}
        for system, measured in times.items():
            s = summary(measured)
            rate = case.sequences * case.new / s["median_s"]
            figures["cases"][name]["systems"][system] = {**s, "tokens_per_s": rate}
            shown = [f"{s[k]:.4f}" for k in ("median_s", "min_s", "max_s")]
            rows.append([name, system, f"{rate:,.0f}", *shown, f"{s['median_s'] / case.new * 1e3:.3f}"])
    finish("generate", figures, rows, args.json)


if __name__ == "__main__":
    main()
