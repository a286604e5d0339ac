"""The kernels of decode attention with a tile of keys a warp: what they refuse, and their machine code for an H200."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from processes import finished
from torch import Tensor

pytest.importorskip("triton")

import triton

from lockstep.ops import pdl
from lockstep.ops.attention import triton_decode
from lockstep.ops.records import PLAIN, AttentionScores

kernels = triton_decode.hopper_decode
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

MMAS, EXPLICIT = 32 + 32 + 4 * 16, 32 + 4 * 2  # in the loop's body, a thread's: products of matrices, and `fma`
COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Hopper:
    def get_current_device(self): return 0
    def get_current_stream(self, _): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(Hopper())
from lockstep.ops.attention.hopper_decode import WARPS, _decode_async_kernel, _group_async_kernel

def tensor(dtype): return torch.empty(64, dtype=dtype)

bf16, f32, i32, i64 = map(tensor, (torch.bfloat16, torch.float32, torch.int32, torch.int64))
rotation = i64, bf16, bf16, f32, 128, 1e-6
sizes = 256, 100_000, 256, 6144, 128, 1024, 128, 1024, 128
options = dict(PDL=True, launch_pdl=True, enable_fp_fusion=False, num_warps=WARPS, PAGE_SIZE=16, grid=(8, 1, 1))
options |= dict(SPLIT=4096, GROUP=4, HEAD_DIM=128, BLOCK_H=128, warmup=True)
operands = bf16, bf16, bf16, bf16, f32, f32, i32, i32, *rotation, *sizes, 0.1275
print(_decode_async_kernel.run(*operands, **options, AHEAD=256, SPLITS=False).asm["ptx"])
operands = bf16, bf16, bf16, f32, f32, i32, i32, i32, 64, *sizes[2:], 0.1275, 256
print(_group_async_kernel.run(*operands, **options, WIDTH=8).asm["ptx"])
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The code of each, compiled in a process of its own: it stands in for a GPU's driver."""
    if not (TOOLS / "ptxas").exists():
        pytest.skip("this Triton cannot compile for NVIDIA GPUs")
    script = tmp_path_factory.mktemp("compile") / "kernel.py"
    script.write_text(COMPILE)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = finished([sys.executable, str(script)], env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(".version")[1:]


@pytest.fixture(params=[0, 1], ids=["rows", "groups"])
def ptx(compiled: list[str], request: pytest.FixtureRequest) -> str:
    assert len(compiled) == 2
    return compiled[request.param]


def test_warps_meet_before_they_read_what_others_wrote(ptx: str) -> None:
    """The compiler adds the barriers for shared memory; a copy's end is known only to the thread that started it. The
    new token's key and value are stored in global memory, between copies of older keys and those that may read it."""
    waits, unseen = 0, False
    for line in ptx.splitlines():
        if "bar.sync" in line:
            unseen = False
        elif re.search(r"cp\.async\.wait_group|st\.shared|stmatrix|st\.global", line):
            waits, unseen = waits + ("wait_group" in line), True
        elif re.search(r"ld\.shared|ldmatrix|\bcp\.async\.c[ag]\b|bra\b", line):
            assert not unseen, line
    assert waits == 9, "four in each of two loops, and the last"


def test_only_explicit_additions_are_fused(ptx: str) -> None:
    mmas, fused = (len(re.findall(what, ptx)) for what in (r"mma\.sync", r"\bfma\.rn\.f32"))
    assert (mmas, fused) == (2 * MMAS, 2 * EXPLICIT)
    assert not re.search(r"\b(mul|add|sub)(\.ftz)?\.f32", ptx), "which may be fused later"


def _caches(dtype: torch.dtype = torch.bfloat16, head_dim: int = 128, row: int = 256) -> tuple[Tensor, Tensor]:
    return tuple(torch.empty(64, row, dtype=dtype)[:, : 2 * head_dim].view(64, 2, head_dim) for _ in range(2))


def test_what_it_lacks_is_left_to_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    q, caches = torch.empty(1, 8, 128, dtype=torch.bfloat16), _caches()
    assert not kernels.supports(q, caches, 5, 16, PLAIN), "not on a CPU"
    monkeypatch.setattr(pdl, "_capability", lambda _: (10, 0))
    assert not kernels.supports(q, caches, 5, 16, PLAIN), "not on Hopper's successors"
    monkeypatch.setattr(pdl, "_capability", lambda _: (9, 0))
    assert kernels.supports(q, caches, 16, 48, AttentionScores(scale=0.1))
    assert not kernels.supports(q, caches, 17, 16, PLAIN)
    assert not kernels.supports(q, caches, 5, 8, PLAIN)
    for lacking in ({"sinks_N": torch.zeros(8)}, {"window": 64}, {"softcap": 30.0}, {"scale": -0.1}):
        assert not kernels.supports(q, caches, 5, 16, AttentionScores(**lacking)), lacking
    assert not kernels.supports(q.half(), caches, 5, 16, PLAIN)
    assert not kernels.supports(q, (caches[0], caches[1].float()), 5, 16, PLAIN)
    assert not kernels.supports(q[..., :96], _caches(head_dim=96), 5, 16, PLAIN)
    assert not kernels.supports(q, _caches(row=264), 5, 16, PLAIN), "rows begin between 32 bytes"
    moved = torch.empty(64 * 256 + 1, dtype=torch.bfloat16)[1:].view(64, 2, 128)
    assert not kernels.supports(q, (caches[0], moved), 5, 16, PLAIN)
