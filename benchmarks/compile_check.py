"""Every Triton kernel of both roles compiled for an H200, which this machine need not have: shared memory, registers.

The model's own code runs on tensors without memory, so tiles, types and strides are those of a real run; what would
launch a kernel compiles it. Products that the library does are left out. The exit code is 1 when a kernel does not
compile or needs more shared memory than a block can have.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from common import finish
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lockstep.config import LossConfig, OptimizerConfig
from lockstep.distributed.push.memory import SharedMemory
from lockstep.distributed.push.triton import launch_push
from lockstep.distributed.push.triton_norm import take_norm
from lockstep.generator.forward import Paging, decode_step, mixed_step
from lockstep.generator.kv_cache import KVCache
from lockstep.generator.prefill_batch import MixedBatch, MixedSizes
from lockstep.generator.running_batch import RunningBatch
from lockstep.graph import Inputs
from lockstep.graph.check.fingerprints import GOLDEN
from lockstep.graph.check.triton_hash import add_hash
from lockstep.graph.torch_private.trace import NO_STAND_IN
from lockstep.models import Decoder, ModelConfig
from lockstep.models.init import architecture
from lockstep.ops import fold_rows, pdl, sequence_sum
from lockstep.ops.attention import triton_decode
from lockstep.ops.fused.backward import add_gradient, rms_norm_add, rotated_attention_packed
from lockstep.ops.linear import cublas, hopper_async
from lockstep.ops.linear import triton as linear_triton
from lockstep.ops.linear.choice import Choice
from lockstep.ops.linear.kernels import KERNELS
from lockstep.ops.moe import triton_grouped as grouped_kernels
from lockstep.ops.records import AttentionGradient, Contexts, Epilogue, KVPages, Norm, Packed, Peers, Rotation
from lockstep.trainer import BatchShape, Trainer
from lockstep.trainer.packing import blank_batch
from lockstep.trainer.step import score
from lockstep.types import SamplingParams

ARCHITECTURES = (
    *("qwen3-0.6b", "qwen3-100m", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-32b", "llama3.2-1b"),
    *("qwen3-30b-a3b", "deepseek-v3-3-layers-32-experts", "qwen2.5-7b", "gemma3-4b", "mistral-7b", "gpt-oss-20b"),
    *("olmo2-1b", "olmo3-7b", "glm4.5-air", "phi3-mini", "mixtral-8x7b"),
)
TARGET = GPUTarget("cuda", 90, 32)
SHARED_KIB = 227  # that a block can have
MULTIPROCESSORS = 132
PAGE_SIZE, PAGES, RESULTS = 16, 1024, 16
ROWS = (1, 16, 32, 40, 128, 256)  # decoded at once: one for each bound of `linear_choice`
LENGTHS = (256, 8192)  # of the longest sequence: one split of its keys, and several
STORED = (  # products that store their words for other ranks
    Choice("async", 64, 16, 64, 4, 4, 4), Choice("tma", 64, 16, 64, 4, 2), Choice("pipelined", 16, 32, 64, 4, 2),
)  # fmt: skip
TOP_P = SamplingParams(temperature=0.8, top_p=0.95)


class Hopper:
    """All that compiling asks of a driver."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


class Implementations(TorchDispatchMode):
    """Operators of ours run their implementation for a GPU."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace != "lockstep":
            return kwargs["out"] if op in NO_STAND_IN else op(*args, **(kwargs or {}))
        with self:
            return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **(kwargs or {}))


class Kernels:
    """What was compiled, in the order in which it was first needed: the kernel's name and figures, or its failure."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self.arch = ""

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Within, tensors have no memory, and a launch only compiles."""
        run = JITFunction.run

        def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            try:
                self._add(run(kernel, *args, grid=grid, warmup=True, **options))
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                self.found.setdefault(cause, {"kernel": kernel.__name__, "arch": self.arch, "failed": cause[:200]})

        def product(
            x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype = torch.bfloat16, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)

        driver.set_active(Hopper())
        with (
            warnings.catch_warnings(action="ignore"),
            mock.patch.object(JITFunction, "run", compile_only),
            mock.patch.object(FakeTensor, "is_cuda", True),
            mock.patch.object(FakeTensor, "data_ptr", lambda x: int(x.storage_offset()) * x.element_size()),
            mock.patch.object(pdl, "_capability", lambda _: pdl.HOPPER if pdl.gdc_wait else (0, 0)),
            mock.patch.object(grouped_kernels, "_multiprocessors", lambda _: MULTIPROCESSORS),
            mock.patch.object(cublas, "cublaslt_linear", product),
            FakeTensorMode(allow_non_fake_inputs=True),
            Implementations(),
        ):
            yield

    def _add(self, kernel: Any) -> None:
        if kernel.hash not in self.found:
            figures = {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps}
            name = {"kernel": kernel.name, "arch": self.arch}
            self.found[kernel.hash] = {**name, **figures, **usage(kernel.asm["cubin"])}


def usage(binary: bytes) -> dict[str, int]:
    """Registers, and bytes of stack (spilled registers, mostly), of a thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {key: max(map(int, re.findall(rf"{name}:(\d+)", text))) for key, name in _USAGE.items()}


