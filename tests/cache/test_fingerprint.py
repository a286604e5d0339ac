"""What is kept between processes is found only where what computes is told the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cache import loaded_code
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


def test_source_files_are_those_that_are_imported_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, elsewhere = tmp_path / "package", tmp_path / "elsewhere"
    monkeypatch.setattr(loaded_code, "PACKAGE", package)
    for folder in (elsewhere, package / "below" / "__pycache__"):
        folder.mkdir(parents=True)
    for path in ("b.py", "a.c", ".a.py", "a.txt", "below/t.json", "below/__pycache__/a.py", "../elsewhere/c.h"):
        (package / path).touch()
    (package / "linked").symlink_to(elsewhere)
    (package / "round.py").symlink_to("round.py")
    found = [path.relative_to(package).as_posix() for path in loaded_code.files()]
    assert found == ["a.c", "b.py", "below/t.json", "linked/c.h"]
