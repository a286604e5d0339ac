"""GPU tests skip without a CUDA device, and end with a table of the words they compared."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROWS = pytest.StashKey[list[tuple[str, int, int]]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def census(request: pytest.FixtureRequest) -> Callable[[str, Tensor, Tensor], int]:
    """`census(what, a, b)`: how many words of two equally shaped tensors differ; remembered for the table."""
    rows = request.config.stash.setdefault(ROWS, [])

    def count(what: str, a: Tensor, b: Tensor) -> int:
        assert a.shape == b.shape and a.dtype == b.dtype
        words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        different = int((a.contiguous().view(words) != b.contiguous().view(words)).sum())
        rows.append((what, a.numel(), different))
        request.node.user_properties.append((what, (a.numel(), different)))
        return different

    return count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    totals: dict[str, tuple[int, int, int]] = {}
    for what, words, different in config.stash.get(ROWS, []):
        n, w, d = totals.get(what, (0, 0, 0))
        totals[what] = (n + 1, w + words, d + different)
    if totals:
        terminalreporter.write_line(f"\n{'compared':58s} {'times':>5s} {'words':>12s} {'different':>10s}")
    for what, (n, words, different) in totals.items():
        terminalreporter.write_line(f"{what:58s} {n:5d} {words:12,d} {different:10,d}")
