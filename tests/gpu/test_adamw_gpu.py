"""The one-pass AdamW kernel on a GPU against torch's fused optimizer, and its time beside the bytes it must move."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from attention_cases import READ_GBPS, captured_milliseconds
from torch.optim.adamw import adamw as torch_adamw

from lockstep import ops

SIZE, MATRICES = 600_000_000, 599_000_000
BYTES_AN_ELEMENT = 34  # gradient, master and moments read; all four and the bfloat16 weight written


@pytest.mark.timed
def test_equals_torch_and_runs_at_the_speed_of_memory() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    size, matrices = 1_000_003, 900_001
    settings = ops.AdamWSettings(matrices, 0.9, 0.95, 1e-8, 0.1)
    master = torch.randn(size, device="cuda", generator=generator)
    weights = master.bfloat16()
    ours = [master.clone(), torch.zeros_like(master), torch.zeros_like(master)]
    theirs = [t.clone() for t in ours]
    steps, their_steps = torch.zeros(2, device="cuda"), torch.zeros(2, device="cuda")
    lr, scale, yes = (torch.tensor(v, device="cuda") for v in (3e-3, 2.5, True))
    for _ in range(4):
        grad = torch.randn(size, device="cuda", generator=generator)
        for i, span in enumerate((slice(0, matrices), slice(matrices, None))):
            torch_adamw(
                *([t[span]] for t in (theirs[0], grad.clone(), *theirs[1:])), [], [their_steps[i]], fused=True,
                grad_scale=scale, found_inf=(~yes).float(), amsgrad=False, maximize=False, beta1=0.9, beta2=0.95,
                lr=lr, weight_decay=(0.1, 0.0)[i], eps=1e-8,
            )  # fmt: skip
        ops.adamw(ops.AdamWState(weights, grad, *ours, steps), ops.AdamWStep(lr, scale, yes), settings)
        assert not grad.any() and torch.equal(weights, ours[0].bfloat16())
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)
    before = [t.clone() for t in (weights, *ours, steps)]
    bad = ops.AdamWState(weights, grad.fill_(torch.nan), *ours, steps)
    ops.adamw(bad, ops.AdamWStep(lr, scale, ~yes), settings)
    assert all(map(torch.equal, before, (weights, *ours, steps))) and not grad.any()


def test_an_update_in_parts_has_the_bits_of_one() -> None:
    """Groups of parameters are cut between blocks of 1,024 elements. And one that rounds nothing has its masters."""
    size, matrices, cuts = 1_000_003, 900_001, (0, 1024, 500_736, 1_000_003)
    start = torch.randn(2, size, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    lr, scale, yes = (torch.tensor(v, device="cuda") for v in (3e-3, 2.5, True))
    found = []
    for bounds, rounds in ((cuts[::3], True), (cuts, True), (cuts, False)):
        master, grad = start.clone()
        flat = [master.bfloat16() if rounds else None, grad, master, *torch.zeros(2, size, device="cuda")]
        steps = torch.zeros(2, device="cuda")
        for begin, end in pairwise(bounds):
            settings = ops.AdamWSettings(max(0, min(end, matrices) - begin), 0.9, 0.95, 1e-8, 0.1)
            own = ops.AdamWState(*(None if t is None else t[begin:end] for t in flat), steps.clone())
            ops.adamw(own, ops.AdamWStep(lr, scale, yes), settings)
        found.append([master.bfloat16() if flat[0] is None else flat[0], *flat[1:]])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    assert not torch.equal(found[0][2], start[0])


@pytest.mark.timed
def test_speed() -> None:
    weights = torch.zeros(SIZE, dtype=torch.bfloat16, device="cuda")
    flat = [torch.zeros(SIZE, device="cuda") for _ in range(4)]
    steps, lr, scale, yes = (torch.tensor(v, device="cuda") for v in ([0.0, 0.0], 1e-6, 1.0, True))
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        state, settings = ops.AdamWState(weights, *flat, steps), ops.AdamWSettings(MATRICES, 0.9, 0.95, 1e-8, 0.1)
        ops.adamw(state, ops.AdamWStep(lr, scale, yes), settings)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    rate = SIZE * BYTES_AN_ELEMENT / min(times) / 1e9
    print(f"\nadamw: {min(times):.2f} ms for {SIZE:,} elements, {rate:.2f} TB/s")
    assert rate > 0.68e-3 * READ_GBPS


def test_square_sums() -> None:
    x = torch.randn(SIZE, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    exact = torch.stack([part.double().square().sum() for part in x.split(SIZE // 16)]).sum().sqrt()
    found = ops.square_sums(x)
    assert abs(found.sum().sqrt().double() / exact - 1) < 1e-6
    assert torch.equal(found, ops.square_sums(x))
    rows = x[: SIZE // 1024 * 1024].view(-1, 1024)  # a block's sum does not depend on its place
    order = torch.randperm(len(rows), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    assert torch.equal(ops.square_sums(rows[order].flatten()), found[: len(rows)][order])


@pytest.mark.timed
def test_exact_sum() -> None:
    """The words of the reference, and its root; the time beside that of torch's sum of float32 numbers."""
    generator = torch.Generator("cuda").manual_seed(4)
    x = torch.randn(8_000_003, device="cuda", generator=generator).square()
    x *= torch.exp2(torch.randint(-120, 90, x.shape, device="cuda", generator=generator).float())
    words = ops.exact_sum(x)
    assert torch.equal(words.cpu(), ops.exact_sum(x.cpu())) and torch.equal(words, ops.exact_sum(x.flip(0)))
    root = ops.root_of_sum(words)
    assert root.cpu() == ops.root_of_sum(words.cpu())
    for bad in (torch.inf, torch.nan):
        x[-1] = bad
        broken = ops.exact_sum(x)
        assert torch.equal(broken.cpu(), ops.exact_sum(x.cpu())) and not ops.root_of_sum(broken).isfinite()
    found, plain = (captured_milliseconds(run, 20) for run in (lambda: root_of(x), lambda: x.sum().sqrt()))
    print(f"\nexact sum: {1000 * found:.1f} us for {len(x):,} numbers, torch's sum and root {1000 * plain:.1f} us")
    update = len(x) * 1024 * BYTES_AN_ELEMENT / 4e9  # milliseconds, of the elements whose squares' sums these would be
    assert found < update / 500


def root_of(x: torch.Tensor) -> torch.Tensor:
    return ops.root_of_sum(ops.exact_sum(x))


@pytest.mark.timed
def test_fold_rows() -> None:
    """The bits of the reference, of rows that lie apart; the time beside that of an addition for each row."""
    generator = torch.Generator("cuda").manual_seed(5)
    size = 50_000_000
    rows = torch.randn(8, size + 1024, device="cuda", generator=generator).bfloat16()[:, 1024:]
    start = torch.randn(size, device="cuda", generator=generator)
    for cell in (0, 4, 3):
        total, expected = start.clone(), start[:1_000_003].cpu()
        ops.fold_rows(total, rows, cell)
        ops.fold_rows(expected, rows[:, :1_000_003].cpu(), cell)
        assert torch.equal(total[:1_000_003].cpu(), expected)

    def one_by_one() -> None:
        for row in rows:
            start.add_(row)

    found, plain = (captured_milliseconds(run, 5) for run in (lambda: ops.fold_rows(start, rows), one_by_one))
    rate = (2 * 8 + 8) * size / found / 1e9
    print(f"\nfold of 8 rows: {found:.3f} ms, {rate:.2f} TB/s; one by one {plain:.3f} ms")
    assert found < 0.6 * plain
