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

FOLDER = Path(__file__).parents[2] / "benchmarks"
COMMANDS = {
    "train": "--arch qwen3-0.6b --role train",
    "generate": "--arch qwen3-0.6b --role generate",
    "latent": "--arch deepseek-v3-3-layers-32-experts --role generate",
    "limit": "--arch qwen3-0.6b --role train --limit 159",
}
ALL = """
import compile_check, gc, json, sys
gc.disable()  # each compiler's pass would look through all of torch
print(json.dumps([compile_check.main(line.split()) for line in sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, dict]]:
    """The exit code and the figures of each command, in a process of their own: it stands in for a GPU's driver."""
    folder = tmp_path_factory.mktemp("checks")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join((str(FOLDER), *sys.path))}
    lines = [f"{line} --json {folder / name}" for name, line in COMMANDS.items()]
    done = finished([sys.executable, "-c", ALL, *lines], env=environment)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    return {name: (code, json.loads((folder / name).read_text())) for name, code in zip(COMMANDS, codes, strict=True)}


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (
            "train",
            {"_attention_kernel", "_query_kernel", "_adamw_kernel", "_key_kernel", "_sequence_sum_kernel"}
            | {"_exact_sum_kernel", "_root_of_sum_kernel", "_fold_rows_kernel", "_hash_kernel"},
        ),
        (
            "generate",
            {"_linear_kernel", "_decode_kernel", "_decode_async_kernel", "_group_kernel", "_draw_kernel"}
            | {"_push_kernel", "_take_norm_kernel"},
        ),
        ("latent", {"_attention_kernel", "_persistent_kernel"}),
    ],
)
def test_kernels_compile_and_fit(found: dict[str, tuple[int, dict]], command: str, names: set[str]) -> None:
    code, said = found[command]
    assert code == 0 and said["refused"] == []
    assert names <= {kernel["kernel"] for kernel in said["kernels"]}
    largest = max(kernel["shared"] for kernel in said["kernels"])
    assert 64 * 1024 < largest <= 227 * 1024 and all(0 < kernel["registers"] <= 255 for kernel in said["kernels"])


def test_ranks_have_the_same_kernels(found: dict[str, tuple[int, dict]]) -> None:
    """Of words that go to all, or to the rows' owners, or that products have stored, also those of a norm: the first
    rank of a host compiles for the others."""
    names = [kernel["kernel"] for kernel in found["generate"][1]["kernels"]]
    assert (names.count("_push_kernel"), names.count("_take_norm_kernel")) == (3, 1)


def test_a_kernel_too_large_is_named(found: dict[str, tuple[int, dict]]) -> None:
    code, said = found["limit"]
    assert code == 1 and {kernel["kernel"] for kernel in said["refused"]} == {"_query_kernel"}
