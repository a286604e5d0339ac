"""Compiling ahead of launches: real compilations for a GPU that this machine need not have."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from processes import finished

pytest.importorskip("triton")

SCRIPT = """
import threading
from types import SimpleNamespace
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from lockstep.ops.kernels.precompile import compiling_only

class Hopper:  # all that compiling and loading ask of a driver
    get_current_device = get_current_stream = lambda self, *_: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    launcher_cls = lambda self, source, metadata: threads.append(threading.get_ident()) or str
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda name, *_: (1, name, 32, 0, 1024) if loads else 1 / 0,
    )

loads, threads = True, []

driver.set_active(Hopper())

@triton.jit
def fill(out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 1.0, mask=i < n)

@triton.jit
def broken(out):
    tl.store(out, undefined_name)

run, out = JITFunction.run, torch.zeros(256)
with compiling_only():
    for block in (64, 128):
        for n in (256, 256, 7):  # a multiple of 16, again, and none
            fill[(4,)](out, n, BLOCK=block)
    broken[(1,)](out)
assert len(threads) == 4 and threading.get_ident() not in threads
loads = False
with compiling_only():
    fill[(4,)](out, 256, BLOCK=256)
assert JITFunction.run is run and not out.any()

missed = []
triton.knobs.runtime.jit_cache_hook = lambda *, compile, **_: missed.append(compile["constants"]) or True
for block in (64, 128, 32, 256):
    fill.warmup(out, 256, BLOCK=block, grid=(4,))
    fill.warmup(out, 7, BLOCK=block, grid=(4,))
broken.warmup(out, grid=(1,))
print([list(constants.values()) for constants in missed])
"""


def test_kernels_are_compiled_and_not_launched(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)  # Triton reads a kernel's source from its file
    paths = os.pathsep.join(map(str, (Path(__file__).parents[2], *sys.path)))
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": paths,
        "TRITON_INTERPRET": "0",
    }
    command = [sys.executable, str(tmp_path / "script.py")]
    done = finished(command, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "[[32], [32], [256], [256], []]"  # all others are there, and loaded
    assert len(list((tmp_path / "cache").rglob("fill.cubin"))) == 5
