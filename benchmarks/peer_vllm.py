"""Seconds that vLLM's offline engine takes for the cases of `generate.py`, which starts it in a process of its own.

Prompts are new at every call, log-probs are on, and kernels and CUDA graphs are made before the first case."""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from typing import Any

SETTINGS = {  # nothing is fetched or reported; no kernels of packages that compile them at first use
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # multicast, which a host may not offer; its own all-reduce stays
}  # fmt: skip
MEMORY = 0.6  # of the GPU, which another process may use as well
SEED = 3


def timed(engine: Any, case: dict[str, Any], repeats: int) -> list[float]:
    """Seconds of each call after a first one."""
    from vllm import SamplingParams

    draw = random.Random(SEED)
    params = SamplingParams(
        n=case["samples"], temperature=case["temperature"], top_p=case["top_p"], max_tokens=case["new"],
        min_tokens=case["new"], ignore_eos=True, logprobs=0, detokenize=False,
    )  # fmt: skip
    times = []
    for _ in range(repeats + 1):
        prompts = [
            {"prompt_token_ids": [draw.randrange(1000, 50000) for _ in range(case["prompt"])]}
            for _ in range(case["prompts"])
        ]
        began = time.perf_counter()
        found = engine.generate(prompts, params, use_tqdm=False)
        times.append(time.perf_counter() - began)
        made = sum(len(completion.token_ids) for request in found for completion in request.outputs)
        assert made == case["prompts"] * case["samples"] * case["new"], made
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split()))
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--cases", required=True, help="fields of each case by name, as JSON")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--dummy", action="store_true", help="weights of its own, as the folder has none")
    parser.add_argument("--json", required=True, metavar="PATH", help="the times by case, written after each")
    args = parser.parse_args()
    os.environ.update(SETTINGS)
    began = time.perf_counter()
    import vllm

    engine = vllm.LLM(
        args.model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096, gpu_memory_utilization=MEMORY,
        max_num_seqs=512, enable_prefix_caching=True, max_logprobs=1, tensor_parallel_size=args.tensor_parallel,
        load_format="dummy" if args.dummy else "auto",
    )  # fmt: skip
    found: dict[str, Any] = {"version": vllm.__version__, "start_s": time.perf_counter() - began, "cases": {}}
    for name, case in json.loads(args.cases).items():
        found["cases"][name] = timed(engine, case, args.repeats)
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