_USAGE = {"registers": "REG", "stack": "STACK"}


def shortened(config: ModelConfig) -> ModelConfig:
    """The first layers, with one of each kind that the model has."""
    kinds = [(window, config.is_moe(layer)) for layer, window in enumerate(config.windows)]
    return config.first_layers(1 + max(kinds.index(kind) for kind in kinds))


def train(model: Decoder) -> None:
    """Forward, backward, checks and the update, with and without filters, of short and of long sequences."""
    trainer = Trainer(model, OptimizerConfig(), LossConfig())
    routed = bool(model.config.moe_layers)
    for length in LENGTHS:
        for sampling in (TOP_P, SamplingParams()):
            batch = blank_batch(BatchShape(4736, 4096, 48, length), sampling, True, routed)
            trainer.forward_backward(batch, keep_support=sampling.truncated)
            if sampling.truncated:
                batch.check_parity = False
                trainer.forward_backward(batch)
            with torch.no_grad():
                score(model, batch)
    sequence_sum(batch.old_logprob_C, batch.cu_seqlens)  # of losses with terms of whole sequences
    trainer.programs.by_name["optim_step"]()
    add_hash(torch.empty((), dtype=torch.int64), torch.empty(9, dtype=torch.int64), 1, GOLDEN)
    for rows, cell in ((torch.empty(8, 4096, dtype=torch.bfloat16), 0), (torch.empty(16, 4096), 8)):
        fold_rows(torch.empty(4096), rows, cell)  # of several ranks
    if model.config.mla is None:
        joined(model)


