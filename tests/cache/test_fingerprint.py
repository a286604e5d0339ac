"""What is kept between processes is found only where what computes is told the same."""

from __future__ import annotations

import pytest

from lockstep.cache.fingerprint import key

TOLD = (  # of cuBLAS and its Lt, and of Triton and what it compiles with
    *("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TRITON_DEFAULT_FP_FUSION"),
    *("TRITON_FORCE_DISABLE_FP_FUSION", "TRITON_LIBDEVICE_PATH", "TRITON_OVERRIDE_ARCH", "TRITON_KERNEL_OVERRIDE"),
    *("DISABLE_PTXAS_OPT", "DISABLE_LLVM_OPT", "DISABLE_MMA_V3", "PTXAS_OPTIONS"),
)


@pytest.mark.parametrize("name", TOLD)
def test_a_setting_of_what_compiles_or_adds_is_part_of_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    without = key("x")
    monkeypatch.setenv(name, "1")
    assert key("x") != without
    monkeypatch.delenv(name)
    assert key("x") == without
