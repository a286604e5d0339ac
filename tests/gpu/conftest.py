"""GPU tests skip without a CUDA device, or as many as they need, and end with a table of the words they compared."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launch import Launch
from sharing import WHERE
from torch import Tensor

ROWS = pytest.StashKey[list[tuple[str, int, int]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ranks-share-gpu", action="store_true", help="ranks of tests of several GPUs share those that there are"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpus(count): needs so many GPUs, or some that its ranks share")
    config.addinivalue_line("markers", "timed: measures what a GPU takes, which nothing else may use meanwhile")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    there = torch.cuda.device_count()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            several = item.get_closest_marker("gpus")
            needed = several.args[0] if several and not ranks_share_gpu(config) else 1
            if there < needed:
                what = "a CUDA device" if needed == 1 else f"{needed} GPUs, or --ranks-share-gpu"
                item.add_marker(pytest.mark.skip(reason=f"needs {what}"))


def ranks_share_gpu(config: pytest.Config) -> bool:
    return config.getoption("--ranks-share-gpu", False)  # of a run of all tests nobody may ask for it


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def launch(request: pytest.FixtureRequest) -> Launch:
    return Launch(ranks_share_gpu(request.config))


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
    if ranks_share_gpu(config):
        terminalreporter.write_line(f"\n{WHERE}: nothing here is of as many")
    totals: dict[str, tuple[int, int, int]] = {}
    for what, words, different in config.stash.get(ROWS, []):
        n, w, d = totals.get(what, (0, 0, 0))
        totals[what] = (n + 1, w + words, d + different)
    if totals:
        terminalreporter.write_line(f"\n{'compared':58s} {'times':>5s} {'words':>12s} {'different':>10s}")
    for what, (n, words, different) in totals.items():
        terminalreporter.write_line(f"{what:58s} {n:5d} {words:12,d} {different:10,d}")