def joined(model: Decoder, tokens: int = 4736) -> None:
    """Of the backward what captured graphs join: the rest of it is the same kernels."""
    c, norm = model.config, model.norm.detach()
    qkv, x = (norm.new_empty(tokens, width) for width in (model.layers[0].qkv.shape[0], c.hidden_size))
    add_gradient(torch.empty(x.shape), x)
    rms_norm_add(x, x, norm, c.rms_norm_eps, x)
    q, k, v = qkv.unflatten(1, (-1, c.head_dim)).split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
    head = norm.new_empty(c.head_dim) if model.layers[0].qk_norm else None
    lse, table = torch.empty(c.num_kv_heads, tokens, c.num_heads // c.num_kv_heads), torch.empty(tokens, c.head_dim)
    layout = [torch.empty(48 + extra, dtype=torch.int32) for extra in (1, 0, 0)]
    rotation = Rotation(head, head, table, c.num_heads, c.num_kv_heads, c.rms_norm_eps)
    gradient = AttentionGradient(torch.empty_like(q), q, k, v, torch.empty_like(q), lse)
    rotated_attention_packed(gradient, Packed(*layout, LENGTHS[0]), qkv, rotation)


@torch.no_grad()
def generate(model: Decoder) -> None:
    """Decode and mixed steps of every kind."""
    config = model.config
    cache = KVCache(config, PAGES, PAGE_SIZE, model.embed)
    for count in ROWS:
        for length in LENGTHS:
            pages = length // PAGE_SIZE
            rows = RunningBatch(count, pages, RESULTS, cache.null_page, model.embed.device, bool(config.moe_layers))
            inputs = Inputs(buffer=rows.tensors(count), kv=cache.tensors())
            paging = Paging(PAGE_SIZE, cache.null_page, length)
            for truncated, greedy, grouped in ((False, False, False), (True, False, count > 1), (False, True, False)):
                decode_step(model, inputs, paging, truncated, greedy, grouped and not config.mla)
        sizes = MixedSizes.for_tokens(count, 1024)
        prompt = MixedBatch.view(torch.zeros(sum(sizes.fields), dtype=torch.int64), sizes)._asdict()
        prompt = {f"prompt.{name}": tensor for name, tensor in prompt.items()}
        buffer = {**inputs.buffer, **prompt, "tables": rows.table}
        mixed_step(model, replace(inputs, buffer=buffer), paging, True, True, True)
    chain = torch.empty(128, config.hidden_size, dtype=model.embed.dtype)
    linear_triton.chain(chain, chain)
    linear_triton.chain(chain, chain, "linear_fp32")
    table, state = torch.empty(9, dtype=torch.int64), torch.empty(2, dtype=torch.int64)
    one_step = torch.empty(128, 128, dtype=model.embed.dtype)
    for rank in (0, 1, 7):  # of eight that generate together
        memory = SharedMemory(rank, 8, 10**9, table, state, torch.empty(1, dtype=torch.int64))
        for to_owners in (False, True):
            launch_push(chain, to_owners, memory)
        launch_push(chain, False, memory, store=False, out=chain.new_empty(128, 8 * config.hidden_size))
        take_norm(torch.empty_like(chain), Norm(model.norm, config.rms_norm_eps, model.norm_offset), memory)
        stored(memory.peers, one_step)
        if config.mla is None:
            stored_attention(memory.peers, cache)
    hopper_async.run("linear", Choice("async", 64, 64, 128, 4, 3, 3), one_step, one_step)


def stored(peers: Peers, x: torch.Tensor) -> None:
    """Products that store their result for other ranks."""
    for tile in STORED:
        run = KERNELS[tile.kernel].run
        run("linear_add", tile, x, x, x, Epilogue(peers=peers))
        run("norm_gate_up", tile, x, x, None, Epilogue(peers=peers))


def stored_attention(peers: Peers, cache: KVCache, rows: int = 8) -> None:
    """Attention of a decode step that does, of one split and of several."""
    pages = KVPages(cache.k[0], cache.v[0])
    kv_heads, head_dim = pages.k_cache.shape[2:]
    qkv, slots = pages.k_cache.new_empty(rows, 3 * kv_heads * head_dim), torch.empty(rows, dtype=torch.int64)
    rotation = Rotation(None, None, torch.empty(rows, head_dim), kv_heads, kv_heads, 1e-6)
    for length in LENGTHS:
        block_table, context = (torch.empty(*shape, dtype=torch.int32) for shape in ((rows, PAGES), (rows,)))
        triton_decode.attention_decode(qkv, rotation, pages, slots, Contexts(block_table, context, length), peers=peers)


def table(found: list[dict[str, Any]]) -> list[list[str]]:
    rows = [["kernel", "first in", "shared KiB", "warps", "registers", "stack"]]
    for f in sorted(found, key=lambda f: (-f.get("shared", 1 << 30), -f.get("stack", 0))):
        if "failed" in f:
            rows.append([f["kernel"], f["arch"], "FAILED", f["failed"], "", ""])
        else:
            numbers = (f"{f['shared'] / 1024:.1f}", f["warps"], f["registers"], f["stack"])
            rows.append([f["kernel"], f["arch"], *map(str, numbers)])
    return rows


def main(line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="*", default=list(ARCHITECTURES), help=f"default: {' '.join(ARCHITECTURES)}")
    parser.add_argument("--role", choices=["generate", "train"], help="default: both")
    parser.add_argument("--limit", type=float, default=SHARED_KIB, metavar="KIB", help=f"default: {SHARED_KIB}")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    args = parser.parse_args(line)
    kernels = Kernels()
    with kernels.collected():
        for kernels.arch in args.arch:
            model = Decoder(shortened(architecture(kernels.arch)), torch.bfloat16, torch.device("cpu"))
            for role in (generate, train):
                if args.role in (None, role.__name__):
                    role(model)
            print(f"{kernels.arch}: {len(kernels.found)} kernels so far", file=sys.stderr, flush=True)
    found = list(kernels.found.values())
    too_large = [f for f in found if "failed" in f or f["shared"] > 1024 * args.limit]
    figures = {"triton": triton.__version__, "target": str(TARGET), "kernels": found, "refused": too_large}
    finish("compile_check", figures, table(found), args.json)
    print(f"{len(found)} kernels, {len(too_large)} refused, Triton {triton.__version__}")
    return int(bool(too_large))


if __name__ == "__main__":
    sys.exit(main())
