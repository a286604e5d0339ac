"""Every kernel of a dense model and of one with latent attention compiles for an H200 and fits one of its blocks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from processes import finished

triton = pytest.importorskip("triton")
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
pytestmark = pytest.mark.skipif(not (TOOLS / "ptxas").exists(), reason="this Triton cannot compile for NVIDIA GPUs")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compile_check.py"
LOSSES = {"_sequence_sum_kernel"}  # of terms of whole sequences


def check(tmp_path: Path, *flags: str) -> tuple[int, dict]:
    """In a process of its own: it stands in for a GPU's driver."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(SCRIPT), "--json", str(tmp_path / "check.json"), *flags]
    done = finished(command, env=environment)
    assert (tmp_path / "check.json").exists(), done.stderr
    return done.returncode, json.loads((tmp_path / "check.json").read_text())


@pytest.mark.parametrize(
    ("arch", "role", "names"),
    [
        (
            "qwen3-0.6b",
            "train",
            {"_attention_kernel", "_query_kernel", "_adamw_kernel", "_key_kernel", "_sequence_sum_kernel"}
            | {"_exact_sum_kernel", "_root_of_sum_kernel", "_fold_rows_kernel"},
        ),
        (
            "qwen3-0.6b",
            "generate",
            {"_linear_kernel", "_decode_kernel", "_group_kernel", "_draw_kernel", "_push_kernel"},
        ),
        ("deepseek-v3-3-layers-32-experts", "generate", {"_attention_kernel", "_walking_kernel"}),
    ],
)
def test_kernels_compile_and_fit(tmp_path: Path, arch: str, role: str, names: set[str]) -> None:
    code, found = check(tmp_path, "--arch", arch, "--role", role)
    assert code == 0 and found["refused"] == []
    assert names <= {kernel["kernel"] for kernel in found["kernels"]}
    largest = max(kernel["shared"] for kernel in found["kernels"])
    assert 64 * 1024 < largest <= 227 * 1024 and all(0 < kernel["registers"] <= 255 for kernel in found["kernels"])


def test_a_kernel_too_large_is_named(tmp_path: Path) -> None:
    code, found = check(tmp_path, "--arch", "qwen3-0.6b", "--role", "train", "--limit", "159")
    assert code == 1 and {kernel["kernel"] for kernel in found["refused"]} == {"_query_kernel"}
