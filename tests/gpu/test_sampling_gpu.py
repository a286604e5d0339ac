"""The search for a filtered support and the check of the machine on a GPU: exact, independent of order and batch, and
within the time that a decode step allows (`-s` shows it)."""

import pytest
import torch
from torch import Tensor

from lockstep.ops.linear import choice as linear_choice
from lockstep.ops.linear.choice import Kind
from lockstep.ops.logprobs import philox
from lockstep.ops.logprobs import reference as logprobs_reference
from lockstep.ops.machine_check import check as machine_check
from lockstep.ops.machine_check.check import HeadShape, Product
from lockstep.ops.records import Filters, SampleKeys

DEVICE = "cuda"
VOCABULARY = 151_936


def columns(rows: int, temperature: float, top_k: int, top_p: float) -> Filters:
    one = torch.ones(rows, device=DEVICE)
    return Filters(temperature * one, (top_k * one).int(), top_p * one, 0 * one)


def thresholds(logits: Tensor, *filters: float) -> Tensor:
    from lockstep.ops.logprobs import triton as logprobs_triton

    return logprobs_triton.statistics(logits, columns(len(logits), *filters), None, True, False).threshold_C


# temperature, top-k, top-p; spread of the logits. The last three are beyond the list: the row itself is searched.
CASES = [(0.8, 0, 0.95, 0.6), (0.3, 0, 0.9, 3.0), (1.0, 50, 1.0, 2.0), (1.0, 1000, 0.9, 2.0), (1.0, 0, 0.99999, 1.0)]
CASES += [(1.0, 100_000, 1.0, 1.0), (1.0, 0, 0.9, 0.0), (0.7, 40_000, 0.99, 0.1)]


@pytest.mark.parametrize("case", CASES)
def test_thresholds(case, census):
    torch.manual_seed(0)
    *filters, spread = case
    logits = spread * torch.randn(48, VOCABULARY, device=DEVICE)
    found = thresholds(logits, *filters)
    z = logits / logprobs_reference.divisor(columns(48, *filters)[0]).unsqueeze(1)
    expected = logprobs_reference.support_threshold(z, *columns(48, *filters)[1:])
    kept, expected_kept = ((z >= t.unsqueeze(1)).sum(1) for t in (found, expected))
    assert ((kept - expected_kept).abs() <= 1).all()  # exponentials differ in their last bit, so one logit may fall out
    assert census("support: threshold of a row alone", thresholds(logits[7:8], *filters), found[7:8]) == 0
    order = torch.randperm(VOCABULARY, device=DEVICE)
    assert (
        census("support: threshold of a permuted row", thresholds(logits[:, order].contiguous(), *filters), found) == 0
    )


def test_noise_is_bounded_for_every_word():
    """All 2^32: the draw computes no noise that the bound rules out."""
    import triton
    import triton.language as tl

    from lockstep.ops.logprobs.triton import gumbel, gumbel_bound

    @triton.jit
    def above(count_ptr, gap_ptr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
        count, gap = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.float32)
        for i in range(BLOCKS):
            first = (tl.program_id(0) * BLOCKS + i).to(tl.int64) * BLOCK
            words = (first + tl.arange(0, BLOCK)).to(tl.uint32)
            noise, bound = gumbel(words), gumbel_bound(words)
            count += (noise > bound).to(tl.int32)
            gap = tl.maximum(gap, tl.where((words >= (1 << 16)) & (words < (1 << 24)), bound - noise, 0.0))
        tl.store(count_ptr + tl.program_id(0), tl.sum(count, axis=0))
        tl.store(gap_ptr + tl.program_id(0), tl.max(gap, axis=0))

    count, gap = torch.ones(1 << 16, dtype=torch.int32, device=DEVICE), torch.ones(1 << 16, device=DEVICE)
    above[(1 << 16,)](count, gap, BLOCK=1024, BLOCKS=64, num_warps=4, enable_fp_fusion=False)
    assert not count.any() and 0.05 < gap.max() < 0.07


@pytest.mark.timed
@pytest.mark.parametrize(("top_p", "limit"), [(1.0, 0.08), (0.95, 0.15)])
def test_speed_of_sampling(top_p, limit):
    """40 rows after the LM head, in milliseconds of a CUDA graph."""
    from lockstep.ops.logprobs import triton as logprobs_triton

    logits = 0.6 * torch.randn(40, VOCABULARY, device=DEVICE)
    filters = columns(40, 0.8, 0, top_p)
    key = torch.tensor([philox.sample_key(0, 0, 0, 0, i) for i in range(40)]).to(DEVICE)
    keys = SampleKeys(key, torch.arange(40, device=DEVICE))

    def sample() -> tuple[Tensor, Tensor]:
        stats = logprobs_triton.statistics(logits, filters, None, top_p < 1, False)
        token = logprobs_triton.draw(logits, filters.temperature_C, stats.threshold_C, keys, False)
        return logprobs_triton.scores(logits, token, filters.temperature_C, stats)

    sample()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            sample()
    times = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 10)
    print(f"\nsampling, top-p {top_p}: {min(times):.3f} ms, floor {logits.nbytes / 4.3e9:.3f}")
    assert min(times) < limit


@pytest.fixture
def no_overrides():
    yield
    linear_choice.overrides.clear()


def test_the_machine_keeps_the_contract(tmp_path):
    kinds: dict[tuple[int, int], Kind] = {
        (4096, 1024): "norm_linear",
        (1024, 2048): "linear_add",
        (6144, 1024): "norm_gate_up",
        (1024, 3072): "linear_add",
    }
    products = [
        *(Product(kind, m, *shape) for m in (1, 8, 40, 512) for shape, kind in kinds.items()),
        *(Product("linear", 4685, *shape) for shape in kinds),
        *(Product("linear_fp32", m, VOCABULARY, 1024) for m in (40, 928, 1024)),
    ]
    verdict = machine_check.check(
        products, [HeadShape(16, 8, 128)], torch.device(DEVICE), torch.bfloat16, tmp_path / "cache"
    )
    print(f"\n{verdict}")
    assert verdict.holds and not verdict.replaced


def test_a_product_in_two_halves_is_replaced(tmp_path, monkeypatch, no_overrides):
    """Split K, the wrong plan."""

    def halves(x: Tensor, weight: Tensor) -> Tensor:
        half = x.shape[1] // 2
        return (
            x[:, :half].float() @ weight[:, :half].float().t() + x[:, half:].float() @ weight[:, half:].float().t()
        ).to(x.dtype)

    monkeypatch.setattr(machine_check, "linear", halves)
    product = Product("linear", 300, 1024, 3072)
    assert linear_choice.choose(*product) == linear_choice.LIBRARY
    verdict = machine_check.check([product], [], torch.device(DEVICE), torch.bfloat16, tmp_path / "cache")
    assert verdict.holds and verdict.replaced == (str(product),)
    assert linear_choice.choose(*product) == linear_choice.CHAIN
